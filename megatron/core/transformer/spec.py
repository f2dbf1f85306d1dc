"""The parts of a model: frozen values that specify, layer by layer, which modules to build.

`layer_specs.model_spec` derives them from the flags, once. Everything else (the model, its
FLOP count, the mapping to the transformers library) reads specs and never flags, so layers of
different kinds are combined without a branch on the name of a model. Three gated delta nets and one
gated attention, repeated:

    layers = (LayerSpec(GatedDeltaNetSpec(...), DenseSpec(...), norm),) * 3 + (
        LayerSpec(AttentionSpec(has_output_gate=True, ...), DenseSpec(...), norm),
    )

Sizes are counted in channels (features of the hidden state or of a head) and positions (tokens of a
sequence).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class NormKind(enum.Enum):
    """Which arithmetic a norm has."""

    LAYER_NORM = "LayerNorm"
    RMS_NORM = "RMSNorm"


class Activation(enum.Enum):
    """The function between the two linear layers of a feed-forward network."""

    GELU = "gelu"  # exact, with erf
    GELU_TANH = "gelu_tanh"  # its approximation by tanh
    QUICK_GELU = "quick_gelu"  # its approximation x * sigmoid(1.702 x)
    SILU = "silu"
    SQUARED_RELU = "squared_relu"


class Sinks(enum.Enum):
    """The softmax's extra term in the denominator besides the keys, for each head."""

    NONE = "vanilla"
    ZERO = "off-by-one"  # exp(0): a key that is always there and has no value
    LEARNED = "learnable"  # exp of a learned logit


class Scores(enum.Enum):
    """How a router's logits become scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class Balancing(enum.Enum):
    """Over which tokens an auxiliary loss balances the experts."""

    NONE = "none"
    MICROBATCH = "aux_loss"  # all tokens of a rank's microbatch together
    SEQUENCE = "seq_aux_loss"  # the tokens of each sequence by itself


class DropPolicy(enum.Enum):
    """Which tokens an expert keeps that has more than its capacity."""

    PROBS = "probs"  # the ones with the largest weights
    POSITION = "position"  # the first ones


@dataclass(frozen=True)
class NormSpec:
    """A normalization over the last dim.

    Attributes:
        eps: added to the variance, or to the mean of squares, before its root is taken.
        is_zero_centered: the weight is stored as its difference from one.
    """

    kind: NormKind
    eps: float
    is_zero_centered: bool = False


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths are stretched by `factor`, short ones kept, the others blended.

    Attributes:
        low_freq_factor, high_freq_factor: wavelengths above `original_length / low_freq_factor`
            positions are long, the ones below `original_length / high_freq_factor` short.
        original_length: positions of the training before the model was extended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True)
class YarnScaling:
    """Wavelengths that turn fewer than `beta_slow` times within `original_length` positions are
    stretched by `factor`, the ones that turn more than `beta_fast` times kept, the others blended;
    the cosines and sines are multiplied by `attention_factor` (Peng et al. 2023, arXiv:2309.00071).

    Attributes:
        rounds_range: whether the channels where blending starts and ends are whole numbers.
    """

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    rounds_range: bool


RotaryScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True)
class RotarySpec:
    """The rotation of queries and keys by their positions.

    Attributes:
        dim: channels of each head that are rotated.
        base: of the wavelengths.
        is_interleaved: neighbouring channels are turned together, 2i and 2i + 1; else channel i of
            the first half and channel i of the second one.
    """

    dim: int
    base: float
    scaling: RotaryScaling | None = None
    is_interleaved: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """Self-attention with grouped queries.

    Attributes:
        num_heads: of queries.
        num_key_value_heads: of keys, and of values; a divisor of `num_heads`.
        head_dim: channels of one head.
        scale: what products of queries and keys are multiplied by.
        rotary: of the first channels of each head; None leaves queries and keys unrotated.
        window: how many positions each one attends to, itself included; None: all before it.
        sinks: the softmax's extra term in the denominator.
        qk_norm: of queries and keys, before the rotation.
        qk_norm_is_per_head: it is one of each head; else of all heads' channels together.
        has_output_gate: the heads' outputs are multiplied by the sigmoid of a projection of the
            input, which is a section of the fused QKV weight.
        softcap: products of queries and keys become softcap * tanh(product / softcap).
        has_qkv_bias, has_output_bias: of the two projections.
        is_causal: each position attends to itself and earlier ones; else to all of its document.
            Then there are no window, sinks and softcap.
    """

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    scale: float
    rotary: RotarySpec | None = None
    window: int | None = None
    sinks: Sinks = Sinks.NONE
    qk_norm: NormSpec | None = None
    qk_norm_is_per_head: bool = True
    has_output_gate: bool = False
    softcap: float | None = None
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    dropout: float = 0.0
    is_causal: bool = True

    @property
    def query_size(self) -> int:
        """Channels of all query heads together; also the width of the attention's output before
        its projection.
        """
        return self.num_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Channels of all key heads together, and of all value heads together."""
        return self.num_key_value_heads * self.head_dim


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Causal self-attention whose keys and values are computed from a latent much smaller than they
    are: multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434).

    A head's query and key have channels that depend on the content alone, and behind them channels
    that are rotated. The rotated channels of the key are the same for all heads, and are computed
    from the layer's input.

    Attributes:
        query_rank: channels of the latent of the queries; None: these are computed from the layer's
            input.
        key_value_rank: channels of the latent of keys and values.
        content_dim, rotary_dim: channels of a head's query and key, of either kind.
        value_dim: channels of a head's value.
        scale: what products of queries and keys are multiplied by.
        rotary: None leaves the rotary channels as they are.
        latent_norm: of each latent, or None.
        has_output_bias: of the projection of the heads' outputs, the only one that may have one.
    """

    num_heads: int
    query_rank: int | None
    key_value_rank: int
    content_dim: int
    rotary_dim: int
    value_dim: int
    scale: float
    rotary: RotarySpec | None = None
    latent_norm: NormSpec | None = None
    has_output_bias: bool = False
    dropout: float = 0.0

    @property
    def head_dim(self) -> int:
        """Channels of one head's query, and of its key."""
        return self.content_dim + self.rotary_dim

    @property
    def query_size(self) -> int:
        """Channels of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def value_size(self) -> int:
        """Channels of all value heads together; also the width of the attention's output before its
        projection.
        """
        return self.num_heads * self.value_dim


@dataclass(frozen=True)
class GatedDeltaNetSpec:
    """Linear attention whose state decays and is corrected by the delta rule (Yang et al. 2024,
    arXiv:2412.06464).

    Attributes:
        num_key_heads: of queries, and of keys.
        num_value_heads: of values, gates and states; a multiple of `num_key_heads`.
        key_head_dim, value_head_dim: channels of one head.
        conv_kernel: positions that the causal convolution of queries, keys and values covers.
        norm_eps: of the gated norm of the heads' outputs.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    norm_eps: float

    @property
    def key_size(self) -> int:
        """Channels of all query heads together, and of all key heads together."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Channels of all value heads together."""
        return self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class DenseSpec:
    """A position-wise network of two linear layers.

    Attributes:
        size: channels between the two.
        is_gated: the first layer has a gate and an up projection: activation(gate) * up.
        clamp: bound of the gate from above, and of up from both sides; gated ones only.
        up_offset: added to up after that: activation(gate) * (up + up_offset); gated ones only.
    """

    size: int
    activation: Activation
    is_gated: bool
    has_bias: bool
    clamp: float | None = None
    up_offset: float = 0.0


@dataclass(frozen=True)
class RouterSpec:
    """The choice of experts for each token, and their weights.

    Attributes:
        top_k: experts of each token.
        scores: how logits become scores.
        is_scored_first: scores are taken over all experts, and the largest are chosen; else the
            largest logits are chosen, and scores are taken over these. Sigmoids are the same both
            ways.
        is_normalized: a token's weights are divided by their sum.
        scale: their factor after that.
        num_groups, top_groups: experts in groups, of which a token chooses the `top_groups` with
            the largest sums of their two best scores, and experts in these only.
        has_bias: of the logits; learned.
        has_expert_bias: a bias of the scores that counts in the choice only; not learned but moved
            by `bias_update_rate` in each step, up for experts with less than the mean load.
        dtype: "fp32" or "fp64", in which logits and scores are computed; None: logits in the
            compute dtype, scores in fp32.
        balancing, balance_coeff: the auxiliary loss.
        z_coeff: weight of the mean squared log-sum-exp of the logits (Zoph et al. 2022,
            arXiv:2202.08906); 0: no such loss.
    """

    num_experts: int
    top_k: int
    scores: Scores
    is_scored_first: bool
    is_normalized: bool
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    has_bias: bool = False
    has_expert_bias: bool = False
    bias_update_rate: float = 0.0
    dtype: str | None = None
    balancing: Balancing = Balancing.NONE
    balance_coeff: float = 0.0
    z_coeff: float = 0.0


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts: dense networks, of which a router chooses some for each token.

    Attributes:
        expert: one of them.
        shared: a network besides that computes every token.
        has_shared_gate: its output is multiplied by the sigmoid of a projection of the token.
        capacity_factor: an expert takes at most this times an even share of the tokens; None: all.
        drop_policy: which ones it takes.
        rows_are_inputs: the rows of an expert's stored matrices are its input channels, and in the
            columns of the first one gate and up alternate; else rows are output channels, the
            gate's before the up rows.
    """

    router: RouterSpec
    expert: DenseSpec
    shared: DenseSpec | None = None
    has_shared_gate: bool = False
    capacity_factor: float | None = None
    drop_policy: DropPolicy = DropPolicy.PROBS
    rows_are_inputs: bool = False


Mixer = AttentionSpec | LatentAttentionSpec | GatedDeltaNetSpec
FeedForward = DenseSpec | MoeSpec


@dataclass(frozen=True)
class LayerSpec:
    """One layer: a mixer, which moves information between positions, and a feed-forward network.
    Each reads the normalized residual stream and adds its output to it.

    Attributes:
        norm: of the residual stream before each.
        post_norm: of each one's output before it is added; None: it is added as it is.
        dropout: of each one's output, in training.
    """

    mixer: Mixer
    feed_forward: FeedForward
    norm: NormSpec
    post_norm: NormSpec | None = None
    dropout: float = 0.0


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only language model.

    Attributes:
        hidden_size: width of the residual stream.
        final_norm: of the residual stream after the last layer.
        is_tied: the output projection reads the embedding's weight.
        max_length: positions of the longest sequence the model accepts; None: no limit.
        embedding_scale: what embeddings are multiplied by.
        logit_softcap: logits become logit_softcap * tanh(logit / logit_softcap).
        dropout: of the embeddings, in training.
        init_std: standard deviation of the initial weights.
        output_init_std: that of the projections that write into the residual stream.
        z_loss_coeff: of the square of log(sum(exp(logits))) of each token, which training adds to
            its loss.
    """

    layers: tuple[LayerSpec, ...]
    hidden_size: int
    final_norm: NormSpec
    is_tied: bool
    max_length: int | None
    embedding_scale: float
    logit_softcap: float | None
    dropout: float
    init_std: float
    output_init_std: float
    z_loss_coeff: float = 0.0

    @property
    def mixtures(self) -> tuple[MoeSpec, ...]:
        """The feed-forward networks that are mixtures of experts, in the order of the layers."""
        networks = (layer.feed_forward for layer in self.layers)
        return tuple(network for network in networks if isinstance(network, MoeSpec))
