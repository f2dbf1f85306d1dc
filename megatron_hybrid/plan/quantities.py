"""Sizes and rates with units: `80GB`, `512GiB`, `50GB/s`, `400TFLOP/s`. Types for argparse."""

from __future__ import annotations

import argparse
import re

from megatron.core.log import printable

_PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_NUMBER = r"(\d+(?:\.\d+)?)\s?"
_BYTES = re.compile(_NUMBER + r"((?:[KMGTP]i?)?)B", re.ASCII)
_BYTES_A_SECOND = re.compile(_NUMBER + r"((?:[KMGTP]i?)?)B/s", re.ASCII)
_FLOPS = re.compile(_NUMBER + r"([KMGTP]?)(?:FLOP/s|FLOPS)", re.ASCII)


def size(text: str) -> int:
    """Parses a size in bytes. ArgumentTypeError for anything but a positive size."""
    return int(_positive(size_or_zero(text), text))


def size_or_zero(text: str) -> int:
    """Parses a size in bytes. ArgumentTypeError for anything but a number with a unit."""
    return int(_parsed(_BYTES, text, "a size such as 80GB or 512GiB"))


def rate(text: str) -> float:
    """Parses bytes per second. ArgumentTypeError for anything but a positive rate."""
    return _positive(_parsed(_BYTES_A_SECOND, text, "a rate such as 50GB/s"), text)


def flops(text: str) -> float:
    """Parses FLOP per second. ArgumentTypeError for anything but a positive rate."""
    return _positive(_parsed(_FLOPS, text, "a rate such as 400TFLOP/s"), text)


def whole_number(text: str) -> int:
    """Parses an integer from 1. ArgumentTypeError for anything else."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**40):
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {printable(text, 80)!r}")
    return int(text)


def _parsed(pattern: re.Pattern[str], text: str, expected: str) -> float:
    found = pattern.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {printable(text, 80)!r}")
    return float(found[1]) * (_PREFIXES | _BINARY)[found[2]]


def _positive(value: float, text: str) -> float:
    if value == 0:
        raise argparse.ArgumentTypeError(f"expected more than 0, got {text}")
    return value


def shown_size(nbytes: float) -> str:
    """Returns "12.50 GB"."""
    return _shown(nbytes, "B")


def shown_rate(rate: float, unit: str = "B/s") -> str:
    """Returns "50.00 GB/s"."""
    return _shown(rate, unit)


def shown_seconds(seconds: float) -> str:
    """Returns "1.25 s", "12.5 ms", "3.2 min"."""
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _shown(value: float, unit: str) -> str:
    for prefix in "PTGMK":
        if value >= _PREFIXES[prefix]:
            return f"{value / _PREFIXES[prefix]:.2f} {prefix}{unit}"
    return f"{value:.0f} {unit}"
