"""examples/qwen3_5_proxy.yaml matches its comments."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.models.description import ModelDescription
from megatron.core.models.hugging_face import config_from_hf, hf_config
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.spec import AttentionSpec, GatedDeltaNetSpec
from megatron.training.arguments import parse_config
from megatron.training.config import RunConfig

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "qwen3_5_proxy.yaml"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """The configuration of the unchanged file, in a directory with the files it refers to."""
    (tmp_path / "data").mkdir()
    for name in ("stdlib_text_document.bin", "stdlib_text_document.idx", "stdlib_tokenizer.json"):
        (tmp_path / "data" / name).touch()
    monkeypatch.chdir(tmp_path)
    return parse_config(["--config", str(EXAMPLE)], world_size=2)


def test_every_fourth_layer_has_gated_attention_and_the_others_a_gated_delta_net(
    config: RunConfig,
) -> None:
    *others, last = [layer.mixer for layer in model_spec(config.model).layers]
    assert len(others) == 3
    assert all(isinstance(mixer, GatedDeltaNetSpec) for mixer in others)
    assert isinstance(last, AttentionSpec)
    assert last.has_output_gate


def test_it_is_offloaded_whole_with_every_overlap(config: RunConfig) -> None:
    optimizer = config.optimizer
    assert optimizer.optimizer_cpu_offload
    assert optimizer.optimizer_offload_fraction == 1
    assert optimizer.overlap_cpu_optimizer_d2h_h2d
    assert optimizer.overlap_optimizer_with_forward


def test_transformers_has_an_architecture_that_computes_the_same(config: RunConfig) -> None:
    content = hf_config(ModelDescription(config.model, 4096))
    assert content["architectures"] == ["Qwen3_5ForCausalLM"]
    again, _, _ = config_from_hf(content, "config.json")
    # Dropout is not in the file; it is off here.
    assert model_spec(again) == model_spec(config.model)
