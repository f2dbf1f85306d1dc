from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from megatron.core.device import Device
from megatron.training.rng import check_rng_state, rng_state, seed_all, set_rng_state


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
def test_all_generators_continue_where_they_were(num_draws):
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
    assert {
        name: (state.shape, state.dtype) for name, state in rng_state(Device("cpu")).items()
    } == shapes


def test_ranks_draw_differently_and_the_same_rank_alike():
    seed_all(5, rank=0)
    first = draw()
    seed_all(5, rank=1)
    second = draw()
    seed_all(5, rank=0)
    assert draw() == first
    assert all(a != b for a, b in zip(first, second, strict=True))


def at(place: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(state: torch.Tensor) -> torch.Tensor:
        state = state.clone()
        state.view(-1)[place] = value
        return state

    return change


def test_every_state_that_there_can_be_is_accepted():
    seed_all(5, rank=1)
    for _ in range(5):
        check_rng_state(rng_state(Device("cpu")), rng_state(Device("cpu")))
        draw()
        torch.rand(311)
        [random.random() for _ in range(311)]
        np.random.rand(311)  # noqa: NPY002


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "torch",
            lambda state: state[:100],
            "Expected torch to be torch.uint8 of shape .*, got .*100",
        ),
        (
            "torch",
            lambda state: state.long(),
            "Expected torch to be torch.uint8 of shape .*, got torch.int64",
        ),
        ("torch", lambda state: state * 0 + 255, "Expected torch to be the state of a generator"),
        ("torch", lambda state: state * 0, "Expected torch to be the state of a generator"),
        ("torch", at(9, 2), "Expected torch to be"),  # more words left than there are
        ("torch", at(17, 2), "Expected torch to be .* as the next of its words"),
        ("numpy", lambda state: state[:-1], "Expected numpy to be torch.int64 of shape"),
        ("numpy", at(624, 10**6), "Expected numpy to be a position of at most 624, got 1000000"),
        ("numpy", at(624, -1), "Expected numpy to be a position of at most 624, got -1"),
        ("numpy", at(625, 2), "Expected numpy to be 0 or 1"),
        ("numpy", at(7, 2**32), "Expected numpy to be words of 32 bits"),
        ("numpy", at(7, -1), "Expected numpy to be words of 32 bits"),
        ("numpy", lambda state: state * 0, "Expected numpy to be a word that is not 0"),
        ("numpy_gauss", at(0, float("nan")), "Expected numpy_gauss to be a finite number, got nan"),
        ("python", at(0, 2), "Expected python to be version 3, got 2"),
        ("python", at(1, 2**40), "Expected python to be words of 32 bits"),
        ("python", at(625, 625), "Expected python to be a position of at most 624, got 625"),
        ("python_gauss", at(0, 0.5), "Expected python_gauss to be 0 or 1 and a finite number"),
        (
            "python_gauss",
            at(1, float("inf")),
            "Expected python_gauss to be 0 or 1 and a finite number",
        ),
    ],
)
def test_a_state_that_no_generator_gives_is_rejected_before_one_takes_it(name, change, message):
    """With such a position numpy reads where there is nothing: the process would end with a
    signal.
    """
    seed_all(5, rank=0)
    own = rng_state(Device("cpu"))
    torch.rand(3)
    before = rng_state(Device("cpu"))
    with pytest.raises(ValueError, match=message):
        check_rng_state({**own, name: change(own[name])}, own)
    after = rng_state(Device("cpu"))
    assert all(torch.equal(before[kind], after[kind]) for kind in before)


def test_states_of_other_generators_are_rejected():
    own = rng_state(Device("cpu"))
    with pytest.raises(
        ValueError, match=r"Expected the random states to be torch, numpy.*, got torch"
    ):
        check_rng_state({"torch": own["torch"]}, own)
