"""Arithmetic that torch.autocast must not narrow."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """While open, operations on `device` compute in the dtypes of their inputs.

    Backward needs it too: it runs under its caller's autocast.
    """
    # Kinds without autocast, such as meta, must not even be asked.
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
