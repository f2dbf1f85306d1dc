"""Ranks that disagree about collectives or about which parameters have a gradient."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate

from megatron.core.device import Device
from megatron.core.distributed.experts import ExpertExchange
from megatron.core.distributed.fsdp import (
    Flat,
    FsdpContext,
    MixedPrecisionPolicy,
    Placements,
    collectives,
    fully_shard,
    fully_shard_context,
    microbatch,
)
from megatron.core.distributed.fsdp.collective_history import (
    CollectiveHistory,
    Kind,
    compare,
    histories_over,
    is_any_uncompared,
)
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.lanes import Lane
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.rank_waits import rank_wait
from megatron.training.step import train_step
from tests.helpers.ranks import on_ranks, run_ranks

DIM = 6
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
HSDP = Placements((0, 1), (Replicate(), Flat()), (Partial("avg"), Flat()), (Replicate(), Flat()))


class Pair(nn.Module):
    """Two parameters, of which the second is not always used, and both do not always get a
    gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(DIM, DIM))
        self.second = nn.Parameter(torch.randn(DIM))
        self.uses_second = True
        self.learns = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (p if self.learns else p.detach() for p in (self.first, self.second))
        x = torch.tanh(x.to(first.dtype) @ first)
        return x * second if self.uses_second else x


class Pairs(nn.Module):
    """Two modules that are sharded each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = Pair()
        self.b = Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def shard(model: Pairs, strategy: str, compute_dtype: torch.dtype = torch.float32) -> FsdpContext:
    num_axes = 2 if strategy == "hsdp" else 1
    placements = HSDP if strategy == "hsdp" else Placements.for_strategy(strategy)
    mesh = init_device_mesh("cpu", (2,) * num_axes)
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32, compute_dtype=compute_dtype)
    with fully_shard_context("cpu") as context:
        for module in (model.a, model.b, model):
            fully_shard(module, mesh, placements, policy)
    return context


def num_ranks(strategy: str) -> int:
    return 4 if strategy == "hsdp" else 2


def own_batch(number: int = 0) -> torch.Tensor:
    return torch.randn(
        3, DIM, generator=torch.Generator().manual_seed(10 * dist.get_rank() + number)
    )


def backward(model: Pairs, number: int = 0) -> None:
    model(own_batch(number)).square().sum().backward()


def local_gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]


def clear_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def new_history(entries: Iterable[Sequence[int]] = ()) -> CollectiveHistory:
    history = CollectiveHistory(dist.group.WORLD, "cpu")
    for entry in entries:
        history.add(*entry)
    return history


def _groups_that_room_is_made_for(is_frozen: bool) -> list[str]:
    """In a backward in which only module a gets gradients."""
    model = Pairs()
    context = shard(model, "optim")
    backward(model)  # names the groups
    clear_gradients(model)
    made: list[str] = []
    original = context.make_room

    def make_room(group: FsdpParameterGroup) -> None:
        made.append(group.name)
        original(group)

    context.make_room = make_room
    model.b.learns = False
    if is_frozen:
        model.b.requires_grad_(False)
    backward(model)
    return made


@on_ranks(2)
def test_the_host_waits_for_room_only_for_groups_that_take_memory() -> None:
    assert sorted(_groups_that_room_is_made_for(is_frozen=False)) == ["a", "b"], (
        "b's ranks reduce, since another rank may have a gradient"
    )
    assert _groups_that_room_is_made_for(is_frozen=True) == ["a"]


# Gradients that a rank lacks


def _gradients_differ(strategy: str) -> list[str]:
    """The errors of ranks when one lacks a parameter's gradient, and when one lacks a group's."""
    model, told = Pairs(), []
    context = shard(model, strategy)
    backward(model)
    context.check_agreement()
    clear_gradients(model)

    model.b.uses_second = dist.get_rank() != 1
    backward(model)
    second = model.b.second.grad
    assert (second is None) if dist.get_rank() == 1 else bool(second.to_local().isnan().all())
    with pytest.raises(RuntimeError) as caught:
        context.check_agreement()
    told.append(str(caught.value))

    model.b.uses_second, model.b.learns = True, dist.get_rank() != 1
    for is_last in (False, True):
        with microbatch(context, is_last=is_last):
            backward(model)
    # The next step's collectives still match: the rank without gradients has joined the reduction.
    clear_gradients(model)
    model.b.learns = True
    backward(model)
    with pytest.raises(RuntimeError) as caught:
        context.check_agreement()
    told.append(str(caught.value))

    # Ranks that agree from here on get no error.
    clear_gradients(model)
    backward(model)
    context.check_agreement()
    return told


@pytest.mark.parametrize("strategy", [*STRATEGIES, pytest.param("hsdp", marks=pytest.mark.wide)])
def test_gradients_that_only_some_ranks_have_are_named_with_their_group_and_the_ranks(strategy):
    for rank, messages in enumerate(run_ranks(num_ranks(strategy), _gradients_differ, strategy)):
        for message, missing in zip(messages, ("b.second", "b.first, b.second"), strict=True):
            if rank == 2:  # of HSDP, in no process group with rank 1
                assert "a difference between other ranks" in message
            else:
                assert f"rank 1 reduced the gradients of b without any for {missing}" in message


@on_ranks(2)
def test_a_rank_that_adds_to_the_gradients_of_an_earlier_step_is_named() -> None:
    model = Pairs()
    shard(model, "optim_grads")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    if dist.get_rank() == 0:
        optimizer.zero_grad()
    backward(model)
    with pytest.raises(RuntimeError, match="gradients of b and added 2 of them to earlier ones"):
        optimizer.step()


@on_ranks(2)
def test_ranks_that_add_to_the_gradients_of_other_parameters_are_named() -> None:
    model = Pairs()
    shard(model, "optim_grads")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    (model.a.first if dist.get_rank() == 0 else model.a.second).grad = None
    clear_gradients(model.b)
    backward(model)
    with pytest.raises(RuntimeError, match="gradients of a and added 1 of them to earlier ones"):
        optimizer.step()


# Ranks that wait for each other

NAMES = {
    "gather": "all-gather of the weights of {}",
    "reduce": "reduce-scatter of the gradients of {}",
    "exchange": "all-to-all of the loads of 2 experts in {}",
    "step": "all-reduce of the digests of collectives",
}


class Program:
    """A rank's program, whose next action may be another than that of the other rank."""

    def __init__(self) -> None:
        self._model = Pairs()
        shard(self._model, "optim_grads_params")
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)
        backward(self._model)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._first = {
            name: module.first.full_tensor() for name, module in self._model.named_children()
        }

    def act(self, action: str, module: str, lane: Lane) -> None:
        """Does one thing, and checks that it used the data of no other collective."""
        getattr(self, f"_{action}")(module, lane)

    def _gather(self, module: str, lane: Lane) -> None:
        (group,) = getattr(self._model, module).parameter_groups
        group.unshard(lane)
        group.wait_unsharded()
        assert torch.equal(group.fsdp_parameters[0].full, self._first[module])

    def _reduce(self, module: str, lane: Lane) -> None:
        (group,) = getattr(self._model, module).parameter_groups
        value = float(ord(module))
        for index, parameter in enumerate(group.fsdp_parameters):
            gradient = torch.full(parameter.full.shape, value * (1 + dist.get_rank()))
            group.gradients.collect(index, gradient)
        group.wait_reduced(group.reduce(lane, is_last=True))
        found = group.main_grad.get_local_tensor(0)  # also if a comparison drops gradients
        assert torch.equal(found, torch.full_like(found, 1.5 * value))

    def _exchange(self, module: str, _: Lane) -> None:
        exchange = ExpertExchange(dist.group.WORLD, names=[module])
        sent = exchange.send(torch.full((2, 3), float(dist.get_rank())), torch.tensor([1, 1]))
        assert sent.tokens[:, 0].tolist() == [0.0, 1.0]

    def _step(self, *_: object) -> None:
        with pytest.raises(RuntimeError, match="Expected every rank to do the same"):
            self._optimizer.step()


def _wait_for_each_other(*actions: tuple[str, str]) -> str:
    """Rank r starts with the r-th action. Once both wait, each does the other's action."""
    program, device, rank = Program(), Device("cpu"), dist.get_rank()
    apart, errors = dist.new_group(), []

    def begin() -> None:
        try:
            program.act(*actions[rank], device.lane("begun"))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=begin)
    thread.start()
    # Before it waits in a collective, it is seen in torch's functions that issue one.
    while (name := rank_wait(thread.ident)) is None or name.endswith("of torch.distributed"):
        assert thread.is_alive(), f"{actions[rank]} did not wait: {errors}"
        time.sleep(0.001)  # leaves the interpreter to the thread

    dist.barrier(group=apart)
    if actions[rank][0] == "step":
        thread.join()  # the other rank's next action must not be recorded during a comparison
    program.act(*actions[1 - rank], device.lane("resumed"))
    thread.join()
    assert not errors
    return name


@pytest.mark.parametrize(
    "actions",
    [
        pytest.param((("gather", "a"), ("gather", "b")), id="another order of modules"),
        pytest.param((("gather", "a"), ("reduce", "a")), id="another kind"),
        pytest.param((("reduce", "b"), ("reduce", "a")), id="another order of gradients"),
        pytest.param((("gather", "a"), ("step", "")), id="one more step"),
        pytest.param((("reduce", "b"), ("step", "")), id="no backward"),
        pytest.param((("exchange", "a"), ("gather", "b")), id="no exchange"),
    ],
)
def test_ranks_that_are_in_different_collectives_wait_by_name_and_mix_no_data(actions):
    assert run_ranks(2, _wait_for_each_other, *actions) == [
        NAMES[action].format(module) for action, module in actions
    ]


# Ranks that agree


def _gradients_of_microbatches(
    model: Pairs, uses: Sequence[tuple[bool, bool]], context: FsdpContext | None = None
) -> None:
    """A step of microbatches in which b is trained and uses its second parameter, or not."""
    clear_gradients(model)
    for number, (model.b.learns, model.b.uses_second) in enumerate(uses):
        if context is None:
            backward(model, number)
        else:
            with microbatch(context, is_last=number == len(uses) - 1):
                backward(model, number)


def _gradients_that_all_lack(strategy: str) -> int:
    plain, model = Pairs(), Pairs()
    context = shard(model, strategy)
    num_missing = 0
    for uses in (
        [(False, True)],
        [(True, False)],
        [(True, True), (True, False), (False, True)],
        [(False, True), (True, False)],
        [(False, True), (False, True)],
    ):
        _gradients_of_microbatches(plain, uses)
        _gradients_of_microbatches(model, uses, context)
        context.check_agreement()
        for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
            if expected.grad is None:
                assert found.grad is None
                num_missing += 1
                continue
            dist.all_reduce(expected.grad)
            torch.testing.assert_close(
                found.grad.full_tensor(), expected.grad / dist.get_world_size()
            )
    return num_missing


@pytest.mark.parametrize("strategy", [*STRATEGIES, pytest.param("hsdp", marks=pytest.mark.wide)])
def test_gradients_that_all_ranks_lack_are_none_and_the_others_are_means(strategy):
    assert run_ranks(num_ranks(strategy), _gradients_that_all_lack, strategy) == (
        [6] * num_ranks(strategy)
    )


@pytest.mark.parametrize("is_whole_group", [False, True])
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
@on_ranks(2)
def test_ranks_may_use_a_parameter_in_different_microbatches_if_sums_are_reduced_once(
    strategy: str, is_whole_group: bool
) -> None:
    """One rank uses a parameter, or a whole group, in the first microbatch, the other in the
    second; both are reduced together.
    """
    plain, model = Pairs(), Pairs()
    context = shard(model, strategy, torch.bfloat16)
    is_first = dist.get_rank() == 0
    uses = [(own or not is_whole_group, own) for own in (is_first, not is_first)]
    _gradients_of_microbatches(plain, uses)
    _gradients_of_microbatches(model, uses, context)
    context.check_agreement()
    dist.all_reduce(plain.b.second.grad)
    torch.testing.assert_close(
        model.b.second.grad.full_tensor(), plain.b.second.grad / 2, rtol=0.05, atol=0.05
    )


@on_ranks(2)
def test_parameters_that_are_frozen_later_cost_no_reduction() -> None:
    model = Pairs()
    shard(model, "optim_grads")
    model.b.requires_grad_(False)
    sent: list[torch.Tensor] = []
    original = collectives.reduce_scatter
    collectives.reduce_scatter = lambda out, *args: (sent.append(out), original(out, *args))
    try:
        backward(model)
    finally:
        collectives.reduce_scatter = original
    assert len(sent) == 1


@on_ranks(4)
def test_a_replica_may_run_forwards_that_the_others_do_not_run() -> None:
    """One replica of HSDP logs an output before each of two optimizers' steps."""
    model = Pairs()
    shard(model, "hsdp")
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.1) for half in (model.a, model.b)]
    for _ in range(2):
        backward(model)
        for optimizer in optimizers:
            if dist.get_rank() < 2:
                with torch.no_grad():
                    model(own_batch())
            optimizer.step()
    weight = model.a.first.full_tensor()
    total = weight.clone()
    dist.all_reduce(total)
    assert torch.equal(total / 4, weight), "replicas stay alike"


@on_ranks(4)
def test_a_replica_may_take_a_norm_of_weights_that_the_others_do_not_take() -> None:
    model = Pairs()
    shard(model, "hsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        backward(model)
        if dist.get_rank() < 2:
            model.a.second.norm()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() < 2:
            torch.nn.utils.get_total_norm([parameter.detach() for parameter in model.parameters()])


def _skip_a_gradient_in_the_first_microbatch() -> str:
    """What replicas reduce among each other is the same."""
    model = Pairs()
    context = shard(model, "hsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for is_last in (False, True):
        model.b.uses_second = is_last or dist.get_rank() != 1
        with microbatch(context, is_last=is_last):
            backward(model)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    return str(caught.value)


def test_a_disagreement_of_ranks_of_one_replica_is_an_error_on_all_replicas():
    first, second, third, fourth = run_ranks(4, _skip_a_gradient_in_the_first_microbatch)
    assert "rank 1 reduced the gradients of b without any for b.second" in first
    assert second == first
    assert "other ranks" in third
    assert fourth == third


@on_ranks(2)
def test_a_rank_without_gradients_joins_in_every_backward_of_several_forwards() -> None:
    model = Pairs()
    context = shard(model, "optim_grads_params")
    model.b.learns = dist.get_rank() == 0
    losses = [model(own_batch(number)).square().sum() for number in range(2)]
    for loss in losses:
        loss.backward()
    with pytest.raises(RuntimeError, match=r"rank 1 .* without any for b\.first, b\.second"):
        context.check_agreement()


@on_ranks(2)
def test_ranks_agree_only_about_units_that_they_share() -> None:
    """As with experts that only some ranks share: a unit over each rank alone, one over both."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "own"))
    model = Pairs()
    fully_shard(model.a, mesh["own"])
    fully_shard(model, mesh["all"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.a.uses_second = dist.get_rank() == 0
    for _ in range(2):
        backward(model)
        optimizer.step()
    model.b.uses_second = dist.get_rank() == 0
    backward(model)
    with pytest.raises(RuntimeError, match="rank 1 reduced the gradients of the model without"):
        optimizer.step()


# Before an optimizer's step


def _train_step(model: Pairs) -> Callable[[], object]:
    return partial(
        train_step,
        model,
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 1.0),
        itertools.repeat({"x": own_batch()}),
        forward_step=lambda model, batch: model(batch["x"]).square().mean(),
        num_microbatches=1,
        device=torch.device("cpu"),
        mesh=build_mesh("cpu", dist.get_world_size()),
    )


def _closures(model: Pairs) -> Callable[[], object]:
    """With a backward, the first too, inside of a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(own_batch()).square().sum()
        loss.backward()
        return loss

    return partial(optimizer.step, closure)


def _scaled(model: Pairs) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(own_batch()).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def _own_loop(
    model: Pairs,
    build: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    foreach: bool | None = None,
) -> Callable[[], object]:
    optimizer = build(model.parameters())

    def step() -> None:
        backward(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        optimizer.step()
        optimizer.zero_grad()

    return step


LOOPS: dict[str, Callable[[Pairs], Callable[[], object]]] = {
    "train_step": _train_step,
    "SGD": partial(_own_loop, build=partial(torch.optim.SGD, lr=0.1)),
    "single norms": partial(_own_loop, build=partial(torch.optim.SGD, lr=0.1), foreach=False),
    "AdamW": partial(_own_loop, build=partial(torch.optim.AdamW, lr=0.1)),
    "FusedAdam": partial(_own_loop, build=partial(FusedAdam, lr=0.1)),
    "closure": _closures,
    "GradScaler": _scaled,
    "HybridDeviceOptimizer": partial(_own_loop, build=partial(HybridDeviceOptimizer, lr=0.1)),
}


def _steps(loop: str, differs: bool, strategy: str = "optim_grads_params") -> tuple[str, bool]:
    model = Pairs()
    shard(model, strategy)
    step = LOOPS[loop](model)
    step()
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    model.b.uses_second = not differs or dist.get_rank() == 0
    outcome = ""
    try:
        step()
    except RuntimeError as error:
        outcome = str(error)
    if outcome and loop != "train_step":
        # A program that ignores the error does not train on this step's gradients.
        assert all(parameter.grad is None for parameter in model.parameters())
    after = [parameter.to_local() for parameter in model.parameters()]
    return outcome, all(map(torch.equal, before, after))


def _step_another_optimizer(model: Pairs) -> None:
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.1) for half in (model.a, model.b)]
    backward(model)
    optimizers[dist.get_rank()].step()


def _step_without_a_gradient(model: Pairs) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    if dist.get_rank() == 1:
        model.b.second.grad = None
    optimizer.step()


def _step_without_a_decoupled_gradient(model: Pairs) -> None:
    optimizer = FusedAdam(model.parameters(), lr=0.1, use_decoupled_grad=True)
    backward(model)
    for parameter in model.parameters():
        parameter.decoupled_grad, parameter.grad = parameter.grad, None
    if dist.get_rank() == 1:
        model.b.second.decoupled_grad = None
    try:
        optimizer.step()
    finally:
        assert all(parameter.decoupled_grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "step",
    [_step_another_optimizer, _step_without_a_gradient, _step_without_a_decoupled_gradient],
)
@on_ranks(2)
def test_ranks_that_are_about_to_update_other_weights_change_none(
    step: Callable[[Pairs], None],
) -> None:
    model = Pairs()
    shard(model, "optim_grads_params")
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match="is about to update b"):
        step(model)
    assert all(map(torch.equal, before, (each.to_local() for each in model.parameters())))


@pytest.mark.parametrize(
    ("loop", "strategy"),
    [*((loop, "optim_grads_params") for loop in LOOPS), ("GradScaler", "no_shard")],
)
def test_a_step_ends_before_weights_change_when_ranks_disagree(loop, strategy):
    for outcome, is_unchanged in run_ranks(2, _steps, loop, True, strategy):
        assert "rank 1 reduced the gradients of b without any for b.second" in outcome
        assert is_unchanged
    assert run_ranks(2, _steps, loop, False, strategy) == [("", False)] * 2, "ranks that agree step"


# After an error


def _end_by_comparison(model: Pairs) -> None:
    with pytest.raises(RuntimeError, match="is about to update"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("end", [_end_by_comparison, lambda model: model.reset_iter_state()])
@on_ranks(2)
def test_sums_of_which_only_some_ranks_know_are_forgotten_after_an_error(
    end: Callable[[Pairs], None],
) -> None:
    """Gradients of one microbatch travel in bf16, sums of several in fp32."""
    model = Pairs()
    context = shard(model, "optim", torch.bfloat16)
    with microbatch(context, is_last=False):
        loss = model(own_batch()).square().sum()
        if dist.get_rank() == 0:
            loss.backward()
    del loss
    end(model)
    assert all(parameter.grad is None for parameter in model.parameters())

    backward(model)
    context.check_agreement()
    whole = model.a.first.grad.full_tensor()
    assert whole.isfinite().all()


@on_ranks(2)
def test_weights_that_rest_gathered_are_gathered_again_after_an_error() -> None:
    model = Pairs()
    shard(model, "optim", torch.bfloat16)
    backward(model)
    buffers = [group.model_weight.local_buffer for group in model.a.parameter_groups]
    expected = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        buffer.fill_(7.0)  # a gather that did not match, on an accelerator

    if dist.get_rank() == 1:
        model.b.second.grad = None
    _end_by_comparison(model)
    model(own_batch())
    assert all(map(torch.equal, buffers, expected))


@on_ranks(2)
def test_an_exchange_of_different_mixtures_is_told_once() -> None:
    model = Pairs()
    context = shard(model, "no_shard")
    (history,) = context.histories
    exchange = ExpertExchange(
        dist.group.WORLD,
        dist.get_rank(),
        ["a", "b"],
        lambda is_backward: history.add(Kind.EXCHANGE, dist.get_rank(), is_backward),
    )
    with pytest.raises(RuntimeError, match="Expected every rank to send tokens of"):
        exchange.send(torch.ones(2, 3), torch.tensor([1, 1]))
    context.check_agreement()


# Histories


@on_ranks(2)
def test_digests_differ_with_entries_their_order_their_number_and_where_they_are_cut() -> None:
    cases = [
        [],
        [(1, 2)],
        [(1, 2), (2, 3)],
        [(2, 3), (1, 2)],
        [(1, 2), (3,)],
        [(1,), (2, 3)],
        [(1, 2, 3)],
    ]
    digests = [new_history(entries).digest for entries in cases]
    assert len(set(digests)) == len(cases)
    assert all(0 <= digest < 2**48 for digest in digests)
    assert new_history([(1, 2)]).digest == new_history([(1, 2, 0)]).digest, "padded with 0"
    history = new_history([(1, 2)])
    history.forget()
    assert history.digest == digests[0]


@on_ranks(2)
def test_a_context_compares_groups_that_only_one_rank_has_freed() -> None:
    """And its digest depends on which process group has which entries."""
    meshes = [DeviceMesh.from_group(dist.new_group(), "cpu") for _ in range(2)]
    model = Pairs()
    with fully_shard_context("cpu") as context:
        for module, mesh in zip((model.a, model.b), meshes, strict=True):
            fully_shard(module, mesh)
    if dist.get_rank() == 0:
        del model.b, module
        gc.collect()
    assert len(context.histories) == 2
    context.check_agreement()

    digests = []
    for order in (1, -1):
        for number, history in enumerate(context.histories[::order]):
            history.forget()
            history.add(Kind.GATHER, number)
        digests.append(context.digest)
    assert digests[0] != digests[1]


@on_ranks(1)
def test_a_thread_may_ask_for_entries_while_another_makes_histories() -> None:
    asked = threading.Event()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            while not asked.is_set():
                is_any_uncompared()
        except RuntimeError as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=ask)
    thread.start()
    meshes = []
    try:
        for _ in range(200):
            meshes.append(DeviceMesh.from_group(dist.new_group(), "cpu"))
            histories_over(meshes[-1])
    finally:
        asked.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not errors


def _first_difference(entries: Sequence[Sequence[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    history = new_history(entries[dist.get_rank()])
    return [entry[:3] for entry in history.first_difference()]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (
            [[(1, 5), (2, 7, 3)], [(1, 5), (2, 7, 3), (1, 9)], [(1, 5), (2, 8)]],
            [(2, 7, 3), (2, 7, 3), (2, 8, 0)],
        ),
        ([[(1, 5), (1, 6)], [(1, 5)], [(1, 5), (1, 6)]], [(1, 6, 0), (0, 0, 0), (1, 6, 0)]),
        ([[], [(1, 5)], []], [(0, 0, 0), (1, 5, 0), (0, 0, 0)]),
        (
            [[(2, 1, -(2**62))], [(2, 1, 2**62 - 1)], []],
            [(2, 1, -(2**62)), (2, 1, 2**62 - 1), (0, 0, 0)],
        ),
    ],
)
def test_ranks_find_the_first_entry_that_is_not_the_same(entries, expected):
    assert run_ranks(3, _first_difference, entries) == [expected] * 3


class Recorded:
    """A group without parameters."""

    def __init__(self, number: int) -> None:
        self.display_name = str(number)
        self.names: list[str] = []
        self.is_recovered = False

    def recover(self) -> None:
        self.is_recovered = True


def _named_together(entries: Sequence[Sequence[tuple[int, ...]]]) -> str:
    mesh = build_mesh("cpu", dist.get_world_size())
    (history,) = histories_over(mesh)
    groups = {number: Recorded(number) for number in (7, 8)}
    history.groups.update(groups)
    for entry in entries[dist.get_rank()]:
        history.add(*entry)
    with pytest.raises(RuntimeError) as caught:
        compare([history])
    assert all(group.is_recovered for group in groups.values())
    compare([history])  # has no actions left to compare
    return str(caught.value)


def test_ranks_that_agree_with_each_other_are_named_together():
    entries = [[(1, 1), (1, 7)], [(1, 1), (1, 7)], [(1, 1)], [(1, 1), (5, 8)]]
    for message in run_ranks(4, _named_together, entries):
        assert "ranks 0, 1 gathered 7; rank 2 did nothing more; rank 3 stepped" in message
