"""A model of Llama's shape, of the size that a benchmark is asked for."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.core.transformer.config import TransformerConfig


def llama_config(arguments: argparse.Namespace, **options: Any) -> TransformerConfig:
    """`arguments` has `layers` and `hidden`; heads have 64 channels. `options` are added."""
    return TransformerConfig(
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_attention_heads=arguments.hidden // 64,
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **options,
    )
