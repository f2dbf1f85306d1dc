"""TransformerConfig: everything that decides the shapes and the arithmetic of the model.

`layer_specs.py` makes the specs of the layers out of it; no other code reads these options to build
or to describe a model.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.options import check_options, expect, option, resolve_default
from megatron.core.transformer.latent_config import LatentAttentionOptions
from megatron.core.transformer.layer_pattern import PATTERN_NOUN, layer_pattern
from megatron.core.transformer.moe_config import MoeOptions
from megatron.core.transformer.rotary_config import RotaryOptions
from megatron.core.transformer.spec import Activation, Sinks

# Bounds far beyond any model, within which the number of elements of a weight is an int64.
_MOST_CHANNELS = 2**24


@dataclass(frozen=True)
class TransformerConfig(LatentAttentionOptions, MoeOptions, RotaryOptions):
    """The model's options, under Megatron's names and, where it has them, with its defaults.

    Options left at None are derived from the others once, at construction; `dataclasses.replace`
    therefore keeps the values derived before.

    Raises:
        ConfigError: a value is of the wrong type or out of bounds, or values contradict each other.
    """

    num_layers: int = option(help="number of transformer layers", at_least=1, ceiling=2**16)
    hidden_size: int = option(
        help="channels of each token's hidden state", at_least=1, ceiling=_MOST_CHANNELS
    )
    num_attention_heads: int = option(
        help="query heads of each attention layer", at_least=1, ceiling=_MOST_CHANNELS
    )
    ffn_hidden_size: int | None = option(
        None,
        "channels inside the MLP (default: 4 x --hidden-size; 8/3 x --hidden-size for a gated "
        "MLP, rounded down to a multiple of 64)",
        at_least=1,
        ceiling=4 * _MOST_CHANNELS,
    )
    kv_channels: int | None = option(
        None,
        "channels of one attention head (default: --hidden-size / --num-attention-heads)",
        at_least=1,
        ceiling=_MOST_CHANNELS,
    )
    group_query_attention: bool = option(
        False, "grouped-query attention: query heads share --num-query-groups key and value heads"
    )
    num_query_groups: int | None = option(
        None,
        "key and value heads of each layer (default: 1 with --group-query-attention, otherwise "
        "one per query head)",
        at_least=1,
    )
    max_position_embeddings: int | None = option(
        None, "longest sequence that the model accepts, in tokens (default: no limit)", at_least=1
    )
    window_size: tuple[int, ...] | None = option(
        None,
        "sliding-window attention: how many earlier tokens each token attends to, then 0 for "
        "later ones, as in 1023,0 (default: all earlier tokens)",
        at_least=-1,
        ceiling=2**31,
    )
    window_attn_skip_freq: str | None = option(
        None,
        "layers with the sliding window: N is all but every N-th layer; a list such as "
        "([1]*3+[0])*6 has 1 for each layer with it (default: all layers)",
        requires="window_size",
        noun=PATTERN_NOUN,
        is_pattern=True,
    )
    softmax_type: str = option(
        Sinks.NONE.value,
        "term added to the denominator of the attention's softmax: none (vanilla), 1 "
        "(off-by-one), or a learned value per head (learnable)",
        choices=tuple(kind.value for kind in Sinks),
    )
    softmax_scale: float | None = option(
        None,
        "factor of the products of queries and keys (default: 1 / sqrt(--kv-channels))",
        more_than=0.0,
    )
    attn_logit_softcapping: float | None = option(
        None,
        "cap of the attention's logits: they become cap * tanh(logits / cap) (default: no cap)",
        more_than=0.0,
    )
    attention_output_gate: bool = option(
        False,
        "multiply the output of attention by a sigmoid gate, a learned projection of the "
        "layer's input",
    )
    linear_attention_freq: str | None = option(
        None,
        "layers with linear attention (gated delta net) instead of softmax attention: N is all "
        "but every N-th layer; a list such as ([1]*3+[0])*6 has 1 for each layer with it "
        "(default: none)",
        noun=PATTERN_NOUN,
        is_pattern=True,
    )
    linear_conv_kernel_dim: int = option(
        4,
        "tokens covered by the convolution in linear attention",
        at_least=1,
        ceiling=2**10,
        requires="linear_attention_freq",
    )
    linear_key_head_dim: int = option(
        128,
        "channels of a query or key head in linear attention",
        at_least=1,
        ceiling=_MOST_CHANNELS,
        requires="linear_attention_freq",
    )
    linear_value_head_dim: int = option(
        128,
        "channels of a value head in linear attention",
        at_least=1,
        ceiling=_MOST_CHANNELS,
        requires="linear_attention_freq",
    )
    linear_num_key_heads: int = option(
        16,
        "query heads, and key heads, in linear attention",
        at_least=1,
        ceiling=_MOST_CHANNELS,
        requires="linear_attention_freq",
    )
    linear_num_value_heads: int = option(
        32,
        "value heads in linear attention, a multiple of --linear-num-key-heads",
        at_least=1,
        ceiling=_MOST_CHANNELS,
        requires="linear_attention_freq",
    )
    normalization: str = option(
        "LayerNorm", "type of the normalization layers", choices=("LayerNorm", "RMSNorm")
    )
    norm_epsilon: float = option(
        1e-5, "epsilon that normalization layers add to the variance", more_than=0.0
    )
    layernorm_zero_centered_gamma: bool = option(
        False,
        "store the weight of a normalization layer as its difference from 1, except in linear "
        "attention",
        flag="--apply-layernorm-1p",
    )
    post_norm: bool = option(
        False,
        "also normalize the outputs of attention and MLP before they are added to the hidden state",
    )
    qk_layernorm: bool = option(
        False, "normalize the queries and keys of each head before the rotary embedding"
    )
    qk_layernorm_across_heads: bool = option(
        False,
        "normalize the queries of all heads as one vector, and likewise the keys",
        requires="qk_layernorm",
    )
    swiglu: bool = option(False, "gated MLP with SiLU: silu(gate) * up instead of gelu(up)")
    gated_linear_unit: bool = option(
        False, "gated MLP with --activation-func: activation(gate) * up"
    )
    activation_func: str | None = option(
        None,
        "activation of the MLP (default: gelu; silu with --swiglu)",
        choices=tuple(kind.value for kind in Activation),
    )
    activation_func_clamp_value: float | None = option(
        None,
        "limit of a gated MLP: clamp the gate to at most this value, and up to plus or minus "
        "this value (default: no limit)",
        more_than=0.0,
    )
    glu_linear_offset: float = option(
        0.0, "constant added to the up projection of a gated MLP, after clamping"
    )
    embedding_multiplier: float = option(1.0, "factor of the word embeddings", more_than=0.0)
    final_logit_softcapping: float | None = option(
        None,
        "cap of the output logits: they become cap * tanh(logits / cap) (default: no cap)",
        more_than=0.0,
    )
    z_loss_coeff: float | None = option(
        None,
        "weight of the z loss, the squared log of the output softmax's denominator, which keeps"
        " logits small (default: no z loss)",
        more_than=0.0,
    )
    add_bias_linear: bool = option(
        True, "biases in the linear layers", off_flag="--disable-bias-linear"
    )
    add_qkv_bias: bool = option(False, "bias in the QKV projection even with --disable-bias-linear")
    hf_architecture: str | None = option(
        None,
        "model_type to export as, where several architectures of the transformers library "
        "compute the same (default: that of --hf-model, or the first one)",
        metavar="NAME",
    )
    untie_embeddings_and_output_weights: bool = option(
        False, "use separate weights for word embeddings and output layer"
    )
    attention_dropout: float = option(
        0.1, "dropout probability of the attention weights", at_least=0.0, less_than=1.0
    )
    hidden_dropout: float = option(
        0.1,
        "dropout probability of embeddings and of the outputs of attention and MLP",
        at_least=0.0,
        less_than=1.0,
    )
    init_method_std: float = option(0.02, "standard deviation of the initial weights", at_least=0.0)
    recompute_granularity: str | None = option(
        None,
        "recompute activations in backward instead of keeping them: full recomputes whole "
        "layers and needs the least memory, selective recomputes only the attention between its"
        " projections (default: keep all activations)",
        choices=("full", "selective"),
    )

    def __post_init__(self) -> None:
        check_options(self)
        self._check_latent_attention()
        self._resolve_attention()
        self._resolve_ffn()
        self._check_window()
        self._check_delta_nets()
        self._check_rotation(self.head_dim, self.rotary_dim)
        self._check_moe()
        # Lists of layers are read here, too, so that a wrong one is rejected with the other
        # options.
        self.windowed_layers()
        self.linear_layers()
        self.unrotated_layers()
        self.expert_layers()

    def _resolve_attention(self) -> None:
        heads = self.num_attention_heads
        if not self.multi_latent_attention:
            expect(
                self.kv_channels is not None or self.hidden_size % heads == 0,
                "--hidden-size",
                f"a multiple of --num-attention-heads ({heads}), or --kv-channels",
                self.hidden_size,
            )
            resolve_default(self, "kv_channels", self.hidden_size // heads)

        if not self.group_query_attention:
            # One group per head is the meaning of the missing flag, so a config may be rebuilt
            # from its own values.
            expect(
                self.num_query_groups in (None, heads),
                "--num-query-groups",
                "--group-query-attention beside it",
                self.num_query_groups,
            )

        resolve_default(self, "num_query_groups", 1 if self.group_query_attention else heads)
        expect(
            heads % self.num_key_value_heads == 0,
            "--num-query-groups",
            f"a divisor of --num-attention-heads ({heads})",
            self.num_query_groups,
        )

    def _resolve_ffn(self) -> None:
        if self.swiglu:
            expect(
                self.activation_func in (None, Activation.SILU.value),
                "--activation-func",
                f"{Activation.SILU.value}, since --swiglu is given",
                self.activation_func,
            )

        for flag, is_given in (
            ("--activation-func-clamp-value", self.activation_func_clamp_value is not None),
            ("--glu-linear-offset", self.glu_linear_offset != 0.0),
        ):
            expect(
                self.is_gated or not is_given,
                flag,
                "--swiglu or --gated-linear-unit, which it applies to",
                None,
            )

        gated_size = int((4 * self.hidden_size * 2 / 3) / 64) * 64
        resolve_default(
            self, "ffn_hidden_size", gated_size if self.is_gated else 4 * self.hidden_size
        )
        expect(
            self.ffn_size > 0,
            "--ffn-hidden-size",
            "a value, since the default of gated MLPs, a multiple of 64, is 0 for --hidden-size "
            f"{self.hidden_size}",
            self.ffn_hidden_size,
        )

    def _check_window(self) -> None:
        if self.window_size is not None:
            expect(
                len(self.window_size) == 2 and self.window_size[1] == 0,
                "--window-size",
                "the number of earlier positions that each one attends to, and 0 for later ones "
                "(1023,0 for a window of 1024)",
                self.window_size,
            )

    def _check_delta_nets(self) -> None:
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if self.linear_attention_freq is not None:
            expect(
                values % keys == 0,
                "--linear-num-value-heads",
                f"a multiple of --linear-num-key-heads ({keys})",
                values,
            )

    @property
    def head_dim(self) -> int:
        """Channels of one head's query: `kv_channels`, resolved, or latent attention's."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        assert self.kv_channels is not None  # _resolve_attention set it
        return self.kv_channels

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys and values: `num_query_groups`, resolved."""
        assert self.num_query_groups is not None  # _resolve_attention set it
        return self.num_query_groups

    @property
    def activation(self) -> Activation:
        """Of the MLP. Not filled in, so that a config may be replaced by one without --swiglu."""
        if self.activation_func is not None:
            return Activation(self.activation_func)
        return Activation.SILU if self.swiglu else Activation.GELU

    @property
    def is_gated(self) -> bool:
        """Whether the MLP is a gated one."""
        return self.swiglu or self.gated_linear_unit

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP: `ffn_hidden_size`, resolved."""
        assert self.ffn_hidden_size is not None  # _resolve_ffn set it
        return self.ffn_hidden_size

    @property
    def rotary_dim(self) -> int:
        """Channels of each head that are rotated."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        return int(self.head_dim * self.rotary_percent)

    @property
    def is_rotary_interleaved(self) -> bool:
        """Not filled in, so that a config may be replaced by one of other attention."""
        given = self.rotary_interleaved
        return self.multi_latent_attention if given is None else given

    def linear_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has a gated delta net."""
        return self._layers("--linear-attention-freq", self.linear_attention_freq, False)

    def windowed_layers(self) -> tuple[bool, ...]:
        """For each layer, whether its attention, if it has one, has the window."""
        found = (True,) * self.num_layers
        if self.window_attn_skip_freq is not None:
            found = self._layers("--window-attn-skip-freq", self.window_attn_skip_freq, False)
        # Infinitely many positions before each one are no window.
        has_window = self.window_size is not None and self.window_size[0] != -1
        return found if has_window else (False,) * self.num_layers

    def unrotated_layers(self) -> tuple[bool, ...]:
        """For each layer, whether its attention leaves queries and keys unrotated."""
        if self.position_embedding_type == "none":
            return (True,) * self.num_layers
        return self._layers("--no-rope-freq", self.no_rope_freq, True)

    def expert_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has a mixture of experts."""
        flag, text = "--moe-layer-freq", self.moe_layer_freq
        if self.num_experts is None or text is None:
            return (self.num_experts is not None,) * self.num_layers

        # Megatron counts these layers from the first one on.
        found = layer_pattern(flag, text, self.num_layers, every_nth=True, from_first=True)
        expect(any(found), flag, "at least one layer with experts", text)
        return found

    def _layers(self, flag: str, text: str | None, every_nth: bool) -> tuple[bool, ...]:
        if text is None:
            return (False,) * self.num_layers
        return layer_pattern(flag, text, self.num_layers, every_nth=every_nth)
