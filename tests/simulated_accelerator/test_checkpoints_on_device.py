"""Saves while training continues on an accelerator, to the bit, and resuming from them."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.dist_checkpointing.store import open_store
from megatron.training.engine import SaveLoadMeta
from tests.helpers.ranks import run_ranks
from tests.simulated_accelerator.helpers import engines
from tests.simulated_accelerator.helpers.behaviours import (
    DEFAULT_LAST,
    GPU_WITH_PAUSES,
    LANES_LAST,
    Behaviour,
    all_behaviours,
    these_behaviours,
)
from tests.simulated_accelerator.helpers.engines import CASES

LIMIT = 500.0  # seconds
SOME = ["offload forward half", "fp16 moments"]
Snapshot = dict[str, torch.Tensor]


def _snapshot(contents: Contents) -> Snapshot:
    """Copies on the host of what this rank has to save."""
    return {
        entry.key: entry.part_of(entry.values.read()).detach().cpu().clone()
        for entry in contents.entries
        if entry.is_own
    }


def _wrong_tensors(folder: str, contents: Contents, snapshot: Snapshot) -> list[str]:
    """The names of those that a checkpoint has otherwise than they were."""
    checkpoint = PublishedCheckpoint.open(open_store(folder), checkpoint_name(1))
    wrong = []
    for entry in contents.entries:
        if entry.key in snapshot and snapshot[entry.key].numel():
            expected = snapshot[entry.key]
            found = torch.empty_like(expected)
            checkpoint.read(entry.key, entry.offsets, found)
            if not torch.equal(
                found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
            ):
                wrong.append(entry.key)
    return wrong


def _save_beside_steps(folder: str, names: list[str], behaviour: Behaviour) -> dict[str, list[str]]:
    """What is wrong in checkpoints whose saves ran while two more steps were made."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    wrong = {}
    with behaviour.applied():
        for name in names:
            engine = engines.make_engine(name, behaviour.kind)
            engines.train(engine, behaviour.kind, range(2))
            state, path = engine.state, f"{folder}/{name}"
            torch.accelerator.synchronize()
            state.optimizer.synchronize()
            snapshot = _snapshot(state.contents(engine.device, with_optim=True))

            # Steps go on at once: what they overwrite must have been read.
            contents = state.contents(engine.device, with_optim=True)
            with CheckpointManager.start(path, engine.device, rank, world_size) as manager:
                manager.save(1, contents, {})
                engines.train(engine, behaviour.kind, range(2, 4))
                manager.finish()
            dist.barrier()
            assert len(snapshot) > 20
            wrong[name] = _wrong_tensors(path, contents, snapshot)
            state.optimizer.synchronize()
            del engine, state, contents
            gc.collect()
    return wrong


@all_behaviours(DEFAULT_LAST, GPU_WITH_PAUSES)
def test_a_save_beside_the_training_holds_what_there_was_when_it_began(
    tmp_path: Path, behaviour: Behaviour
):
    results = run_ranks(
        2, _save_beside_steps, str(tmp_path), SOME, behaviour, device=behaviour.kind, timeout=LIMIT
    )
    assert results == [{name: [] for name in SOME}] * 2


@pytest.mark.wide
@these_behaviours(LANES_LAST, GPU_WITH_PAUSES)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if name not in SOME])
def test_saves_of_every_way_to_train_hold_what_there_was(
    tmp_path: Path, behaviour: Behaviour, name: str
):
    results = run_ranks(
        2,
        _save_beside_steps,
        str(tmp_path),
        [name],
        behaviour,
        device=behaviour.kind,
        timeout=LIMIT,
    )
    assert results == [{name: []}] * 2


def _resume(folder: str, names: list[str], behaviour: Behaviour) -> dict[str, bool]:
    """Whether an engine that has gone on, and one that is new, go the same way from a
    checkpoint.
    """
    same = {}
    with behaviour.applied():
        for name in names:
            meta = SaveLoadMeta(f"{folder}/{name}", with_optim=True)
            engine = engines.make_engine(name, behaviour.kind)
            engines.train(engine, behaviour.kind, range(2))
            engine.save(meta)
            whole = engines.train(engine, behaviour.kind, range(2, 5)).numbers
            engine.load(meta)
            again = engines.train(engine, behaviour.kind, range(2, 5)).numbers

            other = engines.make_engine(name, behaviour.kind)
            other.load(meta)
            resumed = engines.train(other, behaviour.kind, range(2, 5)).numbers
            same[name] = whole == again == resumed
            for each in (engine, other):
                each.state.optimizer.synchronize()
            del engine, other, each
            gc.collect()
    return same


@all_behaviours(LANES_LAST, GPU_WITH_PAUSES)
def test_going_on_from_a_checkpoint_gives_the_same_losses(tmp_path: Path, behaviour: Behaviour):
    results = run_ranks(
        2, _resume, str(tmp_path), SOME, behaviour, device=behaviour.kind, timeout=LIMIT
    )
    assert results == [dict.fromkeys(SOME, True)] * 2


@pytest.mark.wide
@these_behaviours(LANES_LAST, GPU_WITH_PAUSES)
@pytest.mark.parametrize("name", [name for name in CASES if name not in SOME])
def test_every_way_to_train_goes_on_from_a_checkpoint(
    tmp_path: Path, behaviour: Behaviour, name: str
):
    results = run_ranks(
        2, _resume, str(tmp_path), [name], behaviour, device=behaviour.kind, timeout=LIMIT
    )
    assert results == [{name: True}] * 2
