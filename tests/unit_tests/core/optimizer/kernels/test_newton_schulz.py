from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim._muon import _zeropower_via_newtonschulz

from megatron.core import products
from megatron.core.optimizer.kernels.newton_schulz import (
    COEFFICIENTS,
    SCALE_MODES,
    MuonStep,
    orthogonalize,
)

BF16 = torch.bfloat16
# Of singular values after five iterations, from matrices whose values are not tiny.
BOUNDS = {"simple": (0.6, 1.25), "quintic": (0.6, 1.3), "polar_express": (0.6, 1.2)}


def matrix(num_rows: int, num_columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, num_columns, generator=generator).to(BF16)


@settings(deadline=None, max_examples=30)
@given(
    name=st.sampled_from(sorted(COEFFICIENTS)),
    num_rows=st.integers(1, 40),
    num_columns=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_singular_values_come_near_to_one_and_vectors_stay(name, num_rows, num_columns, seed):
    # Not nearly square, where some singular values are close to zero.
    shape = (num_rows, num_columns + 3 * num_rows)
    given_values = matrix(*shape, seed)
    u, values, v = torch.linalg.svd(given_values.float(), full_matrices=False)
    found = orthogonalize(given_values, MuonStep(0.1, coefficient_type=name))
    assert (found.dtype, found.shape) == (BF16, shape)
    low, high = BOUNDS[name]
    own = torch.linalg.svdvals(found.float())
    assert float(values.min()) > 0
    assert low < float(own.min())
    assert float(own.max()) < high
    inner = (u.T @ found.float() @ v.T).diagonal()
    assert (inner > 0.9 * low).all()


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8), (1, 30), (30, 1)])
def test_a_factor_of_the_matrix_changes_nothing_and_transposing_it_transposes_the_result(shape):
    given_values, step = matrix(*shape), MuonStep(0.1)
    found = orthogonalize(given_values, step)
    assert torch.equal(orthogonalize(given_values * 2.0**20, step), found)
    if shape[0] != shape[1]:
        assert torch.equal(orthogonalize(given_values.T, step), found.T)


def test_the_bits_match_torch(monkeypatch):
    monkeypatch.setattr(products, "_SLOW_DTYPES", frozenset())
    for shape in ((24, 24), (8, 40), (40, 8), (1, 30)):
        given_values = matrix(*shape)
        expected = _zeropower_via_newtonschulz(
            given_values.clone(), COEFFICIENTS["simple"][0], 5, 1e-7
        )
        assert torch.equal(orthogonalize(given_values, MuonStep(0.1)), expected)
        # The factors of `quintic` differ from step to step.
        others = orthogonalize(given_values, MuonStep(0.1, coefficient_type="quintic"))
        assert not torch.equal(others, expected)


def test_zeros_stay_zeros_and_the_input_stays_as_it_is():
    assert not orthogonalize(torch.zeros(4, 6, dtype=BF16), MuonStep(0.1)).any()
    given_values = matrix(6, 4)
    before = given_values.clone()
    orthogonalize(given_values, MuonStep(0.1))
    assert torch.equal(given_values, before)


def test_more_iterations_than_triples_repeat_the_last_one():
    values = {
        number: torch.linalg.svdvals(
            orthogonalize(
                matrix(16, 64), MuonStep(0.1, ns_steps=number, coefficient_type="polar_express")
            ).float()
        )
        for number in (5, 12)
    }
    assert (values[12] - 1).abs().max() < 0.02
    assert (values[12] - 1).abs().max() < (values[5] - 1).abs().max()


@pytest.mark.parametrize("mode", SCALE_MODES)
def test_scales_are_the_documented_ones_and_the_decay_has_none(mode):
    found = MuonStep(0.5, 0.25, scale_mode=mode, extra_scale_factor=3.0).addition(64, 16)
    expected = {"match_rms_adamw": 0.2 * 8, "original": 2.0, "spectral": 8.0}[mode]
    assert found == pytest.approx((1 - 0.125, 0.5 * 3 * expected))
    wide = MuonStep(0.5, scale_mode=mode).addition(16, 64)
    expected = {"match_rms_adamw": 0.2 * 8, "original": 1.0, "spectral": 8.0}[mode]
    assert wide == pytest.approx((1, 0.5 * expected))
