"""Checkpoints of other models are rejected without changes; skipped keys are not loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from typing import NamedTuple

import pytest
import torch

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.load.reader import check_contents, load_entries
from megatron.core.dist_checkpointing.state.param_groups import PARAM_GROUPS
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.helpers.models import (
    Setting,
    Trained,
    build_gpt,
    differences,
    expected_tensors,
    full_tensors,
    local_values,
    moments,
    open_checkpoint,
    train_and_save,
)


class Other(NamedTuple):
    """A run with another model or optimizer, and parts of the expected error."""

    num_layers: int = 2
    vocab_size: int = 61
    setting: Setting = Setting()
    says: tuple[str, ...] = ()


OTHERS = {
    "more layers": Other(
        3, says=("it lacks model.decoder.layers.2.", "optimizer.state.decoder.layers.2.")
    ),
    "fewer layers": Other(1, says=("it has unexpected keys model.decoder.layers.1.",)),
    "another shape": Other(
        vocab_size=62,
        says=(
            "model.embedding.word_embeddings.weight has shape (61, 24) where the model has (62, "
            "24)",
        ),
    ),
    "another optimizer": Other(
        setting=Setting(fraction=0.5, optimizer=(("optimizer", "sgd"),)),
        says=(
            "it lacks optimizer.state.",
            ".momentum_buffer",
            "it has unexpected keys optimizer.state.",
        ),
    ),
}


def _refuse(root: str, other: Other) -> tuple[str, list[str]]:
    """The error, and the keys of changed tensors."""
    model = build_gpt(other.setting, num_layers=other.num_layers, vocab_size=other.vocab_size)
    trained = Trained(other.setting, seed=1, model=model)
    trained.step(99)
    before = local_values(trained)
    options = deepcopy([{**group, "params": None} for group in trained.optimizer.param_groups])
    with pytest.raises(CheckpointError) as caught:
        trained.load(root)
    assert [{**group, "params": None} for group in trained.optimizer.param_groups] == options
    return str(caught.value), differences(local_values(trained), before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of two ranks."""
    root = str(tmp_path_factory.mktemp("saved"))
    run_ranks(2, train_and_save, root, Setting())
    return root


@pytest.mark.parametrize("name", OTHERS)
def test_the_checkpoint_of_another_run_is_rejected_before_a_tensor_is_changed(saved, name):
    for message, touched in run_ranks(2, _refuse, saved, OTHERS[name]):
        assert touched == []
        assert f"{saved}/iter_0000002" in message
        for words in OTHERS[name].says:
            assert words in message


def _load_some(
    root: str, skip: Sequence[str], strictness: str, other: Other
) -> tuple[list[str], list[str]]:
    """The keys with the saved values, and the keys with the previous values."""
    model = build_gpt(other.setting, num_layers=other.num_layers, vocab_size=other.vocab_size)
    trained = Trained(other.setting, seed=1, model=model)
    trained.step(99)
    before = full_tensors(trained)
    checkpoint, contents = open_checkpoint(root), trained.contents()
    load_entries(checkpoint, contents, check_contents(checkpoint, contents, skip, strictness))
    after, saved = full_tensors(trained), expected_tensors(root)
    loaded = sorted(
        key
        for key in after
        if key in saved and not differences({key: after[key]}, {key: saved[key]})
    )
    kept = sorted(key for key in after if not differences({key: after[key]}, {key: before[key]}))
    return loaded, kept


def _matching(keys: Sequence[str], pattern: str) -> list[str]:
    return sorted(key for key in keys if re.match(pattern, key))


def test_skipped_keys_keep_their_values_and_the_rest_is_loaded(saved):
    keys = list(expected_tensors(saved))
    for skip, skipped in (
        (["optimizer.*"], r"optimizer\."),
        (["*.layers.1.*", PARAM_GROUPS], r".*\.layers\.1\."),
        # One section of a fused weight, and all of another's states.
        (
            ["model.decoder.layers.0.self_attention.key.weight", "optimizer.state.*.up.*"],
            r"model.*0.*key\.weight|optimizer.*\.up\.",
        ),
    ):
        for loaded, kept in run_ranks(2, _load_some, saved, skip, "raise_all", Other()):
            # Counters are too few to differ between runs.
            assert _matching(kept, r"(?!.*step$)") == _matching(keys, rf"(?!.*step$)({skipped})")
            assert set(loaded) | set(kept) == set(keys)
            assert not set(_matching(loaded, r"(?!.*step$)")) & set(kept)


def _skip_a_section(root: str, setting: Setting) -> dict[str, float]:
    """The largest change in each state, relative to the largest value with its scale."""
    trained = Trained(setting, seed=1)
    trained.step(99)
    before = full_tensors(trained)
    checkpoint, contents = open_checkpoint(root), trained.contents()
    load_entries(
        checkpoint, contents, check_contents(checkpoint, contents, ["optimizer.state.*.up.*"])
    )
    after, saved = full_tensors(trained), expected_tensors(root)
    changes = {}
    for key in _matching(list(after), r"optimizer.*\.up\..*exp_avg"):
        gate = key.replace(".up.", ".gate.")
        assert not torch.equal(after[gate], before[gate])
        largest = max(before[key].abs().max(), saved[gate].abs().max())
        changes[key] = float((after[key] - before[key]).abs().max() / largest)
    return changes


def test_a_section_that_is_skipped_keeps_its_values_in_formats_with_a_scale(tmp_path):
    setting = Setting("no_shard", optimizer=moments("fp8", "fp16"))
    run_ranks(1, train_and_save, str(tmp_path), setting)
    (changes,) = run_ranks(1, _skip_a_section, str(tmp_path), setting)
    assert len(changes) == 8
    # They may have been rounded again with another scale.
    assert all(change <= 2**-4 for change in changes.values())


def test_skipped_keys_may_be_missing_on_either_side(saved):
    skip = ["*.layers.2.*", PARAM_GROUPS]
    for loaded, kept in run_ranks(2, _load_some, saved, skip, "raise_all", Other(num_layers=3)):
        assert loaded == sorted(expected_tensors(saved))
        assert set(kept) == set(_matching(kept, r".*layers\.2\.|.*step"))
    for loaded, _ in run_ranks(
        2, _load_some, saved, ["*.layers.1.*"], "raise_all", Other(num_layers=1)
    ):
        assert loaded == _matching(list(expected_tensors(saved)), r"(?!.*layers\.1\.)")


def _strictness(root: str, other: Other) -> list[str | None]:
    """The errors, by strictness."""
    model = build_gpt(other.setting, num_layers=other.num_layers, vocab_size=other.vocab_size)
    contents = Trained(other.setting, seed=1, model=model).contents()
    said: list[str | None] = []
    for strictness in ("raise_all", "raise_unexpected"):
        try:
            check_contents(open_checkpoint(root), contents, (), strictness)
            said.append(None)
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_strictness_may_accept_more_keys_but_no_missing_or_different_ones(saved):
    (fewer,) = run_ranks(1, _strictness, saved, Other(num_layers=1))
    assert "it has unexpected keys model.decoder.layers.1." in fewer[0]
    assert fewer[1] is None
    for other in (Other(num_layers=3), Other(vocab_size=62)):
        (said,) = run_ranks(1, _strictness, saved, other)
        assert None not in said
    for loaded, _ in run_ranks(2, _load_some, saved, (), "raise_unexpected", Other(num_layers=1)):
        assert loaded == _matching(list(expected_tensors(saved)), r"(?!.*layers\.1\.)")
