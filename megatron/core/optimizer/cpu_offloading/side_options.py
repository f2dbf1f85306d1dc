"""Which optimizer class and which options either side has."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.kernels.adam import MOMENT_DTYPES

# What our pass knows, of FusedAdam's options and torch.optim.AdamW's.
ADAM_OPTIONS = ("lr", "betas", "eps", "weight_decay", "bias_correction", "adam_w_mode")
# Of torch.optim.AdamW's options, those that choose among implementations of the same.
_IMPLEMENTATIONS = ("foreach", "fused")


def is_flat_adam(cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> bool:
    """Whether a class with these options is the AdamW of our one pass. ValueError for FusedAdam
    with others.
    """
    others = [name for name, value in options.items() if name not in ADAM_OPTIONS and value]
    if cls is FusedAdam and others:
        raise ValueError(
            f"Expected options among {', '.join(ADAM_OPTIONS)} of FusedAdam, got "
            f"{', '.join(others)}."
        )
    return cls is FusedAdam or (
        cls is torch.optim.AdamW and not set(others).difference(_IMPLEMENTATIONS)
    )


def defaults_of(cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a class gives its groups."""
    return dict(cls([nn.Parameter(torch.zeros(1))], **options).defaults)


def known_to(cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a class takes."""
    known = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())
    return {name: value for name, value in options.items() if takes_any or name in known}


def common_defaults(
    host_cls: type[torch.optim.Optimizer],
    device_cls: type[torch.optim.Optimizer],
    options: dict[str, Any],
) -> dict[str, Any]:
    """The defaults of both sides' groups. ValueError where the classes' differ; TypeError for
    options of neither.
    """
    sides = [(cls, known_to(cls, options)) for cls in (host_cls, device_cls)]
    unknown = [name for name in options if not any(name in known for _, known in sides)]
    if unknown:
        raise TypeError(
            f"Expected options of {host_cls.__name__} or {device_cls.__name__}, got "
            f"{', '.join(unknown)}."
        )
    host, device = (defaults_of(cls, known) for cls, known in sides)
    for name in host.keys() & device.keys():
        if host[name] != device[name]:
            raise ValueError(
                f"Expected {name} to be given, since {host_cls.__name__} takes {host[name]} by "
                "default and "
                f"{device_cls.__name__} takes {device[name]}, got none."
            )
    return device | host


def check_moment_dtypes(
    dtypes: tuple[torch.dtype, torch.dtype], host_is_flat: bool, device_is_flat: bool
) -> None:
    """ValueError for dtypes of AdamW's moments that a side does not take, or that no side has."""
    if host_is_flat and (dtypes[0] != dtypes[1] or dtypes[0] not in MOMENT_DTYPES):
        raise ValueError(
            f"Expected both moments in one of {MOMENT_DTYPES} on the host, got {dtypes}."
        )
    if not (host_is_flat or device_is_flat) and dtypes != (torch.float32, torch.float32):
        raise ValueError(
            f"Expected AdamW on a side for moments in {dtypes}, got other classes on both."
        )
