"""The core of causal attention, softmax(query key^T) value, and which kernel computes it.

No path holds the scores of all pairs of positions, but for dropout without a window on the CPU,
where PyTorch has no fused kernel. PyTorch's fused attention computes everything but a softcap. It
has a causal mask only, so windows and sinks are expressed by its inputs:

A sink is one more position in front of the others. Its key gives the sink's logit, its value is
zero.

Where `varlen_attention` takes the heads, it has windows. Otherwise a window cuts the queries into
blocks, and each block reads only the keys within its reach. Eight positions under a window of four,
in blocks of two queries:

    position          0 1 2 3 4 5 6 7
    queries 0 .. 3    x x x x            plain causal attention: the window does not bind yet
    queries 4, 5      k k k k x x        k: keys only; a small mask hides keys too far back
    queries 6, 7          k k k k x x

All blocks have the same mask and form one batch. Cost and memory grow with seq * window, on every
device. FlexAttention would also skip masked pairs, but it needs torch.compile and has no backward
on the CPU.

A softcap changes the scores before the softmax, which no fused kernel offers. They are computed in
fp32 for one block of queries at a time, and again in backward.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.autocast import without_autocast
from megatron.core.drivers import kernels_of
from megatron.core.products import is_slow
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.fused_weight import Linear
from megatron.core.transformer.kernel_results import keep_kernel_results
from megatron.core.transformer.rotary import RotaryAngles
from megatron.core.transformer.sequence_slice import ContextExchange, SequenceSlice
from megatron.core.transformer.spec import AttentionSpec, Sinks
from megatron.core.transformer.tensor_exchange import TensorExchange, scattered_linear
from megatron.core.transformer.varlen_attention import attend_varlen, padded, suits_varlen

# A block under a window has half as many queries as the window has positions. Larger blocks compute
# more scores that the mask hides; smaller ones copy each key more often. The bounds keep matrices
# from becoming tiny and masks from becoming large.
_FEWEST_ROWS, _MOST_ROWS = 64, 1024

# Queries per block where scores are held.
_SCORE_ROWS = 256

# Channels added to each head for a learned sink. One would do, but fused kernels for GPUs need head
# sizes in multiples of eight, so PyTorch would pad all three inputs again.
_SINK_CHANNELS = 8

# The largest logit that a query carries for a sink. Its product with the sink's key, which is at
# most 2^15, stays finite in fp32.
_LARGEST_LOGIT = 2.0**100


class Attention(nn.Module, abc.ABC):
    """Attention of every position to itself and earlier ones, or to all positions.

    Args:
        core_spec: the arithmetic once each head has its query, key and value.
        dropout: probability to leave out a weight in training.
        recompute_granularity: see TransformerConfig. "selective": a training forward keeps queries,
            keys and values only, and backward computes the attention again.

    Attributes:
        sinks: [num_heads], the sinks' logits, if they are learned.
        linear_proj: projection of the heads' results to the layer's output.
        exchange: how the core gets the positions of other ranks; None: this rank has all positions.
            Context parallelism sets it.
        tensor: how ranks that divide the heads exchange positions; None: this rank has all heads.
            Tensor parallelism sets it.
    """

    linear_proj: Linear
    exchange: ContextExchange | None = None
    tensor: TensorExchange | None = None
    tensor_dims: Mapping[str, int] = {"sinks": 0}

    def __init__(
        self, core_spec: AttentionSpec, dropout: float, recompute_granularity: str | None
    ) -> None:
        super().__init__()
        self.core_spec = core_spec
        self._dropout = dropout
        self._recompute_granularity = recompute_granularity
        self.sinks: nn.Parameter | None = None

    def forward(
        self,
        hidden: Tensor,
        rotary: RotaryAngles | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Attends within each sequence.

        Args:
            hidden: [batch, seq, hidden].
            rotary: the angles of the positions; None leaves queries and keys unrotated.
            documents: documents of the whole rows; None: each row is one.

        Returns:
            [batch, seq, hidden], same dtype.
        """
        mixed, gate = self.inputs(hidden, rotary)
        return self.output(self.core(mixed, documents), gate)

    @abc.abstractmethod
    def inputs(
        self, hidden: Tensor, rotary: RotaryAngles | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns the core's inputs: queries [batch, heads, seq, head_dim], keys and values
        [batch, groups, seq, dim]. And the gate of the core's result [batch, seq, heads * dim], if
        it has one.
        """

    def output(self, context: Tensor, gate: tuple[Tensor, ...]) -> Tensor:
        """Returns the output for the core's result: [batch, seq, hidden]."""
        context = rearrange(context, "batch head seq dim -> batch seq (head dim)")
        if gate:
            context = context * gate[0].sigmoid()
        return scattered_linear(self.linear_proj, context, self.tensor)

    def core(self, mixed: tuple[Tensor, ...], documents: Documents | None) -> Tensor:
        """Returns each head's weighted sums of values: [batch, heads, seq, value_dim]."""
        if self.exchange is None or self.exchange.gathers:
            return self._recomputable_core(mixed, documents)

        heads = self.exchange.to_heads(*(part.transpose(1, 2) for part in mixed))
        # Not recomputed: whole rows of some heads take no more memory than slices.
        output = self._recomputable_core(tuple(part.transpose(1, 2) for part in heads), documents)
        return self.exchange.to_positions(output.transpose(1, 2)).transpose(1, 2)

    def _recomputable_core(self, mixed: tuple[Tensor, ...], documents: Documents | None) -> Tensor:
        query, key, value = mixed
        has_gradients, granularity = torch.is_grad_enabled(), self._recompute_granularity
        if has_gradients and self.training and granularity == "selective":
            output: Tensor = checkpoint(
                self._core_attention, *mixed, documents, use_reentrant=False
            )
            return output
        gathers = self.exchange is not None and self.exchange.gathers
        if has_gradients and gathers and granularity is None:
            # Keys and values of whole rows would be kept. A layer that is recomputed as a whole
            # gathers them again anyway.
            return keep_kernel_results(self._core_attention, *mixed, documents)
        return self._core_attention(query, key, value, documents)

    def _core_attention(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None
    ) -> Tensor:
        exchange, spec, sinks = self.exchange, self.core_spec, self.sinks
        dropout = self._dropout if self.training else 0.0
        if exchange is not None and exchange.gathers:
            keys, values = exchange.gather(key.transpose(1, 2), value.transpose(1, 2))
            heads = query, keys.transpose(1, 2), values.transpose(1, 2)
            return _attend_from_slice(heads, exchange.part, (spec, sinks, dropout), documents)

        own_sinks = sinks if exchange is None or sinks is None else exchange.own(sinks)
        if documents is None:
            return attend(query, key, value, spec, own_sinks, dropout)
        batch = len(query)
        query, key, value = (_in_one_row(part) for part in (query, key, value))
        row = attend(query, key, value, spec, own_sinks, dropout, documents)
        return rearrange(row, "1 head (batch seq) dim -> batch head seq dim", batch=batch)


def _attend_from_slice(
    heads: tuple[Tensor, Tensor, Tensor],
    part: SequenceSlice,
    options: tuple[AttentionSpec, Tensor | None, float],
    documents: Documents | None,
) -> Tensor:
    """Attention of a part of each row to whole rows.

    Args:
        heads: queries [batch, heads, seq / ranks, head_dim], keys and values [batch, groups, seq,
            dim].
        options: see `attend`.
        documents: documents of whole rows.
    """
    query, key, value = heads
    own, seq_length = part.of_rank(query.shape[2]), key.shape[2]
    if documents is None:
        return attend(query, key[:, :, : own.stop], value[:, :, : own.stop], *options)

    key, value = _in_one_row(key), _in_one_row(value)
    outputs = []
    for row, queries in enumerate(query.split(1)):
        start, stop = (row * seq_length + position for position in (own.start, own.stop))
        first, reached = documents.reach(start, stop)
        keys, values = (each[:, :, first:stop] for each in (key, value))
        outputs.append(attend(queries, keys, values, *options, reached))
    return torch.cat(outputs)


def _in_one_row(part: Tensor) -> Tensor:
    """[batch, heads, seq, dim] -> [1, heads, batch * seq, dim]."""
    return rearrange(part, "batch head seq dim -> 1 head (batch seq) dim")


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    learned_sinks: Tensor | None = None,
    dropout: float = 0.0,
    documents: Documents | None = None,
) -> Tensor:
    """Attention with the scale, window, sinks and softcap of `spec`; causal, if the spec is.

    With the logit s_h of head h's sink, position j has the weight exp(a_ij) / (exp(s_h) + sum_k
    exp(a_ik)) for position i, where a are the scaled products, capped if `spec` has a softcap, and
    j and k the positions that i attends to. A sink is not capped.

    Args:
        query: [batch, heads, seq, head_dim].
        key: [batch, groups, keys, head_dim], one for each query or, if causal, more: the queries
            have the last positions.
        value: [batch, groups, keys, value_dim], where value_dim may be another width.
        learned_sinks: [heads], the sinks' logits; given if and only if they are learned.
        dropout: probability with which a weight becomes zero.
        documents: documents of the keys of a batch that is one row then. Positions attend within
            their document. All but the first have a query for each key.

    Returns:
        [batch, heads, seq, value_dim], same dtype.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    has_window = spec.window is not None and spec.window < num_keys
    is_plain = num_queries == num_keys and not has_window and documents is None
    if not is_plain and suits_varlen(query, value, spec, dropout):
        return attend_varlen(query, key, value, spec, documents)
    if documents is not None:
        # Here, not around the layer, so that it also holds while backward recomputes this.
        with kernels_of(query.device).attention_of_varying_shapes():
            return _attend_by_document((query, key, value), documents, spec, learned_sinks, dropout)

    if spec.window is not None and spec.window < num_keys - num_queries:
        # Keys before the window of the first query.
        _, key = key.split((num_keys - num_queries - spec.window, num_queries + spec.window), dim=2)
        value = value[:, :, -key.shape[2] :]
    if spec.softcap is not None:
        return _attend_by_scores(query, key, value, spec, spec.softcap, learned_sinks, dropout)
    if spec.sinks is Sinks.NONE:
        return _attend_fused(query, key, value, spec, dropout, num_sinks=0)

    value_dim = value.shape[-1]
    query, key, value = _with_sink(query, key, value, learned_sinks, spec.scale)
    output = _attend_fused(query, key, value, spec, dropout, num_sinks=1)
    return output[:, :, -num_queries:, :value_dim]


def _attend_by_document(
    heads: tuple[Tensor, Tensor, Tensor],
    documents: Documents,
    spec: AttentionSpec,
    learned_sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attention of each document by itself: its cost is the sum of the squares of their lengths.

    Documents of one length form a batch, since small kernels take longer to launch than to run.
    """
    query, key, value = heads
    lengths = list(documents.lengths)
    num_queries = [lengths[0] - (key.shape[2] - query.shape[2]), *lengths[1:]]
    # Slices would do as well, but the backward of each allocates a gradient of the whole length;
    # that of split puts the gradients of all parts together once.
    parts = [
        query.split(num_queries, dim=2),
        key.split(lengths, dim=2),
        value.split(lengths, dim=2),
    ]
    numbers: dict[tuple[int, int], list[int]] = {}
    for number, shape in enumerate(zip(num_queries, lengths, strict=True)):
        numbers.setdefault(shape, []).append(number)

    outputs: dict[int, Tensor] = {}
    for same in numbers.values():
        query, key, value = (
            torch.cat([part[number] for number in same]) if len(same) > 1 else part[same[0]]
            for part in parts
        )
        output = attend(query, key, value, spec, learned_sinks, dropout)
        outputs |= zip(same, output.split(1), strict=True)
    return torch.cat([outputs[number] for number in range(len(outputs))], dim=2)


def _with_sink(
    query: Tensor, key: Tensor, value: Tensor, learned_sinks: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs with the sink as position 0. Its value is zero, so it adds to the softmax's
    denominator only.

    A key of zeros gives every query the logit zero. A learned logit takes one more channel, which
    is zero in all other keys: the queries of head h hold s_h / (scale * factor), and the sink's key
    holds the factor, a power of two near 1 / scale, so that small scales do not leave the range of
    fp16. The queries carry the logit because several of their heads share a key head. In 16 bits it
    is rounded as queries are.

    Where there is a query for each key, position 0 gets one as well, since the kernels' causal mask
    needs as many queries as keys.
    """
    is_square = query.shape[2] == key.shape[2]
    sink_key = key.new_zeros(key.shape[-1])
    if learned_sinks is not None:
        factor = _power_of_two(1.0 / scale)
        logits = _finite(learned_sinks / (scale * factor), query.dtype)
        channel = logits.view(1, -1, 1, 1).expand(*query.shape[:3], 1)
        query = F.pad(torch.cat((query, channel), dim=-1), (0, _SINK_CHANNELS - 1))
        key, value = F.pad(key, (0, _SINK_CHANNELS)), F.pad(value, (0, _SINK_CHANNELS))
        sink_key = F.pad(sink_key, (0, _SINK_CHANNELS))
        sink_key[-_SINK_CHANNELS] = factor

    key = torch.cat((sink_key.expand(*key.shape[:2], 1, -1), key), dim=2)
    query = F.pad(query, (0, 0, 1, 0)) if is_square else query
    return query, key, F.pad(value, (0, 0, 1, 0))


def _power_of_two(x: float) -> float:
    """The power of two next below `x`, within the range of normal numbers of all 16-bit dtypes."""
    _, exponent = math.frexp(x)
    return math.ldexp(1.0, min(max(exponent - 1, -14), 15))


def _finite(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """`logits` in `dtype`, values beyond its range at its ends. Infinity, which means no sink,
    would be nan times the zeros of the other keys.
    """
    largest = min(torch.finfo(dtype).max, _LARGEST_LOGIT)
    return logits.clamp(-largest, largest).to(dtype)


def _attend_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    dropout: float,
    num_sinks: int,
) -> Tensor:
    """Attention by PyTorch's fused kernels under the window of `spec`. The first `num_sinks`
    positions are in every window.
    """
    num_keys, window = key.shape[2] - num_sinks, spec.window
    if not spec.is_causal:
        return _fused(query, key, value, None, spec.scale, dropout, is_causal=False)
    if window is None or window >= num_keys:
        return _fused_causal(query, key, value, spec.scale, dropout)

    # The first positions, as many as the window has, see all before them.
    stop = num_sinks + window
    start = stop - (key.shape[2] - query.shape[2])
    outputs = []
    if start > 0:
        parts = query[:, :, :start], key[:, :, :stop], value[:, :, :stop]
        outputs.append(_fused_causal(*parts, spec.scale, dropout))

    # The others form blocks of `rows`. Zeros fill up the last one; no real position sees them,
    # because they come after all of them.
    num_left = num_keys - window
    rows = min(max(window // 2, _FEWEST_ROWS), _MOST_ROWS, num_left)
    num_blocks = -(-num_left // rows)
    fill = (0, 0, 0, num_blocks * rows - num_left)
    blocks = rearrange(
        padded(query[:, :, start:], fill),
        "batch head (block row) dim -> (batch block) head row dim",
        block=num_blocks,
    )
    keys, values = (
        _keys_in_reach(padded(part, fill), window, rows, num_sinks) for part in (key, value)
    )

    mask = _visible(rows, window + rows, window, window, query.device)
    mask = F.pad(mask, (num_sinks, 0), value=True)
    tail = rearrange(
        _fused(blocks, keys, values, mask, spec.scale, dropout),
        "(batch block) head row dim -> batch head (block row) dim",
        block=num_blocks,
    )
    return torch.cat((*outputs, tail[:, :, :num_left]), dim=2)


def _fused_causal(
    query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float
) -> Tensor:
    """Causal attention of queries at the last positions."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if num_queries == num_keys:
        return _fused(query, key, value, None, scale, dropout)

    # The kernels' causal mask starts at the first key. A mask of all pairs would be large; blocks
    # of queries share one of `rows` queries, whose last columns are for the block's positions.
    rows = min(num_queries, _SCORE_ROWS)
    visible = _visible(rows, num_keys, num_keys - rows, None, query.device)
    dtype = torch.float32 if is_slow(query) else query.dtype
    mask = torch.zeros(visible.shape, dtype=dtype, device=query.device)
    mask = mask.masked_fill(~visible, -torch.inf)

    outputs = []
    for start in range(0, num_queries, rows):
        count = min(rows, num_queries - start)
        stop = num_keys - num_queries + start + count
        outputs.append(
            _fused(
                query[:, :, start : start + count],
                key[:, :, :stop],
                value[:, :, :stop],
                mask[-count:, -stop:],
                scale,
                dropout,
            )
        )
    return torch.cat(outputs, dim=2)


def _keys_in_reach(part: Tensor, window: int, rows: int, num_sinks: int) -> Tensor:
    """The keys, or values, that each block of `rows` queries attends to: the sinks, then the
    `window` positions before the block, then the block.

    Args:
        part: [batch, groups, num_sinks + window + blocks * rows, head_dim].

    Returns:
        [batch * blocks, groups, num_sinks + window + rows, head_dim].
    """
    sinks = part[:, :, :num_sinks]
    # [batch, groups, blocks, head_dim, window + rows]. Slices would do as well, but the backward of
    # each allocates a gradient of the whole length; that of unfold adds all blocks into one.
    reach = part[:, :, num_sinks:].unfold(2, window + rows, rows)
    num_blocks = reach.shape[2]
    keys = rearrange(reach, "batch head block dim key -> (batch block) head key dim")
    if num_sinks == 0:
        return keys
    return torch.cat((sinks.repeat_interleave(num_blocks, dim=0), keys), dim=2)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout: float,
    *,
    is_causal: bool = True,
) -> Tensor:
    """PyTorch's attention under `mask` [rows, keys], True where a query sees a key, or added to
    the scores; or causal, or of all positions to all.
    """
    value_dim, dtype, is_widened = value.shape[-1], query.dtype, is_slow(query)
    if is_widened:
        query, key, value = query.float(), key.float(), value.float()
    is_causal = is_causal and mask is None
    if (
        value_dim != key.shape[-1]
        and _is_for_flash(query, max(key.shape[-1], value_dim), mask)
        and not kernels_of(query.device).takes_two_widths(query, key, value, dropout, is_causal)
    ):
        # FlashAttention and the CPU's kernel take one width, the memory-efficient kernel any two.
        # Zeros do not change the scores, and give channels of zeros.
        width = max(value_dim, key.shape[-1])
        query, key, value = (
            padded(part, (0, width - part.shape[-1])) for part in (query, key, value)
        )

    num_repeats = query.shape[1] // key.shape[1]
    is_grouped = num_repeats > 1
    if is_grouped and not _has_grouped_kernel(query, mask):
        key = key.repeat_interleave(num_repeats, dim=1)
        value = value.repeat_interleave(num_repeats, dim=1)
        is_grouped = False

    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=is_grouped,
    )
    output = output[..., :value_dim]
    return output.to(dtype) if is_widened else output


def _has_grouped_kernel(query: Tensor, mask: Tensor | None) -> bool:
    """Whether a fused kernel of PyTorch takes grouped queries, of this size and dtype, on this
    device and under this mask, as they are.

    The kernel for the CPU takes all. On a GPU it is FlashAttention, which has 16-bit dtypes, the
    causal mask only and, depending on the GPU, heads of up to 256 channels; the sink's count,
    so a head of 256 with a learned sink is too large. The memory-efficient kernel, the one for all
    else, takes as many key heads as query heads. With `enable_gqa` PyTorch would fall back to the
    plain formula, which holds the scores of all pairs of positions; repeated keys and values are
    far smaller than that.
    """
    return _is_for_flash(query, query.shape[-1], mask)


def _is_for_flash(query: Tensor, head_dim: int, mask: Tensor | None) -> bool:
    """Whether the fused kernel for heads of this width is the CPU's, or FlashAttention."""
    if query.device.type == "cpu":
        return True
    has_narrow_dtype = query.dtype.itemsize == 2
    widest = kernels_of(query.device).flash_head_dim(query.device.index or 0)
    return has_narrow_dtype and mask is None and head_dim <= widest


def _attend_by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    softcap: float,
    learned_sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attention whose scores are computed and capped block by block of queries."""
    seq_length = query.shape[2]
    if seq_length == 0:
        return F.pad(query, (0, value.shape[-1] - query.shape[-1]))

    offset = key.shape[2] - seq_length  # the key of the first query
    outputs = []
    for start in range(0, seq_length, _SCORE_ROWS):
        stop = min(start + _SCORE_ROWS, seq_length)
        first_key = 0 if spec.window is None else max(0, offset + start - spec.window + 1)
        inputs = (
            query[:, :, start:stop],
            key[:, :, first_key : offset + stop],
            value[:, :, first_key : offset + stop],
            offset + start - first_key,
            spec,
            softcap,
            learned_sinks,
            dropout,
        )

        # Otherwise autograd would keep the weights of every block until backward.
        if torch.is_grad_enabled():
            outputs.append(
                checkpoint(
                    _attend_block, *inputs, use_reentrant=False, preserve_rng_state=dropout > 0
                )
            )
        else:
            outputs.append(_attend_block(*inputs))
    return torch.cat(outputs, dim=2)


def _attend_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset: int,
    spec: AttentionSpec,
    softcap: float,
    learned_sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attention of some consecutive queries, the first of which has key `offset`."""
    scores = softcap * torch.tanh(_scores(query, key, spec.scale) / softcap)
    visible = _visible(query.shape[2], key.shape[2], offset, spec.window, query.device)
    weights = _softmax(scores.masked_fill(~visible, -torch.inf), spec.sinks, learned_sinks)
    return _weighted_sum(F.dropout(weights, dropout), value)


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Scaled products: [batch, heads, rows, head_dim] and [batch, groups, keys, head_dim] ->
    [batch, heads, rows, keys] fp32.
    """
    # Query heads that share a key head become rows of one matrix, which avoids repeated keys.
    grouped = rearrange(
        query.float() * scale,
        "batch (group repeat) row dim -> batch group (repeat row) dim",
        group=key.shape[1],
    )
    # Autocast would multiply in 16 bits, in forward and in the recomputation of backward.
    with without_autocast(query.device):
        scores = grouped @ key.float().transpose(-1, -2)
    return rearrange(
        scores,
        "batch group (repeat row) key -> batch (group repeat) row key",
        row=query.shape[2],
    )


def _softmax(scores: Tensor, sinks: Sinks, learned_sinks: Tensor | None) -> Tensor:
    """Softmax over the keys with the sinks in its denominator, same shape and dtype."""
    weights = scores.softmax(-1)
    if sinks is Sinks.NONE:
        return weights

    # exp(a) / (exp(s) + sum exp(a)) = softmax(a) * sigmoid(logsumexp(a) - s)
    total = scores.logsumexp(-1, keepdim=True)
    if learned_sinks is not None:
        total = total - learned_sinks.float().view(-1, 1, 1)
    return weights * total.sigmoid()


def _weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    """[batch, heads, rows, keys] and [batch, groups, keys, value_dim] -> [batch, heads, rows,
    value_dim] in the values' dtype.
    """
    grouped = rearrange(
        weights.to(value.dtype),
        "batch (group repeat) row key -> batch group (repeat row) key",
        group=value.shape[1],
    )
    return rearrange(
        grouped @ value,
        "batch group (repeat row) dim -> batch (group repeat) row dim",
        row=weights.shape[2],
    )


def _visible(
    num_queries: int, num_keys: int, offset: int, window: int | None, device: torch.device
) -> Tensor:
    """Which keys each query sees: [queries, keys] bool. Query i has key i + `offset`."""
    positions = torch.arange(num_queries, device=device) + offset
    distance = positions.unsqueeze(1) - torch.arange(num_keys, device=device)
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)
