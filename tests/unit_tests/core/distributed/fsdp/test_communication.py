from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.distributed.fsdp import (
    Flat,
    FsdpContext,
    MixedPrecisionPolicy,
    Placements,
    collectives,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.lanes import Event
from tests.helpers.ranks import on_ranks, run_ranks

DIM = 8
NUM_LAYERS = 3
NUM_MICROBATCHES = 2

PLACEMENTS = {
    **{
        name: Placements.for_strategy(name)
        for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")
    },
    "hsdp": Placements(
        (0, 1), (Replicate(), Flat()), (Partial("avg"), Flat()), (Replicate(), Flat())
    ),
    "hfsdp": Placements((0, 1), (Replicate(), Flat()), (Partial("avg"), Flat()), (Flat(), Flat())),
}
# dtypes of compute weights, sent gradients and main gradients, and the policy that sets them
DTYPES = {
    "fp32": (torch.float32, torch.float32, torch.float32, MixedPrecisionPolicy()),
    "bf16": (torch.bfloat16, torch.bfloat16, torch.bfloat16, MixedPrecisionPolicy()),
    "bf16 to fp32": (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
        MixedPrecisionPolicy(main_grads_dtype=torch.float32),
    ),
    "fp32 as bf16": (
        torch.float32,
        torch.bfloat16,
        torch.float32,
        MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16),
    ),
}


class Collective(NamedTuple):
    """One collective call of a rank."""

    what: str
    axis: int  # mesh axis
    input_bytes: int
    output_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank must send to the other rank of its group."""
        if self.what == "all_gather":
            return self.input_bytes
        if self.what == "reduce_scatter":
            return self.input_bytes // 2
        return self.input_bytes // 2 + self.output_bytes // 2


@dataclass(frozen=True)
class Plan:
    """The collectives of one group: in the first forward after a step, in every forward, backward
    and microbatch, and in the last microbatch of a step.
    """

    refresh: Sequence[Collective] = ()
    forward: Sequence[Collective] = ()
    backward: Sequence[Collective] = ()
    microbatch: Sequence[Collective] = ()
    last: Sequence[Collective] = ()

    def of_step(self, num_microbatches: int, num_last: int = 1) -> Counter[Collective]:
        """Returns the collectives of all layers in a step, except for `refresh`."""
        each = [*self.forward, *self.backward, *self.microbatch]
        return _times(NUM_LAYERS, [*each * num_microbatches, *self.last * num_last])


def _times(count: int, calls: Sequence[Collective]) -> Counter[Collective]:
    return Counter([*calls] * count)


def planned(
    name: str, numel: int, dtypes: str, *, reshards: bool = True, is_scoped: bool = True
) -> Plan:
    """Returns the minimal collectives of a strategy on a mesh with two ranks per axis."""
    compute, sent, main = (dtype.itemsize for dtype in DTYPES[dtypes][:3])
    # Sums over microbatches or ranks are sent in the policy's dtype, and are not rounded to the
    # compute dtype again.
    summed = DTYPES[dtypes][3].resolve(DTYPES[dtypes][0]).grad_comm_dtype.itemsize
    half, quarter = numel // 2, numel // 4
    whole = numel * (summed if is_scoped else sent)
    gather = [Collective("all_gather", 0, half * compute, numel * compute)]
    scatter = [Collective("reduce_scatter", 0, numel * sent, half * main)]
    if name == "no_shard":
        return Plan(last=[Collective("all_reduce", 0, whole, numel * main)])
    if name == "optim":
        return Plan(refresh=gather, last=[Collective("reduce_scatter", 0, whole, half * main)])
    if name == "optim_grads":
        return Plan(refresh=gather, microbatch=scatter)
    if name == "optim_grads_params":
        return Plan(forward=gather, backward=gather if reshards else [], microbatch=scatter)
    gather = [Collective("all_gather", 1, half * compute, numel * compute)]
    scatter = [Collective("reduce_scatter", 1, numel * sent, half * main)]
    refresh, last = [], [Collective("all_reduce", 0, half * summed, half * main)]
    if name == "hfsdp":
        refresh = [Collective("all_gather", 0, quarter * compute, half * compute)]
        last = [Collective("reduce_scatter", 0, half * summed, quarter * main)]
    return Plan(refresh, gather, gather if reshards else [], scatter, last)


class Wire(TorchDispatchMode):
    """Records every operation of torch.distributed, and the sent bytes, in the threads that enter
    this mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()
        self.sent_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Let DTensor decompose first: its collectives are recorded only if they run in this mode.
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        if "c10d" in func.namespace:
            self.operations.add(func.name())
            if func.name() == "c10d::send":
                self.sent_bytes += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


@dataclass
class Traffic:
    """Recorded communication: the calls of `collectives`, and the operations of the lane and of the
    calling thread.
    """

    calls: Counter[Collective] = field(default_factory=Counter)
    lane: Wire = field(default_factory=Wire)
    thread: Wire = field(default_factory=Wire)

    def assert_is(self, expected: Counter[Collective], is_step: bool) -> None:
        assert self.calls == expected
        assert self.lane.sent_bytes == sum(
            call.sent_bytes * count for call, count in expected.items()
        )
        assert self.lane.operations == ({"c10d::send", "c10d::recv_"} if expected else set())
        # The all-reduce that compares the ranks' histories before an optimizer step.
        assert self.thread.operations == ({"c10d::allreduce_"} if is_step else set())


@contextmanager
def watched(context: FsdpContext, mesh: DeviceMesh) -> Iterator[Traffic]:
    """Records all communication in the block. Collectives inside of other collectives are not
    counted as calls.
    """
    traffic, lane = Traffic(), context.gather_lane
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    originals = {
        name: getattr(collectives, name) for name in ("all_gather", "reduce_scatter", "all_reduce")
    }
    enqueue = lane.enqueue
    depth = 0

    def counting(name: str) -> Callable[..., None]:
        def call(
            out: torch.Tensor,
            own: torch.Tensor,
            group: dist.ProcessGroup,
            *args: Any,
            **options: Any,
        ) -> None:
            nonlocal depth
            if depth == 0:
                traffic.calls[Collective(name, groups.index(group), own.nbytes, out.nbytes)] += 1
            depth += 1
            originals[name](out, own, group, *args, **options)
            depth -= 1

        return call

    def enqueue_watched(work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        def watched_work() -> None:
            with traffic.lane:
                work()

        return enqueue(watched_work, after)

    for name in originals:
        setattr(collectives, name, counting(name))
    lane.enqueue = enqueue_watched
    try:
        with traffic.thread:
            yield traffic
        enqueue(lambda: None).wait()
    finally:
        del lane.enqueue
        for name, original in originals.items():
            setattr(collectives, name, original)


class Trained:
    """A model, its optimizer and their expected traffic."""

    def __init__(self, name: str, dtypes: str, *, reshards: bool = True) -> None:
        placements = PLACEMENTS[name]
        compute, _, _, policy = DTYPES[dtypes]
        torch.manual_seed(0)
        layers = [nn.Linear(DIM, DIM, dtype=compute) for _ in range(NUM_LAYERS)]
        self.model = nn.Sequential(*layers)
        self.mesh = init_device_mesh("cpu", (2,) * len(placements.dp_axes))
        assert self.mesh.size() == dist.get_world_size()
        with fully_shard_context("cpu") as self.context:
            for layer in layers:
                fully_shard(layer, self.mesh, placements, policy, reshard_after_forward=reshards)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        fully_shard_optimizer(self.optimizer)
        self.compute = compute
        self.plan = planned(
            name, layers[0].parameter_groups[0].layout.size, dtypes, reshards=reshards
        )

    def step(self, *, is_scoped: bool = True) -> None:
        for number in range(NUM_MICROBATCHES):
            with microbatch(self.context, is_last=not is_scoped or number == NUM_MICROBATCHES - 1):
                self.model(torch.ones(2, DIM, dtype=self.compute)).float().square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(torch.ones(2, DIM, dtype=self.compute))


def _sends(name: str, dtypes: str, reshards: bool) -> list[Counter[Collective]]:
    trained = Trained(name, dtypes, reshards=reshards)
    plan = trained.plan
    trained.step()
    seen = []
    refresh, forward = _times(NUM_LAYERS, plan.refresh), _times(NUM_LAYERS, plan.forward)
    for act, expected in (
        (trained.step, plan.of_step(NUM_MICROBATCHES) + refresh),
        # The first forward after a step refreshes weights, in training and in evaluation.
        (trained.evaluate, forward + refresh),
        # Without resharding, the next forward reuses the gathered weights.
        (trained.evaluate, forward if reshards else Counter()),
        (trained.step, plan.of_step(NUM_MICROBATCHES) - (Counter() if reshards else forward)),
        (trained.step, plan.of_step(NUM_MICROBATCHES) + refresh),
    ):
        with watched(trained.context, trained.mesh) as traffic:
            act()
        traffic.assert_is(expected, is_step=act == trained.step)
        seen.append(traffic.calls)
    return seen


def _num_ranks(name: str) -> int:
    return 2 ** len(PLACEMENTS[name].dp_axes)


def assert_alike(per_rank: list[Any]) -> None:
    assert all(own == per_rank[0] for own in per_rank)
    assert any(per_rank[0])


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        *itertools.product(["no_shard", "optim", "optim_grads", "optim_grads_params"], DTYPES),
        *itertools.product(["hsdp", "hfsdp"], ["fp32", "bf16 to fp32"]),
    ],
)
def test_a_step_issues_only_the_minimal_collectives_of_its_strategy(name, dtypes):
    assert_alike(run_ranks(_num_ranks(name), _sends, name, dtypes, True))


@pytest.mark.parametrize("name", ["optim_grads_params", "hsdp"])
def test_without_resharding_after_forward_weights_are_gathered_once(name):
    assert_alike(run_ranks(_num_ranks(name), _sends, name, "bf16", False))


def _sends_unscoped(name: str) -> list[Counter[Collective]]:
    trained = Trained(name, "bf16 to fp32")
    trained.evaluate()
    with watched(trained.context, trained.mesh) as traffic:
        trained.step(is_scoped=False)
    numel = trained.model[0].parameter_groups[0].layout.size
    plan = planned(name, numel, "bf16 to fp32", is_scoped=False)
    traffic.assert_is(plan.of_step(NUM_MICROBATCHES, num_last=NUM_MICROBATCHES), is_step=True)
    return [traffic.calls]


@pytest.mark.parametrize("name", ["no_shard", "optim", "optim_grads", "hfsdp"])
def test_without_deferral_every_microbatch_is_reduced_over_all_axes(name):
    assert_alike(run_ranks(_num_ranks(name), _sends_unscoped, name))


@on_ranks(2)
def test_unused_layers_are_reduced_and_frozen_layers_are_not() -> None:
    """An unused layer may have been used by another rank."""
    trained = Trained("optim_grads", "fp32")
    plan = trained.plan
    trained.evaluate()
    first, *rest = trained.model
    with watched(trained.context, trained.mesh) as traffic:
        rest[0](torch.ones(2, DIM)).sum().backward()
    assert traffic.calls == _times(NUM_LAYERS, plan.microbatch)
    first.requires_grad_(False)
    with watched(trained.context, trained.mesh) as traffic:
        trained.model(torch.ones(2, DIM)).sum().backward()
    assert traffic.calls == _times(NUM_LAYERS - 1, plan.microbatch)
    assert traffic.lane.sent_bytes == plan.microbatch[0].sent_bytes * (NUM_LAYERS - 1)


@on_ranks(2)
def test_the_recorder_sees_communication_outside_of_the_engine() -> None:
    """Proves that the other tests would detect collectives that bypass `collectives`."""
    trained = Trained("optim", "fp32")
    with watched(trained.context, trained.mesh) as traffic:
        dist.all_reduce(torch.ones(4))
        DTensor.from_local(torch.ones(4), trained.mesh, [Partial()]).full_tensor()
        trained.context.gather_lane.enqueue(lambda: dist.barrier()).wait()
    assert traffic.thread.operations > {"c10d::allreduce_", "_c10d_functional::all_reduce"}
    assert traffic.lane.operations == {"c10d::barrier"}
    assert not traffic.calls

    with watched(trained.context, trained.mesh) as traffic:
        trained.model[0].weight.sum().full_tensor()
    assert traffic.thread.operations == {"c10d::allreduce_"}
