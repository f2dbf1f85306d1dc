"""The causal convolution, in blocks and by PyTorch."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.transformer import causal_conv
from megatron.core.transformer.causal_conv import (
    CausalConv1d,
    causal_conv_by_torch,
    causal_conv_in_blocks,
)


def _reference(x: Tensor, weight: Tensor) -> Tensor:
    """Position by position."""
    kernel = weight.shape[2]
    padded = torch.cat([x.new_zeros(x.shape[0], kernel - 1, x.shape[2]), x], dim=1)
    positions = [(padded[:, t : t + kernel] * weight[:, 0].t()).sum(1) for t in range(x.shape[1])]
    return F.silu(torch.stack(positions, 1))


def _inputs(seed: int, length: int, kernel: int, dtype: torch.dtype) -> list[Tensor]:
    """x, a part of a wider tensor as in the model, and a weight."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, length, 9, generator=generator, dtype=torch.float64)[..., 1:7]
    weight = torch.randn(6, 1, kernel, generator=generator, dtype=torch.float64)
    return [x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    length=st.integers(1, 40),
    kernel=st.integers(1, 6),
    block_positions=st.integers(1, 50),
)
@example(0, 2, 4, 50)  # shorter than the kernel
@example(0, 20, 6, 2)  # blocks shorter than the kernel
def test_both_ways_give_what_the_sum_gives_forward_and_backward(
    seed: int, length: int, kernel: int, block_positions: int
) -> None:
    inputs = _inputs(seed, length, kernel, torch.float64)
    weights = torch.randn(2, length, 6, dtype=torch.float64)
    expected = _reference(*inputs)
    gradients = torch.autograd.grad(expected, inputs, weights)
    with mock.patch.object(causal_conv, "BLOCK_NUMEL", 2 * 6 * block_positions):
        for way in (causal_conv_in_blocks, causal_conv_by_torch):
            output = way(*inputs)
            torch.testing.assert_close(output, expected)
            for a, b in zip(torch.autograd.grad(output, inputs, weights), gradients, strict=True):
                torch.testing.assert_close(a, b)


def test_bf16_is_rounded_once() -> None:
    inputs = _inputs(1, 500, 4, torch.bfloat16)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    output, expected = causal_conv_in_blocks(*inputs), _reference(*doubles)
    output.sum().backward()
    expected.sum().backward()
    for found, exact in [
        (output, expected),
        *((x.grad, y.grad) for x, y in zip(inputs, doubles, strict=True)),
    ]:
        assert found.dtype == torch.bfloat16
        error = (found.double() - exact).abs() / exact.abs().clamp_min(1e-3)
        assert error.max() <= 2.0**-8


@pytest.mark.parametrize(("device", "is_in_blocks"), [("cpu", True), ("meta", False)])
def test_only_a_cpu_computes_in_blocks(device: str, is_in_blocks: bool) -> None:
    """Meta tensors replace an accelerator's."""
    weight = CausalConv1d(6, 4).weight.to(device)
    with mock.patch.object(
        causal_conv, "causal_conv_in_blocks", wraps=causal_conv.causal_conv_in_blocks
    ) as in_blocks:
        x = torch.ones(2, 5, 6, device=device)
        assert causal_conv.causal_conv(weight, x).shape == (2, 5, 6)
    assert in_blocks.called == is_in_blocks


def test_weights_start_within_the_bound_of_a_convolution() -> None:
    torch.manual_seed(0)
    weight = CausalConv1d(500, 4).weight
    assert weight.abs().max() <= 0.5
    assert weight.std().item() == pytest.approx(0.5 / 3**0.5, rel=0.05)
