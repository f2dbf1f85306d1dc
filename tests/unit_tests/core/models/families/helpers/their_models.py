"""Tiny models of the transformers library, and copies of weights to this project and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.models.families.row_map import RowMap, RowRange
from megatron.core.models.hugging_face import (
    OwnModel,
    hf_rows,
    saved_buffers,
    section_names,
    tied_names,
)
from megatron.core.transformer.fused_weight import fused_weights
from tests.unit_tests.core.models.families.helpers.mixture_cases import MIXTURE_CASES

VOCAB = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 28,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_FULL, _WINDOWED, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_GEMMA3 = {
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "sliding_window": 5,
    "layer_types": [_WINDOWED, _WINDOWED, _FULL, _WINDOWED],
    "rope_parameters": {
        _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
        _WINDOWED: {"rope_type": "default", "rope_theta": 70.0},
    },
}
QWEN3_5: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR],
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 700.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_QWEN3_MOE = {
    "head_dim": 12,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 10,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "router_aux_loss_coef": 0.02,
    "rope_parameters": {"rope_type": "default", "rope_theta": 2000.0},
}
QWEN3_NEXT: dict[str, Any] = {
    **QWEN3_5,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 10,
    "shared_expert_intermediate_size": 14,
    # The gated norms of heads would enlarge rounding errors otherwise.
    "rms_norm_eps": 1e-3,
    "router_aux_loss_coef": 0.02,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 700.0,
        "partial_rotary_factor": 0.5,
    },
}

# Of each architecture, models that use each field that it has. Values are never the defaults.
CASES: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-3, "rope_parameters": LLAMA3},
    "llama biases": {
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 12,
        "hidden_act": "gelu",
        "num_key_value_heads": None,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0},
    },
    "llama yarn": {
        "rope_parameters": {
            **YARN,
            "attention_factor": 1.3,
            "beta_fast": 2.0,
            "beta_slow": 0.25,
            "truncate": False,
        }
    },
    "llama yarn by default": {"rope_parameters": YARN},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 2000.0},
    },
    "qwen2 listed": {
        "head_dim": 12,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": [_WINDOWED, _FULL, _FULL, _WINDOWED],
        "rope_parameters": YARN,
    },
    "qwen3": {"head_dim": 12, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "qwen3 windows": {
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 0,
        "rope_parameters": YARN,
    },
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_text tied": {**QWEN3_5, "tie_word_embeddings": True, "num_key_value_heads": 4},
    "gemma3_text": _GEMMA3,
    "gemma3_text untied": {
        **_GEMMA3,
        "tie_word_embeddings": False,
        "final_logit_softcapping": 3.0,
        "hidden_activation": "silu",
        "rope_parameters": {
            _FULL: LLAMA3,
            _WINDOWED: {"rope_type": "default", "rope_theta": 70.0},
        },
    },
    "smollm3": {
        "no_rope_layers": [1, 0, 0, 1],
        "head_dim": 12,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": YARN,
    },
    "smollm3 windows": {
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 2000.0},
    },
    "stablelm": {
        "use_qkv_bias": True,
        "layer_norm_eps": 1e-3,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 300.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "starcoder2": {
        "use_bias": True,
        "sliding_window": 5,
        "norm_epsilon": 1e-3,
        "tie_word_embeddings": False,
        "residual_dropout": 0.0,
        "rope_parameters": LLAMA3,
    },
    "starcoder2 no biases": {
        "use_bias": False,
        "head_dim": 12,
        "hidden_act": "gelu",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0},
    },
    "arcee": {
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 12,
        "tie_word_embeddings": True,
        "rope_parameters": YARN,
    },
    **MIXTURE_CASES,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_moe not normalized": {
        **_QWEN3_MOE,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "tie_word_embeddings": True,
    },
    "qwen3_moe windows": {**_QWEN3_MOE, "use_sliding_window": True, "sliding_window": 5},
    "qwen3_next": {**QWEN3_NEXT, "mlp_only_layers": [0, 2]},
    "qwen3_next not normalized": {
        **QWEN3_NEXT,
        "norm_topk_prob": False,
        "linear_num_value_heads": 6,
        "num_key_value_heads": 4,
    },
    "qwen3_5_moe_text": {**QWEN3_NEXT, "rope_parameters": QWEN3_5["rope_parameters"]},
    "olmoe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "rms_norm_eps": 1e-3,
        "router_aux_loss_coef": 0.03,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    },
    "olmoe normalized": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "num_key_value_heads": None,
        "norm_topk_prob": True,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
        "rope_parameters": YARN,
    },
}


def build(transformers: Any, config: Any) -> nn.Module:
    """A model of the library in its plain arithmetic, on any device."""
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    return model


def their_model(transformers: Any, case: str) -> nn.Module:
    """With random weights, all unlike their initial values: norms are not ones, biases not zero."""
    config = transformers.AutoConfig.for_model(case.split()[0], **{**SIZES, **CASES[case]})
    torch.manual_seed(0)
    model = build(transformers, config)
    with torch.no_grad():
        for tensor in model.state_dict().values():  # biases of experts are buffers
            tensor.add_(torch.randn_like(tensor) * 0.2)
    return model.eval()


def content_of(model: nn.Module) -> dict[str, Any]:
    """The config.json that the library writes for a model."""
    content: dict[str, Any] = json.loads(model.config.to_json_string())
    return content


class Piece(NamedTuple):
    """Rows of one of our tensors and the same rows in the library's."""

    own: Tensor
    place: RowMap
    rows: RowRange


def pieces(model: OwnModel, there: Mapping[str, Tensor]) -> Iterator[Piece]:
    """All rows of all of our tensors, in pieces that are consecutive in the library's."""
    places, fused = hf_rows(model, list(there)), fused_weights(model)
    tensors = {**dict(model.named_parameters()), **saved_buffers(model)}
    for name, whole in tensors.items():
        sections = fused.get(name)
        parts = [whole.data] if sections is None else whole.data.split(sections.sizes)
        for own, tensor in zip(section_names(name, sections), parts, strict=True):
            for rows in places[own].ranges(0, len(tensor)):
                yield Piece(tensor[rows.own_start : rows.own_stop], places[own], rows)


def rows_of(piece: Piece, there: Mapping[str, Tensor]) -> Tensor:
    """The library's rows, as a view."""
    whole = there[piece.place.name]
    if piece.place.matrix_rows is not None:
        assert whole.shape[1] == piece.place.matrix_rows
        whole = whole.flatten(0, 1)
    return whole[piece.rows.start : piece.rows.start + len(piece.own)]


def copy_from_theirs(model: OwnModel, theirs: nn.Module) -> None:
    """All of our tensors, and every row of the library's once: an unused row is an error."""
    state = theirs.state_dict()
    taken = {
        # The biases of all experts are one tensor as their matrices are.
        name: torch.zeros(tensor.shape[: 2 if "_proj_bias" in name or tensor.dim() == 3 else 1])
        for name, tensor in state.items()
    }
    for piece in pieces(model, state):
        there = rows_of(piece, state)
        assert there.shape == piece.own.shape, piece.place
        piece.own.copy_(there)
        rows_of(piece, taken).add_(1)
    if tied_names(model):  # the library lists a tied weight twice
        assert taken.pop("lm_head.weight").sum() == 0
    assert all(bool((rows == 1).all()) for rows in taken.values())


def copy_to_theirs(model: OwnModel, theirs: nn.Module) -> None:
    """All of our tensors into a model with other weights."""
    state = theirs.state_dict()
    with torch.no_grad():
        for piece in pieces(model, state):
            rows_of(piece, state).copy_(piece.own)
