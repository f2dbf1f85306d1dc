"""Runs that continue with another set of frozen parts: the projector first, then everything, and
the other way round.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.vlm_runs import (
    OFFLOADED,
    draw_shapes,
    flags,
    run,
    save_what_is_loaded,
    tensors_of,
)

SAVED, LAST = 2, 5
FREEZE = ["--freeze", "vision,decoder"]
SETTINGS = {
    "offloaded": ["--ckpt-format", "fsdp_dtensor", *OFFLOADED],
    "torch_dcp": ["--ckpt-format", "torch_dcp"],
    "FSDP2": ["--use-torch-fsdp2"],
}


def settings(by_default: str) -> list[Any]:
    """All of them. `test_frozen_while_loading.py` has every engine by default."""
    return [
        pytest.param(name, marks=() if name == by_default else pytest.mark.wide)
        for name in SETTINGS
    ]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_shapes(tmp_path_factory.mktemp("shapes"), num_train=40)


def train(shapes: Path, save: Path, *others: object) -> str:
    """A run that resumes if its directory has a checkpoint. Returns the first rank's log."""
    return run_ranks(2, run, flags(shapes, "--bf16", "--save", save, *others))[0]


def loaded(shapes: Path, folder: Path, *others: object) -> dict[str, torch.Tensor]:
    """The tensors that a run has loaded, before its first step."""
    run_ranks(2, save_what_is_loaded, flags(shapes, "--bf16", *others), str(folder))
    return tensors_of(folder, "loaded")


def weights(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key.startswith("model.")}


def states(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if ".state." in key}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []


@pytest.mark.parametrize("setting", settings("offloaded"))
def test_the_projector_is_trained_first_and_then_everything(shapes, tmp_path, setting):
    first, more = tmp_path / "run", SETTINGS[setting]
    train(shapes, first, *more, *FREEZE, "--train-iters", SAVED)
    saved = tensors_of(first, SAVED)
    assert all("vision_projection" in key for key in states(saved))

    found = loaded(shapes, tmp_path, *more, "--load", first)
    assert {tensor.dtype for tensor in weights(found).values()} == {torch.float32}
    assert_equal(weights(found), {key: t.float() for key, t in weights(saved).items()})
    trained = states(saved).keys()
    assert_equal({key: found[key] for key in trained}, states(saved))
    assert states(found).keys() > trained
    assert all(not found[key].any() for key in states(found).keys() - trained)

    log = train(shapes, first, *more)
    assert "start with fresh optimizer states" in log
    last = tensors_of(first, LAST)
    changed = [key for key in weights(last) if not torch.equal(last[key], found[key])]
    assert any("vision_model" in key for key in changed)
    assert any("language_model" in key for key in changed)

    weights_alone = loaded(shapes, tmp_path / "2", *more, "--load", first, "--finetune")
    assert_equal(weights(weights_alone), weights(last))


@pytest.mark.parametrize("setting", settings("torch_dcp"))
def test_everything_is_trained_first_and_then_the_projector(shapes, tmp_path, setting):
    first, more = tmp_path / "run", SETTINGS[setting]
    train(shapes, first, *more, "--train-iters", SAVED)
    saved = tensors_of(first, SAVED)

    found = loaded(shapes, tmp_path, *more, *FREEZE, "--load", first)
    assert_equal(weights(found), {key: t.to(found[key].dtype) for key, t in weights(saved).items()})
    is_narrow = [key for key, t in weights(found).items() if t.dtype == torch.bfloat16]
    assert bool(is_narrow) == (setting != "FSDP2")
    assert all("vision_projection" in key for key in states(found))
    assert_equal(states(found), {key: saved[key] for key in states(found)})

    log = train(shapes, first, *more, *FREEZE)
    assert "optimizer states" in log
    assert ("are rounded" in log) == bool(is_narrow)
    last = tensors_of(first, LAST)
    assert all(torch.equal(last[key], found[key]) for key in weights(last) if "_model" in key)
    assert not all(torch.equal(last[key], found[key]) for key in weights(last))

    weights_alone = ["--finetune", "--no-load-optim"]
    for number, flag in enumerate(weights_alone):
        folder = tmp_path / str(number)
        again = loaded(shapes, folder, *more, "--load", tmp_path / "run", flag, *FREEZE)
        assert_equal(weights(again), weights(last))
