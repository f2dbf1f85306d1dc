"""Attention of documents in a row by one kernel for many lengths, against one after the other."""

from __future__ import annotations

import statistics
import time
from unittest import mock

import torch
from torch import Tensor

from megatron.core.transformer import attention_core
from megatron.core.transformer.attention_core import attend
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.spec import AttentionSpec
from megatron.core.transformer.varlen_attention import suits_varlen, varlen_kernel
from tools.gpu_check.accelerator import Accelerator, open_accelerator
from tools.gpu_check.findings import Findings

_HEADS, _GROUPS, _DIM = 16, 4, 64
_SEED, _NUM_ROUNDS = 5, 10
# As shares of the largest value: sums of bf16 products in two orders.
_APART = 0.02
_WINDOWS = (None, 100)


def documents(findings: Findings) -> None:
    """Outputs and gradients of both, with and without a window; then how fast they are."""
    accelerator = open_accelerator(findings)
    lengths = torch.randint(1, 700, (24,), generator=torch.Generator().manual_seed(_SEED))
    row = Documents(tuple((lengths // 20 + 1 if findings.simulate else lengths).tolist()))
    for window in _WINDOWS:
        _compare(findings, accelerator, row, window)


def _compare(
    findings: Findings, accelerator: Accelerator, row: Documents, window: int | None
) -> None:
    spec = AttentionSpec(
        num_heads=_HEADS,
        num_key_value_heads=_GROUPS,
        head_dim=_DIM,
        scale=_DIM**-0.5,
        window=window,
    )
    heads = _heads(accelerator, row)
    uses_kernel = varlen_kernel() is not None and suits_varlen(heads[0], heads[2], spec, 0.0)
    findings.figure(f"window {window}: one kernel for all documents", uses_kernel)

    together, seconds = _attended(heads, spec, row)
    with mock.patch.object(attention_core, "varlen_kernel", return_value=None):
        apart, seconds_apart = _attended(heads, spec, row)
    for name, found, expected in zip(
        ("output", "query's gradient", "key's gradient", "value's gradient"),
        together,
        apart,
        strict=True,
    ):
        most = (found - expected).abs().max() / expected.abs().max()
        findings.expect_at_most(f"window {window}: {name}, apart", float(most), _APART)
    if uses_kernel:
        findings.figure(f"window {window}: one kernel", seconds * 1e3, "ms", is_telling=True)
        findings.figure(
            f"window {window}: document by document", seconds_apart * 1e3, "ms", is_telling=True
        )


def _heads(accelerator: Accelerator, row: Documents) -> list[Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    return [
        torch.randn(1, heads, row.num_positions, _DIM, generator=generator)
        .to(accelerator.torch_device, torch.bfloat16)
        .requires_grad_()
        for heads in (_HEADS, _GROUPS, _GROUPS)
    ]


def _attended(
    heads: list[Tensor], spec: AttentionSpec, row: Documents
) -> tuple[list[Tensor], float]:
    """The output and the gradients, on the host in fp32; median seconds of both."""
    query, key, value = heads
    times = []
    for _ in range(_NUM_ROUNDS):
        for head in heads:
            head.grad = None
        torch.accelerator.synchronize()
        start = time.perf_counter()
        output = attend(query, key, value, spec, documents=row)
        output.sum().backward()
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    found = [output, *(head.grad for head in heads)]
    return [one.detach().float().cpu() for one in found], statistics.median(times)
