"""Checkpoints of models with experts: an entry for each expert's matrices, which loads however
experts are divided over ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from megatron.core.dist_checkpointing.formats import open_checkpoint
from megatron.core.dist_checkpointing.store import open_store
from megatron.training.engine import SaveLoadMeta
from tests.helpers.engine_contents import Contents, contents_of, differing
from tests.helpers.mixtures import MIXTURE, OFFLOADED, mixture_engine, train
from tests.helpers.ranks import run_ranks

# Experts that two, three and four ranks can divide.
MODEL = replace(MIXTURE, num_experts=12)
SAVED, RESUMED = range(2), range(2, 4)


class Saved(NamedTuple):
    """A checkpoint, and the run that saved it.

    Attributes:
        losses: of the steps after it.
    """

    folder: str
    contents: Contents
    losses: list[float]


def _meta(folder: str, name: str) -> SaveLoadMeta:
    return SaveLoadMeta(f"{folder}/{name}", "dcp", with_optim=True)


def _save(folder: str) -> tuple[Contents, list[float]]:
    engine = mixture_engine(2, model=MODEL, optimizer=OFFLOADED)
    train(engine, SAVED)
    engine.save(_meta(folder, "saved"))
    return contents_of(engine), train(engine, RESUMED).losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A checkpoint of four ranks, with experts divided by two."""
    folder = str(tmp_path_factory.mktemp("experts"))
    contents, losses = run_ranks(4, _save, folder)[0]
    return Saved(folder, contents, losses)


def _load_and_save(
    folder: str, name: str, expert_size: int, strategy: str
) -> tuple[Contents, list[float]]:
    engine = mixture_engine(expert_size, strategy, model=MODEL)
    engine.load(_meta(folder, "saved"))
    engine.save(_meta(folder, name))
    return contents_of(engine), train(engine, RESUMED).losses


def _tensors(folder: str, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a model and its optimizer in a checkpoint."""
    checkpoint = open_checkpoint(open_store(folder), name)
    found = {}
    for key, saved in checkpoint.tensors.items():
        if key.startswith("rng."):
            continue  # of each rank
        found[key] = torch.empty(saved.shape, dtype=saved.dtype)
        checkpoint.read(key, (0,) * len(saved.shape), found[key])
    return found


@pytest.mark.parametrize(
    ("world_size", "expert_size", "strategy"),
    [
        (1, 1, "optim_grads_params"),
        (3, 3, "optim_grads"),
        pytest.param(2, 2, "optim", marks=pytest.mark.wide),
        pytest.param(4, 4, "no_shard", marks=pytest.mark.wide),
        *(
            pytest.param(*case, "optim_grads_params", marks=pytest.mark.wide)
            for case in ((2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 4))
        ),
    ],
)
def test_a_checkpoint_loads_bit_for_bit_with_any_expert_parallelism(
    saved: Saved, world_size: int, expert_size: int, strategy: str
) -> None:
    name = f"{world_size}-{expert_size}-{strategy}"
    ranks = run_ranks(world_size, _load_and_save, saved.folder, name, expert_size, strategy)
    for contents, losses in ranks:
        assert differing(contents, saved.contents) == []
        assert losses == pytest.approx(saved.losses, rel=0, abs=1e-6)

    # They save the same tensors again.
    first, again = _tensors(saved.folder, "saved"), _tensors(saved.folder, name)
    assert first.keys() == again.keys()
    assert [key for key, tensor in first.items() if not torch.equal(tensor, again[key])] == []


def test_every_experts_matrices_have_separate_names_in_the_checkpoint(
    saved: Saved,
) -> None:
    tensors = _tensors(saved.folder, "saved")
    prefix = "decoder.layers.1.mlp.experts"
    first = saved.contents.weights[f"{prefix}.linear_fc1.weight"].unflatten(0, (12, 2, 7))
    second = saved.contents.weights[f"{prefix}.linear_fc2.weight"].unflatten(0, (12, 20))
    for number in range(12):
        own = f"model.{prefix}.{number}"
        assert torch.equal(tensors[f"{own}.gate.weight"], first[number, 0])
        assert torch.equal(tensors[f"{own}.up.weight"], first[number, 1])
        assert torch.equal(tensors[f"{own}.linear_fc2.weight"], second[number])
        assert f"optimizer.state.{prefix}.{number}.up.weight.exp_avg" in tensors
    assert not [key for key in tensors if "mlp.experts.linear" in key]
