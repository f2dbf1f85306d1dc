"""The model whose weights the benchmarks of checkpoints and exports write."""

from __future__ import annotations

from megatron.core.transformer.config import TransformerConfig


def swiglu_config(num_layers: int, hidden_size: int) -> TransformerConfig:
    """A GPT with SwiGLU, without biases, of heads of 64 channels."""
    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=hidden_size // 64,
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
