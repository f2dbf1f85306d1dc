"""`PlanningOptimizer`: an optimizer that can plan a step before the gradients' factor is known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from megatron.core.lane_timings import LaneTimings
from megatron.core.optimizer.state_units import StateUnit, one_unit
from megatron.core.optimizer.step_inputs import StepInputs
from megatron.core.timeline import AnyTimeline

if TYPE_CHECKING:
    # Its package imports the offloaded optimizer, which is one of these.
    from megatron.core.optimizer.cpu_offloading.plan import OffloadPlan

_T = TypeVar("_T")


class PlanningOptimizer(torch.optim.Optimizer, ABC):
    """The interface that our optimizers have besides that of `torch.optim.Optimizer`.

    Attributes:
        use_decoupled_grad: whether `step` reads `p.decoupled_grad` instead of `p.grad`.
    """

    use_decoupled_grad: bool
    _revision = 0  # of the states; see `StepInputs`

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> PlanningOptimizer | None:
        """Returns an optimizer of this class; None for others."""
        return optimizer if isinstance(optimizer, PlanningOptimizer) else None

    @property
    def plan(self) -> OffloadPlan | None:
        """Which groups are in host memory; None without offloading."""
        return None

    @property
    def device_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of the states on the device, if any."""
        return self

    def holds(self, parameter: torch.Tensor) -> bool:  # noqa: ARG002
        """Whether a parameter is updated in host memory."""
        return False

    @property
    def slots_nbytes(self) -> int:
        """Bytes on the device through which states in host memory pass."""
        return 0

    def host_bytes_by_state(self) -> Mapping[str, int]:
        """Bytes of host memory by purpose."""
        return {}

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

    def expect_grad_scale(self, grad_scale: float) -> None:
        """Sets the factor that the gradients of the next steps need, if they are not clipped.

        It may be used before the step; another factor in `step` changes no result.
        """

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

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    def _step_inputs(self) -> StepInputs:
        return StepInputs.of(self.param_groups, self.use_decoupled_grad, self._revision)

    @staticmethod
    def _loss_of(closure: Callable[[], _T] | None) -> _T | None:
        """The result of the closure of a step, which computes gradients."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()


def state_units(optimizer: torch.optim.Optimizer) -> list[StateUnit]:
    """The units of any optimizer, in the order of forward. Its states must have been allocated."""
    ours = PlanningOptimizer.of(optimizer)
    return [one_unit(optimizer)] if ours is None else ours.state_units()
