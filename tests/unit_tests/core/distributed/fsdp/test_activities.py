"""`FsdpModule.Activity`: where a module is in its cycle, with checkpoints and after errors too."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp import FsdpModule, fully_shard
from tests.helpers.ranks import on_ranks

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


@pytest.mark.parametrize(
    ("use_reentrant", "seen", "between"),
    [
        (True, [Activity.CHECKPOINTING] * 2, Activity.CHECKPOINTED),
        (False, [Activity.FORWARD, Activity.BACKWARD], Activity.RESTING),
    ],
    ids=["reentrant", "non-reentrant"],
)
@on_ranks(2)
def test_a_module_in_a_checkpoint_says_whether_a_recomputation_is_still_to_come(
    use_reentrant: bool, seen: list[FsdpModule.Activity], between: FsdpModule.Activity
) -> None:
    layer = fully_shard(Looking())
    x = torch.ones(2, 4, requires_grad=True)
    output = checkpoint(layer, x + 0, use_reentrant=use_reentrant)
    assert layer.activity is between
    output.sum().backward()
    assert (layer.seen, layer.activity) == (seen, Activity.RESTING)


@on_ranks(2)
def test_a_recomputation_inside_a_modules_own_backward_stays_in_that_activity() -> None:
    layer = fully_shard(Recomputing())
    layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert layer.activity is Activity.RESTING
    assert layer.seen == [Activity.FORWARD, Activity.BACKWARD]


@on_ranks(2)
def test_a_module_that_ran_without_a_graph_or_failed_comes_to_rest() -> None:
    layer = fully_shard(Looking())
    x = torch.ones(2, 4, requires_grad=True)
    with torch.no_grad():
        layer(x)
        assert layer.activity is Activity.CHECKPOINTED  # nothing tells it apart from a checkpoint
        layer(x.detach())
        assert layer.activity is Activity.RESTING
    layer.fails = True
    with pytest.raises(ValueError, match="told to fail"):
        layer(x)
    assert layer.activity is Activity.RESTING


@on_ranks(2)
def test_a_checkpoint_whose_recomputation_failed_is_not_expected_again() -> None:
    layer = fully_shard(Looking())
    x = torch.ones(2, 4, requires_grad=True)
    output = checkpoint(layer, x + 0, use_reentrant=True)
    layer.fails = True
    with pytest.raises(ValueError, match="told to fail"):
        output.sum().backward()
    layer.fails = False
    layer(x).sum().backward()
    assert layer.activity is Activity.RESTING
