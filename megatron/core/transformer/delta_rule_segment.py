"""The arithmetic of the gated delta rule over a few chunks of a sequence, forward and backward.

[Note: the chunked delta rule] Let S be the state [key_dim, value_dim] before a chunk, q_i, k_i and
v_i the rows of its C positions, beta_i their gates, and g_i the log decays summed from the chunk's
start. With the triangular matrices

    D_ij = exp(g_i - g_j)            for j <= i
    A_ij = beta_i (k_i . k_j) D_ij   for j <  i
    P_ij = (q_i . k_j) D_ij          for j <= i

the corrections U that the recurrence writes into the state, one after another, solve a triangular
system, and the rest is matrix products (Yang et al. 2024, arXiv:2406.06484 and, with decays,
arXiv:2412.06464):

    (I + A) U = beta * (V - exp(g) * K S)
    output    = exp(g) * Q S + P U
    next S    = exp(g_C) S + K^T (exp(g_C - g) * U)

Only S passes from one chunk to the next. The inverse of I + A is formed for all chunks at once, so
that the step from chunk to chunk is three products. Decays scale rows and columns of A, therefore

    (I + A)^-1_ij = (I + A')^-1_ij D_ij   with A'_ij = beta_i (k_i . k_j)

and the system that is solved has no decays in it: with keys of length one at most and beta in
[0, 1], no entry of its inverse is larger than one, whatever the gates are.

[Note: exponents] All of them are zero or negative, so exp cannot overflow, and D is exactly zero
above its diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# A position with less than this forgets everything: exp of it is zero in fp32. Clamping to it keeps
# sums finite, even of -inf.
MIN_LOG_DECAY = -200.0

# exp of less than this counts as zero, 1e-26. Products with numbers close to the smallest ones of
# fp32 make subnormal numbers, with which CPUs are several times slower.
MIN_EXPONENT = -60.0


@dataclass(frozen=True)
class Segment:
    """The inputs of some chunks, for every value head of every sequence, and what can be computed
    of them without the state. All have the dtype that is computed in.

    Attributes:
        query, key: [chunks, heads, C, key_dim], normalized; queries are scaled too.
        value: [chunks, heads, C, value_dim].
        beta: [chunks, heads, C, 1].
        from_start: exp(g), the decay since the chunk's start, [chunks, heads, C, 1].
        to_end: exp(g_C - g), the decay until the chunk's end, [chunks, heads, C, 1].
        decay: D, [chunks, heads, C, C].
        key_products: k_i . k_j, [chunks, heads, C, C].
        scores: P, [chunks, heads, C, C].
        inverse: (I + A)^-1, [chunks, heads, C, C].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    from_start: Tensor
    to_end: Tensor
    decay: Tensor
    key_products: Tensor
    scores: Tensor
    inverse: Tensor

    @property
    def whole(self) -> Tensor:
        """exp(g_C), the decay over each chunk: [chunks, heads, 1, 1]."""
        return self.from_start[:, :, -1:]


class Scan(NamedTuple):
    """Results of the recurrence over a segment's chunks.

    Attributes:
        states: before each chunk, [chunks, heads, key_dim, value_dim].
        corrections: U, [chunks, heads, C, value_dim].
        end: the state after the last chunk, [heads, key_dim, value_dim].
    """

    states: Tensor
    corrections: Tensor
    end: Tensor


class SegmentGradients(NamedTuple):
    """The gradients of a segment's inputs, of the shapes that they have in `Segment`; of its log
    decays, [chunks, heads, C, 1]; and of the state before it, [heads, key_dim, value_dim].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor
    state: Tensor


def prepare_segment(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> Segment:
    """The segment of these inputs, of the shapes that they have in `Segment`; `log_decay` as
    `beta`, zero or less.
    """
    length = key.shape[2]
    # Summed in fp64: after a position that forgets everything g is large, and fp32 would round the
    # differences between the positions that follow it.
    g = _running_sums(log_decay.clamp_min(MIN_LOG_DECAY).double())
    differences = torch.empty(*key.shape[:3], length, dtype=key.dtype, device=key.device)
    torch.sub(g, g.mT, out=differences)
    differences.masked_fill_(_above_diagonal(length, key.device), -torch.inf)
    decay = _exp_in_place(differences)

    key_products = key @ key.mT
    # Only elements below the diagonal are read.
    inverse = torch.linalg.solve_triangular(
        key_products * beta,
        torch.eye(length, dtype=key.dtype, device=key.device).expand_as(key_products),
        upper=False,
        unitriangular=True,
    )

    return Segment(
        query,
        key,
        value,
        beta,
        from_start=_exp_in_place(g.to(key.dtype, copy=True)),
        to_end=_exp_in_place((g[:, :, -1:] - g).to(key.dtype)),
        decay=decay,
        key_products=key_products,
        scores=(query @ key.mT).mul_(decay),
        inverse=inverse.mul_(decay),
    )


def _running_sums(x: Tensor) -> Tensor:
    """The sums of [chunks, heads, C, 1] along C, from the start."""
    if x.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return x.cumsum(2)
    # In deterministic mode PyTorch has no running sums of floats on a GPU. In fp64 it may use no
    # TF32.
    ones = x.new_ones(x.shape[2], x.shape[2], dtype=torch.float64)
    return (x.squeeze(3).double() @ ones.triu_()).unsqueeze(3).to(x.dtype)


def scan_segment(segment: Segment, state: Tensor) -> Scan:
    """Takes the state [heads, key_dim, value_dim] from chunk to chunk."""
    states = state.new_empty(segment.key.shape[0], *state.shape)
    corrections = torch.empty_like(segment.value)
    for i, (key, value) in enumerate(zip(segment.key, segment.value, strict=True)):
        states[i] = state
        # The state's own value for a key is not written into it again.
        known = torch.bmm(key, state).mul_(segment.from_start[i])
        news = torch.sub(value, known, out=known).mul_(segment.beta[i])
        torch.bmm(segment.inverse[i], news, out=corrections[i])

        written = corrections[i] * segment.to_end[i]
        state = torch.baddbmm(state * segment.whole[i], key.mT, written)
    return Scan(states, corrections, state)


def segment_output(segment: Segment, scan: Scan) -> Tensor:
    """[chunks, heads, C, value_dim]."""
    output = (segment.query @ scan.states).mul_(segment.from_start)
    return output.add_(segment.scores @ scan.corrections)


def segment_gradients(
    segment: Segment, scan: Scan, grad_output: Tensor, grad_end: Tensor
) -> SegmentGradients:
    """Backward of `segment_output` and of the state that the scan ends with.

    Args:
        grad_output: of the output, [chunks, heads, C, value_dim].
        grad_end: of the state after the segment, [heads, key_dim, value_dim].
    """
    seen = grad_output * segment.from_start
    grad_news, grad_ends, grad_state = _scan_back(segment, seen, grad_output, grad_end)

    # Through the products with states. Each decay and gate multiplies whole rows of a product, so
    # its gradient is a dot product of rows that are there already.
    grad_query = seen @ scan.states.mT
    by_known = (grad_news * segment.from_start) @ scan.states.mT
    by_written = (scan.corrections * segment.to_end) @ grad_ends.mT
    grad_key = torch.addcmul(by_written, by_known, segment.beta, value=-1)

    known, written = row_dots(segment.key, by_known), row_dots(segment.key, by_written)
    grad_beta = row_dots(grad_news, segment.value) - known
    grad_g = row_dots(segment.query, grad_query) - segment.beta * known - written
    kept = (grad_ends * scan.states).sum((2, 3), keepdim=True) * segment.whole
    grad_g[:, :, -1:] += kept + written.sum(2, keepdim=True)

    # Through the products within a chunk, which add to the same gradients.
    through_decay = _add_through_scores(segment, scan, grad_output, grad_query, grad_key)
    through_decay += _add_through_system(segment, scan, grad_news, grad_key, grad_beta)
    # D_ij grows with g_i and shrinks with g_j.
    grad_g += through_decay.sum(3, keepdim=True)
    grad_g -= through_decay.sum(2).unsqueeze(3)

    return SegmentGradients(
        grad_query,
        grad_key,
        value=grad_news * segment.beta,
        log_decay=_running_sums(grad_g.flip(2)).flip(2),
        beta=grad_beta,
        state=grad_state,
    )


def state_gradient(segment: Segment, grad_output: Tensor, grad_end: Tensor) -> Tensor:
    """The gradient of the state before the segment, by itself; see `segment_gradients`."""
    seen = grad_output * segment.from_start
    return _scan_back(segment, seen, grad_output, grad_end)[2]


def _scan_back(
    segment: Segment, seen: Tensor, grad_output: Tensor, grad_state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Takes the state's gradient from chunk to chunk, the last one first.

    Returns:
        The gradients of the triangular system's solution, [chunks, heads, C, value_dim]; of
        the state after each chunk, [chunks, heads, key_dim, value_dim]; of the state before all.
    """
    through_scores = segment.scores.mT @ grad_output
    through_output = segment.query.mT @ seen
    known_scale = segment.from_start * segment.beta

    grad_news = torch.empty_like(through_scores)
    grad_ends = torch.empty_like(through_output)
    for i in reversed(range(len(segment.key))):
        key = segment.key[i]
        grad_ends[i] = grad_state
        grad_corrections = torch.bmm(key, grad_state).mul_(segment.to_end[i])
        grad_corrections += through_scores[i]
        torch.bmm(segment.inverse[i].mT, grad_corrections, out=grad_news[i])

        grad_state = torch.addcmul(through_output[i], grad_state, segment.whole[i])
        grad_state.baddbmm_(key.mT, grad_news[i] * known_scale[i], alpha=-1)
    return grad_news, grad_ends, grad_state


def _add_through_scores(
    segment: Segment, scan: Scan, grad_output: Tensor, grad_query: Tensor, grad_key: Tensor
) -> Tensor:
    """Adds the part through P = (q . k) D. Returns the gradient of D times D, below the diagonal,
    where D depends on g: [chunks, heads, C, C].
    """
    grad_scores = grad_output @ scan.corrections.mT
    through_decay = (grad_scores * segment.scores).tril_(-1)
    grad_products = grad_scores.mul_(segment.decay)
    grad_query += grad_products @ segment.key
    grad_key += grad_products.mT @ segment.query
    return through_decay


def _add_through_system(
    segment: Segment, scan: Scan, grad_news: Tensor, grad_key: Tensor, grad_beta: Tensor
) -> Tensor:
    """Adds the part through A = beta (k . k) D. Returns as `_add_through_scores`."""
    grad_system = (grad_news @ scan.corrections.mT).neg_().mul_(segment.decay).tril_(-1)
    through_decay = grad_system * segment.key_products
    grad_beta += through_decay.sum(3, keepdim=True)

    grad_products = grad_system.mul_(segment.beta)
    grad_key += (grad_products + grad_products.mT) @ segment.key
    return through_decay.mul_(segment.beta)


def _exp_in_place(exponents: Tensor) -> Tensor:
    """See [Note: exponents] and MIN_EXPONENT."""
    return torch.threshold_(exponents, MIN_EXPONENT, -torch.inf).exp_()


def row_dots(left: Tensor, right: Tensor) -> Tensor:
    """The dot products of rows with rows: [..., C, dim] twice -> [..., C, 1]."""
    dots: Tensor = torch.linalg.vecdot(left, right)
    return dots.unsqueeze(-1)


def _above_diagonal(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)
