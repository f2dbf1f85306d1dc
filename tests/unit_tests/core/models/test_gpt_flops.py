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
    ],
)
def test_count_is_that_of_the_matrix_products_with_attention_halved(
    changes: dict[str, Any],
) -> None:
    config = TransformerConfig(2, 32, 4, attention_dropout=0.0, hidden_dropout=0.0, **changes)
    model = GPTModel(config, VOCAB)
    tokens = torch.randint(VOCAB, (BATCH, SEQ))
    # The written-out kernel is made of products that the counter knows; it does not skip what the
    # mask hides.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).sum().backward()
    attention = 3 * config.num_layers * (2 * 2 * SEQ * SEQ * config.query_size) * BATCH
    counted = counter.get_total_flops()
    assert num_floating_point_operations(config, VOCAB, SEQ, BATCH) == counted - attention // 2


def test_count_of_gpt3_175b_is_about_six_per_parameter_and_token() -> None:
    config = TransformerConfig(96, 12288, 96)
    per_token = num_floating_point_operations(config, 51200, 2048) / 2048
    assert per_token == pytest.approx(6 * 175e9, rel=0.03)
