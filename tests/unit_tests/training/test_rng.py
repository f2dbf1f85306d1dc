from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from megatron.core.device import Device
from megatron.training.rng import rng_state, seed_all, set_rng_state


@pytest.fixture(autouse=True)
def _restore_generators():
    before = rng_state(Device("cpu"))
    yield
    set_rng_state(Device("cpu"), before)


def draw() -> tuple[float, ...]:
    return (
        float(torch.rand(())),
        float(torch.randn(())),
        float(np.random.rand()),  # noqa: NPY002
        float(np.random.randn()),  # noqa: NPY002
        random.random(),
        random.gauss(0, 1),
    )


@pytest.mark.parametrize("num_draws", [0, 1, 2])
def test_all_generators_go_on_where_they_were(num_draws):
    """An odd number of Gaussian draws leaves a cached value behind, which is state too."""
    seed_all(5, rank=3)
    for _ in range(num_draws):
        draw()
    state = rng_state(Device("cpu"))
    expected = [draw() for _ in range(3)]
    seed_all(6, rank=0)
    assert [draw() for _ in range(3)] != expected
    set_rng_state(Device("cpu"), state)
    assert [draw() for _ in range(3)] == expected


def test_states_are_tensors_whose_shapes_do_not_change():
    seed_all(5, rank=0)
    shapes = {name: (state.shape, state.dtype) for name, state in rng_state(Device("cpu")).items()}
    draw()
    assert {name: (state.shape, state.dtype) for name, state in rng_state(Device("cpu")).items()} == shapes


def test_ranks_draw_differently_and_the_same_rank_alike():
    seed_all(5, rank=0)
    first = draw()
    seed_all(5, rank=1)
    second = draw()
    seed_all(5, rank=0)
    assert draw() == first
    assert all(a != b for a, b in zip(first, second, strict=True))
