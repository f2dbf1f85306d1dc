"""How much memory a model's forward keeps for its backward, from its shapes.

Counted tensor by tensor, as the modules' forwards leave them to autograd: inputs of matrix products
and norms, what attention's kernel reads, both factors of a gate. In low precision, a projection
keeps the codes of its input. Statistics of rows (a mean, a log-sum-exp) and the angles of positions
are left out, being a few bytes a token. So are the blocks that windowed attention cuts, and dropout
masks of attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron.core.transformer.delta_rule import state_nbytes
from megatron.core.transformer.linear_cross_entropy import BLOCK_NUMEL, sizes_for
from megatron.core.transformer.spec import (
    AttentionSpec,
    DenseSpec,
    FeedForward,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mixer,
    ModelSpec,
    MoeSpec,
    NormKind,
    NormSpec,
)

_FP32 = 4


@dataclass(frozen=True)
class Microbatch:
    """What runs through the model at once, and on what.

    Attributes:
        size: sequences.
        seq_length: tokens of each.
        itemsize: bytes of an element of the compute dtype.
        device_kind: `Device.kind`. On the CPU torch composes RMSNorm of single operations, and the
            norm keeps two fp32 tensors instead of its input; delta nets keep more states.
        exchanges_tokens: whether tokens travel to experts on other ranks, as many coming as going.
        context_size: ranks that divide each sequence. In attention and delta nets, whole sequences
            of some heads take as many bytes as slices of all heads.
        gathers: whether these ranks keep slices of all heads instead.
        tensor_size: ranks that divide each layer. All positions of some heads or channels take as
            many bytes as some positions of all of them.
        code_nbytes: bytes, with scales, of an element that a projection keeps in low precision;
            None: projections keep their inputs as they are.
    """

    size: int
    seq_length: int
    itemsize: int
    device_kind: str
    exchanges_tokens: bool = False
    context_size: int = 1
    gathers: bool = False
    tensor_size: int = 1
    code_nbytes: float | None = None

    def projected(self, size: int) -> float:
        """Bytes a token of a projection's input, of `size` channels, if no other layer saves it."""
        return size * (self.itemsize if self.code_nbytes is None else self.code_nbytes)

    def gathered(self, size: int) -> float:
        """The same of a projection that ranks divide. In low precision it keeps all positions."""
        copies = 1 if self.code_nbytes is None else self.tensor_size
        return copies * self.projected(size)

    def projected_beside(self, size: int) -> float:
        """The same, if another layer saves the input in the compute dtype as well."""
        return 0 if self.code_nbytes is None else size * self.code_nbytes

    @property
    def num_tokens(self) -> int:
        """The tokens of this rank between layers."""
        return self.num_layer_tokens // self.tensor_size

    @property
    def num_layer_tokens(self) -> int:
        """The tokens of a layer's heads and channels: of all ranks that divide the layer."""
        return self.size * self.seq_length // self.context_size

    def num_head_copies(self, num_heads: int) -> int:
        """How many ranks keep the same positions of each of these heads."""
        num_own = max(1, num_heads // self.tensor_size)
        own_copies = num_own * self.tensor_size // num_heads
        if self.gathers:
            return own_copies
        return own_copies * math.lcm(num_own, self.context_size) // num_own


@dataclass(frozen=True)
class ActivationBytes:
    """The memory of one microbatch between its forward and its backward.

    Attributes:
        layers: kept by each layer, in their order.
        recomputed: bytes of the largest layer during its backward, where layers keep only
            their inputs.
        rest: the final norm's input.
        loss: in addition, while the losses are computed: logits of a chunk of tokens, and the
            gradients of hidden states and of the head's weight, in fp32.
        exchanged: in addition, on ranks that divide layers, copies of whole rows in the last
            exchange of a layer.
    """

    layers: tuple[int, ...]
    recomputed: int
    rest: int
    loss: int
    exchanged: int

    @property
    def kept(self) -> int:
        """All that waits for the backward once the forward has ended."""
        return sum(self.layers) + self.rest


def activation_bytes(
    spec: ModelSpec,
    vocab_size: int,
    batch: Microbatch,
    recompute_granularity: str | None = None,
    num_bf16_layers: tuple[int, int] = (0, 0),
) -> ActivationBytes:
    """Bytes that a training step with a loss in one number keeps; see `weighted_cross_entropy`.

    Args:
        vocab_size: rows of the output projection.
        recompute_granularity: see TransformerConfig; "selective" recomputes only what no other
            operation keeps anyway.
        num_bf16_layers: layers at the start and at the end that are not in low precision.
    """
    first, last = num_bf16_layers[0], len(spec.layers) - num_bf16_layers[1]
    in_bf16 = replace(batch, code_nbytes=None)
    whole = [
        _layer(layer, spec.hidden_size, batch if first <= number < last else in_bf16)
        for number, layer in enumerate(spec.layers)
    ]
    layers, recomputed = whole, 0
    if recompute_granularity == "full":
        of_input = batch.num_tokens * batch.itemsize * spec.hidden_size
        layers, recomputed = [of_input] * len(whole), max(whole, default=0)

    rest = batch.num_tokens * _norm_input(spec.final_norm, spec.hidden_size, batch.itemsize, batch)
    of_loss = _loss(spec.hidden_size, vocab_size // batch.tensor_size, batch)
    exchanged = _exchanged(spec, batch, is_recomputed=layers is not whole)
    return ActivationBytes(tuple(layers), recomputed, rest, of_loss, exchanged)


def _exchanged(spec: ModelSpec, batch: Microbatch, *, is_recomputed: bool) -> int:
    """Bytes of hidden states in the last exchange of the last layer."""
    last = spec.layers[-1].feed_forward
    # Attention is over when experts have activations, which take more.
    ends_in_experts = isinstance(last, MoeSpec) and last.shared is None
    if batch.tensor_size == 1 or ends_in_experts:
        return 0
    # Several rows are copied to be in the order of the ranks, or to be in rows again.
    own, num_copies = batch.num_tokens * spec.hidden_size, 1 if batch.size == 1 else 2
    whole = batch.tensor_size * own * batch.itemsize
    if is_recomputed:
        # The last is the gather of the outputs' gradients: recomputation ends before the scatter.
        return num_copies * whole
    # Sums before and after they are sent, and this rank's in fp32.
    return (num_copies + 1) * whole + own * _FP32


def _loss(hidden_size: int, vocab_size: int, batch: Microbatch) -> int:
    sizes, num_tokens = sizes_for(batch.device_kind), batch.num_layer_tokens
    chunk = min(max(1, sizes.chunk // vocab_size), num_tokens) * vocab_size
    piece = min(max(1, sizes.piece // vocab_size) * vocab_size, chunk)
    weight, is_narrow = vocab_size * hidden_size, batch.itemsize < _FP32
    # Logits; then a piece of them in fp32 and what one operation makes of that, or a product that
    # is added to the weight's gradient.
    product = min(weight, BLOCK_NUMEL) * batch.itemsize if is_narrow else 0
    logits = chunk * batch.itemsize + max(2 * piece * _FP32, product)

    # Backward makes the weight's gradient of the one in fp32, which it may be itself.
    of_backward = weight * batch.itemsize if is_narrow else 0
    of_hidden = num_tokens * hidden_size * batch.itemsize
    gathered = of_hidden if batch.tensor_size > 1 else 0
    gradients = weight * _FP32 + of_hidden + gathered
    return gradients + max(logits, of_backward)


def _layer(spec: LayerSpec, hidden_size: int, batch: Microbatch) -> int:
    """Of one layer."""
    # The residual stream before each norm, and the norms' outputs, which projections read.
    of_norm = _norm_input(spec.norm, hidden_size, batch.itemsize, batch)
    per_token = 2.0 * of_norm
    # A delta net's projection, and a router, read the norm's output as it is.
    for is_read_as_it_is in (
        isinstance(spec.mixer, GatedDeltaNetSpec),
        isinstance(spec.feed_forward, MoeSpec),
    ):
        of_output = hidden_size * batch.itemsize
        per_token += of_output if is_read_as_it_is else batch.gathered(hidden_size)
    if spec.post_norm is not None:
        per_token += 2 * _norm_input(spec.post_norm, hidden_size, batch.itemsize, batch)
    if spec.dropout:
        per_token += 2 * hidden_size  # masks, of a byte an element
    per_token += _mixer(spec.mixer, batch) + _feed_forward(spec.feed_forward, hidden_size, batch)
    if isinstance(spec.mixer, LatentAttentionSpec):
        per_token += batch.projected_beside(hidden_size)  # two projections read it
    nbytes = math.ceil(batch.num_tokens * per_token)
    if isinstance(spec.mixer, GatedDeltaNetSpec):
        nbytes += _delta_states(spec.mixer, batch)
    return nbytes


def _norm_input(spec: NormSpec, size: int, itemsize: int, batch: Microbatch) -> int:
    """Bytes a token that a norm keeps of its input, of `size` channels; `itemsize` 0: the input is
    kept by others already.
    """
    if spec.kind is NormKind.RMS_NORM and batch.device_kind == "cpu":
        # The input in fp32, unless it is that already, and the normalized input.
        own = itemsize if batch.itemsize == _FP32 else _FP32
        return size * (own + _FP32)
    # A zero-centred scale is fp32, and so is the input that it is multiplied with.
    return size * (_FP32 if spec.is_zero_centered and batch.itemsize < _FP32 else itemsize)


def _mixer(spec: Mixer, batch: Microbatch) -> float:
    """Bytes a token of one mixer, but for states of delta nets."""
    if isinstance(spec, GatedDeltaNetSpec):
        return _delta_net(spec, batch)
    if isinstance(spec, LatentAttentionSpec):
        return _latent_attention(spec, batch)
    return _attention(spec, batch)


def _attention(spec: AttentionSpec, batch: Microbatch) -> float:
    query, key_value = spec.query_size, spec.key_value_size
    # The projection, of which values and gates are views; the result, which the next projection
    # reads in rows.
    elements = query + 2 * key_value + query
    if spec.rotary is not None or spec.qk_norm is not None:
        elements += query + key_value
    if spec.has_output_gate:
        # The gates themselves, their sigmoids, and the product.
        elements += 2 * query
        of_product = batch.projected(query)
    else:
        of_product = batch.projected_beside(query)
    elements += 2 * key_value * (batch.num_head_copies(spec.num_key_value_heads) - 1)
    nbytes = elements * batch.itemsize + of_product
    if spec.qk_norm is not None:
        nbytes += _norm_input(spec.qk_norm, query + key_value, 0, batch)
    return nbytes


def _latent_attention(spec: LatentAttentionSpec, batch: Microbatch) -> float:
    # Both latents, or what becomes of them in a norm; queries, keys, values and the result of the
    # heads, these padded to the queries' channels, unless a GPU takes both widths; the result in
    # rows.
    latents = (spec.query_rank or 0) + spec.key_value_rank
    # The latents of keys and values, of all positions on each rank.
    gathered = batch.tensor_size * (spec.key_value_rank + spec.rotary_dim)
    copied = (spec.query_size + spec.value_size) * (batch.num_head_copies(spec.num_heads) - 1)
    of_inputs = batch.projected(latents) + batch.projected(spec.value_size)
    nbytes = of_inputs + (4 * spec.query_size + copied) * batch.itemsize
    if batch.tensor_size > 1:
        nbytes += gathered * batch.itemsize
    if spec.latent_norm is not None:
        nbytes += _norm_input(spec.latent_norm, latents, batch.itemsize, batch)
    return nbytes


def _delta_net(spec: GatedDeltaNetSpec, batch: Microbatch) -> float:
    key = spec.key_size * batch.num_head_copies(spec.num_key_heads)
    value, heads = spec.value_size, spec.num_value_heads
    # The projection, the convolution's output, and the input of the output's projection.
    elements = (2 * key + 2 * value + 2 * heads) + (2 * key + value)
    # The gated norm of the heads' outputs is composed in fp32; rates and decays are fp32.
    copies = 4 if batch.itemsize == _FP32 else 5
    of_floats = _FP32 * (copies * value + 5 * heads)
    return elements * batch.itemsize + batch.projected(value) + of_floats


def _delta_states(spec: GatedDeltaNetSpec, batch: Microbatch) -> int:
    """Of a microbatch: the states at the beginnings of segments, and how a slice changes them."""
    heads = batch.size * spec.num_value_heads // batch.tensor_size
    dims = spec.key_head_dim, spec.value_head_dim
    if batch.context_size == 1 or not batch.gathers:
        heads //= batch.context_size
        return state_nbytes(batch.seq_length, heads, *dims, batch.device_kind)
    states = state_nbytes(batch.seq_length // batch.context_size, heads, *dims, batch.device_kind)
    return states + heads * spec.key_head_dim**2 * _FP32


def _feed_forward(spec: FeedForward, hidden_size: int, batch: Microbatch) -> float:
    """Bytes a token of one feed-forward network."""
    if isinstance(spec, DenseSpec):
        return _dense(spec, batch)
    return _mixture(spec, hidden_size, batch)


def _dense(spec: DenseSpec, batch: Microbatch) -> float:
    """Bytes a token of one MLP, but for its input."""
    inner = batch.projected(spec.size)  # the activation's output, or the product with up
    if not spec.is_gated:
        return spec.size * batch.itemsize + inner  # the activation's input
    clamped = 2 * spec.size if spec.clamp is not None or spec.up_offset else 0
    return (3 * spec.size + clamped) * batch.itemsize + inner  # gate, up, the gate's activation


def _mixture(spec: MoeSpec, hidden_size: int, batch: Microbatch) -> float:
    top_k, num_experts = spec.router.top_k, spec.router.num_experts
    # Tokens in the order of experts, and what experts make of them; twice where they travel.
    others = 3 if batch.exchanges_tokens else 1
    of_tokens = batch.projected(hidden_size) + others * hidden_size * batch.itemsize
    nbytes = top_k * (of_tokens + _dense(spec.expert, batch))
    if spec.shared is not None:
        nbytes += _dense(spec.shared, batch) + batch.projected_beside(hidden_size)
        nbytes += hidden_size * batch.itemsize if spec.has_shared_gate else 0
    # Scores and the choice: a number for each expert, an index and a weight for each chosen one.
    return nbytes + _FP32 * num_experts + 16 * top_k
