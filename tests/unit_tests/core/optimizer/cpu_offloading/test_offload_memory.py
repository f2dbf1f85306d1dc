"""At fraction 1 the device keeps compute weights and gradients only, and the host has the planned
memory, to the byte.
"""

from __future__ import annotations

import gc
import itertools
import mmap
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import megatron.core.lanes
from megatron.core.device import Device
from megatron.core.distributed.fsdp import (
    FsdpContext,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
    microbatch,
)
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.distributed.fsdp.placement import SHARDING_STRATEGIES
from megatron.core.drivers import PinError
from megatron.core.host_memory import HostNeed, HostSlab
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from tests.helpers.ranks import on_ranks, run_ranks
from tests.unit_tests.core.optimizer.cpu_offloading.helpers.nets import Uneven

DIM = 64
NUM_LAYERS = 4
BF16, FP32 = torch.bfloat16, torch.float32
FORWARD = {"overlap_step_with_forward": True, "fetch_during_backward": True}
CACHE_LINE = 64  # bytes, the alignment of arrays


class Layer(nn.Linear):
    """Calls `look` in the middle of its forward and of its backward."""

    look: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.look is not None:
            self.look()
            x.register_hook(lambda _: self.look())
        return torch.tanh(x)


class Model(nn.Module):
    """Layers, and a matrix behind them that belongs to the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            Layer(DIM, DIM, bias=False, dtype=BF16) for _ in range(NUM_LAYERS)
        )
        self.behind = nn.Linear(DIM, DIM, bias=False, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.behind(x)


def shard(
    model: Model, strategy: str, *, main_grads: torch.dtype | None = None, on_host: bool = False
) -> FsdpContext:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(main_grads_dtype=main_grads)
    with fully_shard_context("cpu") as context:
        for module in (*model.layers, model):
            offload = OffloadPolicy(main_weights_on_host=on_host)
            fully_shard(
                module, mesh, Placements.for_strategy(strategy), policy, offload_policy=offload
            )
    return context


def step(model: Model, context: FsdpContext, optimizer: torch.optim.Optimizer) -> None:
    for number in range(2):
        with microbatch(context, is_last=number == 1):
            backward(model)
    optimizer.step()
    optimizer.zero_grad()


def backward(model: Model) -> None:
    x = torch.ones(1, model.behind.in_features, dtype=BF16, requires_grad=True)
    model(x).float().square().mean().backward()


def bucket_numel(strategy: str) -> int:
    """Of a rank's part of any group here."""
    return DIM * DIM // (1 if strategy == "no_shard" else dist.get_world_size())


# No fp32 on the device side


@contextmanager
def only_new_objects() -> Iterator[None]:
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def slabs_mapped() -> Iterator[list[range]]:
    """The addresses of all slabs that are made meanwhile."""
    original, mapped = HostSlab._map, []

    def mapping(slab: HostSlab, *args: Any) -> None:
        original(slab, *args)
        begin = slab.tensor(0, slab.nbytes, torch.uint8).data_ptr()
        mapped.append(range(begin, begin + slab.nbytes))

    HostSlab._map = mapping
    try:
        yield mapped
    finally:
        HostSlab._map = original


def fp32_on_device(numel: int, slabs: Sequence[range]) -> list[tuple[int, ...]]:
    """The shapes of live fp32 tensors with storages of `numel` elements or more outside of
    the host's slabs.
    """
    found = []
    for value in gc.get_objects():
        if (
            issubclass(type(value), torch.Tensor)
            and not issubclass(type(value), DTensor)
            and value.dtype == FP32
        ):
            storage = value.untyped_storage()
            if storage.nbytes() >= numel * 4 and not any(
                storage.data_ptr() in slab for slab in slabs
            ):
                found.append(tuple(value.shape))
    return found


def _nothing_in_fp32(strategy: str, on_host: bool) -> None:
    numel = bucket_numel(strategy)
    for fraction in (1.0, 0.0):
        if on_host and fraction == 0:
            continue
        with only_new_objects():
            model = Model()
            context = shard(model, strategy, on_host=on_host)
            with slabs_mapped() as slabs:
                optimizer = HybridDeviceOptimizer(model.parameters(), fraction, **FORWARD)
            if on_host:
                # They stay where they are: only the host reads them.
                main_weights = [
                    group_of(parameter).main_weight.local_buffer for parameter in model.parameters()
                ]
                slabs += [
                    range(buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes)
                    for buffer in main_weights
                ]
            assert sum(map(len, slabs)) == optimizer.host_bytes
            seen: list[list[tuple[int, ...]]] = []

            def look(context: Any = context, slabs: Any = slabs, seen: Any = seen) -> None:
                for reduction in context._in_flight:
                    reduction.event.wait()  # reductions in flight are added up in fp32
                seen.append(fp32_on_device(numel, slabs))

            gc.collect()
            look()
            for layer in model.layers:
                layer.look = look
            for _ in range(2):
                step(model, context, optimizer)
                optimizer.synchronize()
                look()
            assert len(seen) == 1 + 2 * (1 + 2 * 2 * NUM_LAYERS)
            if fraction == 1:
                assert not any(seen), seen
            else:
                assert all(len(found) >= 3 * (NUM_LAYERS + 1) for found in seen), (
                    "it does see main weights and moments"
                )
            for layer in model.layers:
                layer.look = None
            del model, context, optimizer, look, layer
            gc.collect()


@pytest.mark.parametrize(
    "strategy",
    [
        each if each == "optim" else pytest.param(each, marks=pytest.mark.wide)
        for each in SHARDING_STRATEGIES
    ],
)
def test_the_device_has_no_fp32_tensor_of_the_size_of_a_bucket(strategy):
    run_ranks(2, _nothing_in_fp32, strategy, False)


def test_the_device_has_no_fp32_tensor_if_main_weights_start_on_the_host():
    run_ranks(2, _nothing_in_fp32, "optim_grads_params", True)


# Host bytes


def arrays_nbytes(arrays: Sequence[tuple[int, int]]) -> int:
    """Of arrays of (elements, bytes an element), one behind the other, each from the next cache
    line on.
    """
    end = 0
    for numel, itemsize in arrays:
        end = -(-end // CACHE_LINE) * CACHE_LINE + numel * itemsize
    return end


class Case(NamedTuple):
    """Of settings, and how many bytes an element then has."""

    settings: dict[str, Any]
    main_grads: torch.dtype
    grad: int
    weight: int  # 0 where new compute weights are written over the gradients
    moment: int = 4


CASES = {
    "bf16 gradients": Case({}, BF16, grad=2, weight=0),
    "fp32 gradients": Case({}, FP32, grad=4, weight=2),
    "gradients not pinned": Case({"pin_cpu_grads": False}, BF16, grad=2, weight=2),
    "nothing pinned": Case(
        {"pin_cpu_grads": False, "pin_cpu_params": False}, BF16, grad=2, weight=0
    ),
    "bf16 moments": Case(
        {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}, BF16, grad=2, weight=0, moment=2
    ),
    "in order": Case({"overlap_cpu_optimizer_d2h_h2d": False}, BF16, grad=2, weight=0),
}

# The buffers' sizes on 2 ranks, by hand: rows of 6 and 1, so cuts at multiples of 6; and so on.
#   (5, 6) and (5,): 30 + 5 = 35 -> 36 = 2 * 18
#   (7, 5) and (7,): 35 + 7 = 42 -> 50 = 2 * 25, multiples of 5
#   (3, 7) and (3,): 21 + 3 = 24 -> 28 = 2 * 14
HALVES = [18, 25, 14]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@on_ranks(2)
def test_host_memory_matches_the_plan_to_the_byte(case: Case) -> None:
    model = Uneven()
    shard(model, "optim_grads_params", main_grads=case.main_grads)
    for fraction, numels in ((1.0, HALVES), (0.4, HALVES[1:]), (0.2, HALVES[2:]), (0.0, [])):
        model = Uneven()
        shard(model, "optim_grads_params", main_grads=case.main_grads)
        optimizer = HybridDeviceOptimizer(model.parameters(), fraction, **case.settings)
        assert [group.is_on_host for group in optimizer.plan.groups].count(True) == len(numels)
        main_weights = [(numel, 4) for numel in numels]
        states = [(numel, case.moment) for numel in numels * 2]
        weights = [(numel, case.weight) for numel in numels if case.weight]
        gradients = [(numel, case.grad) for numel in numels]
        assert optimizer.host_bytes == sum(
            map(arrays_nbytes, (main_weights, states, weights, gradients))
        )


# Pinned memory


class Pinned:
    """The sizes of pinned memory by address. Replaces the driver of a device that pins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int | None = None) -> None:
        self.sizes: dict[int, int] = {}
        self._most = most  # slabs that the driver accepts
        monkeypatch.setattr(Device, "pins_host_memory", property(lambda _: True))
        monkeypatch.setattr(Device, "pin", lambda _, address, nbytes: self._pin(address, nbytes))
        monkeypatch.setattr(Device, "unpin", lambda _, address: self.sizes.pop(address))

    def _pin(self, address: int, nbytes: int) -> None:
        if self._most == len(self.sizes):
            raise PinError(f"Expected to pin {nbytes} bytes.")
        self.sizes[address] = nbytes


class PinCase(NamedTuple):
    """Of dtypes and settings, and the bytes of pinned slabs that 384 elements then have."""

    settings: dict[str, Any]
    dtype: torch.dtype
    pinned: list[int]


NOT_GRADS, NOT_PARAMS = {"pin_cpu_grads": False}, {"pin_cpu_params": False}
PIN_CASES = {
    "bf16 weights over bf16 gradients": PinCase({}, BF16, [2]),
    "fp32 weights over fp32 gradients": PinCase({}, FP32, [4]),
    "fp32 gradients apart from bf16 weights": PinCase({"use_decoupled_grad": True}, BF16, [4, 2]),
    "weights alone": PinCase(NOT_GRADS, BF16, [2]),
    "gradients alone": PinCase(NOT_PARAMS, BF16, [2]),
    "nothing": PinCase(NOT_GRADS | NOT_PARAMS, BF16, []),
    "states that no device can stream": PinCase(
        {"update_on_device": 1.0, "overlap_cpu_optimizer_d2h_h2d": True}, BF16, [2]
    ),
    "bf16 moments": PinCase({"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}, BF16, [2]),
}


@pytest.mark.parametrize("case", PIN_CASES.values(), ids=PIN_CASES)
def test_only_memory_that_is_copied_over_the_link_is_pinned(monkeypatch, case):
    pinned = Pinned(monkeypatch)
    parameters = Uneven().to(case.dtype).parameters()
    settings = {
        "overlap_cpu_optimizer_d2h_h2d": False,
        "param_update_in_fp32": True,
    } | case.settings
    optimizer = HybridDeviceOptimizer(parameters, 1.0, **settings)
    assert list(pinned.sizes.values()) == [6 * 64 * itemsize for itemsize in case.pinned]
    assert optimizer.host_bytes >= 6 * 64 * (4 + 2 * 2), (
        "main weights and moments are there, not pinned"
    )
    del optimizer
    gc.collect()
    assert pinned.sizes == {}


def test_the_preflight_reports_the_pinned_memory(monkeypatch):
    Pinned(monkeypatch)
    seen: list[HostNeed] = []
    module = "megatron.core.optimizer.cpu_offloading.both_sides"
    monkeypatch.setattr(f"{module}.check_memory_on_all_ranks", lambda needs, *_: seen.extend(needs))
    HybridDeviceOptimizer(
        Uneven().parameters(),
        1.0,
        param_update_in_fp32=True,
        **NOT_GRADS,
        overlap_cpu_optimizer_d2h_h2d=False,
    )
    assert {need.what: need.is_pinned for need in seen} == {
        "main weights": False,
        "exp_avg": False,
        "exp_avg_sq": False,
        "gradients": False,
        "compute weights": True,
    }


def test_a_failed_pin_releases_all_memory_before_the_error_is_handled(monkeypatch):
    pinned = Pinned(monkeypatch, most=1)
    mapped: list[weakref.ref[mmap.mmap]] = []

    class Mapping(mmap.mmap):
        """Of which there may be weak references."""

        def __init__(self, *_: Any, **__: Any) -> None:
            mapped.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Mapping)
    try:
        HybridDeviceOptimizer(
            Uneven().parameters(), 1.0, use_decoupled_grad=True, param_update_in_fp32=True
        )
    except PinError:
        # Not after this block: callers that continue unpinned allocate here.
        assert len(mapped) >= 2
        assert pinned.sizes == {}
        assert all(mapping() is None or mapping().closed for mapping in mapped)
    else:
        pytest.fail("nothing was refused")


def test_plain_parameters_take_whole_cache_lines():
    # Every parameter starts at a multiple of 64 elements: 30 -> 64, 5 -> 64, 35 -> 64, 7 -> 64, 21
    # -> 64, 3 -> 64.
    optimizer = HybridDeviceOptimizer(Uneven().float().parameters(), 1.0)
    assert optimizer.host_bytes == 6 * 64 * (4 + 4 + 4) + 6 * 64 * 4
    rounded = HybridDeviceOptimizer(Uneven().parameters(), 1.0, param_update_in_fp32=True)
    assert rounded.host_bytes == 6 * 64 * (4 + 4 + 4) + 6 * 64 * 2


# Steady


class Allocations(TorchDispatchMode):
    """Counts, by bytes, the storages of some size that operations of a thread make."""

    def __init__(self, least_bytes: int, seen: Counter[int]) -> None:
        super().__init__()
        self._least_bytes = least_bytes
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {storage._cdata for storage in _storages((args, tuple(kwargs.values())))}
        result = func(*args, **kwargs)
        for storage in _storages(result):
            if storage._cdata not in given and storage.nbytes() >= self._least_bytes:
                self._seen[storage.nbytes()] += 1
        return result


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _storages(item)
    elif isinstance(value, torch.Tensor) and not value.is_meta:
        yield (value._local_tensor if isinstance(value, DTensor) else value).untyped_storage()


@contextmanager
def allocations_of_lanes(least_bytes: int) -> Iterator[dict[str, Counter[int]]]:
    """What lanes allocate, by the names of their threads' lanes."""
    lane = megatron.core.lanes.ThreadLane
    original = lane.carry_out
    seen: dict[str, Counter[int]] = {}

    def carry_out(self: Any, item: Any) -> None:
        with Allocations(least_bytes, seen.setdefault(self._name, Counter())):
            original(self, item)

    lane.carry_out = carry_out
    try:
        yield seen
    finally:
        lane.carry_out = original


def _allocated(
    strategy: str, make: Callable[[Any], torch.optim.Optimizer], main_grads: torch.dtype
) -> dict[str, Counter[int]]:
    """Of each step after the second: in the main thread outside and inside of step(), and on the
    lanes.
    """
    model = Model()
    context = shard(model, strategy, main_grads=main_grads)
    optimizer = make(model.parameters())
    least = bucket_numel(strategy) * 2
    for _ in range(2):
        step(model, context, optimizer)
    outside: Counter[int] = Counter()
    inside: Counter[int] = Counter()
    with allocations_of_lanes(least) as lanes:
        for _ in range(3):
            with Allocations(least, outside):
                for number in range(2):
                    with microbatch(context, is_last=number == 1):
                        backward(model)
            with Allocations(least, inside):
                optimizer.step()
            optimizer.zero_grad()
        # The lanes finish, and with them the counts.
        model.state_dict()
        context.gather_lane.enqueue(lambda: None).wait()
    return {"backward": outside, "step": inside, **lanes}


@pytest.mark.parametrize(
    ("strategy", "main_grads"),
    [
        pytest.param(strategy, dtype, marks=[] if (strategy, dtype) in kept else pytest.mark.wide)
        for kept in [{("optim_grads_params", BF16), ("optim", FP32)}]
        for strategy, dtype in itertools.product(SHARDING_STRATEGIES, (BF16, FP32))
    ],
)
@on_ranks(2)
def test_from_the_third_step_on_offloading_allocates_no_tensor_of_the_size_of_a_bucket(
    strategy: str, main_grads: torch.dtype
) -> None:
    without = _allocated(strategy, FusedAdam, main_grads)
    for settings in ({}, FORWARD):
        make = partial(HybridDeviceOptimizer, offload_fraction=1.0, **settings)
        found = _allocated(strategy, make, main_grads)
        lanes = [f"optimizer {lane}" for lane in ("d2h", "host start", "host", "h2d")]
        assert set(lanes) <= found.keys()
        assert [found[name] for name in ("step", *lanes)] == [Counter()] * 5
        assert found["backward"] == without["backward"]
        assert found["fsdp communication"] == without["fsdp communication"]
    assert without["backward"].total() > 0, "it does see autograd's gradients"
    adam = torch.optim.Adam
    other = _allocated(strategy, lambda p: HybridDeviceOptimizer(p, 1.0, adam, adam), main_grads)
    assert other["optimizer host"].total() >= 3 * (NUM_LAYERS + 1), (
        "and what PyTorch's Adam takes on the host"
    )


@on_ranks(2)
def test_groups_whose_main_weights_moved_keep_no_other() -> None:
    model = Model()
    shard(model, "optim_grads_params")
    before = [
        group_of(layer.weight).main_weight.local_buffer.untyped_storage() for layer in model.layers
    ]
    sizes = [storage.nbytes() for storage in before]
    references = [torch.multiprocessing.reductions.StorageWeakRef(storage) for storage in before]
    del before
    assert sizes == [DIM * DIM * 4 // 2] * NUM_LAYERS
    assert not any(reference.expired() for reference in references)
    optimizer = HybridDeviceOptimizer(model.parameters(), 0.6)
    gc.collect()
    on_host = [group_of(layer.weight).is_on_host for layer in model.layers]
    assert 0 < sum(on_host) < NUM_LAYERS
    assert [reference.expired() for reference in references] == on_host
    del optimizer


class _Matrices(nn.Module):
    """Two ranks have all of one matrix each, and share the one in the middle."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "middle", "last"):
            self.register_parameter(name, nn.Parameter(torch.zeros(4, DIM)))


def _bytes_over_both_ends() -> dict[str, int]:
    model = _Matrices()
    fully_shard(model, offload_policy=OffloadPolicy(main_weights_on_host=True))
    parameters = [model.get_parameter(name) for name in ("first", "last")]
    return HybridDeviceOptimizer(parameters, 1.0, lr=0.1).host_bytes_by_state()


def test_an_optimizer_over_a_part_of_a_group_has_memory_for_the_rows_in_between_alone() -> None:
    # Each rank has rows of one of the two, and all of its rows of the matrix in the middle last or
    # first.
    for by_state in run_ranks(2, _bytes_over_both_ends):
        assert set(by_state.values()) == {4 * DIM * FP32.itemsize}
