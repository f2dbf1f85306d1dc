"""`fully_shard` on an accelerator: agreement of ranks, streams that wait for deliveries, and the
cost of a unit on the host.
"""

from __future__ import annotations

import copy
import io
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import megatron.core.mesh as meshes
from megatron.core import local_ranks
from megatron.core.device import Device
from megatron.core.distributed.fsdp import (
    FsdpContext,
    Placements,
    collectives,
    fully_shard,
    fully_shard_context,
    microbatch,
    parameter_grouping,
)
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.precision import MixedPrecisionPolicy, OffloadPolicy
from megatron.core.dtensors import local_tensor
from megatron.core.lanes import Event, relay
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from tests.helpers.ranks import run_ranks
from tests.simulated_accelerator.helpers import engines
from tests.simulated_accelerator.helpers.behaviours import (
    DEFAULT_LAST,
    LANES_LAST,
    WITH_PAUSES,
    Behaviour,
    these_behaviours,
)

pytestmark = pytest.mark.sim

DIM = 4
PATIENCE = 60.0  # seconds before a wait fails
STRATEGIES = ("optim", "optim_grads_params")


def _nothing() -> None:
    """The default callback of a layer."""


class Layer(nn.Linear):
    """Calls something before its kernels are issued, and after."""

    before: Callable[[], None] = staticmethod(_nothing)
    after: Callable[[], None] = staticmethod(_nothing)
    uses_bias = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before()
        x = nn.functional.linear(x, self.weight, self.bias if self.uses_bias else None)
        self.after()
        return x


def this_device() -> Device:
    import tests.simulated_accelerator.device  # noqa: F401  makes the kind known

    return Device("sim", dist.get_rank())


def shard(strategy: str, *, is_offloaded: bool = False) -> tuple[nn.Sequential, FsdpContext]:
    device = this_device().torch_device
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(DIM, DIM) for _ in range(3)]).to(device)
    mesh = init_device_mesh("sim", (dist.get_world_size(),))
    with fully_shard_context(device) as context:
        for layer in model:
            fully_shard(
                layer,
                mesh,
                Placements.for_strategy(strategy),
                offload_policy=OffloadPolicy(is_offloaded),
            )
    return model, context


def own_batch() -> torch.Tensor:
    return torch.full((2, DIM), 1.0 + dist.get_rank(), device=this_device().torch_device)


def _disagree(strategy: str) -> str:
    model, context = shard(strategy)
    model(own_batch()).sum().backward()
    context.check_agreement()
    assert all(bool(parameter.grad.to_local().isfinite().all()) for parameter in model.parameters())

    model.zero_grad()
    model[1].uses_bias = dist.get_rank() == 0
    model(own_batch()).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        context.check_agreement()
    return str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_that_only_some_ranks_have_is_named_on_the_device(strategy):
    for message in run_ranks(2, _disagree, strategy, device="sim"):
        assert (
            "rank 0 reduced the gradients of Layer[1]; rank 1 reduced the gradients of Layer[1] "
            "without any for Layer[1].bias"
        ) in message


# How PyTorch's engine and this one shard a module.
ENGINES: dict[str, Callable[..., object]] = {"FSDP2": fsdp2.fully_shard, "ours": fully_shard}


def _operations(engine: str, num_units: int) -> dict[str, int]:
    """Launches and waits of the host in forward and backward."""
    from tests.simulated_accelerator import device

    model = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(num_units)])
    model.to(this_device().torch_device)
    mesh = init_device_mesh("sim", (dist.get_world_size(),))
    for module in (*model, model):
        ENGINES[engine](module, mesh=mesh)
    for _ in range(3):
        before = device.counters()
        model(own_batch()).sum().backward()
        torch.sim.synchronize()
    return vars(device.counters() - before)


def test_the_host_launches_no_more_for_a_unit_than_with_fsdp2_and_waits_for_nothing():
    launched = {}
    for engine in ENGINES:
        few, many = (
            run_ranks(2, _operations, engine, num_units, device="sim")[0] for num_units in (3, 8)
        )
        launched[engine] = many["kernels"] - few["kernels"]
        if engine == "ours":
            assert many["stream_syncs"] == few["stream_syncs"]
            assert many["event_syncs"] == few["event_syncs"]
    assert 0 < launched["ours"] <= launched["FSDP2"]


def deliver_later(group: FsdpParameterGroup, device: Device) -> tuple[threading.Event, list[bool]]:
    """Delivers weights of 2 once the event is set; the list then says whether it was set in
    time.
    """
    go, was_let = threading.Event(), list[bool]()
    host, h2d = device.host_lane("test host"), device.lane("test h2d")

    def update() -> Event:
        was_let.append(go.wait(PATIENCE))
        weight = group.post_optimizer_model_weight.local_buffer
        return h2d.enqueue(lambda: weight.fill_(2.0))

    group.delivery.announce(relay(host, update))
    return go, was_let


def _waits_for_a_delivery(strategy: str) -> tuple[list[bool], bool]:
    """Whether the delivery was released in time, and whether the gather overlapped with the
    layer before.
    """
    import tests.simulated_accelerator.device as sim

    device = this_device()
    model, _ = shard(strategy, is_offloaded=True)
    with torch.no_grad():
        model(own_batch())
    torch.accelerator.synchronize()

    group = model[1].parameter_groups[0]
    go, was_let = deliver_later(group, device)
    computation = ExitStack()
    arrived: list[bool] = []

    def hold_and_let() -> None:
        # The next kernel on this stream is slow, like the kernels of a large layer.
        computation.enter_context(sim.held(torch.accelerator.current_stream()))
        torch.zeros(1, device=device.torch_device)
        go.set()

    def look() -> None:
        deadline = time.monotonic() + PATIENCE
        weight = group.unsharded_weight.local_buffer
        while not bool((sim.peek(weight) == 2.0).all()) and time.monotonic() < deadline:
            time.sleep(0.001)
        arrived.append(bool((sim.peek(weight) == 2.0).all()))
        computation.close()

    model[0].after, model[1].before = hold_and_let, look
    with torch.no_grad():
        model(own_batch())
    torch.accelerator.synchronize()
    return was_let, arrived[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pending_delivery_holds_up_neither_the_kernels_before_it_nor_the_gather_after_it(
    strategy,
):
    assert run_ranks(2, _waits_for_a_delivery, strategy, device="sim") == [([True], True)] * 2


def pickled(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def _replicas_in_host_memory() -> dict[str, object]:
    """What programs do with a replicated parameter whose main weight is in host memory."""
    model, _ = shard("no_shard")
    weight = model[0].weight
    before = weight.detach().to_local().cpu().clone()
    HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1)

    values = {
        "detach": weight.detach(),
        "view_as": weight.view_as(weight).detach(),
        "state_dict": model.state_dict()["0.weight"],
        "clone": weight.detach().clone(),
        "deepcopy": copy.deepcopy(weight).detach(),
        "pickled": pickled(weight.detach()),
        "pickled parameter": pickled(weight).detach(),
    }
    same = {name: torch.equal(local_tensor(value), before) for name, value in values.items()}
    devices = {name: local_tensor(value).device.type for name, value in values.items()}
    with torch.no_grad():
        returned = weight.add_(1.0)
    return {
        "same": set(same.values()),
        "devices": set(devices.values()),
        "in place": returned is weight and torch.equal(local_tensor(weight), before + 1),
        "says": weight.device.type,
        "views": local_tensor(values["detach"]).data_ptr() == local_tensor(weight).data_ptr(),
    }


def test_a_replicated_parameter_in_host_memory_is_looked_at_and_copied_as_any_other():
    expected = {
        "same": {True}, "devices": {"cpu"}, "in place": True, "says": "sim", "views": True,
    }  # fmt: skip
    assert run_ranks(2, _replicas_in_host_memory, device="sim") == [expected] * 2


def _default_step(strategy: str) -> tuple[bool, bool]:
    """Whether AdamW uses operators on lists by default, with the results of `foreach=False`."""
    found: list[bool] = []
    results: list[list[torch.Tensor]] = []
    original = torch._foreach_addcdiv_

    def listed(*args: object, **kwargs: object) -> object:
        found.append(True)
        return original(*args, **kwargs)

    for foreach in (None, False):
        model, _ = shard(strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
        model(own_batch()).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
        torch._foreach_addcdiv_ = listed
        try:
            optimizer.step()
        finally:
            torch._foreach_addcdiv_ = original
        results.append([local_tensor(p).detach().cpu() for p in model.parameters()])
    return bool(found), all(map(torch.allclose, *results))


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_optimizers_of_pytorch_step_lists_by_default_as_on_plain_parameters(strategy: str) -> None:
    found = run_ranks(2, _default_step, strategy, device="sim")
    assert found == [(True, True)] * 2


@contextmanager
def on_machines(num_machines: int) -> Iterator[None]:
    """While open, models are sharded as over so many machines."""
    with pytest.MonkeyPatch.context() as patch:
        # Ranks of other tests have the same process group, on one machine.
        patch.setattr(meshes, "_second_groups", weakref.WeakKeyDictionary())
        patch.setattr(local_ranks, "machine", lambda: str(dist.get_rank() % num_machines))
        yield


def _gathers_during_a_reduction(num_machines: int) -> tuple[bool, bool]:
    """Whether gathers of a backward are done while its first reduction has not started, and whether
    the gradients are right in the end.
    """
    import tests.simulated_accelerator.device as sim

    with on_machines(num_machines):
        model, context = shard("optim_grads_params")
    model(own_batch()).sum().backward()
    expected = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    model.zero_grad()
    torch.accelerator.synchronize()

    loss = model(own_batch()).sum()
    gathers = context.gather_lane._stream
    with sim.held(context.reduce_lane._stream):
        loss.backward()
        # All ranks have issued everything: a gather that still waits, waits for the reduction.
        compared = torch.zeros(1)
        dist.all_reduce(compared)
        deadline = time.monotonic() + (PATIENCE if num_machines > 1 else 0)
        while not gathers.query() and time.monotonic() < deadline:
            time.sleep(0.001)
        is_done = gathers.query()
    torch.accelerator.synchronize()
    found = [parameter.grad.to_local() for parameter in model.parameters()]
    return is_done, all(map(torch.equal, found, expected))


@pytest.mark.parametrize("num_machines", [1, 2])
def test_gathers_overlap_reductions_between_machines_and_follow_them_within_one(num_machines):
    is_overlapped = num_machines > 1
    found = run_ranks(2, _gathers_during_a_reduction, num_machines, device="sim")
    assert found == [(is_overlapped, True)] * 2


def _courses(behaviour: Behaviour) -> list[object]:
    found: list[object] = []
    new_group = dist.new_group
    with behaviour.applied(), pytest.MonkeyPatch.context() as patch:
        # With local synchronization, torch repeats the names of destroyed groups, whose addresses
        # are still in the store of this pool of ranks.
        patch.setattr(dist, "new_group", lambda ranks, **_: new_group(ranks))
        for num_machines in (1, 2):
            with on_machines(num_machines):
                engine = engines.make_engine("zero3", "sim")
            found.append(engines.train(engine, "sim", range(3)).numbers)
            torch.accelerator.synchronize()
    return found


@these_behaviours(LANES_LAST, DEFAULT_LAST, WITH_PAUSES)
def test_training_over_two_machines_has_the_bits_of_one(behaviour: Behaviour) -> None:
    for on_one, on_two in run_ranks(2, _courses, behaviour, device="sim"):
        assert on_one == on_two


class Unlike(nn.Module):
    """Rows of 6, 10 and 1 elements: three groups where any padding is too much."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def _parts(kind: str, strategy: str, splits: bool) -> tuple[list[Any], int]:
    """(this rank's gradients and weights, the collectives of two microbatches and a step)."""
    torch.manual_seed(0)
    device = torch.device("cpu") if kind == "cpu" else this_device().torch_device
    model = nn.Sequential(*[Unlike() for _ in range(2)]).to(device)
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    group = mesh.get_group()
    with pytest.MonkeyPatch.context() as patch:
        if splits:
            patch.setattr(parameter_grouping, "_MAX_PADDING_SHARE", 0.0)
            patch.setattr(parameter_grouping, "_MIN_PADDING_NUMEL", 0)
        with fully_shard_context(device) as context:
            for layer in model:
                fully_shard(layer, mesh, Placements.for_strategy(strategy))
    assert [len(layer.parameter_groups) for layer in model] == [3 if splits else 1] * 2

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    backend = None if kind == "cpu" else group._get_backend(device)
    for _ in range(2):
        before = backend.num_issued if backend else 0
        for number in range(2):
            with microbatch(context, is_last=number == 1):
                x = torch.full((4, 6), 0.1 * (1 + number + dist.get_rank()), device=device)
                model(x).square().mean().backward()
        gradients = [parameter.grad.full_tensor().cpu() for parameter in model.parameters()]
        num_issued = backend.num_issued - before - len(gradients) if backend else 0
        optimizer.step()
        optimizer.zero_grad()
    weights = [parameter.full_tensor().cpu() for parameter in model.parameters()]
    return [tensor.tolist() for tensor in (*gradients, *weights)], num_issued


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_the_parts_of_a_unit_are_gathered_and_reduced_by_as_many_collectives_as_a_whole_unit(
    strategy,
):
    expected = [run_ranks(2, _parts, "cpu", strategy, splits)[0] for splits in (False, True)]
    assert expected[0] == expected[1]
    whole, split = (
        run_ranks(2, _parts, "sim", strategy, splits, device="sim")[0] for splits in (False, True)
    )
    assert whole[0] == split[0]
    assert whole[1] == split[1] > 0
    close = {"rtol": 1e-5, "atol": 1e-6}
    for found, on_cpu in zip(split[0], expected[0][0], strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(on_cpu), **close)


PEAK_DIM = 512


def _peak(dtypes: tuple[torch.dtype, ...], strategy: str) -> tuple[int, int]:
    """The most memory of forward and backward in addition to the memory at rest: (planned,
    measured).
    """
    torch.manual_seed(0)
    layers = [
        nn.ModuleList(nn.Linear(PEAK_DIM, PEAK_DIM, bias=False) for _ in range(3)) for _ in range(4)
    ]
    device = this_device().torch_device
    model = nn.ModuleList(layers).to(device)
    mesh = init_device_mesh("sim", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.float32, *dtypes, compute_dtype=torch.bfloat16)
    with fully_shard_context(device) as context:
        for layer in model:
            layer.forward = nn.Sequential(*layer).forward
            fully_shard(layer, mesh, Placements.for_strategy(strategy), policy)

    def step() -> None:
        for is_last in (False, True):
            with microbatch(context, is_last):
                x = torch.ones(1, PEAK_DIM, device=device, dtype=torch.bfloat16)
                for layer in model:
                    x = layer(x)
                x.sum().backward()
        torch.sim.synchronize()

    step()
    at_rest = torch.sim.memory_allocated()
    torch.sim.reset_peak_memory_stats()
    step()
    measured = torch.sim.max_memory_allocated() - at_rest

    plan = model[0].parameter_groups[0].plan
    one_gradient = PEAK_DIM**2 * plan.dtype.itemsize
    planned = 2 * (plan.whole_weights_nbytes + plan.whole_grads_nbytes) + one_gradient
    planned += len(layers) * plan.partial_grads_nbytes + plan.reduction_nbytes
    return planned, measured


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,), (torch.bfloat16,), (torch.float32, torch.bfloat16)],
    ids=["fp32", "bf16", "fp32 sent in bf16"],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_take_the_planned_memory_until_they_are_reduced(num_ranks, dtypes, strategy):
    for planned, measured in run_ranks(num_ranks, _peak, dtypes, strategy, device="sim"):
        assert 0.95 * planned < measured <= 1.01 * planned


def _over_one_rank() -> None:
    def unused(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective of the backend over one rank")

    generator = torch.Generator().manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_gather_on_device", unused)
        patch.setattr(collectives, "_reduce_scatter_on_device", unused)
        patch.setattr(collectives, "_DIVIDED_NUMEL", 300)  # several pieces
        for dtypes in itertools.product((torch.float32, torch.bfloat16), repeat=2):
            for divisor, accumulates in itertools.product((1.0, 3.0), (False, True)):
                whole = torch.randn(1000, generator=generator).to(dtypes[0])
                out = torch.randn(1000, generator=generator).to(dtypes[1])
                how = collectives.Reduction(True, divisor, accumulates)
                on_device = out.to("sim")
                collectives.reduce_scatter(on_device, whole.to("sim"), dist.group.WORLD, how)
                collectives.reduce_scatter(out, whole, dist.group.WORLD, how)
                assert torch.equal(on_device.cpu(), out)

        own, out = torch.randn(10).to("sim"), torch.zeros(10).to("sim")
        collectives.all_gather(out, own, dist.group.WORLD)
        assert torch.equal(out.cpu(), own.cpu())


def test_collectives_over_one_rank_give_the_bits_of_the_cpu_without_the_backend():
    run_ranks(1, _over_one_rank, device="sim")
