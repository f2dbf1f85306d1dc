"""Units: parts of an optimizer's state that may be read while other parts are being updated.

A reader on another thread waits for a unit's `updated`, and holds its next update back until it has
read:

    for unit in state_units(optimizer):
        unit.hold(lane.enqueue(lambda: read(unit), after=[unit.updated]))

`RuleOptimizer` has a unit for each FSDP group and `HybridDeviceOptimizer` for each bucket besides,
so that a step waits for one reader at a time. Any other optimizer is one unit, and its next step
waits for all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from megatron.core.lanes import Event

# The attribute of an optimizer with the events that its next step awaits; read by `_reads_of`.
_READS = "_pending_reads"


class KeepsScales(Protocol):
    """An optimizer with states of 8 and 16 bits that are read with a scale: `RuleOptimizer`."""

    @property
    def state(self) -> Mapping[torch.Tensor, Mapping[str, Any]]: ...
    def state_scale(self, param: torch.Tensor, state_name: str) -> torch.Tensor | None: ...
    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor: ...
    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor
    ) -> None: ...


class StateUnit(NamedTuple):
    """Parameters whose states are updated and read together.

    Attributes:
        optimizer: whose states these are.
        parameters: in the order of forward; their values, main weights, are part of the unit.
        states: of each parameter by name, as in `optimizer.state`; not copies.
        updated: after this event parameters and states may be read; None: now, on this thread's
            stream.
        hold: the unit is not written to before this event, which must not fail, by any later
            `step`.
        scaled_by: the optimizer, where it keeps states with a scale.
    """

    optimizer: torch.optim.Optimizer
    parameters: Sequence[torch.Tensor]
    states: Sequence[Mapping[str, Any]]
    updated: Event | None
    hold: Callable[[Event], None]
    scaled_by: KeepsScales | None = None


def one_unit(optimizer: torch.optim.Optimizer) -> StateUnit:
    """All of an optimizer that updates in `step` itself."""
    # No wait is needed: work issued by `step` precedes later work of this thread.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]

    return StateUnit(optimizer, parameters, states, None, _reads_of(optimizer).append)


def _reads_of(optimizer: torch.optim.Optimizer) -> list[Event]:
    """The events that the next step of an optimizer waits for."""
    found: list[Event] | None = vars(optimizer).get(_READS)
    if found is not None:
        return found

    # Any optimizer has hooks. This one is registered once, with the first reader.
    reads: list[Event] = []

    def wait(*_: Any) -> None:
        while reads:
            reads.pop().synchronize()

    optimizer.register_step_pre_hook(wait)
    vars(optimizer)[_READS] = reads
    return reads


class Hold(NamedTuple):
    """Parameters that are not stepped before an event: until then their weights and states are
    being read.
    """

    parameters: Sequence[torch.Tensor]
    event: Event


class StepHolds:
    """The holds on one optimizer's parameters."""

    def __init__(self) -> None:
        self._holds: list[Hold] = []

    def add(self, parameters: Sequence[torch.Tensor], event: Event) -> None:
        """Holds the steps of some parameters back until an event."""
        self._holds.append(Hold(parameters, event))

    def known(self) -> list[Hold]:
        """The holds of the moment."""
        return list(self._holds)

    def wait(self, besides: Sequence[Hold] = ()) -> None:
        """Waits for all readers, but for some that are known."""
        known = set(map(id, besides))
        for hold in self._holds:
            if id(hold) not in known:
                hold.event.synchronize()
        # Only now, since an error may have ended the wait; holds with active readers stay.
        self._holds = [hold for hold in self._holds if not hold.event.is_done()]

    def events_of(self, parameters: Iterable[torch.Tensor]) -> list[Event]:
        """The events for which a step of some parameters has to wait."""
        own = set(map(id, parameters))
        return [
            hold.event
            for hold in self._holds
            if not hold.event.is_done() and any(id(each) in own for each in hold.parameters)
        ]

    def batches(
        self, parameters: Iterable[torch.Tensor]
    ) -> Iterator[tuple[list[Event], list[torch.Tensor]]]:
        """The order in which to step, with the events that each batch waits for: first parameters
        without readers, then each part as soon as it has been read.
        """
        held = [
            (hold.event, {id(parameter) for parameter in hold.parameters})
            for hold in self._holds
            if not hold.event.is_done()
        ]
        # Parameters that are held several times are stepped with the last of their holds.
        last = {key: number for number, (_, keys) in enumerate(held) for key in keys}
        # By the number of the hold; -1 is without a reader.
        batches: dict[int, list[torch.Tensor]] = {}
        for parameter in parameters:
            batches.setdefault(last.get(id(parameter), -1), []).append(parameter)

        for number in sorted(batches):
            own = set(map(id, batches[number]))
            events = [event for event, keys in held[: number + 1] if keys & own]
            yield events, batches[number]
