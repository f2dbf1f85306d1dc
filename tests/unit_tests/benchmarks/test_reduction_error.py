from __future__ import annotations

import torch

from benchmarks.reduction_error import error, mean_rounded_once, ring_mean, worst_error

BF16 = torch.bfloat16


def test_a_ring_of_wide_sums_gives_the_mean_of_each_element():
    gradients = torch.randn(4, 12, generator=torch.Generator().manual_seed(0)).to(BF16)
    exact = gradients.double().mean(0)
    assert torch.allclose(ring_mean(gradients, torch.float64), exact, atol=0, rtol=1e-14)
    assert torch.equal(mean_rounded_once(gradients), exact.to(BF16))


def test_a_ring_rounds_at_every_hop():
    # 257 has nine bits: a sum of ones in bf16 stays at 256.
    ones = torch.ones(512, 512, dtype=BF16)
    assert set(ring_mean(ones, BF16).tolist()) == {0.5}
    assert set(mean_rounded_once(ones).tolist()) == {1.0}


def test_the_sum_of_a_part_starts_behind_the_rank_that_gets_it():
    # Of three summands of which only the first two cancel, bf16 keeps the third if it comes last.
    gradients = torch.zeros(3, 3, dtype=BF16)
    gradients[:, 0] = torch.tensor([1.0, 512.0, -512.0], dtype=BF16)  # added as 1, 2, 0
    gradients[:, 1] = torch.tensor([512.0, -512.0, 1.0], dtype=BF16)  # 2, 0, 1
    assert (3 * ring_mean(gradients, BF16).float()).round().tolist() == [1.0, 0.0, 0.0]


def test_errors_are_in_percent_of_the_exact_norm():
    exact = torch.tensor([3.0, 4.0, 0.0, 10.0], dtype=torch.float64)
    found = torch.tensor([3.0, 4.0, 0.0, 11.0])
    assert error(found, exact) == 100 / 125**0.5
    assert worst_error(found, exact, [2, 1, 1]) == 10.0
