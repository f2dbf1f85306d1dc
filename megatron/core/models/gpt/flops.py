"""How many floating point operations the model's arithmetic takes: the numerator of TFLOP/s and of
utilization.
"""

from __future__ import annotations

from megatron.core.transformer.config import TransformerConfig


def num_floating_point_operations(
    config: TransformerConfig, vocab_size: int, seq_length: int, batch: int = 1
) -> int:
    """Operations of forward and backward over `batch` sequences of `seq_length` tokens.

    Counted as Megatron does: the matrix products only, two operations per multiply-add; backward is
    twice forward (Narayanan et al. 2021, arXiv:2104.04473, appendix); what recomputation repeats is
    not counted. Attention scores and their product with the values count half of seq_length^2, for
    the causal mask leaves half of them.

    Args:
        config: the model's shapes.
        vocab_size: rows of the output projection, padding included.
        seq_length: tokens per sequence.
        batch: sequences.
    """
    forward_per_token = (
        config.num_layers * _layer_forward(config, seq_length) + 2 * config.hidden_size * vocab_size
    )
    return 3 * forward_per_token * seq_length * batch


def _layer_forward(config: TransformerConfig, seq_length: int) -> int:
    """Forward operations of one layer for one token."""
    qkv_and_proj = config.hidden_size * (config.query_size + 2 * config.key_value_size) + (
        config.query_size * config.hidden_size
    )
    mlp = (3 if config.swiglu else 2) * config.hidden_size * config.ffn_size
    # Two products (scores, then values), each of half a multiply-add per pair of positions: 2 * 2 /
    # 2.
    attention = 2 * seq_length * config.query_size
    return 2 * (qkv_and_proj + mlp) + attention
