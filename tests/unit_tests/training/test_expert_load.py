from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.training.config import LoggingConfig
from megatron.training.expert_load import load_record
from megatron.training.metrics import JsonlSink, Metrics, Rates, TensorBoardSink
from megatron.training.step import StepResult

LOAD = torch.tensor([[4, 4, 4, 4], [16, 0, 0, 0], [6, 2, 6, 2]])


def test_a_model_without_experts_reports_no_loads():
    assert load_record(None, with_experts=True) == {}


def test_the_coefficient_of_variation_is_0_of_even_loads_and_largest_where_one_has_all():
    record = load_record(LOAD, with_experts=False)
    assert record["expert_load_cv_by_layer"] == pytest.approx([0.0, math.sqrt(3), 0.5])
    assert record["expert_load_cv"] == pytest.approx((math.sqrt(3) + 0.5) / 3)
    assert record["expert_load_cv_max"] == pytest.approx(math.sqrt(3))
    assert record["busiest_expert"] == 4.0
    assert record["idle_experts"] == 3
    assert "expert_load" not in record
    assert load_record(LOAD, with_experts=True)["expert_load"] == LOAD.tolist()


def test_a_layer_without_tokens_is_even():
    assert load_record(torch.zeros(1, 4, dtype=torch.int64), with_experts=False) == {
        "expert_load_cv": 0.0,
        "expert_load_cv_max": 0.0,
        "busiest_expert": 0.0,
        "idle_experts": 4,
        "expert_load_cv_by_layer": [0.0],
    }


def report(folder: Path, **settings: bool) -> None:
    config = LoggingConfig(log_interval=1, log_format="long", **settings)
    sinks = [JsonlSink(str(folder / "metrics.jsonl")), TensorBoardSink(str(folder), 0)]
    metrics = Metrics(
        Rates(10, 4, 8, 1e12, 1), config, sinks, start_iteration=0, shows_progress=False
    )
    result = StepResult(
        2.0, 1.5, False, (), (), auxiliary={"balance": 0.25, "z": 0.125}, expert_load=LOAD
    )
    metrics.step(result, iteration=1, consumed_samples=4, learning_rate=0.1, skipped=0, nan=0)
    metrics.close()


@pytest.mark.parametrize("is_long", [False, True])
def test_losses_and_loads_are_in_the_json_lines_and_in_tensorboard(tmp_path: Path, is_long: bool):
    report(tmp_path, moe_per_layer_logging=is_long)
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (record["loss"], record["balance_loss"], record["z_loss"]) == (2.0, 0.25, 0.125)
    assert record["expert_load_cv_by_layer"] == pytest.approx([0.0, math.sqrt(3), 0.5])
    assert record.get("expert_load") == (LOAD.tolist() if is_long else None)

    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = {name: events.Scalars(name)[0].value for name in events.Tags()["scalars"]}
    assert scalars["train/balance_loss"] == 0.25
    assert scalars["train/z_loss"] == 0.125
    assert scalars["train/expert_load_cv_max"] == pytest.approx(math.sqrt(3))
    assert scalars["train/idle_experts"] == 3
    by_layer = {name for name in scalars if "of_layer" in name}
    assert by_layer == (
        {f"train/expert_load_cv_of_layer_{n}" for n in range(3)} if is_long else set()
    )
