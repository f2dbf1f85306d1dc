"""When `fully_shard` has whole weights: in forward, in backward, in flight, never at rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.distributed.fsdp.uneven_rows import UnevenShard
from tests.helpers.ranks import on_ranks, run_ranks
from tests.unit_tests.core.distributed.fsdp.fully_shard.helpers.stacks import (
    DIM,
    DTYPES,
    STRATEGIES,
    ZERO_3,
    Stack,
    Watched,
    assert_gradients,
    assert_resting,
    clear_gradients,
    expected_gradients,
    groups_of,
    loss_of,
    own_batch,
    shard,
    whole_weights,
    write_weights,
)

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
        seen.append((number, module.activity.value))
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
    # Modules constructed later may run first in forward.
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
        # The gather of the teacher's third layer is still in flight, and not needed.
        clear_gradients(student)
        loss_of(student(own_batch())).backward()
        assert_gradients(student, expected_gradients(plain))
        write_weights(teacher, "local tensor")


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
        moments.append((module.activity.value, list(model.layers).index(module), unsharded))

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
    # Layer 1 is gathered needlessly; so is layer 4, at the end of forward.
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
        write_weights(model, "copy_")
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
    """An object whose tensor no traversal finds."""

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
