from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.checkpoint.saver import Frequency
from megatron.training.step import StepInfo


@given(
    epoch=st.integers(1, 40),
    batches=st.lists(st.integers(1, 60), max_size=60),
)
def test_every_epoch_that_is_passed_is_followed_by_one_dump_however_large_the_batches(
    epoch, batches
):
    frequency, consumed, dumped = Frequency(samples=epoch), 0, []
    for iteration, batch in enumerate(batches, start=1):
        before, consumed = consumed, consumed + batch
        is_due = frequency.is_due(StepInfo(iteration, consumed), batch, 0.0)
        assert is_due == any(
            before < multiple * epoch <= consumed for multiple in range(1, consumed // epoch + 1)
        )
        dumped += [iteration] if is_due else []
    assert len(dumped) <= consumed // epoch


@pytest.mark.parametrize(
    ("frequency", "num_late", "due"),
    [
        (Frequency(), 0.0, []),
        (Frequency(steps=4), 0.0, [4, 8]),
        (Frequency(steps=4, samples=12), 0.0, [3, 4, 6, 8, 9]),
        (Frequency(steps=4), 2.0, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_the_state_is_dumped_by_whichever_comes_first(frequency, num_late, due):
    found = [n for n in range(1, 10) if frequency.is_due(StepInfo(n, 4 * n), 4, num_late)]
    assert found == due
