"""`FsdpModule.Phase`: where a module is in its cycle, with checkpoints and after errors too."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp import FsdpModule, fully_shard
from tests.helpers.ranks import run_ranks

Phase = FsdpModule.Phase


class Looking(nn.Linear):
    """Notes its phase whenever its forward runs, and fails when told to."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen: list[FsdpModule.Phase] = []
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.phase)
        if self.fails:
            raise ValueError("told to fail")
        return super().forward(x)


class Recomputing(Looking):
    """Recomputes its own body."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def _through_a_step(use_reentrant: bool) -> tuple[list[FsdpModule.Phase], ...]:
    layer = fully_shard(Looking())
    x = torch.ones(2, 4, requires_grad=True)
    output = checkpoint(layer, x + 0, use_reentrant=use_reentrant)
    between = [layer.phase]
    output.sum().backward()
    return layer.seen, between, [layer.phase]


@pytest.mark.parametrize(
    ("use_reentrant", "phases"),
    [
        (True, ([Phase.CHECKPOINTING] * 2, [Phase.CHECKPOINTED], [Phase.RESTING])),
        (False, ([Phase.FORWARD, Phase.BACKWARD], [Phase.RESTING], [Phase.RESTING])),
    ],
    ids=["reentrant", "non-reentrant"],
)
def test_a_module_in_a_checkpoint_says_whether_a_recomputation_is_still_to_come(
    use_reentrant, phases
):
    assert run_ranks(2, _through_a_step, use_reentrant) == [phases] * 2


def _in_its_own_backward() -> list[FsdpModule.Phase]:
    layer = fully_shard(Recomputing())
    layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert layer.phase is Phase.RESTING
    return layer.seen


def test_a_recomputation_inside_a_modules_own_backward_stays_in_that_phase():
    assert run_ranks(2, _in_its_own_backward) == [[Phase.FORWARD, Phase.BACKWARD]] * 2


def _without_a_graph() -> list[FsdpModule.Phase]:
    layer = fully_shard(Looking())
    x = torch.ones(2, 4, requires_grad=True)
    after = []
    with torch.no_grad():
        layer(x)
        after.append(layer.phase)  # as in a checkpoint: nothing tells them apart
        layer(x.detach())
        after.append(layer.phase)
    layer.fails = True
    with pytest.raises(ValueError, match="told to fail"):
        layer(x)
    return [*after, layer.phase]


def test_a_module_that_ran_without_a_graph_or_failed_comes_to_rest():
    phases = [Phase.CHECKPOINTED, Phase.RESTING, Phase.RESTING]
    assert run_ranks(2, _without_a_graph) == [phases] * 2


def _abandoned() -> FsdpModule.Phase:
    layer = fully_shard(Looking())
    x = torch.ones(2, 4, requires_grad=True)
    output = checkpoint(layer, x + 0, use_reentrant=True)
    layer.fails = True
    with pytest.raises(ValueError, match="told to fail"):
        output.sum().backward()
    layer.fails = False
    layer(x).sum().backward()
    return layer.phase


def test_a_checkpoint_whose_recomputation_failed_is_not_expected_again():
    assert run_ranks(2, _abandoned) == [Phase.RESTING] * 2
