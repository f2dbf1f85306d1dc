"""The versions of the compared software."""

from __future__ import annotations

import platform
from importlib import metadata

_DISTRIBUTIONS = (
    "torch",
    "megatron-hybrid",
    "numpy",
    "transformers",
    "accelerate",
    "deepspeed",
    "torchao",
    "megatron-core",
)


def versions() -> dict[str, str]:
    """The versions of this interpreter, and of the distributions that are installed for it."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
