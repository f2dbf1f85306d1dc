"""A sharded model after a forward or a backward that raised, and after it was deleted."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed.fsdp import (
    FsdpContext,
    fully_shard_optimizer,
)
from tests.helpers.ranks import on_ranks, run_ranks
from tests.unit_tests.core.distributed.fsdp.fully_shard.helpers.stacks import (
    DIM,
    STRATEGIES,
    Stack,
    assert_gradients,
    assert_resting,
    clear_gradients,
    expected_gradients,
    groups_of,
    loss_of,
    outcome_of,
    own_batch,
    settle,
    shard,
    whole_weights,
)

# Modules and backwards that fail


class Fragile(nn.Module):
    """The identity, which can be made to fail in forward or backward."""

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
    """Fragile modules in all layers and between them; with `has_root`, the root has parameters,
    too.
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


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
@pytest.mark.parametrize(
    ("strategy", "has_root"),
    [(name, name in ("optim", "optim_grads_params")) for name in STRATEGIES]
    + [("optim_grads_params", False)],
)
def test_after_a_pass_that_raised_the_model_is_usable(strategy, has_root, fails_in):
    for outcomes in run_ranks(2, _fails, strategy, has_root, fails_in, list(range(5))):
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
    # Weights prefetched for modules after the failure are freed by the next forward.
    assert list(whole_weights(model)) == list(layers[1].parameter_groups)
    weak.fails_in = ""
    loss_of(model(own_batch())).backward()
    assert_resting(model)


# Deletion


def lane_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "fsdp communication"}


def _collect_all() -> None:
    """Collects other tests' models, which autograd has put into cycles."""
    for _ in range(4):
        gc.collect()


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
    others = lane_threads()  # of models that earlier tests have left, whose lanes are shared
    model, context, optimizer = _trained(strategy, with_root)
    threads = lane_threads() - others
    lane = weakref.ref(context.gather_lane)
    references = [weakref.ref(value) for value in (*_buffers(model), model, model[0].layers[0])]
    del optimizer
    assert all(reference() is not None for reference in references)
    del model
    assert not any(reference() is not None for reference in references)
    assert context.forward_order == context.backward_order == []
    assert all(thread.is_alive() for thread in threads)
    del context
    assert lane() is None
    for thread in threads:
        thread.join(timeout=60)
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
    # First imports and warnings may leave frames, and the objects of these frames, in cycles. The
    # cycle of this test exists each time.
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


@on_ranks(1)
def test_a_graph_without_a_backward_is_freed_at_once() -> None:
    """Garbage is collected at other moments on other ranks, which must not differ meanwhile."""
    model = Stack(3)
    shard(*model.layers, model)
    alive: weakref.WeakSet[Saved] = weakref.WeakSet()

    def save(tensor: torch.Tensor) -> Saved:
        alive.add(saved := Saved(tensor))
        return saved

    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(save, Saved.unpack):
            loss = loss_of(model(own_batch()))
            assert alive
            del loss
        assert not alive
    finally:
        gc.enable()


class Saved:
    """A tensor that autograd saves."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()

    def unpack(self) -> torch.Tensor:
        return self._tensor
