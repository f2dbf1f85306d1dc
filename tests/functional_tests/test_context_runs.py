"""Runs of `pretrain_gpt.py` whose ranks divide sequences or layers report what one rank reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.functional_tests.helpers.runs import train

SMALL = "--attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --log-interval 1".split()


def records(path: Path) -> list[dict[str, float]]:
    """The iterations and losses of a run, and the samples that it has seen."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    names = ("iteration", "loss", "grad_norm", "consumed_samples", "validation_loss")
    return [{name: record[name] for name in names if name in record} for record in found]


@pytest.mark.parametrize("flag", ["--context-parallel-size", "--tensor-model-parallel-size"])
def test_a_run_with_divided_sequences_or_layers_resumes_with_whole_ones(
    tmp_path: Path, flag: str
) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    train(*SMALL, "--metrics-jsonl", whole)

    save = ["--save", tmp_path / "saved", "--metrics-jsonl", parts]
    train(*SMALL, flag, "2", *save, "--exit-interval", "2", world_size=2)
    train(*SMALL, *save)
    expected = records(whole)
    assert len(expected) > 4
    for found, record in zip(records(parts), expected, strict=True):
        assert found == pytest.approx(record, rel=1e-6)
