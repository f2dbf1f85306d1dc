"""Rotary position embedding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.rotary import apply_rotary, rotary_angles

CPU = torch.device("cpu")


def _config(head_dim: int = 16, percent: float = 1.0) -> TransformerConfig:
    return TransformerConfig(1, 2 * head_dim, 2, rotary_percent=percent)


def test_angles_are_positions_times_falling_frequencies() -> None:
    angles = rotary_angles(_config(), 5, CPU)
    assert angles.cos.shape == angles.sin.shape == (5, 8)
    assert angles.cos.dtype == angles.sin.dtype == torch.float32
    for position, channel in [(0, 0), (3, 0), (4, 5)]:
        angle = position * 10000.0 ** (-2 * channel / 16)
        assert angles.cos[position, channel].item() == pytest.approx(math.cos(angle), abs=1e-7)
        assert angles.sin[position, channel].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_angles_of_far_positions_are_exact_to_fp32() -> None:
    position = 1_000_003
    angles = rotary_angles(_config(), position + 1, CPU)
    angle = position * 10000.0 ** (-2 / 16)
    assert angles.cos[position, 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    seq_length=st.integers(1, 40),
    percent=st.sampled_from([0.25, 0.5, 1.0]),
    half=st.booleans(),
)
def test_rotation_keeps_norms(seed: int, seq_length: int, percent: float, half: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype, tolerance = (torch.bfloat16, 2e-2) if half else (torch.float32, 1e-5)
    x = torch.randn(2, seq_length, 3, 16, generator=generator).to(dtype)
    angles = rotary_angles(_config(percent=percent), seq_length, CPU)
    y = apply_rotary(x, angles.cos, angles.sin)
    assert y.dtype == dtype
    torch.testing.assert_close(
        y.float().norm(dim=-1), x.float().norm(dim=-1), rtol=tolerance, atol=tolerance
    )


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    first=st.integers(0, 30),
    second=st.integers(0, 30),
    shift=st.integers(0, 30),
    percent=st.sampled_from([0.5, 1.0]),
)
def test_dot_products_depend_on_relative_positions_only(
    seed: int, first: int, second: int, shift: int, percent: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    angles = rotary_angles(_config(percent=percent), 64, CPU)
    # The same two vectors at every position.
    query, key = (
        apply_rotary(v.expand(1, 64, 1, 16), angles.cos, angles.sin)[0, :, 0]
        for v in torch.randn(2, 16, generator=generator)
    )
    torch.testing.assert_close(
        query[first] @ key[second], query[first + shift] @ key[second + shift], rtol=1e-4, atol=1e-4
    )


def test_other_relative_positions_give_other_dot_products() -> None:
    angles = rotary_angles(_config(), 8, CPU)
    v = apply_rotary(torch.ones(1, 8, 1, 16), angles.cos, angles.sin)[0, :, 0]
    assert abs(v[0] @ v[1] - v[0] @ v[5]) > 1


def test_channels_beyond_the_percentage_pass_unchanged() -> None:
    x = torch.randn(1, 6, 2, 16)
    angles = rotary_angles(_config(percent=0.5), 6, CPU)
    y = apply_rotary(x, angles.cos, angles.sin)
    assert torch.equal(y[..., 8:], x[..., 8:])
    assert not torch.equal(y[:, 1:, :, :8], x[:, 1:, :, :8])


def test_halves_of_the_rotated_channels_pair_up() -> None:
    x = torch.zeros(1, 2, 1, 8)
    x[..., 1] = 1.0  # channel 1 of the first half turns into channel 1 of the second
    angles = rotary_angles(_config(head_dim=8), 2, CPU)
    y = apply_rotary(x, angles.cos, angles.sin)
    assert y[0, 1, 0].nonzero().flatten().tolist() == [1, 5]
    assert y[0, 1, 0, 5].item() == pytest.approx(math.sin(10000.0**-0.25))


def test_angles_that_do_not_fit_are_refused() -> None:
    angles = rotary_angles(_config(), 6, CPU)
    with pytest.raises(ValueError, match="Expected angles of 5 positions"):
        apply_rotary(torch.randn(1, 5, 2, 16), angles.cos, angles.sin)
    with pytest.raises(ValueError, match="at most 8 channels"):
        apply_rotary(torch.randn(1, 6, 2, 8), angles.cos, angles.sin)
    with pytest.raises(
        ValueError, match=r"Expected cosines and sines in torch.float32, got torch.bfloat16"
    ):
        apply_rotary(torch.randn(1, 6, 2, 16), angles.cos.bfloat16(), angles.sin.bfloat16())
