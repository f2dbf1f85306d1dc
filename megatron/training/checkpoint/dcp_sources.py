"""The rows of this project's tensors in the tensors of another program's checkpoint. Integer
arithmetic only.

A table (`dcp_key_map.py`) lists the parts of each tensor of the other program, which are
consecutive in each group of its rows. For a fused weight with four query heads and two key and
value heads of three channels, in two groups:

    their rows       0 .. 5       6 .. 8   9 .. 11    12 .. 17     18 .. 20   21 .. 23
                     query 0, 1   key 0    value 0    query 2, 3   key 1      value 1

    query: RowMap("wqkv", start=0, block=6, stride=12)
    key:   RowMap("wqkv", start=6, block=3, stride=12)

The order of rows in a head may differ: see `HeadOrder`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron.core.dist_checkpointing.errors import expect_same_model
from megatron.core.dist_checkpointing.layout.saved import SavedTensor
from megatron.core.models.families.row_map import RowMap
from megatron.core.optimizer.state_tensors import STEP
from megatron.training.checkpoint.dcp_key_map import KeyMap, KeyPattern, Match

# Of a stack. A file may have any number of matrices without elements.
_MAX_MATRICES = 1 << 16
# The prefixes of our keys.
WEIGHTS, MOMENTS = "model.", "optimizer.state."


class HeadOrder(NamedTuple):
    """The order of rows in heads whose rotary embedding pairs neighboring channels. This project
    pairs channel i with channel i + half. For a head of six channels, of which four are rotated:

        our row     0  1  2  3  4  5
        their row   0  2  1  3  4  5
    """

    num_rows: int  # of a head
    num_turned: int

    def theirs(self) -> torch.Tensor:
        """Returns the row in the checkpoint for each row of a head."""
        pairs = torch.arange(self.num_turned).view(-1, 2).T.flatten()
        return torch.cat([pairs, torch.arange(self.num_turned, self.num_rows)])


@dataclass(frozen=True)
class RowSource:
    """The source of a tensor of this project.

    Attributes:
        rows: its rows in the checkpoint's tensor; all rows for a step counter.
        shape: its shape; () for a step counter.
        theirs: the tensor in the checkpoint.
        heads: the order of rows in each head; None: the same order.
    """

    rows: RowMap
    shape: tuple[int, ...]
    theirs: SavedTensor
    heads: HeadOrder | None = None


@dataclass(frozen=True)
class Sources:
    """The sources of all tensors in a directory.

    Attributes:
        ours: the sources by this project's keys.
        unknown: tensors of the checkpoint that the table does not list.
        tied: this project's keys of weights that may be stored twice, with the key of the first.
    """

    ours: dict[str, RowSource]
    unknown: list[SavedTensor]
    tied: dict[str, str]

    @property
    def has_moments(self) -> bool:
        return any(key.startswith(MOMENTS) for key in self.ours)


def find_sources(tensors: Mapping[str, SavedTensor], key_map: KeyMap, path: str) -> Sources:
    """Applies a table to the tensors of a directory.

    Args:
        path: the directory, for messages.

    Raises:
        CheckpointError: listing all tensors that do not divide by the table, and all tensors that
            are stored twice.
    """
    wanted = {key: each for key, each in tensors.items() if not _is_ignored(key, key_map.ignored)}
    weights = _best(key_map.weights, wanted, key_map)
    moments = _best(key_map.moments, wanted, key_map)

    # Without a prefix of weights, the key of a moment may look like that of a weight.
    reads = {key: _read(key, moments, key_map) or _read(key, weights, key_map) for key in wanted}
    # The step counter of a stack has no dim of matrices.
    stacks = {
        read.name: min(wanted[key].shape[0], _MAX_MATRICES)
        for key, read in reads.items()
        if read is not None and len(wanted[key].shape) > 1
    }

    found = Sources({}, [], {})
    problems: list[str] = []
    for key, read in reads.items():
        if read is None:
            found.unknown.append(wanted[key])
            continue

        names = read.match.names_of(stacks.get(read.name, 0))
        own_keys = [read.own_key(name) for name in names]
        problems += [f"it has {own} twice" for own in own_keys if own in found.ours]
        sources = list(_parts(wanted[key], read, key_map, len(names)))
        if not sources:
            problems.append(f"{key} of shape {wanted[key].shape} {_division(read)}")
        found.ours.update(zip(own_keys, sources, strict=bool(sources)))

        first = key_map.match(key_map.tied.get(read.name, ""))
        if read.moment is None and first is not None:
            found.tied.update(zip(own_keys, map(read.own_key, first.names), strict=False))

    expect_same_model(path, problems)
    return found


class _Read(NamedTuple):
    """A parsed key of the checkpoint."""

    name: str
    moment: str | None  # None: a weight
    match: Match

    def own_key(self, name: str) -> str:
        return f"{WEIGHTS}{name}" if self.moment is None else f"{MOMENTS}{name}.{self.moment}"


def _read(key: str, patterns: Iterable[KeyPattern], key_map: KeyMap) -> _Read | None:
    for key_pattern in patterns:
        found = key_pattern.pattern.fullmatch(key)
        if found is None:
            continue
        named = found.groupdict()
        match = key_map.match(named["name"])
        if match is not None:
            return _Read(named["name"], key_pattern.moment or named.get("moment"), match)
    return None


def _best(
    alternatives: Sequence[Sequence[KeyPattern]], keys: Collection[str], key_map: KeyMap
) -> Sequence[KeyPattern]:
    """Returns the first alternative that fits most keys."""

    def num_read(patterns: Sequence[KeyPattern]) -> int:
        return sum(_read(key, patterns, key_map) is not None for key in keys)

    return max(alternatives, key=num_read, default=())


def _parts(
    theirs: SavedTensor, read: _Read, key_map: KeyMap, num_parts: int
) -> Iterator[RowSource]:
    """Yields the source of each part of a checkpoint's tensor; none if its rows do not divide."""
    rule = read.match.rule
    if not theirs.shape or (read.moment == STEP and theirs.shape == (1,)):
        for _ in range(num_parts):
            yield RowSource(RowMap(theirs.key), (), theirs)
        return

    num_matrices = num_parts // len(rule.parts)
    if rule.stack is not None and theirs.shape[0] != num_matrices:
        return

    # Of a stack, the shape of a matrix.
    sizes = theirs.shape if rule.stack is None else theirs.shape[1:]
    heads = [part.heads or 1 for part in rule.parts]
    per_head, rest = divmod(sizes[0], sum(heads)) if sizes else (0, 1)
    turned = int(per_head * key_map.heads.rotary_percent)
    # Heads are never divided.
    has_cut = any(
        (part.heads or per_head) % rule.groups or (part.is_interleaved and turned % 2)
        for part in rule.parts
    )
    if rest or has_cut:
        return

    matrix_rows = None if rule.stack is None else max(sizes[0], 1)
    for matrix in range(num_matrices):
        start = matrix * sizes[0]
        for count, part in zip(heads, rule.parts, strict=True):
            num_rows = count * per_head
            block = num_rows // rule.groups
            # A tensor without rows has no blocks either.
            has_blocks = rule.groups > 1 and block > 0
            rows = RowMap(
                theirs.key,
                start,
                block if has_blocks else None,
                sizes[0] // rule.groups if has_blocks else None,
                matrix_rows,
            )
            order = HeadOrder(per_head, turned) if part.is_interleaved else None
            yield RowSource(rows, (num_rows, *sizes[1:]), theirs, order)
            start += block


def _division(read: _Read) -> str:
    """Returns the end of a clause about a tensor that does not divide."""
    rule = read.match.rule
    heads = " + ".join(str(part.heads or 1) for part in rule.parts)
    what = "heads" if rule.parts[0].heads else "parts"
    groups = "" if rule.groups == 1 else f" in {rule.groups} groups"
    return f"does not divide into {heads} {what}{groups}"


def _is_ignored(key: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
