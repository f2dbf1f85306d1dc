"""Rotary position embedding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.transformer.rotary import RotaryAngles, apply_rotary, rotary_angles
from megatron.core.transformer.spec import (
    LinearScaling,
    Llama3Scaling,
    RotaryScaling,
    RotarySpec,
    YarnScaling,
)

CPU = torch.device("cpu")


def _spec(dim: int = 16, scaling: RotaryScaling | None = None) -> RotarySpec:
    return RotarySpec(dim, 10000.0, scaling)


def test_angles_are_positions_times_falling_frequencies() -> None:
    angles = rotary_angles(_spec(), torch.arange(5))
    assert angles.cos.shape == angles.sin.shape == (5, 8)
    assert angles.cos.dtype == angles.sin.dtype == torch.float32
    for position, channel in [(0, 0), (3, 0), (4, 5)]:
        angle = position * 10000.0 ** (-2 * channel / 16)
        assert angles.cos[position, channel].item() == pytest.approx(math.cos(angle), abs=1e-7)
        assert angles.sin[position, channel].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_channels_beyond_the_rotated_ones_pass_unchanged() -> None:
    x = torch.randn(1, 6, 2, 16)
    angles = rotary_angles(_spec(8), torch.arange(6))
    y = apply_rotary(x, angles)
    assert torch.equal(y[..., 8:], x[..., 8:])
    assert not torch.equal(y[:, 1:, :, :8], x[:, 1:, :, :8])


def test_angles_that_do_not_fit_are_rejected() -> None:
    angles = rotary_angles(_spec(), torch.arange(6))
    narrow = RotaryAngles(angles.cos.bfloat16(), angles.sin.bfloat16())
    with pytest.raises(ValueError, match="Expected angles of 5 positions"):
        apply_rotary(torch.randn(1, 5, 2, 16), angles)
    with pytest.raises(ValueError, match="at most 8 channels"):
        apply_rotary(torch.randn(1, 6, 2, 8), angles)
    with pytest.raises(
        ValueError, match=r"Expected cosines and sines in torch.float32, got torch.bfloat16"
    ):
        apply_rotary(torch.randn(1, 6, 2, 16), narrow)


LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)
YARN = YarnScaling(
    factor=32.0,
    original_length=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    attention_factor=1.3465735902799727,
    rounds_range=False,
)
YARN_SIZES = {"factor": 32.0, "original_max_position_embeddings": 4096}
# Blending starts and ends in the same place.
ABRUPT_YARN = YarnScaling(4.0, 64, 8.0, 8.0, 0.7, rounds_range=False)


@pytest.mark.parametrize(
    ("scaling", "published"),
    [
        (LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            LLAMA3,
            {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"factor": 8.0, "original_max_position_embeddings": 8192},
        ),
        (YARN, {"rope_type": "yarn", "truncate": False} | YARN_SIZES),
        (
            replace(YARN, beta_fast=16.0, beta_slow=2.0, attention_factor=0.5, rounds_range=True),
            {"rope_type": "yarn", "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.5}
            | YARN_SIZES,
        ),
        (
            ABRUPT_YARN,
            {"rope_type": "yarn", "beta_fast": 8.0, "beta_slow": 8.0, "attention_factor": 0.7}
            | {"truncate": False, "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
@pytest.mark.parametrize(("dim", "base"), [(128, 500000.0), (64, 150000.0), (16, 10000.0)])
def test_scaled_angles_match_the_transformers_library(
    scaling: RotaryScaling, published: dict[str, Any], dim: int, base: float
) -> None:
    transformers = pytest.importorskip("transformers")
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    config = transformers.LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": base, **published},
    )
    frequencies, factor = rope_utils.ROPE_INIT_FUNCTIONS[published["rope_type"]](config, CPU)

    # The library's frequencies are fp32; so few positions do not show their rounding.
    angles = rotary_angles(RotarySpec(dim, base, scaling), torch.arange(5))
    expected = torch.outer(torch.arange(5.0), frequencies)
    torch.testing.assert_close(angles.cos, expected.cos() * factor, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(angles.sin, expected.sin() * factor, rtol=1e-6, atol=1e-6)

    unscaled = rotary_angles(RotarySpec(dim, base), torch.arange(5))
    assert (angles.sin - unscaled.sin).abs().max() > 1e-4


def test_interleaved_channels_are_turned_as_halves_in_another_order() -> None:
    x = torch.randn(2, 5, 3, 12, generator=torch.Generator().manual_seed(0))
    angles = rotary_angles(_spec(8), torch.arange(5))
    order = [0, 2, 4, 6, 1, 3, 5, 7, 8, 9, 10, 11]
    halves = apply_rotary(x[..., order], angles)
    turned = apply_rotary(x, replace(angles, is_interleaved=True))
    assert torch.equal(turned[..., order], halves)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert not torch.allclose(turned, apply_rotary(x, angles), atol=0.1)


def test_angles_of_far_positions_are_exact_to_fp32() -> None:
    position = 1_000_003
    angles = rotary_angles(_spec(), torch.tensor([position]))
    angle = position * 10000.0 ** (-2 / 16)
    assert angles.cos[0, 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
