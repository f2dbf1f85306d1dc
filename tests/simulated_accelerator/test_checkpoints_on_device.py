"""Saves while training continues on an accelerator, to the bit, and resuming from them."""

from __future__ import annotations

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
    ALL,
    DEFAULT_LAST,
    GPU_WITH_PAUSES,
    LANES_LAST,
    WITH_PAUSES,
    Behaviour,
)
from tests.simulated_accelerator.helpers.engines import CASES

LIMIT = 500.0  # seconds
SOME = ["offload forward half", "offload streamed half", "fp16 moments"]
Snapshot = dict[str, torch.Tensor]


def ways_to_train(*default: tuple[str, Behaviour]) -> pytest.MarkDecorator:
    """Parametrizes with some engines under all behaviours, and with the others under one.

    Args:
        default: the engines of the default run, and their behaviours.
    """
    others = [
        (name, each)
        for name in CASES
        for each in (ALL if name in SOME else (LANES_LAST, GPU_WITH_PAUSES))
        if (name, each) not in default
    ]
    parameters = [
        *(pytest.param(*one, marks=one[1].mark) for one in default),
        *(pytest.param(*one, marks=(one[1].mark, pytest.mark.wide)) for one in others),
    ]
    return pytest.mark.parametrize(("name", "behaviour"), parameters, ids=str)


def _snapshot(contents: Contents) -> Snapshot:
    """Host copies of the tensors that this rank saves."""
    return {
        entry.key: entry.part_of(entry.values.read()).detach().cpu().clone()
        for entry in contents.entries
        if entry.is_own
    }


def _wrong_tensors(folder: str, contents: Contents, snapshot: Snapshot) -> list[str]:
    """The names of tensors that differ in a checkpoint."""
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


def _save_during_steps(folder: str, name: str, behaviour: Behaviour) -> list[str]:
    """Wrong tensors in a checkpoint whose save ran during the last update, and two more steps."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with behaviour.applied():
        waiting = engines.make_engine(name, behaviour.kind)
        # An evaluation comes before the last step, and would wait for an update.
        engines.train(waiting, behaviour.kind, range(3))
        torch.accelerator.synchronize()
        waiting.state.optimizer.synchronize()
        snapshot = _snapshot(waiting.state.contents(waiting.device, with_optim=True))

        engine = engines.make_engine(name, behaviour.kind)
        state = engine.state
        with CheckpointManager.start(folder, engine.device, rank, world_size) as manager:
            engines.train(engine, behaviour.kind, range(3))
            contents = state.contents(engine.device, with_optim=True)
            manager.save(1, contents, {})
            # Steps continue at once: values must have been read before they are overwritten.
            engines.train(engine, behaviour.kind, range(3, 5))
            manager.finish()
        dist.barrier()
        assert len(snapshot) > 20
        wrong = _wrong_tensors(folder, contents, snapshot)
        state.optimizer.synchronize()
    return wrong


@ways_to_train(
    ("fp16 moments", DEFAULT_LAST),
    ("fp16 moments", GPU_WITH_PAUSES),
    ("offload streamed half", LANES_LAST),
    ("offload streamed", WITH_PAUSES),
)
def test_a_save_during_training_holds_the_values_of_its_start(
    tmp_path: Path, behaviour: Behaviour, name: str
):
    results = run_ranks(
        2, _save_during_steps, str(tmp_path), name, behaviour, device=behaviour.kind, timeout=LIMIT
    )
    assert results == [[], []]


def _resume(folder: str, name: str, behaviour: Behaviour) -> bool:
    """Whether the engine that saved and a new engine continue alike from a checkpoint."""
    meta = SaveLoadMeta(folder, with_optim=True)
    with behaviour.applied():
        engine = engines.make_engine(name, behaviour.kind)
        engines.train(engine, behaviour.kind, range(1))
        engine.save(meta)
        whole = engines.train(engine, behaviour.kind, range(1, 3)).numbers
        engine.load(meta)
        again = engines.train(engine, behaviour.kind, range(1, 3)).numbers

        other = engines.make_engine(name, behaviour.kind)
        other.load(meta)
        resumed = engines.train(other, behaviour.kind, range(1, 3)).numbers
        for each in (engine, other):
            each.state.optimizer.synchronize()
    return whole == again == resumed


@ways_to_train(("offload forward half", LANES_LAST), ("offload forward half", GPU_WITH_PAUSES))
def test_resuming_from_a_checkpoint_gives_the_same_losses(
    tmp_path: Path, behaviour: Behaviour, name: str
):
    results = run_ranks(
        2, _resume, str(tmp_path), name, behaviour, device=behaviour.kind, timeout=LIMIT
    )
    assert results == [True, True]
