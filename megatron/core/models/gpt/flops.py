"""How many floating point operations the model's arithmetic takes: the numerator of TFLOP/s and of
utilization.
"""

from __future__ import annotations

from megatron.core.transformer.spec import (
    AttentionSpec,
    DenseSpec,
    FeedForward,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mixer,
    ModelSpec,
)


def num_floating_point_operations(
    spec: ModelSpec, vocab_size: int, seq_length: int, batch: int = 1
) -> int:
    """Operations of forward and backward over `batch` sequences of `seq_length` tokens.

    Counted as Megatron does: the matrix products only, two operations per multiply-add; backward is
    twice forward (Narayanan et al. 2021, arXiv:2104.04473, appendix); what recomputation repeats is
    not counted. Attention scores and their product with the values count half of seq_length^2, for
    the causal mask leaves half of them, and less within a window. A delta net's recurrence counts
    four products with its state.

    Args:
        spec: the model's shapes.
        vocab_size: rows of the output projection, padding included.
        seq_length: tokens per sequence.
        batch: sequences.
    """
    forward = sum(
        _mixer_forward(layer.mixer, spec.hidden_size, seq_length)
        + seq_length * _feed_forward(layer.feed_forward, spec.hidden_size)
        for layer in spec.layers
    )
    forward += 2 * spec.hidden_size * vocab_size * seq_length
    return 3 * forward * batch


def _mixer_forward(spec: Mixer, hidden_size: int, seq_length: int) -> int:
    """Forward operations of one mixer for one sequence."""
    if isinstance(spec, GatedDeltaNetSpec):
        return 2 * seq_length * _delta_net_products(spec, hidden_size)
    if isinstance(spec, LatentAttentionSpec):
        return _latent_attention_forward(spec, hidden_size, seq_length)
    return _attention_forward(spec, hidden_size, seq_length)


def _attention_forward(spec: AttentionSpec, hidden_size: int, seq_length: int) -> int:
    gate = spec.query_size if spec.has_output_gate else 0
    projections = hidden_size * (2 * spec.query_size + 2 * spec.key_value_size + gate)

    # Twice the pairs of positions: seq^2 under the causal mask alone.
    window = min(spec.window or seq_length, seq_length)
    twice_pairs = window * (2 * seq_length - window)
    # Two products (scores, then values) of a multiply-add for each pair.
    return 2 * projections * seq_length + 2 * twice_pairs * spec.query_size


def _latent_attention_forward(spec: LatentAttentionSpec, hidden_size: int, seq_length: int) -> int:
    rank, latent = spec.query_rank, spec.key_value_rank
    if rank is None:
        queries = hidden_size * spec.query_size
    else:
        queries = hidden_size * rank + rank * spec.query_size
    keys_and_values = hidden_size * (latent + spec.rotary_dim)
    keys_and_values += latent * (spec.num_heads * spec.content_dim + spec.value_size)
    projections = queries + keys_and_values + spec.value_size * hidden_size

    # Products of queries and keys, then of weights and values, for half of all pairs.
    return 2 * projections * seq_length + seq_length**2 * (spec.query_size + spec.value_size)


def _delta_net_products(spec: GatedDeltaNetSpec, hidden_size: int) -> int:
    """Multiply-adds of one gated delta net for one token."""
    heads = spec.num_value_heads
    projections = hidden_size * (2 * spec.key_size + 3 * spec.value_size + 2 * heads)
    convolution = spec.conv_kernel * (2 * spec.key_size + spec.value_size)
    recurrence = 4 * heads * spec.key_head_dim * spec.value_head_dim
    return projections + convolution + recurrence


def _feed_forward(spec: FeedForward, hidden_size: int) -> int:
    """Forward operations of one feed-forward network for one token."""
    if isinstance(spec, DenseSpec):
        return _dense_forward(spec, hidden_size)

    router = spec.router
    total = 2 * hidden_size * router.num_experts
    total += router.top_k * _dense_forward(spec.expert, hidden_size)
    if spec.shared is not None:
        total += _dense_forward(spec.shared, hidden_size)
    return total + (2 * hidden_size if spec.has_shared_gate else 0)


def _dense_forward(spec: DenseSpec, hidden_size: int) -> int:
    """Forward operations of one MLP for one token."""
    return 2 * (3 if spec.is_gated else 2) * hidden_size * spec.size
