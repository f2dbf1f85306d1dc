"""The members of a JSON file of a checkpoint: each is held against what it should be."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError, shown
from megatron.core.json_reading import parse_json

FORMAT_VERSION = 3

_MAX_COUNT = (1 << 63) - 1  # the largest size or place in a file
_DIGEST = re.compile(r"[0-9a-f]{32}")


def to_json(value: object, *, sort_keys: bool = False) -> str:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), sort_keys=sort_keys)


def parse_object(content: bytes, source: str) -> dict[str, Any]:
    """A JSON object. CheckpointDamagedError for anything else."""
    try:
        members = parse_json(content)
    except ValueError as error:
        raise CheckpointDamagedError(f"Expected JSON in {source}, got {error}.") from error
    expect(isinstance(members, dict), "a JSON object", members, source)
    return dict(members)


def check_version(members: dict[str, Any], source: str) -> None:
    """Takes out `format_version`. CheckpointError if it is another than this program's."""
    # Not damage: another version of this program can read the checkpoint.
    version = members.pop("format_version", None)
    expect(is_count(version), "a format version", version, source)
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"Expected format version {FORMAT_VERSION} in {source}, got {version}. The version of "
            "this program that wrote the checkpoint reads it."
        )


def values_of(members: dict[str, Any], names: Sequence[str], source: str) -> list[Any]:
    """The values of exactly these members, in the order of `names`."""
    got, wanted = sorted(members), sorted(names)
    expect(got == wanted, f"the members {wanted}", got, source)
    return [members[name] for name in names]


def expect(is_met: bool, what: str, got: object, source: str) -> None:
    """CheckpointDamagedError unless the condition is met."""
    if not is_met:
        raise CheckpointDamagedError(
            f"Expected {what} in {source}, got {got if isinstance(got, str) else shown(got)}."
        )


def is_count(value: object) -> bool:
    """Whether it is a number of bytes, elements, ranks."""
    # Not `isinstance`, for which JSON's `true` is an integer, too.
    return type(value) is int and 0 <= value <= _MAX_COUNT


def is_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


def is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def is_digest(value: object) -> bool:
    """Whether it is an xxh3-128 as 32 hex digits."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None
