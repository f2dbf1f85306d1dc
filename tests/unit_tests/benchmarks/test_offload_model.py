"""The computed table of docs/offload.md matches the step model."""

from __future__ import annotations

import pytest

from benchmarks import offload_model
from benchmarks.reporting.stored import stored_results
from benchmarks.reporting.tables import COMPUTED
from benchmarks.runner.registry import RESULTS


@pytest.mark.parametrize("tokens", offload_model.PUBLISHED)
def test_the_published_cost_of_a_whole_optimizer_on_the_host_is_reproduced(tokens):
    found = offload_model.published_ratio(tokens)
    assert found == pytest.approx(offload_model.PUBLISHED[tokens], rel=0.15)


def test_the_stored_table_matches_the_model():
    stored = stored_results(RESULTS)["offload_model"].result.facts[COMPUTED]["rows"]
    expected = [row for row in stored if row[1] == "1B"]
    assert [*offload_model.rows(["1B"])] == expected
    names = [name for name, (*_, models) in offload_model.MACHINES.items() for _ in models]
    assert [row[0] for row in stored] == names


def test_a_side_with_more_means_is_never_slower():
    for row in stored_results(RESULTS)["offload_model"].result.facts[COMPUTED]["rows"]:
        for cell in row[2:-1]:
            host, streamed, early = map(float, cell.split(" / "))
            assert early <= streamed <= host
