"""The kernel for documents of many lengths computes the same as each by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.device import Device
from megatron.core.drivers import CudaDriver, Driver
from megatron.core.transformer import attention_core, varlen_attention
from megatron.core.transformer.attention_core import attend
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.spec import AttentionSpec, Sinks
from megatron.core.transformer.varlen_attention import (
    attend_varlen,
    suits_varlen,
    varlen_kernel,
    with_repeated_keys,
)

DOCUMENTS = Documents((5, 1, 17, 9))
HEADS, DIM = 4, 16


def documented(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """As in PyTorch's documentation, for as many key heads as query heads."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    before, behind = window_size
    outputs = []
    bounds = [torch.stack((cu[:-1], cu[1:]), 1).tolist() for cu in (cu_seq_q, cu_seq_k)]
    for (start, stop), (first, last) in zip(*bounds, strict=True):
        # [positions, heads, dim] -> [heads, positions, dim]
        parts = [
            part.transpose(0, 1) for part in (query[start:stop], key[first:last], value[first:last])
        ]
        # Aligned at the last query and the last key.
        num_keys = last - first
        positions = torch.arange(num_keys - (stop - start), num_keys)
        distance = positions[:, None] - torch.arange(num_keys)
        is_seen = torch.ones_like(distance, dtype=torch.bool)
        if before >= 0:
            is_seen &= distance <= before
        if behind >= 0:
            is_seen &= -distance <= behind
        found = F.scaled_dot_product_attention(*parts, attn_mask=is_seen, scale=scale)
        outputs.append(found.transpose(0, 1))
    return torch.cat(outputs)


def documented_with_groups(*arguments: Any, enable_gqa: bool, **options: Any) -> Tensor:
    """The same, of a release that takes grouped heads."""
    query, key, value, *rest = arguments
    assert enable_gqa == (key.shape[1] < query.shape[1])
    repeats = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    return documented(query, key, value, *rest, **options)


def spec_of(**options: Any) -> AttentionSpec:
    settings = {"num_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": DIM, "scale": 0.3}
    return AttentionSpec(**{**settings, **options})


KERNELS = [with_repeated_keys(documented), documented_with_groups]


def _heads(batch: int, groups: int, value_dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    widths = ((HEADS, DIM), (groups, DIM), (groups, value_dim))
    return [
        torch.randn(batch, heads, DOCUMENTS.num_positions, width, generator=generator)
        for heads, width in widths
    ]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("value_dim", [DIM, DIM - 6])
@pytest.mark.parametrize("options", [{}, {"window": 4}, {"is_causal": False}], ids=str)
def test_the_kernel_is_given_what_attention_by_documents_computes(
    monkeypatch: pytest.MonkeyPatch,
    kernel: Any,
    groups: int,
    value_dim: int,
    options: dict[str, Any],
) -> None:
    query, key, value = _heads(1, groups, value_dim)
    spec = spec_of(num_key_value_heads=groups, **options)
    expected = attend(query, key, value, spec, documents=DOCUMENTS)
    monkeypatch.setattr(varlen_attention, "varlen_kernel", lambda: kernel)
    found = attend_varlen(query, key, value, spec, DOCUMENTS)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("window", [None, 4, 25])
@pytest.mark.parametrize("num_queries", [29, 20])
def test_queries_of_the_last_positions_see_the_keys_of_all(
    monkeypatch: pytest.MonkeyPatch,
    documents: Documents | None,
    window: int | None,
    num_queries: int,
) -> None:
    query, key, value = _heads(1 if documents else 2, 2, DIM)
    spec = spec_of(num_key_value_heads=2, window=window)
    expected = attend(query, key, value, spec, documents=documents)[:, :, -num_queries:]
    if documents is not None:
        first, documents = documents.reach(32 - num_queries, 32)
        key, value = key[:, :, first:], value[:, :, first:]
    monkeypatch.setattr(varlen_attention, "varlen_kernel", lambda: KERNELS[0])
    found = attend_varlen(query[:, :, -num_queries:], key, value, spec, documents)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("window", [1, 4, 31, 32, None])
def test_rows_under_a_window_are_computed_by_the_kernel(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, groups: int, window: int | None
) -> None:
    """Output and gradients. PyTorch's other fused kernels take rows whose window hides nothing."""
    heads = _heads(3, groups, DIM)
    spec = spec_of(num_key_value_heads=groups, window=window)
    expected = _output_and_gradients(heads, spec)

    calls = 0

    def counted(*arguments: Any, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return kernel(*arguments, **options)

    monkeypatch.setattr(varlen_attention, "varlen_kernel", lambda: counted)
    monkeypatch.setattr(attention_core, "suits_varlen", lambda *_: True)
    found = _output_and_gradients(heads, spec)
    assert calls == (window in (1, 4, 31)), f"of {DOCUMENTS.num_positions} positions"
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_kernels_signature_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    varlen_kernel()
    monkeypatch.setattr(varlen_attention.inspect, "signature", None)
    assert varlen_kernel() is not None


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_the_installed_pytorch_has_a_kernel_that_takes_these_arguments(
    groups: int, documents: Documents | None
) -> None:
    """Meta tensors reach its operator's shapes, forward and backward, and no kernel."""
    heads = [
        part.to("meta", torch.bfloat16).requires_grad_()
        for part in _heads(1 if documents else 3, groups, DIM - 8)
    ]
    spec = spec_of(num_key_value_heads=groups, window=4)
    output = attend_varlen(*heads, spec, documents)
    assert output.shape == (*heads[0].shape[:3], DIM - 8)
    output.sum().backward()
    assert [part.grad.shape for part in heads] == [part.shape for part in heads]


def _output_and_gradients(
    heads: list[Tensor], spec: AttentionSpec, documents: Documents | None = None
) -> list[Tensor]:
    inputs = [head.clone().requires_grad_() for head in heads]
    output = attend(*inputs, spec, documents=documents)
    output.sum().backward()
    return [output.detach(), *(one.grad for one in inputs)]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("has_documents", [False, True])
def test_on_a_gpu_one_kernel_computes_what_others_compute_apart(
    monkeypatch: pytest.MonkeyPatch, window: int | None, has_documents: bool
) -> None:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 700, (24,), generator=generator).tolist()
    documents, dim = Documents(tuple(lengths)), 64
    spec = spec_of(num_heads=16, num_key_value_heads=4, head_dim=dim, window=window)
    heads = [
        torch.randn(1, number, documents.num_positions, dim, generator=generator).to(
            "cuda", torch.bfloat16
        )
        for number in (16, 4, 4)
    ]
    assert suits_varlen(heads[0], heads[2], spec, 0.0)
    divided = documents if has_documents else None
    together = _output_and_gradients(heads, spec, divided)
    monkeypatch.setattr(attention_core, "suits_varlen", lambda *_: False)
    apart = _output_and_gradients(heads, spec, divided)
    for found, expected in zip(together, apart, strict=True):
        difference = (found.float() - expected.float()).abs().max()
        assert difference <= 0.02 * expected.float().abs().max(), "sums of bf16 in two orders"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("lengths", "window"), [((2048,), None), ((700, 1, 512, 835), 100)])
def test_on_a_gpu_attention_gives_the_same_bits_each_time(
    lengths: tuple[int, ...], window: int | None, dtype: torch.dtype
) -> None:
    """With so many blocks, the sums of its backward would differ in some element."""
    documents, generator = Documents(lengths), torch.Generator().manual_seed(6)
    spec = spec_of(num_heads=16, num_key_value_heads=4, head_dim=64, window=window)
    heads = [
        torch.randn(1, number, documents.num_positions, 64, generator=generator).to("cuda", dtype)
        for number in (16, 4, 4)
    ]
    with Device("cuda").deterministic():
        first = _output_and_gradients(heads, spec, documents)
        for _ in range(5):
            again = _output_and_gradients(heads, spec, documents)
            assert all(map(torch.equal, first, again))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"dropout": 0.1}, False),
        ({"softcap": 20.0}, False),
        ({"sinks": Sinks.ZERO}, False),
        ({"head_dim": 20}, False),
        ({"head_dim": 512}, False),
        ({"value_dim": 72}, False),
        ({"has_kernel": False}, False),
    ],
    ids=str,
)
def test_it_is_used_where_it_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: bool
) -> None:
    monkeypatch.setattr(CudaDriver, "flash_head_dim", lambda *_: 256)
    driver = CudaDriver() if changes.get("has_kernel", True) else Driver("plain")
    monkeypatch.setattr(varlen_attention, "kernels_of", lambda _: driver)

    device = SimpleNamespace(index=0)
    head_dim = changes.get("head_dim", 64)
    dtype = changes.get("dtype", torch.bfloat16)
    query = SimpleNamespace(device=device, dtype=dtype, shape=(1, HEADS, 8, head_dim))
    value = SimpleNamespace(shape=(1, HEADS, 8, changes.get("value_dim", head_dim)))
    options = {name: changes[name] for name in ("softcap", "sinks") if name in changes}
    spec = spec_of(head_dim=head_dim, **options)
    assert suits_varlen(query, value, spec, changes.get("dropout", 0.0)) is expected
