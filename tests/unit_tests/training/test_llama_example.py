"""examples/llama3_8b_offload_1gpu.yaml: its flags, and the memory sizes in its comments."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from megatron.core.distributed.units import sharding_units
from megatron.core.host_memory import format_bytes
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import plan_offload
from megatron.core.optimizer.planned_memory import plan_memory
from megatron.core.transformer.linear_cross_entropy import ACCELERATOR
from megatron.training.arguments import parse_config
from megatron.training.config import RunConfig
from megatron.training.step_memory import state_settings

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "llama3_8b_offload_1gpu.yaml"
ROW = re.compile(r"#   (?P<name>\S.*?)  +(?P<factors>\d bytes x [\dx, ]+)?.* (?P<size>\S+ [GM]iB)")


@pytest.fixture
def config(tmp_path, monkeypatch) -> RunConfig:
    """The configuration of the unchanged file, in a directory with the files it refers to."""
    (tmp_path / "data" / "llama3").mkdir(parents=True)
    for name in ("llama3_text_document.bin", "llama3_text_document.idx", "llama3/tokenizer.json"):
        (tmp_path / "data" / name).touch()
    monkeypatch.chdir(tmp_path)
    return parse_config(["--config", str(EXAMPLE)], world_size=1)


def model_of(config: RunConfig) -> GPTModel:
    """Builds the model on meta. The vocabulary needs no padding."""
    vocab_size = config.tokenizer.vocab_size
    assert vocab_size % config.tokenizer.make_vocab_size_divisible_by == 0
    with torch.device("meta"):
        return GPTModel(config.model, vocab_size)


def rows() -> tuple[dict[str, str], dict[str, str]]:
    """Returns the sizes in the tables of device and host by name, in order. Each is the product of
    the numbers in its row.
    """
    tables = []
    for text in EXAMPLE.read_text().split("# Host memory", maxsplit=1):
        matches = [match for line in text.splitlines() if (match := ROW.fullmatch(line))]
        for match in matches:
            if match["factors"]:
                factors = re.findall(r"\d[\d,]*", match["factors"])
                product = math.prod(int(factor.replace(",", "")) for factor in factors)
                assert format_bytes(product) == match["size"], match["name"]
        tables.append({match["name"]: match["size"] for match in matches})
    card, host = tables
    return card, host


def shown(nbytes: dict[str, int]) -> dict[str, str]:
    """Formats a size as in the tables."""
    sizes = {**nbytes, "in all": sum(nbytes.values())}
    return {name: format_bytes(size) for name, size in sizes.items()}


def numel(*modules: torch.nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def test_the_model_is_llama_3_8b(config):
    model = model_of(config)
    assert numel(model) == 8_030_261_248
    assert f"{numel(model):,}" in EXAMPLE.read_text()
    assert config.model.head_dim == 128
    assert config.model.rotary_base == 500_000
    assert config.training.compute_dtype == "bf16"
    assert config.optimizer.optimizer_offload_fraction == 1


def test_the_host_memory_in_its_comments_matches_the_preflight(config):
    plan = plan_offload(model_of(config), config.optimizer)
    planned = plan_memory(
        model_of(config), state_settings(config.engine(), 1, is_accelerator=True), plan
    )
    needs = {need.what: need.nbytes for need in planned.host_needs}
    expected = {
        "main weights, fp32": 4 * plan.host_numel,
        "gradients, bf16": 2 * plan.host_numel,
        "optimizer states, fp32": 8 * plan.host_numel,
    }
    assert rows()[1] == shown(expected)
    # New weights share the gradients' memory. Alignment of rows in a buffer is added.
    for what, nbytes in expected.items():
        asked = needs.pop(what.split(",")[0])
        assert nbytes < asked < 1.001 * nbytes
    assert needs == {}


def test_the_device_memory_in_its_comments_adds_up(config):
    model, of_bf16 = model_of(config), torch.bfloat16.itemsize
    layers = sharding_units(model)
    vocab_size, hidden_size = model.vocab_size, config.model.hidden_size
    num_tokens = config.training.micro_batch_size * config.data.seq_length
    query_size = config.model.num_attention_heads * config.model.head_dim
    key_value_size = config.model.num_key_value_heads * config.model.head_dim
    of_layer = (
        # The two norms' outputs, and the sum between attention and MLP.
        3 * hidden_size
        # Before the rotation, after it, attended, and that in rows.
        + (query_size + 2 * key_value_size)
        + (query_size + key_value_size)
        + 2 * query_size
        # Gate and up, silu of the gate, their product.
        + 4 * config.model.ffn_size
    )
    expected = {
        "weights, bf16": of_bf16 * numel(model),
        "gradients, bf16": of_bf16 * numel(model),
        "embedding and head": of_bf16 * (numel(model) - numel(*layers)),
        "two layers": of_bf16 * numel(*layers[:2]),
        "from autograd": of_bf16 * max(parameter.numel() for parameter in model.parameters()),
        "inputs of layers": of_bf16 * num_tokens * (len(layers) + 1) * hidden_size,
        "one layer, recomputed": of_bf16 * num_tokens * of_layer,
        "the head's, in fp32": torch.float32.itemsize * vocab_size * hidden_size,
        "a chunk of logits": of_bf16 * ACCELERATOR.chunk,
        "a piece in fp32": 2 * torch.float32.itemsize * ACCELERATOR.piece,
    }
    assert rows()[0] == shown(expected)
    assert sum(expected.values()) < 80e9 * 0.8, "a fifth of the card is for what is not counted"
