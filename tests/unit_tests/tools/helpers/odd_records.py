"""Records of JSON with one value in the place of another."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    7,
    -0.5,
    "",
    "odd",
    "\0",
    "\ud800",
    "x" * 5000,
    [],
    ["user"],
    [[]],
    {},
    {"role": {}},
)


def odd_records(record: Any) -> Iterator[Any]:
    """The record with each odd value in the place of each of its values, one at a time."""
    for path in _paths(record):
        for value in ODD_VALUES:
            changed = copy.deepcopy(record)
            place = changed
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            yield changed


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    members = value.items() if isinstance(value, dict) else enumerate(value)
    for key, member in members:
        yield (key,)
        if isinstance(member, dict | list):
            yield from ((key, *rest) for rest in _paths(member))
