"""Prefetching weights that are still being updated in host memory, on lanes that issue work at
once, as streams do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.device import Device
from megatron.core.distributed.fsdp import FsdpContext, Placements, fully_shard, fully_shard_context
from megatron.core.distributed.fsdp.collective_history import Kind
from megatron.core.distributed.fsdp.group_weights import MemoryPhase
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.precision import OffloadPolicy
from megatron.core.lanes import Event, InlineLane, relay
from tests.helpers.ranks import on_ranks, run_ranks

DIM = 4
NUM_LAYERS = 4
PATIENCE = 60.0  # seconds, after which a thread that waits for this one has waited in vain
STRATEGIES = ("optim", "optim_grads_params")


class Layer(nn.Linear):
    """Calls `look` once its kernels have been issued."""

    look: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.look()
        return x


class IssuingLane:
    """Does its work in the thread that queues it, and so waits there for the work before it."""

    def __init__(self) -> None:
        self._lane = InlineLane(Device("cpu"))
        self.queued: list[Sequence[Event]] = []

    def enqueue(self, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        self.queued.append(after)
        return self._lane.enqueue(work, after)

    def close(self) -> None:
        self._lane.close()


class HeldDelivery:
    """An update of a group's weights on a host lane that continues once released, or fails after a
    while.
    """

    def __init__(self, group: FsdpParameterGroup) -> None:
        self._go = threading.Event()
        self.was_let: bool | None = None
        device = Device("cpu")
        host, h2d = device.host_lane("test host"), device.lane("test h2d")

        def update() -> Event:
            self.was_let = self._go.wait(PATIENCE)
            weight = group.post_optimizer_model_weight.local_buffer
            return h2d.enqueue(lambda: weight.fill_(2.0))

        group.delivery.announce(relay(host, update))

    def let(self) -> None:
        self._go.set()


def shard(strategy: str) -> tuple[nn.Sequential, FsdpContext, IssuingLane]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(DIM, DIM, bias=False) for _ in range(NUM_LAYERS)])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with fully_shard_context("cpu") as context:
        for layer in model:
            fully_shard(
                layer, mesh, Placements.for_strategy(strategy), offload_policy=OffloadPolicy(True)
            )
    with torch.no_grad():
        model(
            torch.ones(1, DIM)
        )  # after which only a delivery is gathered where weights stay whole
    lane = context.gather_lane = context.reduce_lane = IssuingLane()
    context.lanes_issue_at_once = True
    return model, context, lane


def _does_not_hold_up(strategy: str) -> list[bool | None]:
    model, context, _ = shard(strategy)
    deliveries = [HeldDelivery(layer.parameter_groups[0]) for layer in list(model)[1:]]
    for layer, delivery in zip(model, deliveries, strict=False):
        layer.look = delivery.let
    with torch.no_grad():
        output = model(torch.ones(1, DIM))
    expected = (
        model[0].weight.full_tensor().sum(dim=1) * (2.0 * DIM) ** (NUM_LAYERS - 2)
    ).sum() * 2.0
    torch.testing.assert_close(output, expected.expand(1, DIM))
    assert context.backward_order
    return [delivery.was_let for delivery in deliveries]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_prefetch_whose_delivery_is_pending_does_not_keep_the_module_before_from_being_issued(
    strategy,
):
    """Each delivery ends only after the layer before has run: a thread that waits for it earlier
    waits in vain.
    """
    assert run_ranks(2, _does_not_hold_up, strategy) == [[True] * (NUM_LAYERS - 1)] * 2


def _gathers_in_order(strategy: str) -> list[tuple[int, ...]]:
    """One rank's deliveries are done when they are looked at, the other's are not."""
    model, context, _ = shard(strategy)
    context.check_agreement()
    deliveries = [HeldDelivery(model[number].parameter_groups[0]) for number in (1, 3)]
    for layer, delivery in zip((model[0], model[2]), deliveries, strict=True):
        if dist.get_rank() == 0:
            delivery.let()
        layer.look = delivery.let
    for _ in range(2):
        model(torch.ones(1, DIM)).sum().backward()
    assert all(delivery.was_let for delivery in deliveries)
    numbers = [layer.parameter_groups[0].number for layer in model]
    (history,) = context.histories
    return [(kind, numbers.index(number)) for kind, number, *_ in history.entries]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_order_of_collectives_does_not_depend_on_when_a_rank_gets_its_delivery(strategy):
    one, other = run_ranks(2, _gathers_in_order, strategy)
    assert one == other
    gathered = {number for kind, number in one if kind == Kind.GATHER}
    assert gathered == ({1, 3} if strategy == "optim" else {0, 1, 2, 3})


def _begins_early(strategy: str) -> list[bool]:
    """Whether the work that a postponed gather waits for was issued before the module ahead ran."""
    model, context, lane = shard(strategy)
    made: list[tuple[str, Event]] = []
    moment = "before"
    make_event = Device.event

    def event(device: Device) -> Event:
        made.append((moment, make_event(device)))
        return made[-1][1]

    def ran() -> None:
        nonlocal moment
        moment = "after"

    model[0].look = ran
    Device.event = event
    group = model[1].parameter_groups[0]
    seen = []
    try:
        for is_overwritten in (False, True):
            moment = "before"
            made.clear()
            lane.queued.clear()
            delivery = HeldDelivery(group)
            delivery.let()

            def overwrite() -> None:
                with torch.no_grad():
                    model[1].weight.mul_(1.0)

            model[0].look = (lambda: (overwrite(), ran())) if is_overwritten else ran
            with torch.no_grad():
                model(torch.ones(1, DIM))
            (ready,) = [after[0] for after in lane.queued if len(after) == 2]
            moments = {id(own): when for when, own in made}
            seen.append(moments[id(ready)])
    finally:
        Device.event = make_event
    assert context.gather_lane is lane
    return seen


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_postponed_gather_waits_for_nothing_that_was_issued_since_but_writes_to_the_weights(
    strategy,
):
    assert run_ranks(2, _begins_early, strategy) == [["before", "after"]] * 2


@on_ranks(2)
def test_a_module_that_is_skipped_gives_its_reserved_memory_back() -> None:
    model, context, _ = shard("optim_grads_params")
    group = model[1].parameter_groups[0]
    delivery = HeldDelivery(group)
    delivery.let()
    storage = group.unsharded_weight.local_buffer.untyped_storage()
    sizes = []
    model[0].look = lambda: sizes.append(storage.nbytes())
    with torch.no_grad():
        model[2](model[0](torch.ones(1, DIM)))
        assert sizes == [group.layout.size * 4]
        assert storage.nbytes() == 0, (
            "memory that was reserved for a module that does not come is given back"
        )
        assert group.phase is MemoryPhase.SHARDED
        output = model[1](torch.ones(1, DIM))
    assert torch.equal(output, torch.full((1, DIM), 2.0 * DIM))
    assert context.forward_order == list(model)
