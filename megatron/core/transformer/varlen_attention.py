"""Attention by FlashAttention for sequences of many lengths: of all documents of a row at once, and
of rows under a window, which PyTorch's other fused kernels do not have.

PyTorch has it as `torch.nn.attention.varlen.varlen_attn` from 2.11 on, for 16-bit dtypes, without
dropout. Written by its documentation: it has not been run on a GPU. Tests compare its inputs with
attention document by document.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.drivers import kernels_of
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.spec import AttentionSpec, Sinks

Kernel = Callable[..., Tensor]

_WIDTHS = 8  # of heads, multiples of which the kernel takes


@cache
def varlen_kernel() -> Kernel | None:
    """PyTorch's, which takes grouped heads with `enable_gqa`; None if it has none that takes a
    scale and a window.
    """
    try:
        kernel: Kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    names = inspect.signature(kernel).parameters
    if not {"scale", "window_size"} <= names.keys():
        return None
    return kernel if "enable_gqa" in names else with_repeated_keys(kernel)


def with_repeated_keys(kernel: Kernel) -> Kernel:
    """A kernel that takes grouped heads, of one that does not, as PyTorch's of 2.11."""

    def grouped(
        query: Tensor, key: Tensor, value: Tensor, *bounds: Any, enable_gqa: bool, **options: Any
    ) -> Tensor:
        if enable_gqa:
            num_repeats = query.shape[1] // key.shape[1]
            key, value = (part.repeat_interleave(num_repeats, dim=1) for part in (key, value))
        return kernel(query, key, value, *bounds, **options)

    return grouped


def suits_varlen(query: Tensor, value: Tensor, spec: AttentionSpec, dropout: float) -> bool:
    """Whether there is a kernel that computes attention of such heads, [batch, heads, seq, dim]."""
    driver, head_dim = kernels_of(query.device), query.shape[-1]
    return (
        driver.has_varlen_attention
        and varlen_kernel() is not None
        and query.dtype in (torch.float16, torch.bfloat16)
        and spec.softcap is None
        and spec.sinks is Sinks.NONE
        and dropout == 0.0
        and head_dim % _WIDTHS == 0
        and value.shape[-1] <= head_dim <= driver.flash_head_dim(query.device.index or 0)
    )


def padded(x: Tensor, padding: tuple[int, ...]) -> Tensor:
    """`F.pad` with zeros. Without padding it would return a copy."""
    return F.pad(x, padding) if any(padding) else x


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    documents: Documents | None,
) -> Tensor:
    """Attention within each row or document under the scale, the window and the causality of
    `spec`, by `varlen_kernel`.

    Args:
        query: [batch, heads, seq, head_dim].
        key: [batch, groups, keys, head_dim]; with more keys than queries, the queries have the last
            positions.
        value: [batch, groups, keys, value_dim], at most as wide as keys.
        documents: documents of the keys of a batch that is one row then.

    Returns:
        [batch, heads, seq, value_dim], same dtype.
    """
    kernel = varlen_kernel()
    assert kernel is not None, "callers ask suits_varlen"
    batch, num_heads, seq_length, width = query.shape
    num_keys, value_dim = key.shape[2], value.shape[-1]
    # Zeros give channels of zeros.
    value = padded(value, (0, width - value_dim))

    if documents is None:
        rows = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
        of_queries, of_keys, longest = rows * seq_length, rows * num_keys, (seq_length, num_keys)
    else:
        of_keys = documents.bounds(query.device).to(torch.int32)
        # Only the first document may have fewer queries.
        num_missing = num_keys - seq_length
        of_queries = (of_keys - num_missing).clamp(min=0)
        first, *others = documents.lengths
        longest = max(first - num_missing, *others, 0), max(documents.lengths)
    # How many positions before and behind each it sees; -1: all.
    before = -1 if spec.window is None else spec.window - 1
    window = (before, 0) if spec.is_causal else (-1, -1)
    output = kernel(
        *(part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)),
        of_queries,
        of_keys,
        *longest,
        scale=spec.scale,
        window_size=window,
        enable_gqa=num_heads != key.shape[1],
    )
    output = output.view(batch, seq_length, num_heads, width)
    return output.transpose(1, 2)[..., :value_dim]
