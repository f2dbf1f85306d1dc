from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.distributed.fsdp import (
    DBuffer,
    Flat,
    FsdpContext,
    FsdpModule,
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from tests.helpers.ranks import run_ranks

DIM = 64
NUM_LAYERS = 5
SMALL_BYTES = 1024
ZERO_3 = "optim_grads_params"


class Pieces(NamedTuple):
    """Into how many pieces the ranks cut each kind of buffer, where every axis of the mesh has two
    ranks.
    """

    parameter: int
    gradient: int
    optimizer: int  # main weights, and gradients that are reduced over all axes


class Case(NamedTuple):
    """A strategy in certain dtypes."""

    name: str
    compute: torch.dtype = torch.bfloat16
    main: torch.dtype = torch.float32
    main_grads: torch.dtype = torch.float32
    sent: torch.dtype = torch.bfloat16

    def __repr__(self) -> str:
        dtypes = (self.compute, self.main, self.main_grads, self.sent)
        return f"{self.name}-{'-'.join(f'{dtype.itemsize}' for dtype in dtypes)}"

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(self.main, self.main_grads, self.sent)


STRATEGIES = {
    **{
        name: Placements.for_strategy(name)
        for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")
    },
    "hsdp": Placements(
        (0, 1), (Replicate(), Flat()), (Partial("avg"), Flat()), (Replicate(), Flat())
    ),
    "hfsdp": Placements((0, 1), (Replicate(), Flat()), (Partial("avg"), Flat()), (Flat(), Flat())),
}
PIECES = {
    "no_shard": Pieces(parameter=1, gradient=1, optimizer=1),
    "optim": Pieces(parameter=1, gradient=1, optimizer=2),
    "optim_grads": Pieces(parameter=1, gradient=2, optimizer=2),
    "optim_grads_params": Pieces(parameter=2, gradient=2, optimizer=2),
    "hsdp": Pieces(parameter=2, gradient=2, optimizer=2),
    "hfsdp": Pieces(parameter=2, gradient=2, optimizer=4),
}
BF16, FP32 = torch.bfloat16, torch.float32
ONE_DTYPE = {"compute": FP32, "main": FP32, "main_grads": FP32, "sent": FP32}


class Sizes:
    """Bytes of a group's buffers, by formula."""

    def __init__(self, case: Case, numel: int) -> None:
        pieces = PIECES[case.name]
        optimizer_numel = numel // pieces.optimizer
        # Main weights of the compute weights' dtype are the compute weights, or a part of them.
        main_weight = optimizer_numel * case.main.itemsize if case.main != case.compute else 0
        self.model_weight = numel // pieces.parameter * case.compute.itemsize
        self.frozen = self.model_weight
        self.resting = self.model_weight + main_weight
        self.main_gradient = optimizer_numel * case.main_grads.itemsize
        # Compute weights that are whole at rest are used as they are.
        self.unsharded_weight = numel * case.compute.itemsize if pieces.parameter > 1 else 0
        self.unsharded_gradient = numel * case.sent.itemsize
        # Gradients with a deferred reduction over an axis have separate sums, in addition to the
        # main gradients.
        is_deferred = case.name not in ("optim_grads", "optim_grads_params")
        self.partial_gradient = (
            numel // pieces.gradient * case.main_grads.itemsize if is_deferred else 0
        )
        # Where no axis is reduced before the last microbatch, a single one goes into the main ones
        # at once.
        self.partial_gradient_of_one = self.partial_gradient if pieces.gradient > 1 else 0
        # The gradients that every microbatch but the last leaves.
        self.sum_so_far = self.partial_gradient if is_deferred else self.main_gradient


class Layer(nn.Linear):
    """Calls `look` in the middle of its forward and of its backward."""

    look: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.look is not None:
            self.look()
            if x.requires_grad:
                x.register_hook(lambda _: self.look())
        return torch.tanh(x)


class Model(nn.Module):
    """Layers of one size; with parameters before and behind them that belong to the model where
    `is_nested`.
    """

    def __init__(self, case: Case, *, is_nested: bool = False, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"dtype": case.compute, "device": device}
        self.layers = nn.ModuleList(Layer(DIM, DIM, **options) for _ in range(NUM_LAYERS))
        self.before = nn.Linear(DIM, DIM, **options) if is_nested else nn.Identity()
        self.behind = nn.Linear(DIM, DIM, **options) if is_nested else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return self.behind(x)


def mesh_of(case: Case) -> DeviceMesh:
    return init_device_mesh("cpu", (2,) * len(STRATEGIES[case.name].dp_axes))


def shard(model: Model, case: Case, mesh: DeviceMesh, **options: Any) -> FsdpContext:
    """The layers, and the model if it has direct parameters."""
    placements = STRATEGIES[case.name]
    with fully_shard_context("cpu", **options) as context:
        for layer in model.layers:
            fully_shard(layer, mesh, placements, case.policy)
        if isinstance(model.before, nn.Linear):
            fully_shard(model, mesh, placements, case.policy)
    return context


def groups_of(module: nn.Module) -> list[FsdpParameterGroup]:
    found = (child for child in module.modules() if isinstance(child, FsdpModule))
    return [group for child in found for group in child.parameter_groups]


def storages_of(groups: Iterable[FsdpParameterGroup]) -> dict[int, int]:
    """The bytes of all storages that belong to the groups' buffers."""
    storages: dict[int, int] = {}
    for group in groups:
        buffers = [
            group.model_weight,
            group.main_weight,
            group.post_optimizer_model_weight,
            group.unsharded_weight,
        ]
        if group.gradients is not None:
            own = (group.gradients.main, group.gradients.unsharded, group.gradients.partial)
            buffers += [buffer for buffer in own if buffer is not None]
        for buffer in buffers:
            storage = buffer.local_buffer.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return storages


def engine_bytes(groups: Iterable[FsdpParameterGroup]) -> int:
    """Each storage counted once."""
    return sum(storages_of(groups).values())


@contextmanager
def only_new_objects() -> Iterator[None]:
    """`live_bytes` counts objects created since: `gc` does not see older ones."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def live_bytes() -> int:
    """Of the storages of all live tensors, each counted once, but for the smallest."""
    # Another thread may free one storage and take another while this one looks.
    seen = live_storages()
    while seen != (again := live_storages()):
        seen = again
    return sum(num_bytes for num_bytes in seen.values() if num_bytes >= SMALL_BYTES)


def live_storages() -> dict[int, int]:
    """The bytes of the storages of all live tensors."""
    storages: dict[int, int] = {}
    for value in gc.get_objects():
        # The local tensor of a DTensor is another live one.
        if (
            issubclass(type(value), torch.Tensor)
            and not issubclass(type(value), DTensor)
            and not value.is_meta
        ):
            storages[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
    return storages


def batch(case: Case) -> torch.Tensor:
    return torch.ones(1, DIM, dtype=case.compute)


def backward(model: Model, case: Case) -> None:
    model(batch(case)).float().square().sum().backward()


def clear_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def num_ranks(case: Case) -> int:
    return 2 ** len(STRATEGIES[case.name].dp_axes)


CASES = [
    *[Case(name) for name in STRATEGIES],
    *[Case(name, **ONE_DTYPE) for name in ("optim", ZERO_3)],
    Case(ZERO_3, main_grads=BF16),
    Case("optim", FP32, FP32, FP32, sent=BF16),
]


def _rests(case: Case) -> None:
    mesh = mesh_of(case)
    for is_nested in (False, True):
        with only_new_objects():
            model = Model(case, is_nested=is_nested)
            plain_bytes = [parameter.nbytes for parameter in model.parameters()]
            assert (
                live_bytes()
                == sum(num_bytes for num_bytes in plain_bytes if num_bytes >= SMALL_BYTES)
                > 0
            )
            originals = list(model.parameters())
            model.layers[0].requires_grad_(False)
            context = shard(model, case, mesh)
            groups = groups_of(model)
            frozen = [group for group in groups if not group.requires_grad]
            assert [group.layout.tensor_shapes for group in frozen] == [((DIM, DIM), (DIM,))]
            expected = sum(
                Sizes(case, group.layout.size).resting
                if group.requires_grad
                else Sizes(case, group.layout.size).frozen
                for group in groups
            )
            assert engine_bytes(groups) == expected
            gc.collect()
            assert live_bytes() == expected, (
                "all else is freed, even if a caller holds the original parameters"
            )
            assert sum(original.untyped_storage().nbytes() for original in originals) == 0
            for is_last in (True, False):
                _uses_and_rests(model, case, context, expected, is_last=is_last)


def _uses_and_rests(
    model: Model, case: Case, context: FsdpContext, expected: int, *, is_last: bool
) -> None:
    groups = groups_of(model)
    with torch.no_grad():
        model(batch(case))
    assert engine_bytes(groups) == expected
    with microbatch(context, is_last=is_last):
        backward(model, case)
    sizes = [Sizes(case, group.layout.size) for group in groups if group.requires_grad]
    with_gradients = expected + sum(size.main_gradient for size in sizes)
    if not is_last:
        assert engine_bytes(groups) == expected + sum(size.sum_so_far for size in sizes)
        backward(model, case)
    assert engine_bytes(groups) == with_gradients
    with torch.no_grad():
        model(batch(case))
    assert engine_bytes(groups) == with_gradients, "they are still to be read"
    clear_gradients(model)
    with torch.no_grad():
        model(batch(case))
    gc.collect()
    assert live_bytes() == expected


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_at_rest_memory_is_the_shards_to_the_byte(case):
    run_ranks(num_ranks(case), _rests, case)


def main_gradients_of(groups: Iterable[FsdpParameterGroup]) -> int:
    """The bytes of the gradients that the optimizer reads."""
    found = (group.main_grad for group in groups)
    return sum(each.local_buffer.untyped_storage().nbytes() for each in found if each is not None)


@contextmanager
def engine_peaks(groups: list[FsdpParameterGroup]) -> Iterator[list[int]]:
    """The engine's bytes, but for the main gradients, whenever it has taken memory for others."""
    peaks: list[int] = []
    original = DBuffer.reallocate_storage

    def sampling(buffer: DBuffer) -> None:
        original(buffer)
        peaks.append(engine_bytes(groups) - main_gradients_of(groups))

    DBuffer.reallocate_storage = sampling
    try:
        yield peaks
    finally:
        DBuffer.reallocate_storage = original


def _peaks(case: Case) -> None:
    mesh = mesh_of(case)
    for is_nested in (False, True):
        model = Model(case, is_nested=is_nested)
        context = shard(model, case, mesh)
        groups = groups_of(model)
        layer = Sizes(case, model.layers[0].parameter_groups[0].layout.size)
        sizes = [Sizes(case, group.layout.size) for group in groups]
        resting = sum(size.resting for size in sizes)
        root = Sizes(case, model.parameter_groups[0].layout.size) if is_nested else Sizes(case, 0)
        with engine_peaks(groups) as peaks, torch.no_grad():
            model(batch(case))
        assert (
            max(peaks, default=resting)
            == resting + 2 * layer.unsharded_weight + root.unsharded_weight
        )
        transient = 2 * (layer.unsharded_weight + layer.unsharded_gradient)
        transient += root.unsharded_weight + root.unsharded_gradient
        with engine_peaks(groups) as peaks:
            backward(model, case)
        assert max(peaks) == resting + transient + 2 * layer.partial_gradient_of_one
        clear_gradients(model)
        with engine_peaks(groups) as peaks:
            for number in range(3):
                with microbatch(context, is_last=number == 2):
                    backward(model, case)
        assert max(peaks) == resting + transient + sum(size.partial_gradient for size in sizes)
        assert engine_bytes(groups) == resting + sum(size.main_gradient for size in sizes)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_in_use_memory_adds_at_most_two_layers_of_weights_and_gradients(case):
    run_ranks(num_ranks(case), _peaks, case)


def _keeps_its_sums(case: Case) -> None:
    model = Model(case)
    context = shard(model, case, mesh_of(case))
    seen: list[list[int]] = []
    for number in range(3):
        with microbatch(context, is_last=number == 2):
            backward(model, case)
        partial_sums = [group.gradients.partial.local_buffer for group in groups_of(model)]
        seen.append([buffer.untyped_storage().data_ptr() for buffer in partial_sums])
    assert all(seen[0])
    assert seen[1] == seen[0]
    assert not any(seen[2]), "after the last microbatch they are no longer needed"


@pytest.mark.parametrize("name", ["no_shard", "optim", "hsdp", "hfsdp"])
def test_sums_over_microbatches_stay_where_they_are(name):
    """Taking memory anew for each would cost one more buffer for a moment, and a copy."""
    run_ranks(num_ranks(Case(name)), _keeps_its_sums, Case(name))


@contextmanager
def live_peaks(model: Model) -> Iterator[list[int]]:
    """All live bytes in the middle of every layer's forward and backward, and whenever a lane sends
    a piece.
    """
    peaks: list[int] = []
    original = dist.isend

    def sampling(tensor: torch.Tensor, *args: Any, **options: Any) -> dist.Work | None:
        if tensor.nbytes >= SMALL_BYTES:
            peaks.append(live_bytes())
        return original(tensor, *args, **options)

    for layer in model.layers:
        layer.look = lambda: peaks.append(live_bytes())
    dist.isend = sampling
    try:
        yield peaks
    finally:
        dist.isend = original
        for layer in model.layers:
            layer.look = None


def _live_peaks(case: Case) -> None:
    mesh = mesh_of(case)
    with only_new_objects():
        model = Model(case)
        context = shard(model, case, mesh)
        numel = model.layers[0].parameter_groups[0].layout.size
        layer = Sizes(case, numel)
        resting = NUM_LAYERS * layer.resting
        with live_peaks(model) as peaks, torch.no_grad():
            model(batch(case))
        assert max(peaks) == resting + 2 * layer.unsharded_weight
        engine = 2 * (
            layer.unsharded_weight + layer.unsharded_gradient + layer.partial_gradient_of_one
        )
        # A weight's gradient in the hands of autograd, and the pieces that one reduction sends and
        # receives.
        passing = DIM * DIM * case.compute.itemsize + numel * case.sent.itemsize
        for _ in range(2):
            with live_peaks(model) as peaks:
                backward(model, case)
            assert resting + layer.unsharded_weight + layer.unsharded_gradient < max(peaks)
            assert max(peaks) <= resting + NUM_LAYERS * layer.main_gradient + engine + passing
            clear_gradients(model)
        assert context.forward_order == list(model.layers)


@pytest.mark.parametrize(
    "case", [Case("optim"), Case(ZERO_3), Case(ZERO_3, **ONE_DTYPE), Case("hsdp")], ids=repr
)
def test_a_step_keeps_no_other_large_tensors_than_messages_in_flight(case):
    run_ranks(num_ranks(case), _live_peaks, case)


def _live_alone(case: Case) -> None:
    mesh = init_device_mesh("cpu", (1,))
    with only_new_objects():
        model = Model(case)
        context = shard(model, case, mesh)
        numel = NUM_LAYERS * DIM * (DIM + 1)
        assert live_bytes() == numel * sum(
            dtype.itemsize for dtype in (case.compute, case.main)[case.compute == case.main :]
        )
        resting = live_bytes() + numel * case.main_grads.itemsize
        with microbatch(context, is_last=False):
            backward(model, case)
        assert live_bytes() == resting
        for number in range(3):
            with live_peaks(model) as peaks, microbatch(context, is_last=number == 2):
                backward(model, case)
            # Autograd's gradients of two layers, as on several ranks, and no buffer between them
            # and the sums.
            of_layer = DIM * DIM * case.compute.itemsize
            assert resting + of_layer <= max(peaks) <= resting + 2 * of_layer
            assert live_bytes() == resting


@pytest.mark.parametrize("name", ["no_shard", "optim", ZERO_3])
@pytest.mark.parametrize("dtypes", [ONE_DTYPE, {"sent": FP32}], ids=["fp32", "bf16"])
def test_a_step_of_one_rank_allocates_only_the_gradients_of_autograd(name, dtypes):
    run_ranks(1, _live_alone, Case(name, **dtypes))


class Allocations(TorchDispatchMode):
    """Remembers the storages of some size that operations of this thread bring about, without
    keeping them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                storage = local.untyped_storage()
                if storage.nbytes() >= SMALL_BYTES:
                    self.storages.append(StorageWeakRef(storage))
        return result

    def alive(self) -> set[int]:
        return {reference.cdata for reference in self.storages if not reference.expired()}


def states_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """The storages of its moments."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return {
        value.to_local().untyped_storage()._cdata for value in values if isinstance(value, DTensor)
    }


def _is_steady(case: Case) -> None:
    mesh = mesh_of(case)
    with only_new_objects():
        model = Model(case, is_nested=True)
        context = shard(model, case, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        fully_shard_optimizer(optimizer)
        seen = []
        for _ in range(5):
            allocations = Allocations()
            with allocations:
                for is_last in (False, True):
                    with microbatch(context, is_last=is_last):
                        backward(model, case)
                optimizer.step()
                optimizer.zero_grad()
            gc.collect()
            states = states_of(optimizer)
            assert allocations.alive() <= storages_of(groups_of(model)).keys() | states
            assert allocations.alive() & states, "it does see what stays"
            assert len(allocations.storages) > len(allocations.alive()), (
                "and freed storages, gradients at least"
            )
            seen.append((engine_bytes(groups_of(model)), live_bytes()))
        assert len(set(seen[2:])) == 1


@pytest.mark.parametrize("case", [Case("optim"), Case(ZERO_3), Case("hfsdp")], ids=repr)
def test_from_the_third_step_on_no_memory_is_taken_that_is_not_given_back(case):
    run_ranks(num_ranks(case), _is_steady, case)


def _drawn(case: Case) -> None:
    mesh = mesh_of(case)
    seen: list[tuple[int, int]] = []
    with only_new_objects():
        model = Model(case, is_nested=True, device="meta")

        def reset(module: nn.Module) -> None:
            assert module.weight.dtype == case.main
            seen.append((live_bytes(), sum(parameter.nbytes for parameter in module.parameters())))
            torch.manual_seed(0)
            module.reset_parameters()

        shard(model, case, mesh, reset_parameters=reset)
        sizes = [Sizes(case, group.layout.size) for group in groups_of(model)]
        resting = sum(size.resting for size in sizes)
        gc.collect()
        assert live_bytes() == resting == engine_bytes(groups_of(model))
    assert len(seen) == NUM_LAYERS + 2
    # When a layer is initialized, the shards of all layers before it exist; the last one has the
    # most.
    assert all(live - whole <= resting for live, whole in seen)
    assert seen[0][0] < sizes[0].resting + sizes[1].resting + seen[0][1]
    assert resting - SMALL_BYTES < seen[-1][0] - seen[-1][1] <= resting


@pytest.mark.parametrize("case", [Case("optim"), Case(ZERO_3)], ids=repr)
def test_a_model_on_meta_is_initialized_one_module_at_a_time(case):
    run_ranks(num_ranks(case), _drawn, case)


def _tensors_left_to_the_collector() -> list[tuple[int, ...]]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    gc.disable()
    # Models of earlier tests that their ranks have not collected yet stay out of sight.
    with only_new_objects():
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            step()
            gc.collect()
            return [tuple(found.shape) for found in gc.garbage if isinstance(found, torch.Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


def test_a_step_leaves_no_tensor_in_a_cycle_for_the_garbage_collector():
    assert run_ranks(2, _tensors_left_to_the_collector) == [[], []]
