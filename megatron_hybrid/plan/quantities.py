"""Sizes and rates as people write them: `80GB`, `512GiB`, `50GB/s`, `400TFLOP/s`."""

from __future__ import annotations

import re

from megatron.core.log import printable
from megatron.core.options import ConfigError

_PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_NUMBER = r"(\d+(?:\.\d+)?)\s?"
_SIZE = re.compile(_NUMBER + r"((?:[KMGTP]i?)?)B", re.ASCII)
_RATE = re.compile(_NUMBER + r"((?:[KMGTP]i?)?)B/s", re.ASCII)
_FLOPS = re.compile(_NUMBER + r"([KMGTP]?)(?:FLOP/s|FLOPS)", re.ASCII)


def parse_size(text: str, flag: str, *, may_be_zero: bool = False) -> int:
    """Bytes. ConfigError for anything but a positive number with a unit."""
    expected = "a size such as 80GB or 512GiB"
    return int(_parse(_SIZE, text, flag, expected, may_be_zero=may_be_zero))


def parse_rate(text: str, flag: str) -> float:
    """Bytes a second. ConfigError as `parse_size`."""
    return _parse(_RATE, text, flag, "bytes a second such as 50GB/s")


def parse_flops(text: str, flag: str) -> float:
    """Floating point operations a second. ConfigError as `parse_size`."""
    return _parse(_FLOPS, text, flag, "operations a second such as 400TFLOP/s")


def _parse(
    pattern: re.Pattern[str], text: str, flag: str, expected: str, *, may_be_zero: bool = False
) -> float:
    found = pattern.fullmatch(text)
    value = -1.0
    if found is not None:
        value = float(found[1]) * (_PREFIXES | _BINARY)[found[2]]
    if value < 0 or (value == 0 and not may_be_zero):
        raise ConfigError(f"{flag}: expected {expected}, got {printable(text, 80)!r}.")
    return value


def shown_size(nbytes: float) -> str:
    """In the units in which memory is sold: "12.5 GB"."""
    return _shown(nbytes, "B")


def shown_rate(rate: float, unit: str = "B/s") -> str:
    """ "50.0 GB/s"."""
    return _shown(rate, unit)


def shown_seconds(seconds: float) -> str:
    """ "1.25 s", "12.5 ms", "3.2 min"."""
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _shown(value: float, unit: str) -> str:
    for prefix in "PTGMK":
        if value >= _PREFIXES[prefix]:
            return f"{value / _PREFIXES[prefix]:.2f} {prefix}{unit}"
    return f"{value:.0f} {unit}"
