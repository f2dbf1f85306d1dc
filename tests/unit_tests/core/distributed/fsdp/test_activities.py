"""`FsdpModule.Activity`: where a module is in its cycle, with checkpoints and after errors too."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp import FsdpModule, fully_shard
from tests.helpers.ranks import run_ranks

Activity = FsdpModule.Activity


class Looking(nn.Linear):
    """Notes its activity whenever its forward runs, and fails when told to."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen: list[FsdpModule.Activity] = []
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.activity)
        if self.fails:
            raise ValueError("told to fail")
        return super().forward(x)


class Recomputing(Looking):
    """Recomputes its own body."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def _through_a_step(use_reentrant: bool) -> tuple[list[FsdpModule.Activity], ...]:
    layer = fully_shard(Looking())
    x = torch.ones(2, 4, requires_grad=True)
    output = checkpoint(layer, x + 0, use_reentrant=use_reentrant)
    between = [layer.activity]
    output.sum().backward()
    return layer.seen, between, [layer.activity]


@pytest.mark.parametrize(
    ("use_reentrant", "activities"),
    [
        (True, ([Activity.CHECKPOINTING] * 2, [Activity.CHECKPOINTED], [Activity.RESTING])),
        (False, ([Activity.FORWARD, Activity.BACKWARD], [Activity.RESTING], [Activity.RESTING])),
    ],
    ids=["reentrant", "non-reentrant"],
)
def test_a_module_in_a_checkpoint_says_whether_a_recomputation_is_still_to_come(
    use_reentrant, activities
):
    assert run_ranks(2, _through_a_step, use_reentrant) == [activities] * 2


def _in_its_own_backward() -> list[FsdpModule.Activity]:
    layer = fully_shard(Recomputing())
    layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert layer.activity is Activity.RESTING
    return layer.seen


def test_a_recomputation_inside_a_modules_own_backward_stays_in_that_activity():
    assert run_ranks(2, _in_its_own_backward) == [[Activity.FORWARD, Activity.BACKWARD]] * 2


def _without_a_graph() -> list[FsdpModule.Activity]:
    layer = fully_shard(Looking())
    x = torch.ones(2, 4, requires_grad=True)
    after = []
    with torch.no_grad():
        layer(x)
        after.append(layer.activity)  # as in a checkpoint: nothing tells them apart
        layer(x.detach())
        after.append(layer.activity)
    layer.fails = True
    with pytest.raises(ValueError, match="told to fail"):
        layer(x)
    return [*after, layer.activity]


def test_a_module_that_ran_without_a_graph_or_failed_comes_to_rest():
    activities = [Activity.CHECKPOINTED, Activity.RESTING, Activity.RESTING]
    assert run_ranks(2, _without_a_graph) == [activities] * 2


def _abandoned() -> FsdpModule.Activity:
    layer = fully_shard(Looking())
    x = torch.ones(2, 4, requires_grad=True)
    output = checkpoint(layer, x + 0, use_reentrant=True)
    layer.fails = True
    with pytest.raises(ValueError, match="told to fail"):
        output.sum().backward()
    layer.fails = False
    layer(x).sum().backward()
    return layer.activity


def test_a_checkpoint_whose_recomputation_failed_is_not_expected_again():
    assert run_ranks(2, _abandoned) == [Activity.RESTING] * 2
