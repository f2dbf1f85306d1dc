"""What a checkpoint says of the tensors in it: their chunks, and the places of these in its files.

    box         a hyper-rectangle of a tensor (boxes.py)
    holding     a box, and the ranks that hold it (holdings.py)
    chunk       a box that one rank writes to one place in one file
    blob        what `torch.save` makes of a chunk in a `.distcp` file: data in a frame (blob.py)
    block       256 KiB of a chunk's data; each has a digest

Plain data is a tensor of bytes: the blob that `torch.save` makes of it, without a frame around it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch

from megatron.core.dist_checkpointing.errors import few
from megatron.core.dist_checkpointing.layout.boxes import Box

logger = logging.getLogger(__name__)

# "optimizer." in our checkpoints and Megatron-FSDP's; most programs save "optim." with DCP.
_STATE_KEY = re.compile(r"optim(?:izer)?\.state\.(.+)", re.DOTALL)


class SavedChunk(NamedTuple):
    """A box of a tensor in a file of a checkpoint. Its elements lie there row by row."""

    box: Box
    rank: int  # that writes it; -1 if that is not known, in files of other programs
    file: str  # in the checkpoint's folder
    offset: int  # bytes from the beginning of the file to the data


class SavedTensor(NamedTuple):
    """A tensor, and all of its chunks on all ranks."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[SavedChunk]

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return Box.whole(self.shape).numel * self.dtype.itemsize

    def chunk_nbytes(self, chunk: SavedChunk) -> int:
        """Of the data of one of its chunks."""
        return chunk.box.numel * self.dtype.itemsize


def differences(
    saved: SavedTensor, shape: tuple[int, ...], dtype: torch.dtype, *, may_round: bool = False
) -> list[str]:
    """How a saved tensor differs from the one it is to be loaded into, each as a clause. A dtype
    that represents every saved value is no difference.

    Args:
        may_round: whether any floating-point dtype will do for floating-point values.
    """
    found = []
    if saved.shape != shape:
        found.append(f"{saved.key} has shape {saved.shape} where the model has {shape}")
    is_loadable = (
        may_round and saved.dtype.is_floating_point and dtype.is_floating_point
    ) or not is_rounded(saved.dtype, dtype)
    if not is_loadable:
        found.append(f"{saved.key} is {saved.dtype} where the model has {dtype}")
    return found


def is_rounded(saved: torch.dtype, own: torch.dtype) -> bool:
    """Whether `own` cannot represent every value of `saved`."""
    if saved == own:
        return False
    if not (saved.is_floating_point and own.is_floating_point):
        return True
    narrow, wide = torch.finfo(saved), torch.finfo(own)
    return not (
        wide.eps <= narrow.eps
        and wide.max >= narrow.max
        and wide.smallest_normal <= narrow.smallest_normal
    )


class FrozenChanges(NamedTuple):
    """How the set of frozen parameters differs from that of the run that saved.

    Attributes:
        fresh: keys of optimizer states that the checkpoint lacks, by the name of a parameter of
            which it has none.
        left_out: keys of optimizer states in the checkpoint, by the name of a parameter that has
            none here.
        rounded: keys of frozen weights that are saved in a wider dtype than they have here.
    """

    fresh: Mapping[str, list[str]]
    left_out: Mapping[str, list[str]]
    rounded: Collection[str]

    @classmethod
    def of(
        cls, own: Collection[str], saved: Collection[str], names: Collection[str]
    ) -> FrozenChanges:
        """Compares the keys of optimizer states. A checkpoint without any was saved without its
        optimizer, and an optimizer without any keeps none: that is no change.

        Args:
            own, saved: the keys here and in the checkpoint.
            names: of the parameters whose weights are in both.
        """
        known = set(names)
        own_states, saved_states = _states_by_name(own, known), _states_by_name(saved, known)
        if not own_states or not saved_states:
            return cls({}, {}, [])
        return cls(
            {name: keys for name, keys in own_states.items() if name not in saved_states},
            {name: keys for name, keys in saved_states.items() if name not in own_states},
            [],
        )

    @property
    def fresh_keys(self) -> set[str]:
        return {key for keys in self.fresh.values() for key in keys}

    @property
    def left_out_keys(self) -> set[str]:
        return {key for keys in self.left_out.values() for key in keys}

    def log(self) -> None:
        """Logs a line for each kind of change."""
        if self.fresh:
            logger.info(
                "%d parameters start with fresh optimizer states, since they were frozen when the "
                "checkpoint was saved: %s",
                len(self.fresh),
                few(list(self.fresh)),
            )
        if self.left_out:
            logger.info(
                "the optimizer states of %d parameters are left out, since they are frozen now: %s",
                len(self.left_out),
                few(list(self.left_out)),
            )
        if self.rounded:
            logger.info(
                "%d frozen weights are rounded to the dtype in which frozen weights are kept: %s",
                len(self.rounded),
                few(list(self.rounded)),
            )


def _states_by_name(keys: Collection[str], names: Collection[str]) -> dict[str, list[str]]:
    """The keys of optimizer states, by the parameter that they belong to."""
    most_dots = max((name.count(".") for name in names), default=0)
    found: dict[str, list[str]] = {}
    for key in keys:
        match = _STATE_KEY.fullmatch(key)
        # The bound is for a prepared key of a million dots.
        parts = match[1].split(".", most_dots + 1) if match is not None else []
        for length in range(len(parts) - 1, 0, -1):
            if (name := ".".join(parts[:length])) in names:
                found.setdefault(name, []).append(key)
                break
    return found
