"""Runs whose loss is more than the cross entropy of all tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.functional_tests.helpers.runs import refusal, train


def records(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in found if record["kind"] == "train"]


def test_a_z_loss_is_trained_and_reported_next_to_the_cross_entropy(tmp_path: Path) -> None:
    plain, small, more = (tmp_path / f"{name}.jsonl" for name in ("plain", "small", "more"))
    for path, flags in (
        (plain, []),
        (small, ["--z-loss-coeff", "1e-3"]),
        (more, ["--z-loss-coeff", "2e-3"]),
    ):
        train(*flags, "--metrics-jsonl", path, world_size=2)
    first, *later = zip(records(plain), records(small), records(more), strict=True)
    losses = [record["loss"] for record in first]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-6), "nothing is trained yet"
    assert first[2]["logit_z_loss"] == pytest.approx(2 * first[1]["logit_z_loss"], rel=1e-6)
    assert first[1]["logit_z_loss"] > 0
    assert "logit_z_loss" not in first[0]
    assert any(len({record["loss"] for record in step}) == 3 for step in later)


def test_a_coefficient_that_is_none_is_rejected() -> None:
    assert "--z-loss-coeff: expected" in refusal("--z-loss-coeff", "0")
