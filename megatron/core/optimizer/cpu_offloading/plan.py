"""Which groups of parameters keep their optimizer state in host memory.

The host takes the *last* groups of the network. Their gradients come first in backward and their
weights are needed last in the next forward: the transfers and the update on the host have the
widest window to hide in.

The plan is a function of the groups' global element counts and the fraction alone, in exact
arithmetic: all ranks compute the same one, at any world size. With 10 elements a group and a
fraction of 0.5:

    group    embedding   layers.0   layers.1   layers.2   head
    side     device      device     host       host       host    30 of 50: half or more

Some groups may go first: the experts of mixtures, which hold most elements and compute least for
each of them. The host then takes the last of these, and others only once it has all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple


class PlannedGroup(NamedTuple):
    """A group of parameters and the side it is on."""

    name: str
    numel: int  # of the whole group, over all ranks, without padding
    is_on_host: bool
    goes_first: bool = False  # to the host, before any group that does not

    @property
    def side(self) -> str:
        return "host" if self.is_on_host else "device"


@dataclass(frozen=True)
class OffloadPlan:
    """The side of every group, in forward order.

    The host takes groups from the end of the network: first the groups with `goes_first`, then the
    others.
    """

    groups: tuple[PlannedGroup, ...]

    @classmethod
    def build(
        cls,
        groups: Sequence[tuple[str, int]],
        fraction: float,
        first: Collection[int] = (),
    ) -> OffloadPlan:
        """Puts the fewest groups on the host that hold `fraction` of all elements or more: from the
        end of the network on, groups that go first before the others.

        Args:
            groups: name and global element count of each, in forward order; of 0 elements too.
            first: the indexes of the groups that go first.
            fraction: from 0 (none) to 1 (all). A float is taken for the decimal number that it
                prints as: 0.1 is a tenth. Its binary value is a little more, which would cost a
                group where a tenth is met exactly.

        Raises:
            ValueError: for a fraction that is not a number from 0 to 1, or a negative count.
        """
        for name, numel in groups:
            if numel < 0:
                raise ValueError(f"Expected at least 0 elements in group {name!r}, got {numel}.")
        own = frozenset(first)
        on_host = _on_host([numel for _, numel in groups], _exact(fraction), own)
        return cls(
            tuple(
                PlannedGroup(name, numel, index in on_host, index in own)
                for index, (name, numel) in enumerate(groups)
            )
        )

    def is_on_host(self, index: int) -> bool:
        """Whether the group with this number, in forward order, is on the host."""
        return self.groups[index].is_on_host

    @property
    def names_on_host(self) -> frozenset[str]:
        """The names of the groups on the host."""
        return frozenset(group.name for group in self.groups if group.is_on_host)

    @property
    def total_numel(self) -> int:
        """Elements of all groups."""
        return sum(group.numel for group in self.groups)

    @property
    def host_numel(self) -> int:
        """Elements of the groups on the host."""
        return sum(group.numel for group in self.groups if group.is_on_host)

    @property
    def device_numel(self) -> int:
        """Elements of the groups on the device."""
        return self.total_numel - self.host_numel

    @property
    def host_fraction(self) -> float:
        """The share of all elements that is on the host; 0 where there are no elements."""
        return self.host_numel / self.total_numel if self.total_numel else 0.0

    def __str__(self) -> str:
        """A table for a log: a line a group, long runs of one side as one line, and the totals.

        Groups that go first are listed below the others: between them they would cut runs short.
        """
        ordered = sorted(self.groups, key=lambda group: group.goes_first)
        rows = [
            row
            for _, run in itertools.groupby(ordered, key=lambda g: (g.goes_first, g.is_on_host))
            for row in _rows([*run])
        ]
        rows.append(_Row("on the device", self.device_numel, "device"))
        rows.append(_Row("on the host", self.host_numel, f"host, {self.host_fraction:.2%}"))
        name_width = max(len(row.name) for row in rows)
        numel_width = max(len(f"{row.numel:,}") for row in rows)
        return "\n".join(
            f"{row.name:<{name_width}}  {row.numel:>{numel_width},}  {row.side}" for row in rows
        )


class _Row(NamedTuple):
    """A line of the table."""

    name: str
    numel: int
    side: str


_LONGEST_RUN_IN_FULL = 4


def _rows(run: list[PlannedGroup]) -> list[_Row]:
    """The lines of groups in a row that are on one side."""
    if len(run) <= _LONGEST_RUN_IN_FULL:
        return [_Row(group.name, group.numel, group.side) for group in run]
    name = f"{run[0].name} .. {run[-1].name} ({len(run)} groups)"
    return [_Row(name, sum(group.numel for group in run), run[0].side)]


def _exact(fraction: float) -> Fraction:
    is_number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
    if not is_number or not math.isfinite(fraction) or not 0 <= fraction <= 1:
        raise ValueError(f"Expected an offload fraction from 0 to 1, got {fraction!r}.")
    # As it prints: see `OffloadPlan.build`.
    return Fraction(str(fraction))


def _on_host(numels: Sequence[int], fraction: Fraction, first: frozenset[int]) -> frozenset[int]:
    """The groups on the host, by index."""
    # All includes empty groups, which the loop would leave out.
    if fraction == 1:
        return frozenset(range(len(numels)))

    order = sorted(range(len(numels)), key=lambda index: (index not in first, -index))
    wanted, held, taken = fraction * sum(numels), 0, 0
    while held < wanted:
        held += numels[order[taken]]
        taken += 1
    return frozenset(order[:taken])
