"""Ranks that disagree where no note goes ahead of a collective, as on an accelerator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate

from megatron.core.distributed.fsdp import (
    Flat,
    FsdpContext,
    Placements,
    collectives,
    fully_shard,
    fully_shard_context,
    microbatch,
)
from megatron.core.distributed.fsdp.note_history import NoteHistory, tell_apart
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.training.step import train_step
from tests.helpers.ranks import on_ranks, run_ranks

DIM = 6
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
HSDP = Placements((0, 1), (Replicate(), Flat()), (Partial("avg"), Flat()), (Replicate(), Flat()))


@contextmanager
def without_notes() -> Iterator[None]:
    """What is sharded here takes the accelerator's path: no note goes ahead of a collective."""
    original = collectives.exchanges_notes
    collectives.exchanges_notes = lambda _: False
    try:
        yield
    finally:
        collectives.exchanges_notes = original


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
        x = torch.tanh(x @ first)
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


def shard(model: Pairs, strategy: str) -> FsdpContext:
    num_axes = 2 if strategy == "hsdp" else 1
    placements = HSDP if strategy == "hsdp" else Placements.for_strategy(strategy)
    mesh = init_device_mesh("cpu", (2,) * num_axes)
    with fully_shard_context("cpu") as context:
        for module in (model.a, model.b, model):
            fully_shard(module, mesh, placements)
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


def digest_of(notes: Sequence[Sequence[int]]) -> int:
    history = NoteHistory()
    for note in notes:
        history.add(note)
    return history.digest


def test_notes_that_are_cut_differently_from_the_same_numbers_have_another_digest():
    assert len({digest_of(notes) for notes in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]])}) == 3
    assert digest_of([[1, 2]]) == digest_of([[1, 2, 0]]), "0 stands for what is left out"


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
    assert _groups_that_room_is_made_for(is_frozen=False) == ["a"], (
        "b's ranks tell each other, and need no memory"
    )
    with without_notes():
        assert sorted(_groups_that_room_is_made_for(is_frozen=False)) == ["a", "b"], (
            "b's ranks reduce zeros"
        )
        assert _groups_that_room_is_made_for(is_frozen=True) == ["a"]


# What ranks find out at the end of a step


def _one_parameter_differs(strategy: str) -> str:
    with without_notes():
        model = Pairs()
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

        # Asked again, ranks that agree from here on have nothing to say.
        clear_gradients(model)
        model.b.uses_second = True
        backward(model)
        context.check_agreement()
        return str(caught.value)


@pytest.mark.parametrize("strategy", [*STRATEGIES, pytest.param("hsdp", marks=pytest.mark.wide)])
def test_a_gradient_that_only_some_ranks_have_is_named_with_its_group_and_the_ranks(strategy):
    those = "ranks 0, 2, 3 were" if strategy == "hsdp" else "rank 0 was"
    for message in run_ranks(num_ranks(strategy), _one_parameter_differs, strategy):
        assert (
            f"got: {those} about to reduce the gradients of b; rank 1 was about to reduce the "
            "gradients of b, "
            "which has none for b.second. The gradients"
        ) in message


def _a_whole_group_differs(strategy: str) -> str:
    with without_notes():
        model = Pairs()
        context = shard(model, strategy)
        model.b.learns = dist.get_rank() == 0
        for is_last in (False, True):
            with microbatch(context, is_last=is_last):
                backward(model)
        # The next step's collectives are still each other's: the rank without gradients has joined
        # in the reduction.
        clear_gradients(model)
        model.b.learns = True
        backward(model)
        with pytest.raises(RuntimeError) as caught:
            context.check_agreement()
        return str(caught.value)


@pytest.mark.parametrize("strategy", [*STRATEGIES, pytest.param("hsdp", marks=pytest.mark.wide)])
def test_a_rank_without_any_gradient_of_a_group_joins_the_others_reductions_and_is_named(strategy):
    for message in run_ranks(num_ranks(strategy), _a_whole_group_differs, strategy):
        assert "about to reduce the gradients of b; rank" in message
        assert "about to reduce the gradients of b, which has none for b.first, b.second" in message


# What is right stays right


def _trained(strategy: str, uses: Sequence[tuple[bool, bool]]) -> list[list[torch.Tensor | None]]:
    """The gradients after a step of microbatches where b (learns, uses its second parameter) or
    not, twice.
    """
    model = Pairs()
    context = shard(model, strategy)
    found = []
    for _ in range(2):
        clear_gradients(model)
        for number, (learns, uses_second) in enumerate(uses):
            model.b.learns, model.b.uses_second = learns, uses_second
            with microbatch(context, is_last=number == len(uses) - 1):
                backward(model, number)
        context.check_agreement()
        found.append(local_gradients(model))
    return found


def _same_with_and_without_notes(strategy: str) -> int:
    num_missing = 0
    for uses in (
        [(False, True)],
        [(True, False)],
        [(True, True), (True, False), (False, True)],
        [(False, True), (True, False)],
        [(False, True), (False, True)],
    ):
        expected = _trained(strategy, uses)
        with without_notes():
            found = _trained(strategy, uses)
        for ours, theirs in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)
            num_missing += ours is None
    return num_missing


@pytest.mark.parametrize("strategy", [*STRATEGIES, pytest.param("hsdp", marks=pytest.mark.wide)])
def test_gradients_that_all_ranks_lack_are_none_and_the_others_the_same_bits_as_with_notes(
    strategy,
):
    assert all(run_ranks(num_ranks(strategy), _same_with_and_without_notes, strategy))


def _own_sums_differ(strategy: str) -> list[torch.Tensor]:
    """One rank uses a parameter in the first microbatch, the other in the second; both are reduced
    together.
    """
    model = Pairs()
    context = shard(model, strategy)
    for number in range(2):
        model.b.uses_second = number == dist.get_rank()
        with microbatch(context, is_last=number == 1):
            backward(model)
    context.check_agreement()
    return [model.b.second.grad.full_tensor()]


def _own_sums_differ_without_notes(strategy: str) -> list[torch.Tensor]:
    with without_notes():
        return _own_sums_differ(strategy)


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_sums_that_a_rank_makes_by_itself_are_its_own_business(strategy):
    expected, found = (
        run_ranks(2, f, strategy) for f in (_own_sums_differ, _own_sums_differ_without_notes)
    )
    assert all(torch.equal(own[0], expected[0][0]) for own in [*found, *expected])
    assert expected[0][0].isfinite().all()


def _frozen() -> list[int]:
    with without_notes():
        model = Pairs()
        shard(model, "optim_grads")
        sent: list[int] = []
        original = collectives.reduce_scatter
        collectives.reduce_scatter = lambda out, *args, **options: (
            sent.append(1),
            original(out, *args, **options),
        )
        try:
            model.b.requires_grad_(False)
            backward(model)
        finally:
            collectives.reduce_scatter = original
        return sent


def test_parameters_that_are_frozen_later_cost_no_reduction():
    assert [len(sent) for sent in run_ranks(2, _frozen)] == [1, 1]


# In the training loop


def _steps(differs: bool) -> tuple[str, bool]:
    with without_notes():
        model = Pairs()
        shard(model, "optim_grads_params")
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 1.0)

        def step() -> None:
            train_step(
                model,
                optimizer,
                iter([{"x": own_batch()}]),
                forward_step=lambda model, batch: model(batch["x"]).square().mean(),
                num_microbatches=1,
                device=torch.device("cpu"),
                mesh=build_mesh("cpu", dist.get_world_size()),
            )

        step()
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        model.b.uses_second = not differs or dist.get_rank() == 0
        outcome = ""
        try:
            step()
        except RuntimeError as error:
            outcome = str(error)
        after = [parameter.to_local() for parameter in model.parameters()]
        return outcome, all(map(torch.equal, before, after))


def test_a_training_step_ends_before_weights_change_when_ranks_disagree():
    for outcome, is_unchanged in run_ranks(2, _steps, True):
        assert (
            "rank 1 was about to reduce the gradients of b, which has none for b.second" in outcome
        )
        assert is_unchanged
    assert run_ranks(2, _steps, False) == [("", False)] * 2, "those that agree step"


# Histories


def test_a_digest_tells_notes_orders_and_numbers_of_notes_apart():
    histories = [NoteHistory() for _ in range(5)]
    for history, notes in zip(
        histories, ([], [(1, 2)], [(1, 2), (2, 3)], [(2, 3), (1, 2)], [(1, 2)]), strict=True
    ):
        for note in notes:
            history.add(note)
    assert len({history.digest for history in histories}) == 4
    assert histories[1].digest == histories[4].digest
    assert all(0 <= history.digest < 2**48 for history in histories)
    histories[2].forget()
    assert histories[2].digest == histories[0].digest


def _histories(notes: Sequence[Sequence[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    history = NoteHistory()
    for note in notes[dist.get_rank()]:
        history.add(note)
    return [note[:3] for note in history.first_difference(None, torch.device("cpu"))]


@pytest.mark.parametrize(
    ("notes", "expected"),
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
def test_ranks_find_the_first_note_that_is_not_the_same(notes, expected):
    assert run_ranks(3, _histories, notes) == [expected] * 3


def test_ranks_that_agree_with_each_other_are_named_together():
    notes = [(1, 7), (1, 7), (0, 0), (1, 8)]
    told = tell_apart(notes, lambda note: f"gather {note[1]}")
    assert (
        told == "ranks 0, 1 were about to gather 7; rank 2 was about to do nothing more; "
        "rank 3 was about to gather 8"
    )
    told = tell_apart(notes[:2], str)
    assert told == "a difference after the first 65536 collectives, which were the same"
