"""The count of floating point operations, held against torch's own counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.models.gpt.flops import num_floating_point_operations
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.layer_specs import model_spec

VOCAB, SEQ, BATCH = 48, 16, 3


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"swiglu": True, "ffn_hidden_size": 40},
        {
            "group_query_attention": True,
            "num_query_groups": 2,
            "untie_embeddings_and_output_weights": True,
        },
        {"kv_channels": 16},
        {
            "num_experts": 8,
            "moe_router_topk": 3,
            "swiglu": True,
            "moe_ffn_hidden_size": 24,
            "moe_layer_freq": "[0,1]",
            "moe_shared_expert_intermediate_size": 40,
            "moe_shared_expert_gate": True,
        },
        {"num_experts": 8, "moe_ffn_hidden_size": 24},
    ],
)
def test_count_is_that_of_the_matrix_products_with_attention_halved(
    changes: dict[str, Any],
) -> None:
    config = TransformerConfig(2, 32, 4, attention_dropout=0.0, hidden_dropout=0.0, **changes)
    model = GPTModel(config, VOCAB)
    query_size = config.num_attention_heads * config.head_dim
    tokens = torch.randint(VOCAB, (BATCH, SEQ))
    # The written-out kernel is made of products that the counter has; it does not skip scores that
    # the mask hides.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).sum().backward()
    attention = 3 * config.num_layers * (2 * 2 * SEQ * SEQ * query_size) * BATCH
    counted = counter.get_total_flops()
    assert num_floating_point_operations(model.spec, VOCAB, SEQ, BATCH) == counted - attention // 2


def test_a_window_counts_the_pairs_of_positions_within_it() -> None:
    def attention(length: int, window: int | None) -> int:
        size = None if window is None else (window - 1, 0)
        spec = model_spec(TransformerConfig(1, 32, 4, window_size=size))
        nothing = model_spec(TransformerConfig(1, 32, 4, window_size=(0, 0)))
        return num_floating_point_operations(spec, VOCAB, length) - (
            num_floating_point_operations(nothing, VOCAB, length)
        )

    # Each pair costs two multiply-adds for each of 32 channels, forward, and twice that backward.
    # Half of the diagonal is counted, as for full attention.
    def pairs(length: int, window: int) -> float:
        inside = sum(min(position + 1, window) for position in range(length))
        return inside - window / 2

    for window in (1, 5, 64):
        expected = 3 * 4 * 32 * (pairs(64, window) - pairs(64, 1))
        assert attention(64, window) == pytest.approx(expected, rel=1e-3)
    assert attention(64, 64) == attention(64, None) == attention(64, 1000)


def test_count_of_a_mixture_follows_the_chosen_experts_and_not_their_number() -> None:
    def count(**changes: Any) -> int:
        spec = model_spec(TransformerConfig(1, 32, 4, **changes))
        return num_floating_point_operations(spec, VOCAB, SEQ)

    few, many = (count(num_experts=number, moe_router_topk=4) for number in (4, 64))
    assert many - few == 3 * 2 * SEQ * 32 * 60  # the router's logits
    bounded = count(num_experts=64, moe_router_topk=4, moe_expert_capacity_factor=1.0)
    assert bounded == many


@pytest.mark.parametrize("query_rank", [None, 12])
def test_latent_attention_counts_its_projections_and_half_of_all_pairs(
    query_rank: int | None,
) -> None:
    config = TransformerConfig(
        2,
        32,
        4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        multi_latent_attention=True,
        q_lora_rank=query_rank,
        kv_lora_rank=20,
        qk_head_dim=6,
        qk_pos_emb_head_dim=4,
        v_head_dim=7,
    )
    model = GPTModel(config, VOCAB)
    tokens = torch.randint(VOCAB, (BATCH, SEQ))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).sum().backward()
    products = counter.get_total_flops()  # the kernel of the CPU is none that it knows
    pairs = 3 * 2 * (SEQ * SEQ * 4 * (10 + 7)) * BATCH
    assert num_floating_point_operations(model.spec, VOCAB, SEQ, BATCH) == products + pairs
