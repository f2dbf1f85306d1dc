"""examples/moe_cpu.yaml matches its comments and docs/moe.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.helpers.balance_plot import draw
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import plan_offload
from megatron.core.transformer.layer_specs import model_spec
from megatron.training.arguments import parse_config
from megatron.training.config import RunConfig

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """The configuration of the unchanged file, in a directory with the files it refers to."""
    (tmp_path / "data").mkdir()
    for name in ("stdlib_text_document.bin", "stdlib_text_document.idx", "stdlib_tokenizer.json"):
        (tmp_path / "data" / name).touch()
    monkeypatch.chdir(tmp_path)
    return parse_config(["--config", str(ROOT / "examples" / "moe_cpu.yaml")], world_size=2)


def test_all_but_the_first_layer_have_experts_of_which_a_token_uses_an_eighth(config: RunConfig):
    spec = model_spec(config.model)
    assert len(spec.mixtures) == len(spec.layers) - 1
    for mixture in spec.mixtures:
        assert (mixture.router.num_experts, mixture.router.top_k) == (16, 2)
        assert mixture.shared is not None
        assert mixture.capacity_factor is None, "no token is dropped"
        assert mixture.router.balance_coeff > 0


def test_the_sizes_match_its_comment(config: RunConfig):
    with torch.device("meta"):
        model = GPTModel(config.model, 4096)
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    total = sum(p.numel() for p in model.parameters())
    used = total - experts * 14 // 16
    text = (ROOT / "examples" / "moe_cpu.yaml").read_text()
    assert (
        f"about {total / 1e6:.1f} million parameters, of which a token uses {used / 1e6:.1f}"
        in text
    )


def test_only_experts_are_offloaded(config: RunConfig):
    with torch.device("meta"):
        model = GPTModel(config.model, 4096)
    plan = plan_offload(model, config.optimizer)
    assert plan is not None
    on_host = [group.name for group in plan.groups if group.is_on_host]
    assert on_host == [f"decoder.layers.{number}.mlp.experts" for number in (1, 2, 3)]


def test_two_ranks_divide_the_experts(config: RunConfig):
    assert config.parallel.expert_model_parallel_size == 2


def test_the_picture_shows_the_stored_result_in_which_both_ways_balance():
    stored = json.loads((ROOT / "benchmarks" / "results" / "expert_balance.json").read_text())
    runs = stored["facts"]["runs"]
    ends = {label: sum(run["expert_load_cv"][-25:]) / 25 for label, run in runs.items()}
    assert max(ends["balance loss"], ends["expert bias"]) < 0.5 * ends["no balancing"]
    assert (ROOT / "docs" / "moe_balance.svg").read_text() == draw(runs)
