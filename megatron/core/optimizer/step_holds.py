"""Holds: parts of an optimizer's state that are being read and must not be stepped yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch

from megatron.core.lanes import Event


class Hold(NamedTuple):
    """Parameters that are not stepped before an event: until then their weights and states are
    being read.
    """

    parameters: Sequence[torch.Tensor]
    event: Event


class _OfParameter(Protocol):
    @property
    def parameter(self) -> torch.Tensor: ...


_Step = TypeVar("_Step", bound=_OfParameter)


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

    def batches(self, steps: Sequence[_Step]) -> Iterator[tuple[list[Event], list[_Step]]]:
        """The order in which to step, with the events that each batch waits for: first parameters
        without readers, then each part as soon as it has been read.
        """
        held = [
            (hold.event, {id(parameter) for parameter in hold.parameters})
            for hold in self._holds
            if not hold.event.is_done()
        ]
        # Parameters that are held several times are stepped with the last of their holds.
        last = {
            parameter: number
            for number, (_, parameters) in enumerate(held)
            for parameter in parameters
        }
        # By the number of the hold; -1 is without a reader.
        batches: dict[int, list[_Step]] = {}
        for step in steps:
            batches.setdefault(last.get(id(step.parameter), -1), []).append(step)

        for number in sorted(batches):
            own = {id(step.parameter) for step in batches[number]}
            events = [event for event, parameters in held[: number + 1] if parameters & own]
            yield events, batches[number]
