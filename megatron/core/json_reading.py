"""JSON from a file that others may have written: read strictly, or rejected with a reason.

`json` takes more than JSON, and some of it silently: `NaN`, the last of several equal keys,
integers of any length, which cannot be printed afterwards, and nesting down to where the
interpreter gives up with a RecursionError.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from megatron.core.log import printable

_MAX_DIGITS = 40  # of an integer: more than 128 bits have


def parse_json(content: bytes | str, *, max_depth: int = 32, allow_nan: bool = False) -> Any:
    """The value that JSON represents.

    Args:
        max_depth: levels of lists and objects.
        allow_nan: whether to accept the NaN and Infinity that Python writes.

    Raises:
        ValueError: if it is not JSON, has a key twice in one object, a number that is not finite,
            an integer of more than 40 digits, or more levels. The message names it in a few
            printable words.
    """
    try:
        value = json.loads(
            content,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=float if allow_nan else _finite,
            parse_constant=float if allow_nan else _constant,
        )
    except RecursionError:
        raise ValueError(f"more than {max_depth} levels") from None
    _check_depth(value, max_depth)
    return value


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):
        counts = Counter(key for key, _ in members)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {printable(repr(twice[:60]))} twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]}, which is too large")
    return value


def _constant(name: str) -> float:
    raise ValueError(f"{name}, which is no number")


def _check_depth(value: Any, max_depth: int) -> None:
    # Code that compares or prints the value later may recurse.
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(max_depth):
        below = [each.values() if isinstance(each, dict) else each for each in level]
        level = [item for items in below for item in items if isinstance(item, list | dict)]
    if level:
        raise ValueError(f"more than {max_depth} levels")
