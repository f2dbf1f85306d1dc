"""`PlanningOptimizer`: an optimizer that can plan a step before the gradients' factor is known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.lane_timings import LaneTimings
from megatron.core.optimizer.state_units import StateUnit
from megatron.core.timeline import AnyTimeline

if TYPE_CHECKING:
    # Its package exports HybridDeviceOptimizer, which imports this module.
    from megatron.core.optimizer.cpu_offloading.plan import OffloadPlan


class PlanningOptimizer(torch.optim.Optimizer, ABC):
    """The interface that our optimizers have besides that of `torch.optim.Optimizer`.

    Attributes:
        use_decoupled_grad: whether `step` reads `p.decoupled_grad` instead of `p.grad`.
    """

    use_decoupled_grad: bool

    @property
    def plan(self) -> OffloadPlan | None:
        """Which groups are in host memory; None without offloading."""
        return None

    @abstractmethod
    def plan_step(self) -> Any:
        """Plans a step up to the factor of the gradients, for callers that still wait for that.

        Does not step. A plan holds the gradients, whose values may still change. It raises what
        `step` raises.
        """

    if TYPE_CHECKING:

        def step(
            self, closure: Any = None, *, grad_scale: float = 1.0, planned: Any = None
        ) -> Any: ...

    @abstractmethod
    def init_state(self) -> None:
        """Allocates the states that are not there yet, without stepping."""

    @abstractmethod
    def state_units(self) -> list[StateUnit]:
        """The states, in the order of forward, in parts that are updated and read together."""

    def synchronize(self) -> None:
        """Waits until all updates have ended. Raises what failed there."""

    def record_to(self, timeline: AnyTimeline) -> None:
        """Records the lanes' work in a timeline, if there are lanes."""

    def timings(self) -> LaneTimings | None:
        """Means over the steps completed since the last call; None without a record."""
        return None
