"""TransformerConfig: everything that decides the shapes and the arithmetic of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.core.options import check_options, expect, option, resolve_default

# Bounds far beyond any model, within which the number of elements of a weight is an int64.
_MOST_CHANNELS = 2**24


@dataclass(frozen=True)
class TransformerConfig:
    """The model's options, under Megatron's names and, where it has them, with its defaults.

    Options left at None are derived from the others once, at construction; `dataclasses.replace`
    therefore keeps the values derived before.

    Raises:
        ConfigError: a value is of the wrong type or out of bounds, or values contradict each other.
    """

    num_layers: int = option(help="number of transformer layers", at_least=1, ceiling=2**16)
    hidden_size: int = option(
        help="width of the residual stream", at_least=1, ceiling=_MOST_CHANNELS
    )
    num_attention_heads: int = option(
        help="number of query heads", at_least=1, ceiling=_MOST_CHANNELS
    )
    ffn_hidden_size: int | None = option(
        None,
        "width inside the MLP (default: 4 x hidden; with --swiglu 2/3 of it, cut to a multiple of "
        "64)",
        at_least=1,
        ceiling=4 * _MOST_CHANNELS,
    )
    kv_channels: int | None = option(
        None,
        "channels of one attention head (default: hidden / heads)",
        at_least=1,
        ceiling=_MOST_CHANNELS,
    )
    group_query_attention: bool = option(
        False, "share key and value heads among query heads (needs --num-query-groups)"
    )
    num_query_groups: int | None = option(
        None, "number of key and value heads (default: one per query head)", at_least=1
    )
    max_position_embeddings: int | None = option(
        None, "longest sequence the model accepts (default: no limit of its own)", at_least=1
    )
    position_embedding_type: str = option(
        "rope", "how positions enter the model", choices=("rope", "none")
    )
    rotary_base: float = option(10000.0, "base of the rotary wavelengths", more_than=1.0)
    rotary_percent: float = option(
        1.0, "share of each head's channels that is rotated", more_than=0.0, at_most=1.0
    )
    normalization: str = option(
        "LayerNorm", "normalization layer", choices=("LayerNorm", "RMSNorm")
    )
    norm_epsilon: float = option(
        1e-5, "added to the variance before its root is taken", more_than=0.0
    )
    qk_layernorm: bool = option(False, "normalize each head's queries and keys before the rotation")
    swiglu: bool = option(False, "gated MLP, silu(gate) * up, in place of GELU")
    add_bias_linear: bool = option(
        True, "biases in the linear layers", off_flag="--disable-bias-linear"
    )
    add_qkv_bias: bool = option(
        False, "bias in the QKV projection even under --disable-bias-linear"
    )
    untie_embeddings_and_output_weights: bool = option(
        False, "give the output layer a weight of its own"
    )
    attention_dropout: float = option(
        0.1, "dropout of the attention probabilities", at_least=0.0, less_than=1.0
    )
    hidden_dropout: float = option(
        0.1, "dropout of embeddings and residual branches", at_least=0.0, less_than=1.0
    )
    init_method_std: float = option(0.02, "standard deviation of the initial weights", at_least=0.0)
    recompute_granularity: str | None = option(
        None,
        "recompute in backward: whole layers, or the attention core only",
        choices=("full", "selective"),
    )

    def __post_init__(self) -> None:
        check_options(self)
        self._resolve_attention()
        self._resolve_ffn()
        if self.position_embedding_type == "rope":
            expect(
                self.rotary_dim >= 2 and self.rotary_dim % 2 == 0,
                "--rotary-percent",
                f"an even, positive share of the {self.head_dim} channels of a head "
                "(--kv-channels)",
                self.rotary_dim,
            )

    def _resolve_attention(self) -> None:
        heads = self.num_attention_heads
        if self.kv_channels is None:
            expect(
                self.hidden_size % heads == 0,
                "--hidden-size",
                f"a multiple of --num-attention-heads ({heads}), or --kv-channels",
                self.hidden_size,
            )

        resolve_default(self, "kv_channels", self.hidden_size // heads)
        if self.group_query_attention:
            expect(
                self.num_query_groups is not None,
                "--group-query-attention",
                "--num-query-groups beside it",
                None,
            )
        else:
            # One group per head is what the absence of the flag means, so a config may be rebuilt
            # from its own values.
            expect(
                self.num_query_groups in (None, heads),
                "--num-query-groups",
                "--group-query-attention beside it",
                self.num_query_groups,
            )

        resolve_default(self, "num_query_groups", heads)
        expect(
            heads % self.num_key_value_heads == 0,
            "--num-query-groups",
            f"a divisor of --num-attention-heads ({heads})",
            self.num_query_groups,
        )

    def _resolve_ffn(self) -> None:
        gated_size = int((4 * self.hidden_size * 2 / 3) / 64) * 64
        resolve_default(
            self, "ffn_hidden_size", gated_size if self.swiglu else 4 * self.hidden_size
        )
        expect(
            self.ffn_size > 0,
            "--ffn-hidden-size",
            f"a value of its own where --swiglu would give --hidden-size {self.hidden_size} no "
            "whole 64 channels",
            self.ffn_hidden_size,
        )

    @property
    def head_dim(self) -> int:
        """Channels of one head: `kv_channels`, resolved."""
        assert self.kv_channels is not None  # _resolve_attention set it
        return self.kv_channels

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys and values: `num_query_groups`, resolved."""
        assert self.num_query_groups is not None  # _resolve_attention set it
        return self.num_query_groups

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP: `ffn_hidden_size`, resolved."""
        assert self.ffn_hidden_size is not None  # _resolve_ffn set it
        return self.ffn_hidden_size

    @property
    def query_size(self) -> int:
        """Channels of all query heads together; also the width of the attention's output before its
        projection.
        """
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Channels of all key heads together, and of all value heads together."""
        return self.num_key_value_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Channels of each head that are rotated."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def output_init_std(self) -> float:
        """Standard deviation of the projections that write into the residual stream.

        There are two per layer; the variance of their sum over the depth is that of one (GPT-2,
        Radford et al. 2019).
        """
        return self.init_method_std / math.sqrt(2 * self.num_layers)
