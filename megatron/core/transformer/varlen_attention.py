"""Attention of all documents of a row by one kernel: FlashAttention for sequences of many lengths.

PyTorch has it as `torch.nn.attention.varlen.varlen_attn` from 2.11 on, for 16-bit dtypes, without
dropout. Written by its documentation: it has not been run on a GPU. Tests compare its inputs with
attention document by document.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.drivers import driver_of, kinds_of_accelerators
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.spec import AttentionSpec, Sinks

Kernel = Callable[..., Tensor]

_WIDTHS = 8  # of heads, multiples of which the kernel takes
_GROUPED = "enable_gqa"


@cache
def varlen_kernel() -> Kernel | None:
    """PyTorch's, or None if it has none that takes a scale and a window."""
    try:
        kernel: Kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    names = inspect.signature(kernel).parameters
    return kernel if {"scale", "window_size"} <= names.keys() else None


def suits_varlen(query: Tensor, value: Tensor, spec: AttentionSpec, dropout: float) -> bool:
    """Whether the kernel computes attention of such heads, [1, heads, seq, dim]."""
    kind, head_dim = query.device.type, query.shape[-1]
    return (
        kind in kinds_of_accelerators()
        and driver_of(kind).has_varlen_attention
        and query.dtype in (torch.float16, torch.bfloat16)
        and spec.softcap is None
        and spec.sinks is Sinks.NONE
        and dropout == 0.0
        and head_dim % _WIDTHS == 0
        and value.shape[-1] <= head_dim <= driver_of(kind).flash_head_dim(query.device.index or 0)
    )


def attend_varlen(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    documents: Documents,
) -> Tensor:
    """Each document's attention under the scale, the window and the causality of `spec`.

    Args:
        query: [1, heads, seq, head_dim].
        key: [1, groups, seq, head_dim].
        value: [1, groups, seq, value_dim], at most as wide as keys.

    Returns:
        [1, heads, seq, value_dim], same dtype.
    """
    value_dim, width = value.shape[-1], query.shape[-1]
    # Zeros give channels of zeros.
    value = F.pad(value, (0, width - value_dim))

    options = {}
    num_repeats = query.shape[1] // key.shape[1]
    if num_repeats > 1 and _GROUPED in inspect.signature(kernel).parameters:
        options[_GROUPED] = True
    elif num_repeats > 1:
        key = key.repeat_interleave(num_repeats, dim=1)
        value = value.repeat_interleave(num_repeats, dim=1)

    # How many positions before and behind each it sees; -1: all.
    before = -1 if spec.window is None else spec.window - 1
    window = (before, 0) if spec.is_causal else (-1, -1)
    bounds = documents.bounds(query.device).to(torch.int32)
    longest = max(documents.lengths)
    output = kernel(
        *(part.squeeze(0).transpose(0, 1) for part in (query, key, value)),
        bounds,
        bounds,
        longest,
        longest,
        scale=spec.scale,
        window_size=window,
        **options,
    )
    return output.transpose(0, 1).unsqueeze(0)[..., :value_dim]
