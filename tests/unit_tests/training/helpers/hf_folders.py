"""GPTs in the transformers library's files: one for each architecture that is written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import Device
from megatron.core.distributed import megatron_fsdp, torch_fsdp2
from megatron.core.materialize import materialize, seeded_reset
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config import TransformerConfig
from tests.unit_tests.core.dist_checkpointing.helpers.models import data_parallel

CPU = Device("cpu")
VOCAB = 61  # rows that no number of ranks divides
QWEN3 = TransformerConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    ffn_hidden_size=10,
    group_query_attention=True,
    num_query_groups=2,
    kv_channels=8,
    qk_layernorm=True,
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    norm_epsilon=1e-3,
    rotary_base=500.0,
    init_method_std=0.2,
)
PLAIN = {"qk_layernorm": False, "normalization": "LayerNorm", "norm_epsilon": 1e-2}
ARCHITECTURES = {
    "Qwen3": {"untie_embeddings_and_output_weights": True},
    "Qwen3 tied": {},
    "Llama": {"qk_layernorm": False, "rotary_base": 100000.0},
    "Llama biases": {
        "qk_layernorm": False,
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
    },
    "Qwen2": {"qk_layernorm": False, "add_qkv_bias": True},
    "Qwen2 windows, Llama 3's scaling": {
        "qk_layernorm": False,
        "add_qkv_bias": True,
        "window_size": (4, 0),
        "window_attn_skip_freq": "[0,1]",
        "use_rope_scaling": True,
        "rope_scaling_original_max_position_embeddings": 16,
    },
    "Gemma3": {
        "layernorm_zero_centered_gamma": True,
        "post_norm": True,
        "swiglu": False,
        "gated_linear_unit": True,
        "activation_func": "gelu_tanh",
        "embedding_multiplier": 24**0.5,
        "softmax_scale": 0.25,
        "final_logit_softcapping": 3.0,
        "window_size": (4, 0),
        "window_attn_skip_freq": "2",
        "window_rotary_base": 70.0,
    },
    "SmolLM3": {"qk_layernorm": False, "position_embedding_type": "none"},
    "StableLm": {**PLAIN, "kv_channels": 6, "rotary_percent": 0.34},
    "StableLm biases": {**PLAIN, "kv_channels": 6, "add_qkv_bias": True},
    "Starcoder2": {**PLAIN, "swiglu": False},
    "Starcoder2 biases": {
        **PLAIN,
        "swiglu": False,
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
    },
    "Arcee": {"qk_layernorm": False, "swiglu": False},
    "Arcee biases": {"qk_layernorm": False, "swiglu": False, "add_bias_linear": True},
    "Qwen3Moe": {
        "untie_embeddings_and_output_weights": True,
        "num_experts": 5,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 12,
        "moe_layer_freq": "[0,1]",
        "moe_aux_loss_coeff": 0.01,
    },
    "Qwen3Next": {
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        "rotary_percent": 0.5,
        "linear_attention_freq": "[1,0]",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "num_experts": 4,
        "moe_router_pre_softmax": True,
        "moe_router_norm_topk": False,
        "moe_ffn_hidden_size": 12,
        "moe_shared_expert_intermediate_size": 8,
        "moe_shared_expert_gate": True,
    },
    "Olmoe": {
        "kv_channels": 6,
        "qk_layernorm_across_heads": True,
        "num_experts": 4,
        "moe_ffn_hidden_size": 12,
    },
}


def plain_gpt(config: TransformerConfig = QWEN3, seed: int = 0) -> GPTModel:
    """A GPT with random weights: norms are not ones, biases not zero."""
    model = GPTModel(config, VOCAB)
    materialize(model, "cpu", seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def sharded_gpt(
    engine: str,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    config: TransformerConfig = QWEN3,
    num_rows: int = VOCAB,
) -> GPTModel:
    """A GPT sharded over all ranks, with the same fp32 main weights on any number of ranks."""
    with torch.device("meta"):
        model = GPTModel(config, num_rows)
    reset = seeded_reset(model, torch.device("cpu"), seed)
    shard_model(model, engine, dtype, reset)
    if engine == "torch_fsdp2":
        materialize(model, "cpu", seed)
    return model


def shard_model(
    model: nn.Module,
    engine: str,
    dtype: torch.dtype,
    reset: Callable[[nn.Module], None] | None = None,
) -> None:
    """Shards a model over all ranks."""
    mesh = build_mesh("cpu", dist.get_world_size())
    if engine == "torch_fsdp2":
        torch_fsdp2.shard_model(model, mesh, compute_dtype=dtype, reshard_after_forward=True)
        return
    parallel = data_parallel("optim_grads_params")
    megatron_fsdp.shard_model(
        model, mesh, CPU, parallel, compute_dtype=dtype, reset_parameters=reset
    )


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
