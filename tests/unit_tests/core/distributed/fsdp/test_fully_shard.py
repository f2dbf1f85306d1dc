from __future__ import annotations

import copy
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from megatron.core.distributed.fsdp import (
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
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup, group_of
from megatron.core.distributed.fsdp.uneven_shard import UnevenShard
from tests.helpers.ranks import on_ranks, run_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
ZERO_3 = "optim_grads_params"
DTYPES = (torch.float32, torch.bfloat16)
DIM = 6
Look = Callable[["Watched"], None]


class Watched(nn.Linear):
    """Calls `look` in the middle of its forward and in the middle of its backward."""

    look: Look | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.look is not None:
            self.look(self)
            if x.requires_grad:
                x.register_hook(lambda _: self.look(self))
        return torch.tanh(x)


class Stack(nn.Module):
    """Layers, one after the other; which of them run may be changed."""

    def __init__(self, num_layers: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Watched(DIM, DIM, dtype=dtype) for _ in range(num_layers))
        self.used = list(range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.used:
            x = self.layers[index](x)
        return x


class Pair(nn.Module):
    """Two parameters, of which the second is not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(DIM, DIM))
        self.second = nn.Parameter(torch.randn(DIM))
        self.uses_second = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.first
        return x * self.second if self.uses_second else x


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard(
    *modules: nn.Module,
    strategy: str = ZERO_3,
    policy: MixedPrecisionPolicy | None = None,
    **options: Any,
) -> FsdpContext:
    """Shards modules, the inner ones of which come first, in a context of their own."""
    mesh, placements = line(), Placements.for_strategy(strategy)
    with fully_shard_context("cpu") as context:
        for module in modules:
            fully_shard(module, mesh, placements, policy, **options)
    return context


def settle(context: FsdpContext) -> None:
    """Waits for what is under way, where a test ends in the middle: the next model's messages take
    the same ways.
    """
    context.gather_lane.enqueue(lambda: None).wait()


def batch(rank: int = 0, number: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(100 * rank + number)).to(
        dtype
    )


def own_batch(number: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return batch(dist.get_rank(), number, dtype)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().sum()


def expected_gradients(plain: nn.Module, *numbers: int) -> dict[str, torch.Tensor | None]:
    """The mean over ranks of the sums over batches; every rank computes all ranks' parts."""
    for parameter in plain.parameters():
        parameter.grad = None
    for number in numbers or (0,):
        for rank in range(dist.get_world_size()):
            (loss_of(plain(batch(rank, number))) / dist.get_world_size()).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


def held_rows(parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """The rows of a parameter's whole value, or gradient, that this rank has."""
    group = group_of(parameter)
    index = next(
        index for index, own in enumerate(group.fsdp_parameters) if own.sharded is parameter
    )
    chunk = group.main_weight.chunk(index)
    return whole[chunk.first_row : chunk.first_row + chunk.num_rows]


def assert_gradients(model: nn.Module, expected: dict[str, torch.Tensor | None]) -> None:
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in expected.values())
    for name, parameter in model.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None, name
        else:
            rows = held_rows(parameter, expected[name])
            torch.testing.assert_close(
                parameter.grad.to_local(), rows, msg=lambda text, name=name: f"{name}: {text}"
            )


def clear_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def groups_of(*modules: nn.Module) -> list[FsdpParameterGroup]:
    found = (
        child for module in modules for child in module.modules() if isinstance(child, FsdpModule)
    )
    return [group for module in found for group in module.parameter_groups]


def whole_weights(model: nn.Module) -> Iterator[FsdpParameterGroup]:
    """The groups that have memory for whole weights which they do not keep at rest."""
    for group in groups_of(model):
        if group.is_unsharded and group.is_gathered:
            assert group.unsharded_weight.local_buffer.untyped_storage().nbytes() > 0
            yield group
        elif group.is_gathered:
            assert group.unsharded_weight.local_buffer.untyped_storage().nbytes() == 0


def assert_resting(model: nn.Module) -> None:
    """Every sharded module has its sharded parameters back, and no whole weights."""
    assert not list(whole_weights(model))
    for module in model.modules():
        if isinstance(module, FsdpModule):
            assert module.phase is FsdpModule.Phase.RESTING
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert group_of(parameter) is not None


def outcome_of(call: Callable[[], Any]) -> str:
    """What a call comes to, for the process that started the ranks to judge: they live on when it
    is not expected.
    """
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# At rest, in forward, in backward


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_parameters_are_shards_of_main_weights_at_rest_and_plain_and_whole_in_forward_and_backward(
    strategy: str, dtype: torch.dtype
) -> None:
    plain = Stack(dtype=dtype)
    model = copy.deepcopy(plain)
    shard(*model.layers, strategy=strategy)
    seen: list[tuple[int, str]] = []

    def look(module: Watched) -> None:
        number = list(model.layers).index(module)
        for name, whole in plain.layers[number].named_parameters():
            own = getattr(module, name)
            assert type(own) is nn.Parameter
            assert (own.dtype, own.device.type) == (dtype, "cpu")
            assert torch.equal(own, whole)
        seen.append((number, module.phase.value))
        others = [other for other in model.layers if other is not module]
        assert all(
            isinstance(parameter, DTensor) for other in others for parameter in other.parameters()
        )

    for layer in model.layers:
        layer.look = look
    for _ in range(2):
        assert_resting(model)
        for parameter in model.parameters():
            (placement,) = parameter.placements
            assert type(placement) is (Replicate if strategy == "no_shard" else UnevenShard)
            assert parameter.dtype == torch.float32
            storage = group_of(parameter).main_weight.local_buffer.untyped_storage()
            assert parameter.to_local().untyped_storage().data_ptr() == storage.data_ptr()
        output = model(own_batch(dtype=dtype))
        assert_resting(model)
        loss_of(output).backward()
    assert_resting(model)
    forward, backward = (
        [(number, "forward") for number in range(3)],
        [(number, "backward") for number in (2, 1, 0)],
    )
    assert seen == [*forward, *backward] * 2


# The orders of use


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)
        self.own = nn.Parameter(torch.ones(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.own


def _orders() -> None:
    model = nn.Sequential(
        Block(), nn.Sequential(nn.ReLU(), nn.Linear(DIM, DIM)), nn.Linear(DIM, DIM)
    )
    model.register_parameter("own", nn.Parameter(torch.ones(DIM)))
    names = {id(module): name or "root" for name, module in model.named_modules()}
    block, (_, inner), last = model
    # What is constructed later may come first in forward.
    context = shard(last, block.second, block.first, inner, block, model)
    forward = [names[id(module)] for module in context.forward_order]
    assert forward == ["root", "0", "0.first", "0.second", "1.1", "2"]
    backward = [names[id(module)] for module in context.backward_order]
    assert backward == ["root", "2", "1.1", "0", "0.second", "0.first"]
    assert [module.is_root() for module in context.forward_order] == [True, *[False] * 5]


def _orders_of_siblings() -> None:
    stack = Stack()
    context = shard(stack.layers[0], stack.layers[2])
    assert context.forward_order == [stack.layers[0], stack.layers[2]]
    assert context.backward_order == [stack.layers[2], stack.layers[0]]
    assert all(module.is_root() for module in context.forward_order)
    del stack.layers[2]
    assert context.forward_order == context.backward_order == [stack.layers[0]]


def test_forward_is_expected_in_preorder_and_backward_in_that_of_reversed_children():
    run_ranks(2, _orders)
    run_ranks(2, _orders_of_siblings)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_two_contexts_may_share_a_mesh(strategy: str) -> None:
    plain = Stack(2)
    teacher, student = Stack(4), copy.deepcopy(plain)
    shard(*teacher.layers, strategy=strategy)
    shard(*student.layers, strategy=strategy)
    teacher.used = [0, 1]
    for _ in range(4):
        with torch.no_grad():
            teacher(own_batch())
        # The teacher's third layer is still on its way, for nothing.
        clear_gradients(student)
        loss_of(student(own_batch())).backward()
        assert_gradients(student, expected_gradients(plain))
        _write(teacher, "local tensor")


@on_ranks(2)
def test_ranks_that_use_two_contexts_in_another_order_raise() -> None:
    models = [Stack(1), Stack(1)]
    for model in models:
        shard(*model.layers)
    with pytest.raises(
        RuntimeError, match="Expected every rank to do the same, got: this rank is about to gather"
    ):
        models[dist.get_rank()](own_batch())


# Prefetching

Moment = tuple[str, int, set[int]]


def record_unsharded(model: Stack) -> list[Moment]:
    """Notes, in the middle of every forward and backward: the phase, the layer, which layers are
    unsharded.
    """
    moments: list[Moment] = []

    def look(module: Watched) -> None:
        unsharded = {
            index
            for index, layer in enumerate(model.layers)
            if layer.parameter_groups[0].is_unsharded
        }
        moments.append((module.phase.value, list(model.layers).index(module), unsharded))

    for layer in model.layers:
        layer.look = look
    return moments


@on_ranks(2)
def test_the_weights_of_the_next_module_and_of_no_other_are_on_their_way_while_one_computes() -> (
    None
):
    model = Stack(4)
    shard(*model.layers)
    moments = record_unsharded(model)
    loss_of(model(own_batch())).backward()
    assert moments == [
        *[("forward", index, {index, index + 1} - {4}) for index in range(4)],
        *[("backward", index, {index, index - 1} - {-1}) for index in reversed(range(4))],
    ]
    moments.clear()
    for layer in model.layers:
        layer.reshard_after_forward = False
    loss_of(model(own_batch())).backward()
    assert moments == [
        *[("forward", index, set(range(index + 2)) - {4}) for index in range(4)],
        *[("backward", index, set(range(index + 1))) for index in reversed(range(4))],
    ]
    assert_resting(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_module_that_was_prefetched_and_skipped_does_not_stay_and_gets_no_gradient(
    strategy: str,
) -> None:
    plain = Stack(5)
    model = copy.deepcopy(plain)
    shard(*model.layers, strategy=strategy)
    moments = record_unsharded(model)
    # Layer 1 is brought for nothing; so is layer 4, at the end of forward.
    plain.used = model.used = [0, 2, 3]
    expected = expected_gradients(plain)
    assert [name for name, gradient in expected.items() if gradient is None] == [
        f"layers.{index}.{name}" for index in (1, 4) for name in ("weight", "bias")
    ]
    for _ in range(2):
        clear_gradients(model)
        moments.clear()
        loss_of(model(own_batch())).backward()
        if strategy == ZERO_3:
            assert moments == [
                ("forward", 0, {0, 1}),
                ("forward", 2, {2, 3}),
                ("forward", 3, {3, 4}),
                ("backward", 3, {3, 2}),
                ("backward", 2, {2, 0}),
                ("backward", 0, {0}),
            ]
        assert_resting(model)
        assert_gradients(model, expected)
    plain.used = model.used = [2, 1, 4, 0]
    clear_gradients(model)
    loss_of(model(own_batch())).backward()
    assert_gradients(model, expected_gradients(plain))
    assert_resting(model)


# Gradients that are not there


def _sum_of_gradients(plain: Pair, uses: Iterable[bool]) -> dict[str, torch.Tensor]:
    total = {name: torch.zeros_like(parameter) for name, parameter in plain.named_parameters()}
    for number, uses_second in enumerate(uses):
        plain.uses_second = uses_second
        for name, gradient in expected_gradients(plain, number).items():
            total[name] += 0 if gradient is None else gradient
    return total


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_an_unused_parameter_has_no_gradient_until_it_is_used_in_some_microbatch(
    strategy: str,
) -> None:
    plain = Pair()
    model = copy.deepcopy(plain)
    context = shard(model, strategy=strategy)
    plain.uses_second = model.uses_second = False
    loss_of(model(own_batch())).backward()
    assert model.second.grad is None
    assert_gradients(model, expected_gradients(plain))
    plain.uses_second = model.uses_second = True
    clear_gradients(model)
    loss_of(model(own_batch())).backward()
    assert_gradients(model, expected_gradients(plain))
    for uses in ((True, False, False), (False, True, False), (False, False, True)):
        for is_scoped in (True, False):
            clear_gradients(model)
            for number, uses_second in enumerate(uses):
                model.uses_second = uses_second
                with microbatch(context, is_last=not is_scoped or number == 2):
                    loss_of(model(own_batch(number))).backward()
            assert_gradients(model, _sum_of_gradients(plain, uses))


def _different_parameters(strategy: str) -> None:
    model = nn.ModuleDict({"pair": Pair()})
    _shard_under_root(model, strategy)
    is_first = dist.get_rank() == 0
    model["pair"].uses_second = is_first
    own, other = (
        "reduce the gradients of pair",
        "reduce the gradients of pair, which has none for pair.second",
    )
    if not is_first:
        own, other = other, own
    message = (
        rf"this rank is about to {own}; rank {int(is_first)} of its group is about to {other}\.$"
    )
    with pytest.raises(RuntimeError, match=message):
        loss_of(model["pair"](own_batch())).backward()
    # The lane is dead: nothing may go out that another rank could take for something else.
    model["pair"].uses_second = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            model["pair"](own_batch())


def _shard_under_root(model: nn.ModuleDict, strategy: str) -> None:
    """With a parameter at the root, so that names begin there."""
    model.register_parameter("own", nn.Parameter(torch.ones(DIM)))
    shard(*model.values(), model, strategy=strategy)


def _different_modules(strategy: str) -> None:
    model = nn.ModuleDict({name: nn.Linear(DIM, DIM) for name in "abc"})
    _shard_under_root(model, strategy)
    x = own_batch()
    for name in "abc" if dist.get_rank() == 0 else "ac":
        x = model[name](x)
    # Where weights have to come, ranks disagree about the next ones; else about the next reduction.
    message = (
        r"about to gather b[;.]"
        if strategy == ZERO_3
        else r"about to reduce the gradients of b[;.]"
    )
    with pytest.raises(RuntimeError, match=message):
        loss_of(x).backward()
    with pytest.raises(RuntimeError, match=message):
        model["a"](own_batch())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_with_different_gradients_all_raise_and_name_the_parameter(strategy):
    run_ranks(2, _different_parameters, strategy)
    run_ranks(2, _different_modules, strategy)


# Gradients and compute weights as autograd and optimizers see them


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_gradients_are_views_of_main_grad(strategy: str) -> None:
    model = Stack(dtype=torch.bfloat16)
    shard(
        *model.layers,
        strategy=strategy,
        policy=MixedPrecisionPolicy(main_grads_dtype=torch.float32),
    )
    for _ in range(2):
        loss_of(model(own_batch(dtype=torch.bfloat16))).backward()
        for parameter in model.parameters():
            gradient, buffer = parameter.grad.to_local(), group_of(parameter).main_grad.local_buffer
            assert parameter.grad.placements == parameter.placements
            assert gradient.dtype == torch.float32
            begin, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
            assert gradient.numel() == 0 or begin <= gradient.data_ptr() <= end - gradient.nbytes
    assert sum(parameter.grad.to_local().numel() for parameter in model.parameters()) > 0


class SavesItsArguments(torch.autograd.Function):
    """x @ weight; complains in backward if either has changed since."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class Viewing(nn.Linear):
    """Saves a view of its weight that is no leaf."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        view = self.weight.t()
        assert view._is_view()
        assert not view.is_leaf
        return SavesItsArguments.apply(x, view) + self.bias


def viewing(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Viewing(DIM, DIM, dtype=dtype) for _ in range(3)))


@on_ranks(2)
def test_a_view_of_a_weight_that_autograd_has_saved_survives_the_weights_release_and_return() -> (
    None
):
    plain = viewing()
    model = copy.deepcopy(plain)
    shard(*model)
    for _ in range(2):
        clear_gradients(model)
        loss = loss_of(model(own_batch()))
        assert_resting(model)
        loss.backward()
        assert_gradients(model, expected_gradients(plain))


MODIFIED = (
    "RuntimeError: one of the variables needed for gradient computation has been modified by an "
    "inplace"
)


def _stepped_between(strategy: str, dtype: torch.dtype) -> list[str]:
    outcomes = []
    for reshard_after_forward in (True, False):
        model = viewing(dtype)
        policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
        context = shard(
            *model, strategy=strategy, policy=policy, reshard_after_forward=reshard_after_forward
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loss_of(model(own_batch(dtype=dtype))).backward()
        loss = loss_of(model(own_batch(dtype=dtype)))
        optimizer.step()
        outcomes.append(outcome_of(loss.backward))
        settle(context)
    return outcomes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stepping_between_forward_and_backward_is_an_error_as_in_plain_autograd(strategy, dtype):
    for outcomes in run_ranks(2, _stepped_between, strategy, dtype):
        assert all(outcome.startswith(MODIFIED) for outcome in outcomes)


def compute_weights(model: Stack) -> list[torch.Tensor]:
    """What the layers that run compute with, whole; the own rows are those of the main weights,
    rounded.
    """
    found: list[torch.Tensor] = []

    def look(module: Watched) -> None:
        found.extend(parameter.detach().clone() for parameter in module.parameters())

    for layer in model.layers:
        layer.look = look
    with torch.no_grad():
        model(own_batch(dtype=groups_of(model)[0].dtype))
    for layer in model.layers:
        layer.look = None
    parameters = [
        parameter for index in model.used for parameter in model.layers[index].parameters()
    ]
    for parameter, whole in zip(parameters, found, strict=True):
        assert torch.equal(held_rows(parameter, whole), parameter.to_local().to(whole.dtype))
    return found


def _train(
    model: Stack, dtype: torch.dtype, make: Callable[..., torch.optim.Optimizer], prepares: bool
) -> None:
    clear_gradients(model)
    optimizer = make(model.parameters())
    if prepares:
        fully_shard_optimizer(optimizer)
    loss_of(model(own_batch(dtype=dtype))).backward()
    optimizer.step()


def _load(model: Stack) -> None:
    with torch.no_grad():
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


@torch.no_grad()
def _write(model: Stack, way: str) -> None:
    for parameter in model.parameters():
        if way == "copy_":
            parameter.copy_(parameter * 0.5)
        elif way == "local tensor":
            parameter.to_local().add_(1.0)
        elif way == "detached":
            parameter.detach().mul_(3.0)
        else:
            group_of(parameter).main_weight.local_buffer.add_(0.25)


def _follows(strategy: str, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    model = Stack(dtype=dtype)
    shard(
        *model.layers,
        strategy=strategy,
        policy=MixedPrecisionPolicy(main_grads_dtype=torch.float32),
    )
    states = [compute_weights(model)]
    for make in (
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    ):
        for prepares in (False, True):
            _train(model, dtype, make, prepares)
            states.append(compute_weights(model))
    _load(model)
    states.append(compute_weights(model))
    for way in ("copy_", "local tensor", "detached", "buffer"):
        _write(model, way)
        states.append(compute_weights(model))
    for before, after in itertools.pairwise(states):
        assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    return states


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compute_weights_follow_whatever_has_changed_the_main_weights(strategy, dtype):
    first, second = run_ranks(2, _follows, strategy, dtype)
    for own, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_an_optimizer_of_fp32_main_weights_takes_bf16_gradients(strategy: str) -> None:
    model = Stack(dtype=torch.bfloat16)
    shard(*model.layers, strategy=strategy)
    before = compute_weights(model)
    _train(
        model,
        torch.bfloat16,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
        prepares=True,
    )
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}, (
        "back after the step"
    )
    assert not any(
        torch.equal(old, new) for old, new in zip(before, compute_weights(model), strict=True)
    )


def _keeps_whole_weights(strategy: str, dtype: torch.dtype, is_skipped: bool) -> str:
    """Weights that were brought, and stay for a backward that never comes or for a module that is
    skipped.
    """
    model = Stack(dtype=dtype)
    context = shard(*model.layers, strategy=strategy, reshard_after_forward=is_skipped)
    if is_skipped:
        model.used = [0]
    with torch.set_grad_enabled(not is_skipped):
        model(own_batch(dtype=dtype))
    settle(context)
    if strategy == ZERO_3:
        stayed = model.layers[1:2] if is_skipped else model.layers
        assert list(whole_weights(model)) == groups_of(*stayed)
    _write(model, "local tensor")
    model.used = [1, 2]
    return outcome_of(lambda: compute_weights(model) and None)


@pytest.mark.parametrize("is_skipped", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whole_weights_that_have_stayed_follow_too(strategy, dtype, is_skipped):
    assert run_ranks(2, _keeps_whole_weights, strategy, dtype, is_skipped) == ["None"] * 2


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_compute_weights_are_refreshed_once_for_each_group_and_step(strategy: str) -> None:
    model = Stack(dtype=torch.bfloat16)
    context = shard(*model.layers, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard_optimizer(optimizer)
    groups = groups_of(model)
    refreshed: list[int] = []
    original = FsdpParameterGroup._gather

    def counting(group: FsdpParameterGroup, *is_stale: bool) -> None:
        if any(is_stale):
            refreshed.append(groups.index(group))
        original(group, *is_stale)

    FsdpParameterGroup._gather = counting
    try:
        for _ in range(3):
            for number in range(2):
                with microbatch(context, is_last=number == 1):
                    loss_of(model(own_batch(number, torch.bfloat16))).backward()
            with torch.no_grad():
                model(own_batch(dtype=torch.bfloat16))
            assert refreshed == [0, 1, 2]
            refreshed.clear()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        FsdpParameterGroup._gather = original


# State dicts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_state_dicts_go_round_and_are_not_assigned(strategy: str, dtype: torch.dtype) -> None:
    model = Stack(dtype=dtype)
    names = list(model.state_dict())
    shard(*model.layers, strategy=strategy)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert list(state) == names
    assert all(isinstance(value, DTensor) for value in state.values())
    x = own_batch(dtype=dtype)
    before = model(x).detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not model(x).any()
    parameters = list(model.parameters())
    assert not any(model.load_state_dict(state))
    assert all(own is other for own, other in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(model(x), before)
    for target in (model, model.layers[1]):
        with pytest.raises(
            ValueError,
            match=r"Expected load_state_dict\(assign=False\) for a sharded module, whose",
        ):
            target.load_state_dict(target.state_dict(), assign=True)
    assert_resting(model)
    assert torch.equal(model(x), before)


# Modules and backwards that fail


class Fragile(nn.Module):
    """The identity, which can be made to fail, on its way there or back."""

    fails_in: str = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails_in == "forward":
            raise ArithmeticError("no way there")
        if self.fails_in == "backward":
            x = x * 1
            x.register_hook(self._fail)
        return x

    def _fail(self, _: torch.Tensor) -> None:
        raise ArithmeticError("no way back")


def fragile(has_root: bool) -> nn.Sequential:
    """Fragile modules in all layers and between them; the root has parameters of its own where
    `has_root`.
    """
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(DIM, DIM), Fragile(), nn.Linear(DIM, DIM)) for _ in range(3)]
    rest = [nn.Linear(DIM, DIM)] if has_root else []
    return nn.Sequential(layers[0], Fragile(), layers[1], Fragile(), layers[2], *rest)


def _fails(strategy: str, has_root: bool, fails_in: str, places: list[int]) -> list[str]:
    return [
        outcome_of(partial(_fails_and_goes_on, strategy, has_root, fails_in, place))
        for place in places
    ]


def _fails_and_goes_on(strategy: str, has_root: bool, fails_in: str, place: int) -> None:
    """Gradients are right after a failure, and after another."""
    plain = fragile(has_root)
    model = copy.deepcopy(plain)
    layers = [child for child in model if isinstance(child, nn.Sequential)]
    context = shard(*layers, *[model] * has_root, strategy=strategy)
    expected = expected_gradients(plain)
    weak = [module for module in model.modules() if isinstance(module, Fragile)][place]
    try:
        for _ in range(2):
            weak.fails_in = fails_in
            with pytest.raises(ArithmeticError, match="no way"):
                loss_of(model(own_batch())).backward()
            weak.fails_in = ""
            clear_gradients(model)
            loss_of(model(own_batch())).backward()
            assert_gradients(model, expected)
            assert_resting(model)
            clear_gradients(model)
    finally:
        settle(context)


@pytest.mark.parametrize("has_root", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_a_forward_that_raised_the_model_is_usable(strategy, has_root):
    for outcomes in run_ranks(2, _fails, strategy, has_root, "forward", list(range(5))):
        assert outcomes == ["None"] * 5


@pytest.mark.parametrize("has_root", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_a_backward_that_raised_the_model_is_usable(strategy, has_root):
    for outcomes in run_ranks(2, _fails, strategy, has_root, "backward", list(range(5))):
        assert outcomes == ["None"] * 5


def _refuse(*_: Any) -> None:
    raise ArithmeticError("not this way")


@on_ranks(2)
def test_a_module_whose_forward_raises_is_at_rest_at_once() -> None:
    model = fragile(has_root=True)
    layers = [child for child in model if isinstance(child, nn.Sequential)]
    shard(*layers, model)
    weak = layers[-1][1]
    weak.fails_in = "forward"
    with pytest.raises(ArithmeticError, match="no way there"):
        model(own_batch())
    assert_resting(model)
    refuse = model[0].register_forward_pre_hook(_refuse)
    with pytest.raises(ArithmeticError, match="not this way"):
        model(own_batch())
    refuse.remove()
    # What was prefetched for after the failure goes with the next forward.
    assert list(whole_weights(model)) == layers[1].parameter_groups
    weak.fails_in = ""
    loss_of(model(own_batch())).backward()
    assert_resting(model)


# Deletion


def lane_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fsdp communication"]


def _collect_all() -> None:
    """Collects what other tests' models, which autograd has put into cycles, have left."""
    for _ in range(4):
        gc.collect()
    for thread in lane_threads():
        thread.join(timeout=10)


def _trained(
    strategy: str, with_root: bool
) -> tuple[nn.Module, FsdpContext, torch.optim.Optimizer]:
    """A model after two steps."""
    model = nn.Sequential(Stack(dtype=torch.bfloat16), nn.Linear(DIM, DIM, dtype=torch.bfloat16))
    context = shard(*model[0].layers, *[model] * with_root, strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    fully_shard_optimizer(optimizer)
    for _ in range(2):
        loss_of(model(own_batch(dtype=torch.bfloat16))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, context, optimizer


def _deletes(strategy: str, with_root: bool) -> None:
    gc.disable()
    try:
        _deletes_without_the_collector(strategy, with_root)
    finally:
        gc.enable()


def _deletes_without_the_collector(strategy: str, with_root: bool) -> None:
    model, context, optimizer = _trained(strategy, with_root)
    (thread,) = lane_threads()
    references = [weakref.ref(value) for value in (*_buffers(model), model, model[0].layers[0])]
    del optimizer
    assert all(reference() is not None for reference in references)
    del model
    assert not any(reference() is not None for reference in references)
    assert context.forward_order == context.backward_order == []
    assert thread.is_alive()
    del context
    thread.join(timeout=10)
    assert not thread.is_alive()


def _buffers(model: nn.Module) -> list[torch.Tensor]:
    return [
        buffer.local_buffer
        for group in groups_of(model)
        for buffer in (
            group.model_weight,
            group.main_weight,
            group.unsharded_weight,
            group.main_grad,
        )
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_model_that_is_deleted_frees_its_memory_and_ends_its_lane_without_the_garbage_collector(
    strategy: str,
) -> None:
    # What Python imports, or warns of, for the first time may leave frames in cycles, and with them
    # what they refer to. A cycle of our own is there each time.
    failures: list[AssertionError] = []
    for with_root in (False, True):
        for _ in range(3):
            _collect_all()
            try:
                _deletes(strategy, with_root)
                break
            except AssertionError as failure:
                failures.append(failure.with_traceback(None))
        else:
            raise failures[-1]


# requires_grad


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_requires_grad_may_be_switched_off_and_on_again(strategy: str) -> None:
    plain = Stack()
    model = copy.deepcopy(plain)
    shard(*model.layers, strategy=strategy)
    for frozen in (
        ["layers.1.weight"],
        ["layers.1.weight", "layers.1.bias"],
        ["layers.0.bias"],
        [],
    ):
        for own in (plain, model):
            for name, parameter in own.named_parameters():
                parameter.requires_grad_(name not in frozen)
        clear_gradients(model)
        loss_of(model(own_batch())).backward()
        expected = expected_gradients(plain)
        assert [name for name, gradient in expected.items() if gradient is None] == frozen
        assert_gradients(model, expected)
        assert_resting(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_what_was_frozen_when_it_was_sharded_has_no_gradient_buffer_and_stays_frozen(
    strategy: str,
) -> None:
    plain = Stack()
    plain.layers[0].requires_grad_(False)
    plain.layers[1].bias.requires_grad_(False)
    model = copy.deepcopy(plain)
    shard(*model.layers, strategy=strategy)
    assert [[group.main_grad is None for group in groups_of(layer)] for layer in model.layers] == [
        [True],
        [False, True],
        [False],
    ]
    loss_of(model(own_batch())).backward()
    assert_gradients(model, expected_gradients(plain))
    for number, name in ((1, "bias"), (0, "weight")):
        parameter = getattr(model.layers[number], name)
        parameter.requires_grad_(True)
        message = (
            rf"Expected {name} of .* to stay frozen, as it was when it was sharded and got no "
            r"gradient buffer"
        )
        with pytest.raises(RuntimeError, match=message):
            model(own_batch())
        parameter.requires_grad_(False)
        assert model.layers[number].phase is FsdpModule.Phase.RESTING
    clear_gradients(model)
    loss_of(model(own_batch())).backward()
    assert_gradients(model, expected_gradients(plain))
    assert_resting(model)


# Forward without a backward


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_forward_without_gradients_and_in_inference_mode_gives_the_same_and_leaves_nothing(
    strategy: str, dtype: torch.dtype
) -> None:
    plain = Stack(dtype=dtype)
    model = copy.deepcopy(plain)
    shard(*model.layers, strategy=strategy)
    x = own_batch(dtype=dtype)
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            output = model(x)
            assert output.is_inference() == (mode is torch.inference_mode)
            assert torch.equal(output, plain(x))
            assert_resting(model)
        loss_of(model(x)).backward()
        with mode():
            assert torch.equal(model(x), plain(x))
        assert_resting(model)
        # What requires a gradient gets one where it is wanted, also after weights came in inference
        # mode.
        _write(model, "copy_")
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.copy_(parameter * 0.5)
    if dtype == torch.float32:
        clear_gradients(model)
        loss_of(model(x)).backward()
        assert_gradients(model, expected_gradients(plain))


# Outputs of every kind


@dataclass
class Output:
    hidden: torch.Tensor
    rest: dict[str, Any]


class Opaque:
    """Nobody can see that there is a tensor in it."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


WRAPPINGS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda x: (x, None, 1), lambda output: output[0]),
    "dict": (lambda x: {"x": x, "name": "x"}, lambda output: output["x"]),
    "dataclass": (lambda x: Output(x, {}), lambda output: output.hidden),
    "nested": (
        lambda x: [Output(torch.ones(1), {"in": Output(x, {})})],
        lambda output: output[0].rest["in"].hidden,
    ),
    "opaque": (lambda x: Opaque(x), lambda output: output.hidden),
    "opaque in a dict": (lambda x: {"x": Opaque(x)}, lambda output: output["x"].hidden),
    "opaque beside another": (lambda x: (x.relu(), Opaque(x * 2)), lambda output: output[1].hidden),
}


class Wrapped(nn.Linear):
    kind = ""

    def forward(self, x: torch.Tensor) -> Any:
        wrap, _ = WRAPPINGS[self.kind]
        return wrap(torch.tanh(super().forward(x)))


class WrappedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Wrapped(DIM, DIM) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            _, unwrap = WRAPPINGS[layer.kind]
            x = unwrap(layer(x))
        return x


def _outputs(strategy: str, kind: str) -> None:
    plain = WrappedStack()
    for layer in plain.layers:
        layer.kind = kind
    model = copy.deepcopy(plain)
    shard(*model.layers, strategy=strategy)
    for _ in range(2):
        clear_gradients(model)
        output = model(own_batch())
        has_stayed = strategy == ZERO_3 and "opaque" in kind
        assert list(whole_weights(model)) == (groups_of(model) if has_stayed else [])
        loss_of(output).backward()
        assert_gradients(model, expected_gradients(plain))
        assert_resting(model)
    with torch.no_grad():
        model(own_batch())
    assert_resting(model)


@pytest.mark.parametrize("kind", list(WRAPPINGS))
def test_an_output_may_be_anything_that_holds_tensors_or_hides_them(kind):
    for strategy in STRATEGIES:
        run_ranks(2, _outputs, strategy, kind)


# Mistakes


def _raises(error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=message):
        call()


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(DIM, DIM, **options)


@on_ranks(2)
def test_mistakes_with_contexts_have_their_own_messages() -> None:
    mesh, placements = line(), Placements.for_strategy(ZERO_3)
    child = linear()
    fully_shard(child, mesh, placements)
    child(own_batch())
    _raises(
        RuntimeError,
        r"Expected every fully_shard before the first forward, got one of Sequential after 1 has "
        r"run\.",
        lambda: fully_shard(nn.Sequential(linear(), child), mesh, placements),
    )
    child = linear()
    with fully_shard_context("cpu"):
        fully_shard(child, mesh, placements)
        _raises(
            RuntimeError,
            r"Expected one fully_shard_context at a time, got one in another; it does not support "
            r"nesting\.",
            lambda: fully_shard_context("cpu").__enter__(),
        )
        _raises(
            RuntimeError,
            r"Expected forward after the last fully_shard\. Exit fully_shard_context first\.",
            lambda: child(own_batch()),
        )
        assert child.phase is FsdpModule.Phase.RESTING
    child(own_batch())
    with fully_shard_context("cpu"):
        _raises(
            ValueError,
            r"Expected inner modules of the same context, got 1 of another fully_shard_context\.",
            lambda: fully_shard(nn.Sequential(linear(), child), mesh, placements),
        )
    with pytest.raises(ArithmeticError, match="mine"), fully_shard_context("cpu"):
        raise ArithmeticError("mine")
    shard(linear())


class Clashing(nn.Linear):
    phase = "of the moon"


class Holder(nn.Module):
    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.own = parameter


def with_meta_buffer() -> nn.Module:
    module = linear()
    module.register_buffer("counts", torch.zeros(2, device="meta"))
    return module


@on_ranks(2)
def test_mistakes_with_modules_have_their_own_messages() -> None:
    mesh, placements = line(), Placements.for_strategy(ZERO_3)
    owned_twice = (
        "Expected every parameter in one sharded module, got {}weight of {}, "
        "which another owns already"
    )
    with fully_shard_context("cpu") as context:
        sharded = fully_shard(linear(), mesh, placements)
        tied = nn.ModuleList([linear(), linear()])
        tied[1].weight = tied[0].weight
        fully_shard(tied[0], mesh, placements)
        inside = nn.Sequential(nn.Sequential(linear()))
        fully_shard(inside, mesh, placements)
        dtensor = nn.Parameter(DTensor.from_local(torch.ones(1, DIM), mesh, [Shard(0)]))
        integers = nn.Parameter(torch.ones(DIM, dtype=torch.int64), requires_grad=False)
        for error, message, module in (
            (TypeError, "Expected a module, got Tensor", torch.ones(1)),
            (ValueError, "Expected a module that is not sharded yet, got a FsdpLinear", sharded),
            (ValueError, owned_twice.format("1.", "ModuleList"), tied),
            (ValueError, owned_twice.format("", "Linear"), tied[1]),
            (ValueError, owned_twice.format("0.", "Sequential"), inside[0]),
            (
                ValueError,
                r"without attributes that FsdpModule has, got \['phase'\]",
                Clashing(DIM, DIM),
            ),
            (
                TypeError,
                "Expected plain parameters, got the DTensor own with .*Shard",
                Holder(dtensor),
            ),
            (
                ValueError,
                r"with rows and elements, got own of \(\)",
                Holder(nn.Parameter(torch.tensor(1.0))),
            ),
            (
                ValueError,
                r"with rows and elements, got own of \(0, 2\)",
                Holder(nn.Parameter(torch.ones(0, 2))),
            ),
            (
                TypeError,
                "Expected parameters whose shapes are known, got weight, which is lazy",
                nn.LazyLinear(2),
            ),
            (
                TypeError,
                "Expected parameters of one of the dtypes .*, got torch.int64",
                Holder(integers),
            ),
            (
                RuntimeError,
                "Expected a reset_parameters in Holder",
                Holder(nn.Parameter(torch.ones(1, device="meta"))),
            ),
            (RuntimeError, "Expected buffers with storage, .*counts.* on meta", with_meta_buffer()),
        ):
            _raises(error, message, partial(fully_shard, module, mesh, placements))
    # None of them has left anything behind.
    assert context.forward_order == [sharded, tied[0], inside]
    loss_of(inside(own_batch())).backward()
    assert_resting(inside)


@on_ranks(2)
def test_mistakes_with_meshes_placements_and_divisors_have_their_own_messages() -> None:
    mesh, zero_3 = line(), Placements.for_strategy(ZERO_3)
    unnamed = init_device_mesh("cpu", (2, 1))
    named = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    hsdp = ((Replicate(), Flat()), (Partial("avg"), Flat()), (Replicate(), Flat()))
    in_order = "Expected the axes of a mesh in their order, by name if they are not all of it, got "
    with fully_shard_context("cpu"):
        for message, own_mesh, placements in (
            (
                r"Expected axes of the mesh, 0 to 0 or one of \(\), got 'dp'",
                mesh,
                Placements.for_strategy(ZERO_3, "dp"),
            ),
            (
                r"Expected axes of the mesh, 0 to 0 or one of \(\), got 1\.",
                mesh,
                Placements((0, 1), *hsdp),
            ),
            (
                r"Expected axes of the mesh, 0 to 1 or one of \('outer', 'inner'\), got 'dp'",
                named,
                Placements.for_strategy(ZERO_3, "dp"),
            ),
            (in_order + r"\(0,\) of 2", unnamed, zero_3),
            (in_order + r"\(1, 0\) of 2", unnamed, Placements((1, 0), *hsdp)),
            (in_order + r"\('inner', 'outer'\) of ", named, Placements(("inner", "outer"), *hsdp)),
        ):
            _raises(ValueError, message, partial(fully_shard, linear(), own_mesh, placements))
        for divisor in (-1, 0, float("nan")):
            message = rf"Expected a positive grad_divisor, got {divisor}\."
            _raises(
                ValueError, message, partial(fully_shard, linear(), mesh, zero_3, None, divisor)
            )
        by_name = fully_shard(linear(), named, Placements.for_strategy(ZERO_3, "outer"))
        by_number = fully_shard(linear(), named, Placements.for_strategy(ZERO_3, 0))
    for module in (by_name, by_number):
        assert module.weight.device_mesh.mesh_dim_names == ("outer",)
        loss_of(module(own_batch())).backward()
    assert torch.equal(by_name.weight.grad.to_local() != 0, by_number.weight.grad.to_local() != 0)
    kinds = (Flat(),), (Flat(),), (Flat(),)
    for message, arguments in (
        (r"Expected 2 parameter placements for \(0, 1\), got 1", ((0, 1), *kinds)),
        (
            r"Expected 1 gradient placements for \(0,\), got 2",
            ((0,), (Flat(),), (Flat(), Flat()), (Flat(),)),
        ),
        (r"Expected 1 optimizer placements for \(0,\), got 0", ((0,), (Flat(),), (Flat(),), ())),
        (r"Expected every mesh axis once, got \(0, 0\)", ((0, 0), *hsdp)),
        (
            r"Expected parameter buffers that are replicated or sharded",
            ((0,), (Partial(),), (Flat(),), (Flat(),)),
        ),
        (
            r"Expected gradient placements that are cut wherever parameter",
            ((0,), (Flat(),), (Partial(),), (Flat(),)),
        ),
        (
            r"Expected optimizer placements that are cut wherever gradient",
            ((0,), *kinds[:2], (Replicate(),)),
        ),
    ):
        _raises(ValueError, message, partial(Placements, *arguments))
    _raises(
        ValueError,
        "Expected one of .*'optim_grads_params'.*, got 'zero'",
        lambda: Placements.for_strategy("zero"),
    )


@on_ranks(2)
def test_mistakes_with_optimizers_have_their_own_messages_and_change_no_weight() -> None:
    model = Stack(dtype=torch.bfloat16)
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    context = shard(*model.layers, strategy="optim")
    for error, message, argument in (
        (TypeError, r"Expected a torch\.optim\.Optimizer, got Stack\.", model),
        (
            ValueError,
            r"Expected an optimizer built after fully_shard, got 6 parameters from before\.",
            before,
        ),
        (
            ValueError,
            r"Expected an optimizer over sharded parameters, got none among its parameters\.",
            torch.optim.SGD(linear().parameters(), lr=0.1),
        ),
    ):
        _raises(error, message, partial(fully_shard_optimizer, argument))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard_optimizer(optimizer)
    weights = compute_weights(model)
    with microbatch(context, is_last=False):
        loss_of(model(own_batch(dtype=torch.bfloat16))).backward()
    assert all(parameter.grad.placements == (Partial("avg"),) for parameter in model.parameters())
    _raises(
        RuntimeError,
        r"Expected the gradients of a whole step, got partial sums: the last mic",
        optimizer.step,
    )
    with pytest.raises(ArithmeticError, match="mine"), microbatch(context, is_last=False):
        raise ArithmeticError("mine")
    assert context.is_last_microbatch
    loss_of(model(own_batch(1, torch.bfloat16))).backward()
    message = (
        r"Expected step without a closure, whose torch\.bfloat16 gradients nothing would cast to "
        r"torch\.float32"
    )
    _raises(NotImplementedError, message, lambda: optimizer.step(lambda: 0.0))
    _raises(NotImplementedError, message, lambda: optimizer.step(closure=lambda: 0.0))
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(
        torch.equal(old, new) for old, new in zip(weights, compute_weights(model), strict=True)
    )
    optimizer.step(None)
    assert not any(
        torch.equal(old, new) for old, new in zip(weights, compute_weights(model), strict=True)
    )


class Whatever(nn.Linear):
    """Does in its forward what it is told to."""

    act: Callable[[Whatever, torch.Tensor], Any] = nn.Linear.forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.act(x)


def _looks_up(module: Whatever, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(x.long().abs() % DIM, module.weight, sparse=True)


@on_ranks(2)
def test_mistakes_in_use_have_their_own_messages() -> None:
    model = Stack(1)
    shard(*model.layers)
    settled = (
        "Expected dtype and device to be settled before fully_shard, "
        "got a change from torch.float32 on cpu to "
    )
    _raises(RuntimeError, settled + "torch.bfloat16 on cpu", model.bfloat16)
    _raises(RuntimeError, settled + "torch.float32 on meta", lambda: model.to("meta"))
    _raises(
        NotImplementedError,
        "Expected a copy to be made before fully_shard",
        lambda: copy.deepcopy(model),
    )
    assert model.to(torch.float32) is model
    for error, message, act in (
        (
            RuntimeError,
            "got one of its weights or a view of one, which is whole only",
            lambda own, _: own.weight,
        ),
        (
            RuntimeError,
            "got one of its weights or a view of one, which is whole only",
            lambda own, _: [own.weight[1:]],
        ),
        (
            RuntimeError,
            "from another phase, got forward; a sharded module cannot run inside itself",
            Whatever.__call__,
        ),
        (
            NotImplementedError,
            "Expected a dense gradient for weight, got torch.sparse_coo",
            _looks_up,
        ),
    ):
        module = Whatever(DIM, DIM)
        context = shard(module)
        module.act = partial(act, module)
        _raises(error, message, lambda module=module: loss_of(module(own_batch())).backward())
        settle(context)
    module, other = linear(), linear()
    shard(module)
    shard(other)
    torch.utils.swap_tensors(module.bias, other.bias)
    message = "Expected bias to be the view of its buffer that fully_shard made, got another tensor"
    _raises(RuntimeError, message, lambda: module(own_batch()))
    replaced = linear()
    shard(replaced)
    replaced.weight = nn.Parameter(torch.zeros(DIM, DIM))
    _raises(
        RuntimeError, "Expected weight to be the view of its buffer", lambda: replaced(own_batch())
    )
    hooked = linear()
    hooked.weight.register_hook(lambda gradient: gradient)
    _raises(
        ValueError,
        "Expected parameters without hooks, which would be lost, got some on weight",
        lambda: shard(hooked),
    )
    torch.manual_seed(dist.get_rank())
    different = linear()
    _raises(
        ValueError,
        "the same weights on every rank, got diff",
        lambda: shard(different, strategy="no_shard"),
    )
