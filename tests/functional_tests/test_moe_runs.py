"""Runs of a tiny mixture of experts: their reports, and that they resume to the bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import Device
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.router import Router
from megatron.core.transformer.spec import Balancing, ModelSpec, MoeSpec
from megatron.training.arguments import parse_config
from megatron.training.engines import ModuleEngine, build_engine
from megatron_hybrid.pretrain_gpt import forward_step_of
from tests.functional_tests.helpers.runs import SETTINGS, losses, train
from tests.helpers.ranks import on_ranks, run_ranks

MOE = [
    *"--num-layers 3 --num-experts 4 --moe-layer-freq [0,1,1] --moe-ffn-hidden-size 8".split(),
    *"--moe-router-score-function sigmoid --moe-router-enable-expert-bias".split(),
    *"--moe-router-bias-update-rate 0.01 --moe-aux-loss-coeff 0.01".split(),
    *"--moe-z-loss-coeff 1e-3 --lr-decay-iters 4".split(),
]
# The balance loss is of a rank's own tokens, so it depends on the number of ranks.
SAME_EVERYWHERE = "--attention-dropout 0 --hidden-dropout 0 --moe-aux-loss-coeff 0".split()
# Times, and the peak of memory, which is that of all runs that the process has made.
MEASURED = {"elapsed_ms", "tokens_per_second", "tflops_per_device", "peak_host_memory_bytes"}
CHOICES = 2 * 4 * 16  # experts of a token x sequences x tokens
DENSE = {"loss", "grad_norm", "learning_rate", "iteration", "consumed_samples", "kind"}


def records(path: Path) -> list[dict[str, Any]]:
    """Of the training steps, without measurements."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {name: value for name, value in record.items() if name not in MEASURED}
        for record in found
        if record["kind"] == "train"
    ]


def test_a_run_reports_losses_and_loads_and_resumes_with_its_expert_biases(tmp_path: Path):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    logged = [*MOE, "--moe-per-layer-logging", "--log-interval", "1", "--log-format", "long"]
    log = train(*logged, "--metrics-jsonl", whole, world_size=2)

    found = records(whole)
    assert len(found) == 4
    for record in found:
        assert record["balance_loss"] > 0 < record["z_loss"]
        assert [sum(row) for row in record["expert_load"]] == [CHOICES] * 2
        assert len(record["expert_load_cv_by_layer"]) == 2
        assert record["expert_load_cv_max"] == max(record["expert_load_cv_by_layer"])
        assert record["busiest_expert"] == max(map(max, record["expert_load"])) / (CHOICES / 4)
    last = found[-1]
    assert f"| balance loss: {last['balance_loss']:.6E} | z loss: " in log
    assert f"| expert load cv: {last['expert_load_cv']:.3f} (max " in log

    save = ["--save", tmp_path / "checkpoints", "--save-interval", "2", "--metrics-jsonl", parts]
    for stop in ("--exit-interval 2".split(), []):
        log = train(*logged, *save, *stop, world_size=2)
    assert "iteration 2 and 8 samples" in log
    assert records(parts) == found


def test_a_dense_run_reports_none_of_it(tmp_path: Path):
    train("--metrics-jsonl", tmp_path / "dense.jsonl")
    for record in records(tmp_path / "dense.jsonl"):
        assert set(record) == {*DENSE, "skipped_iterations", "nan_iterations"}


def test_a_loss_that_is_made_nan_on_one_rank_is_a_step_that_is_skipped(tmp_path: Path):
    metrics = tmp_path / "metrics.jsonl"
    inject = ["--inject", "nan:step=2,rank=1", "--metrics-jsonl", metrics]
    train(*MOE, *inject, world_size=2)
    assert [record["skipped_iterations"] for record in records(metrics)] == [0, 1, 1, 1]


def without_balancing(spec: ModelSpec) -> ModelSpec:
    """The same coefficients, which then weigh nothing."""
    layers = []
    for layer in spec.layers:
        mixture = layer.feed_forward
        if isinstance(mixture, MoeSpec):
            router = dataclasses.replace(mixture.router, balancing=Balancing.NONE)
            layer = dataclasses.replace(
                layer, feed_forward=dataclasses.replace(mixture, router=router)
            )
        layers.append(layer)
    return dataclasses.replace(spec, layers=tuple(layers))


@on_ranks(1)
def test_a_balance_loss_is_reported_only_where_something_is_balanced():
    config = parse_config([*SETTINGS, *MOE], 1)
    batch = {"tokens": torch.zeros(1, 4, dtype=torch.int64)}
    batch["labels"] = batch["tokens"]
    dense = parse_config(SETTINGS, 1).model
    said = forward_step_of(model_spec(dense))(GPTModel(dense, 64), batch)
    assert isinstance(said, torch.Tensor), "nothing besides the loss"
    for spec, names in (
        (model_spec(config.model), {"balance", "z"}),
        (without_balancing(model_spec(config.model)), {"z"}),
    ):
        said = forward_step_of(spec)(GPTModel(config.model, 64), batch)
        assert set(said.auxiliary) == names


def routers(model: nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


def _biases_and_loads(flags: list[str]) -> tuple[list[list[int]], list[list[float]], list[float]]:
    """Two steps of an engine."""
    world_size = dist.get_world_size()
    config = parse_config([*SETTINGS, *MOE, *SAME_EVERYWHERE, *flags], world_size)
    mesh = build_mesh("cpu", world_size)
    engine: ModuleEngine = build_engine(config.engine(), Device("cpu"), mesh)
    engine.initialize(lambda: GPTModel(config.model, 64))
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(64, (2, 4, 17), generator=generator)
    loads, losses = [], []
    for step in tokens:
        mine = step[dist.get_rank() :: world_size]
        batch = {"tokens": mine[:, :-1].contiguous(), "labels": mine[:, 1:].contiguous()}
        result = engine.train_batch([batch], forward_step_of(model_spec(config.model)))
        loads += result.expert_load.tolist()
        losses += [result.loss, *result.auxiliary.values()]
    return loads, [router.expert_bias.tolist() for router in routers(engine.model)], losses


@pytest.mark.parametrize(
    ("world_size", "flags"), [(2, []), (2, ["--use-torch-fsdp2"]), (1, ["--no-use-megatron-fsdp"])]
)
def test_every_engine_counts_the_same_loads_and_moves_the_same_biases(
    world_size: int, flags: list[str]
):
    ((loads, biases, losses),) = run_ranks(1, _biases_and_loads, [])
    assert any(map(any, biases))
    assert {round(abs(bias), 6) for row in biases for bias in row} <= {0.0, 0.01, 0.02}
    for own_loads, own_biases, own_losses in run_ranks(world_size, _biases_and_loads, flags):
        assert own_loads == loads
        assert own_biases == biases
        assert len(own_losses) == 4, "of each step the loss and the z loss"
        assert own_losses == pytest.approx(losses, rel=1e-5)


DIVIDED = (
    "--num-experts 4 --ffn-hidden-size 8 --moe-aux-loss-coeff 0.01 --swiglu --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --optimizer-cpu-offload "
    "--optimizer-offload-fraction 0.5 --expert-model-parallel-size"
).split()


def test_a_run_with_divided_experts_resumes_with_experts_divided_otherwise(tmp_path: Path) -> None:
    whole, begun, save = (tmp_path / name for name in ("whole", "begun", "checkpoints"))
    log = train(*DIVIDED, 2, "--metrics-jsonl", whole, world_size=2)
    assert "decoder.layers.0.mlp.experts" in log, "a separate group in the offload plan"
    expected = losses(whole)
    assert len(expected) == 4

    stops = ["--save", save, "--exit-interval", 2, "--metrics-jsonl", begun]
    train(*DIVIDED, 2, *stops, world_size=2)
    assert losses(begun) == {k: expected[k] for k in (1, 2)}
    for world_size in (2, 1):
        resumed = tmp_path / f"resumed on {world_size}"
        train(*DIVIDED, 1, "--load", save, "--metrics-jsonl", resumed, world_size=world_size)
        rest = {k: expected[k] for k in (3, 4)}
        assert losses(resumed) == pytest.approx(rest, rel=0, abs=1e-6)
