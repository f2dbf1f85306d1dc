"""`FsdpParameterGroup`: the memory phases of a group in use, and after errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from megatron.core.device import Device
from megatron.core.distributed.fsdp.group_weights import Delivery, MemoryPhase
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.lanes import Event, InlineLane, ThreadEvent, delays
from tests.helpers.ranks import on_ranks
from tests.unit_tests.core.distributed.fsdp.fully_shard.helpers.stacks import (
    DIM,
    STRATEGIES,
    ZERO_3,
    Stack,
    Watched,
    groups_of,
    own_batch,
    shard,
)

SHARDED, RESERVED, GATHERING, WHOLE, FAILED = MemoryPhase


class FailingLane:
    """A lane whose work fails."""

    def enqueue(self, _: Callable[[], object], __: Sequence[Event] = ()) -> Event:
        event = ThreadEvent()
        event.finish(OSError("the gather failed"))
        return event

    def close(self) -> None:
        """Nothing is queued."""


def make_group(strategy: str = ZERO_3) -> FsdpParameterGroup:
    layer = nn.Linear(DIM, DIM)
    shard(layer, strategy=strategy)
    (group,) = layer.parameter_groups
    return group


def gather(group: FsdpParameterGroup) -> None:
    group.unshard(InlineLane(Device("cpu")))
    group.wait_unsharded()


def has_memory(group: FsdpParameterGroup) -> bool:
    return group.unsharded_weight.local_buffer.untyped_storage().nbytes() > 0


def fail(group: FsdpParameterGroup) -> None:
    group.unshard(FailingLane())
    with pytest.raises(OSError, match="the gather failed"):
        group.wait_unsharded()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_group_goes_through_its_phases_and_has_memory_for_full_weights_in_all_but_the_first(
    strategy: str,
) -> None:
    group, lane = make_group(strategy), InlineLane(Device("cpu"))
    seen = []

    def look() -> None:
        seen.append((group.phase, has_memory(group) or not group.is_gathered))

    for step in (
        look,
        group.reserve,
        look,
        lambda: group.unshard(lane),
        look,
        group.wait_unsharded,
        look,
        group.mark_updated,
        lambda: group.unshard(lane),
        look,
        group.reshard,
    ):
        step()
    assert seen == [
        (SHARDED, not group.is_gathered),
        (RESERVED, True),
        (GATHERING, True),
        (WHOLE, True),
        (GATHERING, True),
    ]
    assert (group.phase, has_memory(group)) == (SHARDED, not group.is_gathered)


@on_ranks(2)
def test_each_layer_of_a_model_is_whole_while_it_runs_and_the_next_one_is_being_gathered() -> None:
    model, seen = Stack(), []

    def look(layer: Watched) -> None:
        phases = [group.phase for group in groups_of(model)]
        seen.append((list(model.layers).index(layer), phases))

    for layer in model.layers:
        layer.look = look
    shard(*model.layers)
    with delays(0):  # the lane is behind the phases, which are what this thread may rely on
        model(own_batch()).sum().backward()
    assert seen == [
        (0, [WHOLE, GATHERING, SHARDED]),
        (1, [SHARDED, WHOLE, GATHERING]),
        (2, [SHARDED, SHARDED, WHOLE]),
        (2, [SHARDED, GATHERING, WHOLE]),
        (1, [GATHERING, WHOLE, SHARDED]),
        (0, [WHOLE, SHARDED, SHARDED]),
    ]


@on_ranks(2)
def test_waiting_for_weights_that_nothing_gathers_is_an_error() -> None:
    group = make_group()
    for prepare in (lambda: None, group.reserve):
        prepare()
        with pytest.raises(RuntimeError, match=f"{group.phase.value}.*{WHOLE.value}"):
            group.wait_unsharded()


@on_ranks(2)
def test_a_gather_that_failed_fails_every_later_use_until_the_group_recovers() -> None:
    group = make_group()
    whole = group.fsdp_parameters[0].sharded.full_tensor()
    for _ in range(2):
        fail(group)
        assert group.phase is FAILED
        for _ in range(2):
            with pytest.raises(OSError, match="the gather failed"):
                gather(group)

        group.recover()
        assert (group.phase, has_memory(group)) == (SHARDED, False)
        gather(group)
        assert torch.equal(group.fsdp_parameters[0].full, whole)
        group.mark_updated()


@on_ranks(2)
def test_a_group_that_failed_frees_its_memory_and_stays_failed() -> None:
    group = make_group()
    fail(group)
    assert has_memory(group)
    for _ in range(2):
        group.reshard()
        assert (group.phase, has_memory(group), group.is_unsharded) == (FAILED, False, False)
    with pytest.raises(RuntimeError, match=f"{FAILED.value}.*{WHOLE.value}"):
        group.wait_unsharded()


@on_ranks(2)
def test_a_group_whose_gather_fails_as_it_is_freed_has_failed() -> None:
    group = make_group()
    group.unshard(FailingLane())
    with pytest.raises(OSError, match="the gather failed"):
        group.reshard()
    assert group.phase is FAILED


@on_ranks(2)
def test_a_group_does_not_recover_from_an_update_that_failed() -> None:
    group = make_group()
    group.delivery.announce(ThreadEvent.done())
    fail(group)
    group.recover()
    assert (group.phase, group.delivery.status) == (FAILED, Delivery.Status.FAILED)
    with pytest.raises(OSError, match="the gather failed"):
        gather(group)
