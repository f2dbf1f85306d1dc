"""The gated delta rule: linear attention with a state that decays and is corrected.

Each head keeps a matrix S [key_dim, value_dim] that maps a key to a value. A position first
lets it decay, then replaces part of its value for the position's key, then reads it (Yang et
al. 2024, arXiv:2412.06464):

    S = exp(log_decay) S
    S = S + beta k (v - S^T k)^T
    output = S^T q / sqrt(key_dim)

with q and k of length one. The recurrence is computed chunk by chunk (`delta_rule_segment`), and
several chunks, a segment, at a time.

[Note: segments] Forward keeps, besides its inputs, the state before each segment; backward computes
a segment's chunks anew from there. Everything else lives for one segment, whose size does not
depend on the sequence: memory grows by the inputs and a state for each segment, and the time per
position does not grow at all.

[Note: slices] The state after a slice of a sequence is an affine function of the state before it,
S_after = M S_before + U, with M [key_dim, key_dim] and U [key_dim, value_dim]. With context
parallelism each rank computes M and U of its slice, the ranks gather both, and each composes the
functions of the earlier slices, which gives the state before its slice. In backward, the gradient
of S_before is M^T times the gradient of S_after, plus G, the gradient through the outputs of the
slice. The ranks gather M and G, and each composes the functions of the later slices. The number of
bytes sent does not depend on the length of the sequence.

M and U are the result of one scan that starts from [0 | I]. The values of the columns of I are
zero, so decays and corrections are all that changes these columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.autocast import without_autocast
from megatron.core.transformer.delta_rule_segment import (
    Segment,
    prepare_segment,
    row_dots,
    scan_segment,
    segment_gradients,
    segment_output,
    state_gradient,
)
from megatron.core.transformer.sequence_slice import ContextExchange

# Added to the square of a query's or key's length, as by the published kernels.
NORM_EPS = 1e-6

_CHUNK_SIZE = 64  # positions that are computed as matrices


def segment_numel(device_kind: str) -> int:
    """Elements of keys, values and states in a segment.

    On a CPU this is the fastest size of 2^17 to 2^22: a segment's tensors stay in a core's cache.
    Segments of an accelerator are large enough to take longer than their kernels take to launch.
    4,096 positions of 32 heads with 128 channels take 2,500 operations, not 15,000; 2^26 would take
    1,900, but three times the memory in backward: 1.3 GiB, not 0.4.
    """
    return 1 << 19 if device_kind == "cpu" else 1 << 24


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    chunk_size: int = _CHUNK_SIZE,
    exchange: ContextExchange | None = None,
) -> Tensor:
    """The outputs of the recurrence above, from a state of zeros, for each sequence of the batch.

    The arithmetic is fp32 (fp64 for values in fp64), under autocast too; sums of log decays are
    fp64. Inputs of 16 bits are exact in fp32, so they add only the rounding of the output and of
    the gradients: in bf16, no element is further from the recurrence in fp64 than 2^-8 of the
    largest.

    Args:
        query, key: [batch, seq, key_heads, key_dim], any floating dtype; they are divided by their
            lengths here.
        value: [batch, seq, value_heads, value_dim]. Value head h reads key head h // (value_heads /
            key_heads).
        log_decay: [batch, seq, value_heads], zero or less, -inf too.
        beta: [batch, seq, value_heads], from 0 (no write) to 1 (the value is replaced).
        chunk_size: how many positions are computed as matrices. It changes the speed, and results
            by roundings only.
        exchange: the ranks that have slices of these sequences, this rank's being the inputs; None:
            the inputs are whole sequences.

    Returns:
        [batch, seq, value_heads, value_dim], value's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check_shapes(query, key, value, log_decay, beta, chunk_size)
    apply: Any = _GatedDeltaRule.apply  # torch declares it without types
    output: Tensor = apply(query, key, value, log_decay, beta, chunk_size, exchange)
    return output


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, chunk_size: int
) -> None:
    shapes = [tuple(x.shape) for x in (query, key, value, log_decay, beta)]
    if (
        key.dim() != 4
        or value.dim() != 4
        or query.shape != key.shape
        or value.shape[:2] != key.shape[:2]
        or not log_decay.shape == beta.shape == value.shape[:3]
    ):
        raise ValueError(
            "Expected queries and keys [batch, seq, key_heads, key_dim], values [batch, seq, "
            "value_heads, value_dim], log decays and betas [batch, seq, value_heads], got "
            f"{shapes}."
        )
    if value.shape[2] % key.shape[2]:
        raise ValueError(
            f"Expected a multiple of the {key.shape[2]} key heads as value heads, got "
            f"{value.shape[2]}."
        )
    if chunk_size < 1:
        raise ValueError(f"Expected a chunk size of at least 1, got {chunk_size}.")


@dataclass(frozen=True)
class _Rows:
    """Between tensors by position [batch, seq, heads, dim] and rows by chunk [chunks, batch *
    heads, length, dim].

    Attributes:
        length: positions of a chunk. The last one is filled up with zeros, without effect: no
            decay, no write, no read.
        num_repeats: value heads of each key head.
        dtype: of rows.
    """

    length: int
    num_repeats: int
    dtype: torch.dtype

    def of(self, x: Tensor) -> Tensor:
        """The rows of [batch, seq, heads, dim]."""
        batch, seq, heads, dim = x.shape
        num_chunks = -(-seq // self.length)
        if fill := num_chunks * self.length - seq:
            x = F.pad(x, (0, 0, 0, 0, 0, fill))
        shape = (num_chunks, batch, heads, self.length, dim)
        rows = torch.empty(shape, dtype=self.dtype, device=x.device)
        rows.copy_(x.unflatten(1, (num_chunks, self.length)).permute(1, 0, 3, 2, 4))
        return rows.flatten(1, 2)

    def write(self, rows: Tensor, out: Tensor) -> None:
        """Writes rows to their positions in `out` [batch, seq, heads, dim]."""
        batch, seq, heads, _ = out.shape
        by_position = rows.unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4)
        if seq == by_position.shape[1] * self.length:
            out.unflatten(1, (-1, self.length)).copy_(by_position)
        else:
            out.copy_(by_position.flatten(1, 2)[:, :seq])

    def repeat(self, rows: Tensor) -> Tensor:
        """The rows of key heads, for each value head that reads them."""
        return rows if self.num_repeats == 1 else rows.repeat_interleave(self.num_repeats, dim=1)

    def add_repeats(self, rows: Tensor) -> Tensor:
        """The sum over the value heads that read one key head: backward of `repeat`."""
        return rows if self.num_repeats == 1 else rows.unflatten(1, (-1, self.num_repeats)).sum(2)


class _GatedDeltaRule(torch.autograd.Function):
    """See [Note: segments] and [Note: slices]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        chunk_size: int,
        exchange: ContextExchange | None,
    ) -> Tensor:
        batch, seq, heads, value_dim = value.shape
        rows = _Rows(
            length=max(1, min(chunk_size, seq)),
            num_repeats=heads // key.shape[2],
            dtype=torch.promote_types(value.dtype, torch.float32),
        )
        state_shape = (batch * heads, key.shape[3], value_dim)
        spans = _spans(seq, rows.length, state_shape, segment_numel(value.device.type))
        inputs = (query, key, value, log_decay, beta)

        state = torch.zeros(state_shape, dtype=rows.dtype, device=value.device)
        starts = state.new_empty(len(spans), *state_shape)
        output = torch.empty_like(value, memory_format=torch.contiguous_format)
        transition = None
        with without_autocast(value.device):
            if exchange is not None:
                segments = (_segment(rows, span, *inputs) for span in spans)
                state, transition = _state_before(exchange, segments, state)
            for i, span in enumerate(spans):
                starts[i] = state
                segment = _segment(rows, span, *inputs)
                scan = scan_segment(segment, state)
                rows.write(segment_output(segment, scan), output[:, span])
                state = scan.end

        ctx.save_for_backward(*inputs, starts, transition)
        ctx.rows, ctx.spans, ctx.exchange = rows, spans, exchange
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, starts, transition = ctx.saved_tensors
        rows: _Rows = ctx.rows
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
        grad_state = starts.new_zeros(starts.shape[1:])

        with without_autocast(starts.device):
            if ctx.exchange is not None:
                segments = (
                    (_segment(rows, span, *inputs), rows.of(grad_output[:, span]))
                    for span in reversed(ctx.spans)
                )
                grad_state = _grad_after(ctx.exchange, segments, grad_state, transition)
            # `reversed` of a tensor would copy all states.
            for start, span in zip(reversed(starts.unbind()), reversed(ctx.spans), strict=True):
                segment = _segment(rows, span, *inputs)
                scan = scan_segment(segment, start)
                found = segment_gradients(segment, scan, rows.of(grad_output[:, span]), grad_state)
                grad_state = found.state

                query, key = (rows.of(x[:, span]) for x in inputs[:2])
                grad_query = rows.add_repeats(found.query).mul_(_scale(key))
                grad_key = rows.add_repeats(found.key)
                by_input = (
                    _normalize_backward(query, grad_query),
                    _normalize_backward(key, grad_key),
                    found.value,
                    found.log_decay,
                    found.beta,
                )
                for grad, found_rows in zip(grads, by_input, strict=True):
                    rows.write(found_rows, _with_dim(grad[:, span]))
        return *grads, None, None


def _state_before(
    exchange: ContextExchange, segments: Iterable[Segment], zeros: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the state before the slice of these segments, and the slice's M [heads, key_dim,
    key_dim].

    Args:
        zeros: a state of zeros, [heads, key_dim, value_dim].
    """
    heads, key_dim, value_dim = zeros.shape
    identity = torch.eye(key_dim, dtype=zeros.dtype, device=zeros.device).expand(heads, -1, -1)
    state = torch.cat((zeros, identity), dim=2)
    for segment in segments:
        widened = replace(segment, value=F.pad(segment.value, (0, key_dim)))
        state = scan_segment(widened, state).end

    before = zeros
    slices = exchange.all_gather(state, is_backward=False)
    for earlier in slices[: exchange.part.rank]:
        written, transition = earlier.split((value_dim, key_dim), dim=2)
        before = torch.baddbmm(written, transition, before)
    return before, state[:, :, value_dim:].clone()


def _grad_after(
    exchange: ContextExchange,
    segments: Iterable[tuple[Segment, Tensor]],
    zeros: Tensor,
    transition: Tensor,
) -> Tensor:
    """Returns the gradient of the state after a slice, [heads, key_dim, value_dim].

    Args:
        segments: segments of the slice, the last one first, and the gradients of their outputs.
        zeros: a gradient of zeros.
        transition: the slice's M.
    """
    gradient = zeros
    for segment, grad_output in segments:
        gradient = state_gradient(segment, grad_output, gradient)

    after = zeros
    slices = exchange.all_gather(torch.cat((gradient, transition), dim=2), is_backward=True)
    for later in reversed(slices[exchange.part.rank + 1 :].unbind()):
        added, transition = later.split((zeros.shape[2], zeros.shape[1]), dim=2)
        after = torch.baddbmm(added, transition.mT, after)
    return after


def state_nbytes(seq: int, heads: int, key_dim: int, value_dim: int, device_kind: str) -> int:
    """Bytes of the states that are kept for backward: fp32, one for each segment.

    Args:
        heads: number of heads in all sequences.
        device_kind: `Device.kind` of the device that computes.
    """
    length = max(1, min(_CHUNK_SIZE, seq))
    spans = _spans(seq, length, (heads, key_dim, value_dim), segment_numel(device_kind))
    return len(spans) * heads * key_dim * value_dim * torch.float32.itemsize


def _spans(seq: int, length: int, state_shape: tuple[int, int, int], numel: int) -> list[slice]:
    """The positions of each segment, which has about `numel` elements in whole chunks but for the
    last one's end.
    """
    heads, key_dim, value_dim = state_shape
    chunk_numel = heads * (length * (key_dim + value_dim) + key_dim * value_dim)
    step = length * max(1, numel // max(1, chunk_numel))
    return [slice(start, min(start + step, seq)) for start in range(0, seq, step)]


def _segment(
    rows: _Rows,
    span: slice,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
) -> Segment:
    """The segment of the positions in `span`."""
    queries, keys = _normalize(rows.of(query[:, span])), _normalize(rows.of(key[:, span]))
    return prepare_segment(
        rows.repeat(queries.mul_(_scale(keys))),
        rows.repeat(keys),
        rows.of(value[:, span]),
        rows.of(_with_dim(log_decay[:, span])),
        rows.of(_with_dim(beta[:, span])),
    )


def _with_dim(x: Tensor) -> Tensor:
    """Gates [batch, seq, heads] as [batch, seq, heads, 1]; other tensors as they are."""
    return x.unsqueeze(3) if x.dim() == 3 else x


def _scale(keys: Tensor) -> float:
    return 1.0 / math.sqrt(keys.shape[-1])


def _normalize(rows: Tensor) -> Tensor:
    """Rows divided by their lengths."""
    return rows * _inverse_length(rows)


def _normalize_backward(rows: Tensor, grad: Tensor) -> Tensor:
    """Only components at right angles to a row turn it."""
    scale = _inverse_length(rows)
    unit = rows * scale
    return torch.addcmul(grad, unit, row_dots(unit, grad), value=-1).mul_(scale)


def _inverse_length(rows: Tensor) -> Tensor:
    return row_dots(rows, rows).add_(NORM_EPS).rsqrt_()
