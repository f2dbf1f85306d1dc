"""Flags of Megatron-LM's that this program lacks: which of them change nothing here, and what to do
about the others.

Megatron-LM's launch scripts name many flags for what is always so here (a distributed optimizer),
for kernels, or for dimensions of parallelism of size 1. `Ruling.NO_EFFECT` accepts them: the run
computes the same with them as without. A flag that asks for more is refused, with what to do. So is
a value of a flag that both programs have, where only Megatron-LM has the value.

The names are those of `megatron/training/arguments.py` and its config classes in
NVIDIA/Megatron-LM, commit d98e8a64 (0.20.0), all that it has; a few are of earlier releases.
docs/coming-from-megatron.md shows this table.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.log import printable
from megatron.training.flag_rows import SHOWN, Given, MegatronFlags, Ruling
from megatron.training.megatron_model_flags import MODEL_FLAGS
from megatron.training.megatron_other_flags import OTHER_FLAGS
from megatron.training.megatron_run_flags import RUN_FLAGS

_MOST_DIGITS = 20  # of a number of samples
# Words of `MegatronFlags.use` that the user fills in: a path, a number.
_BLANKS = frozenset(("FILE", "N", "FRACTION", "MINUTES"))


@dataclass(frozen=True)
class Answer:
    """What becomes of a flag as it was given.

    Attributes:
        use: what to write instead, in words of a command line; empty: nothing.
    """

    given: Given
    ruling: Ruling
    why: str
    use: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether `use` can be written as it stands: no word is left for the user to fill in."""
        return not _BLANKS.intersection(self.use)

    def __str__(self) -> str:
        written = printable(shlex.join(self.use), SHOWN)
        action = f"use {written} instead" if self.use else "remove it"
        return f"{self.given}: {action}. {self.why}"


def answer(given: Given, settings: Mapping[str, Any], samples_per_iteration: int) -> Answer | None:
    """The answer to a flag of Megatron-LM's; None if the table has none.

    Args:
        settings: the run's own, by field name.
        samples_per_iteration: the global batch size; 0: it is not known.
    """
    for row in rows_for(given.flag):
        if row.covers(given, settings):
            iterations = _iterations(given.values, samples_per_iteration)
            value = " ".join(given.values)
            use = (word.format(value=value, iterations=iterations) for word in row.use.split())
            return Answer(given, row.ruling, row.why, tuple(use))
    return None


@functools.lru_cache(maxsize=4096)
def rows_for(flag: str) -> tuple[MegatronFlags, ...]:
    """The rows that answer a flag, each with some value, in their order."""
    return tuple(row for row in MEGATRON_FLAGS if row.answers(flag))


def megatrons_names() -> tuple[str, ...]:
    """The flags of the table that it has with their whole names."""
    return tuple(name for row in MEGATRON_FLAGS for name in row.names if "*" not in name)


def _iterations(values: tuple[str, ...], samples_per_iteration: int) -> str:
    """A number of samples in iterations. Megatron-LM drops what is left over, too."""
    text = "".join(values)
    is_number = text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS
    if not is_number or (samples_per_iteration == 0 and int(text) > 0):
        return "N"
    # No warm-up stays none, but nothing else becomes zero iterations.
    return str(max(int(text) // max(samples_per_iteration, 1), min(int(text), 1)))


# The first row that covers a flag answers it.
MEGATRON_FLAGS: tuple[MegatronFlags, ...] = (*MODEL_FLAGS, *RUN_FLAGS, *OTHER_FLAGS)
