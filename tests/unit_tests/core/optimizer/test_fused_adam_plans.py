"""FusedAdam's steps that are planned ahead: stale plans, and readers of the states meanwhile."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.optimizer.fused_adam import FusedAdam


def _planned(num_parameters: int = 2) -> tuple[list[nn.Parameter], FusedAdam]:
    parameters = [nn.Parameter(torch.full((4,), 1.0 + number)) for number in range(num_parameters)]
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    return parameters, FusedAdam(parameters, lr=0.1)


def test_a_plan_is_used_for_one_step_only():
    parameters, optimizer = _planned()
    expected, reference = _planned()
    planned = optimizer.plan_step()
    for _ in range(2):
        optimizer.step(planned=planned)
        reference.step()
    assert float(optimizer.state[parameters[0]]["step"]) == 2.0
    assert torch.equal(parameters[0], expected[0])


def test_a_plan_made_before_states_were_loaded_is_made_anew():
    parameters, optimizer = _planned()
    optimizer.step()
    loaded = copy.deepcopy(optimizer.state_dict())
    for state in loaded["state"].values():
        state["step"].fill_(100.0)
    planned = optimizer.plan_step()
    optimizer.load_state_dict(loaded)
    optimizer.step(planned=planned)
    assert float(optimizer.state[parameters[0]]["step"]) == 101.0


@pytest.mark.parametrize(
    "change", [lambda group: group["lr"].fill_(0.5), lambda group: group.update(lr=0.5)]
)
def test_a_plan_made_before_an_option_changed_is_made_anew_be_it_changed_in_place(change):
    parameters, optimizer = _planned()
    expected, reference = _planned()
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.1)
    planned = optimizer.plan_step()
    change(optimizer.param_groups[0])
    reference.param_groups[0]["lr"] = 0.5
    optimizer.step(planned=planned)
    reference.step()
    assert torch.equal(parameters[0], expected[0])


class _Reader:
    """The event of a reader, which records whether it was awaited."""

    def __init__(self) -> None:
        self.was_awaited = False

    def wait(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        self.was_awaited = True

    def is_done(self) -> bool:
        return self.was_awaited


def test_readers_that_come_after_the_plan_are_awaited_though_others_have_gone():
    _, optimizer = _planned()
    optimizer.init_state()
    first, second = _Reader(), _Reader()
    (unit,) = optimizer.state_units()
    unit.hold(first)
    planned = optimizer.plan_step()
    optimizer._holds.wait()
    unit.hold(second)
    optimizer.step(planned=planned)
    assert first.was_awaited
    assert second.was_awaited


def test_a_step_that_fails_forgets_no_reader(monkeypatch):
    _, optimizer = _planned()
    optimizer.init_state()
    reader = _Reader()
    (unit,) = optimizer.state_units()
    unit.hold(reader)
    planned = optimizer.plan_step()

    def fail(*_: Any) -> None:
        raise RuntimeError("of the kernel")

    monkeypatch.setattr(reader, "synchronize", fail)
    with pytest.raises(RuntimeError, match="of the kernel"):
        optimizer.step(planned=planned)
    monkeypatch.undo()
    optimizer.step()
    assert reader.was_awaited


def test_a_step_does_not_wait_for_who_reads_what_it_does_not_step():
    parameters, optimizer = _planned()
    optimizer.init_state()
    reader = _Reader()
    optimizer._unit(parameters[:1]).hold(reader)
    parameters[0].grad = None
    optimizer.step()
    assert not reader.was_awaited
    parameters[0].grad = torch.ones(4)
    optimizer.step()
    assert reader.was_awaited
