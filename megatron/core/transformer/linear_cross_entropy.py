"""The output projection and the cross entropy in one, without the logits of all tokens.

[Note: chunks of tokens]
Logits are the largest activation of a model with a large vocabulary: tokens x vocabulary, and their
gradient is as large. Here a chunk of tokens at a time goes through the projection, the softmax and
both products of the backward, in one buffer:

    hidden [chunk, hidden] -> logits [chunk, vocab] -> losses [chunk]
                              their gradient, in their place
                              -> gradient of the hidden states [chunk, hidden]
                              -> added to the weight's gradient [vocab, hidden], in fp32

A chunk's gradient needs logits, labels and how much each token's loss counts.
`weighted_cross_entropy` has all of it, so it does everything in the forward, and its backward
multiplies by one number. `linear_cross_entropy` returns the loss of each token, receives in the
backward how much each counts, and computes the logits a second time.

Weights of tokens are divided by a power of two, the least that is not below the largest of them,
and the results multiplied by it: the gradient of a logit is a number between -1 and 1 then, which
16 bits hold, fp16's too.

Ranks that divide the vocabulary have the logits of their rows. For each chunk they exchange the
largest logit of each token, and then the sums of exponentials and the labels' logits in one
all-reduce. The gradient of the hidden states is the sum over the ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.autocast import without_autocast
from megatron.core.products import is_slow, mm, slices
from megatron.core.transformer.tensor_exchange import TensorExchange, own_rows


class Sizes(NamedTuple):
    """How much is done at a time.

    Attributes:
        chunk: elements of logits. The more, the less often all of the weight's
            gradient is read and written.
        piece: of these, how many become fp32.
    """

    chunk: int
    piece: int


# Pieces that a processor's cache holds; an accelerator would rather have few kernels.
_CPU = Sizes(1 << 25, 1 << 19)
ACCELERATOR = Sizes(1 << 27, 1 << 24)

# Elements of the weight's gradient that change their dtype at a time.
BLOCK_NUMEL = 1 << 22

_SMALLEST_WEIGHT = 2.0**-100


class WeightedLoss(NamedTuple):
    """The losses of many tokens in one number.

    Attributes:
        loss: the weighted sum, the z-loss included: [] fp32, differentiable.
        z_loss: the z-loss in it: [] fp32, without a gradient.
    """

    loss: Tensor
    z_loss: Tensor


@dataclass(frozen=True)
class HeadOptions:
    """Options between the projection and the loss.

    Attributes:
        softcap: logits x become softcap * tanh(x / softcap).
        z_coeff: of the z-loss, the square of log(sum(exp(logits))) of each token.
        chunk_numel: elements of logits at a time, at least one token's; None:
            what suits the device.
        tensor: how ranks that divide the vocabulary exchange sums; None: the weight has all rows.
    """

    softcap: float | None = None
    z_coeff: float = 0.0
    chunk_numel: int | None = None
    tensor: TensorExchange | None = None

    def num_tokens(self, weight: Tensor) -> int:
        """Tokens of the vocabulary, of which `weight` has a part of the rows."""
        return len(weight) * (1 if self.tensor is None else self.tensor.num_ranks)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, options: HeadOptions | None = None
) -> Tensor:
    """-log softmax(hidden weight^T)[label] of each token. There is no z-loss in it.

    Args:
        hidden: [..., hidden], any floating dtype.
        weight: [vocab, hidden], same dtype. Every row takes part in the softmax, padding included.
        labels: [...] int64, each in [0, vocab). Checked on the CPU; elsewhere the device's own
            assertion stops the run.

    Returns:
        [...] fp32, of the labels' shape.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a label out of range.
        RuntimeError: in a backward that is itself to be differentiated.
    """
    options = options or HeadOptions()
    hidden, weight = _of_autocast(hidden), _of_autocast(weight)
    _check(hidden, weight, labels, options.num_tokens(weight))
    apply: Any = _LinearCrossEntropy.apply  # torch declares it without types
    losses: Tensor = apply(hidden, weight, labels, options)
    return losses


def weighted_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    options: HeadOptions | None = None,
) -> WeightedLoss:
    """The sum of the tokens' losses, times their weights: see `linear_cross_entropy`.

    Gradients are computed in the forward, so that the logits are computed once. No gradient reaches
    the tokens' weights.

    Args:
        token_weights: [...] fp32, of the labels' shape: 1 / tokens each for a mean.

    Raises:
        ValueError: as `linear_cross_entropy`, or weights of another shape or dtype.
        RuntimeError: in a second backward, or one that is itself to be differentiated.
    """
    options = options or HeadOptions()
    hidden, weight = _of_autocast(hidden), _of_autocast(weight)
    _check(hidden, weight, labels, options.num_tokens(weight))
    if token_weights.shape != labels.shape or token_weights.dtype != torch.float32:
        raise ValueError(
            f"Expected fp32 weights of shape {tuple(labels.shape)}, got {token_weights.dtype} "
            f"{tuple(token_weights.shape)}."
        )
    # An autograd function does not see whether gradients are wanted at all.
    is_wanted = torch.is_grad_enabled()
    wanted = _Wanted(is_wanted and hidden.requires_grad, is_wanted and weight.requires_grad)
    apply: Any = _WeightedCrossEntropy.apply
    loss, z_loss = apply(hidden, weight, labels, token_weights.detach(), options, wanted)
    return WeightedLoss(loss, z_loss)


class _Wanted(NamedTuple):
    """Of what gradients are wanted."""

    hidden: bool
    weight: bool


_NOTHING = _Wanted(hidden=False, weight=False)


class _Gradients(NamedTuple):
    """Gradients before they are multiplied by `unit`; None where none is wanted.

    Attributes:
        hidden: [tokens, hidden], in the dtype of the hidden states.
        weight: [vocab, hidden] fp32.
        unit: [] fp32.
    """

    hidden: Tensor | None
    weight: Tensor | None
    unit: Tensor

    def times(self, factor: Tensor, hidden: Tensor, weight: Tensor) -> list[Tensor | None]:
        """The gradients of two tensors, in their shapes and dtypes; in the memory of these, where
        they have the dtype.
        """
        found: list[Tensor | None] = []
        for gradient, like in ((self.hidden, hidden), (self.weight, weight)):
            if gradient is None:
                found.append(None)
                continue
            if gradient.dtype == like.dtype:
                out = gradient.mul_(factor)
            else:
                # Not at once: the product in fp32 would be as large as the gradient.
                out = torch.empty_like(gradient, dtype=like.dtype)
                for rows in slices(len(out), BLOCK_NUMEL // max(1, out.shape[1])):
                    torch.mul(gradient[rows], factor, out=out[rows])
            found.append(out.view(like.shape))
        return found


class _Found(NamedTuple):
    """Results of a pass over all tokens.

    Attributes:
        losses, log_sums: [tokens] fp32; log_sums are log(sum(exp(logits))).
    """

    losses: Tensor
    log_sums: Tensor
    gradients: _Gradients


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, options: HeadOptions
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.options = dataclasses.replace(options, z_coeff=0.0)
        losses = _pass(hidden, weight, labels, options).losses
        # Not a view: sharding wrappers register hooks on a module's output and warn about views.
        return losses if losses.shape == labels.shape else losses.view_as(labels).clone()

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_double_backward()
        hidden, weight, labels = ctx.saved_tensors
        wanted = _Wanted(*ctx.needs_input_grad[:2])
        found = _pass(hidden, weight, labels, ctx.options, grad_losses.float(), wanted).gradients
        return *found.times(found.unit, hidden, weight), None, None


class _WeightedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        token_weights: Tensor,
        options: HeadOptions,
        wanted: _Wanted,
    ) -> tuple[Tensor, Tensor]:
        found = _pass(hidden, weight, labels, options, token_weights, wanted)
        ctx.gradients = found.gradients
        # Of the inputs their shapes and dtypes alone.
        ctx.like = [torch.empty_like(one, device="meta") for one in (hidden, weight)]

        flat = token_weights.flatten()
        z_loss = options.z_coeff * (flat * found.log_sums.square()).sum()
        ctx.mark_non_differentiable(z_loss)
        return (flat * found.losses).sum() + z_loss, z_loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_double_backward()
        if ctx.gradients is None:
            raise RuntimeError(
                "Expected one backward through weighted_cross_entropy, got a second: the first "
                "gave its gradients away."
            )
        found, ctx.gradients = ctx.gradients, None
        return *found.times(found.unit * grad_loss, *ctx.like), None, None, None, None


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "Expected a backward without create_graph, got one with it: the gradient of this cross "
            "entropy cannot be differentiated."
        )


def _pass(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: HeadOptions,
    token_weights: Tensor | None = None,
    wanted: _Wanted = _NOTHING,
) -> _Found:
    """All tokens, a chunk at a time."""
    with without_autocast(hidden.device):
        return _pass_in_own_dtypes(hidden, weight, labels, options, token_weights, wanted)


def _pass_in_own_dtypes(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: HeadOptions,
    token_weights: Tensor | None,
    wanted: _Wanted,
) -> _Found:
    vocab_size, width = weight.shape
    hidden, labels = hidden.reshape(-1, width), labels.flatten()
    num_tokens = len(labels)
    losses = hidden.new_empty(num_tokens, dtype=torch.float32)
    log_sums = torch.empty_like(losses)
    unit = losses.new_ones(())
    if token_weights is not None and num_tokens:
        token_weights = token_weights.flatten()
        unit = token_weights.abs().amax().clamp(min=_SMALLEST_WEIGHT).log2().ceil().exp2()
        token_weights = token_weights / unit
    gradients = _Gradients(
        torch.empty_like(hidden) if wanted.hidden else None,
        torch.zeros_like(weight, dtype=torch.float32) if wanted.weight else None,
        unit,
    )

    chunk_numel = options.chunk_numel or sizes_for(hidden.device.type).chunk
    chunk = min(max(1, chunk_numel // vocab_size), num_tokens)
    buffer = hidden.new_empty(chunk, vocab_size)
    for rows in slices(num_tokens, chunk):
        logits = mm(hidden[rows], weight.t(), buffer[: rows.stop - rows.start])
        weights = token_weights[rows] if token_weights is not None and any(wanted) else None
        losses[rows], log_sums[rows] = _softmax(logits, labels[rows], weights, options)
        if gradients.hidden is not None:
            mm(logits, weight, gradients.hidden[rows])
        if gradients.weight is not None:
            _add_product(gradients.weight, logits, hidden[rows])
    return _Found(losses, log_sums, gradients)


def _softmax(
    logits: Tensor, labels: Tensor, token_weights: Tensor | None, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    """The losses and log_sums of a chunk, [tokens] fp32 each. Writes the gradient over the logits
    [tokens, vocab], if weights [tokens] are given; otherwise anything.
    """
    step = max(1, sizes_for(logits.device.type).piece // logits.shape[1])
    pieces = [*slices(len(labels), step)]
    if options.tensor is not None:
        return _softmax_over_ranks(logits, labels, token_weights, options, options.tensor, pieces)
    found = []
    for rows in pieces:
        weights = None if token_weights is None else token_weights[rows]
        found.append(_softmax_of_piece(logits[rows], labels[rows], weights, options))
    losses, log_sums = zip(*found, strict=True)
    return torch.cat(losses), torch.cat(log_sums)


def _softmax_of_piece(
    logits: Tensor, labels: Tensor, token_weights: Tensor | None, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    """As `_softmax`, in fp32 at once. Each operation that can be is in place."""
    x, tanh = _capped(logits.float(), options)
    target = x.gather(1, labels.unsqueeze(1))
    top = x.amax(1, keepdim=True)
    x.sub_(top).exp_()
    total = x.sum(1, keepdim=True)
    log_sum = total.log().add_(top)
    losses = (log_sum - target).squeeze(1)
    if token_weights is None:
        return losses, log_sum.squeeze(1)

    # The gradient of w (log_sum - target + c log_sum^2) is w (1 + 2 c log_sum) p, less w at the
    # label.
    weights = token_weights.unsqueeze(1)
    x.mul_(weights * (1.0 + 2.0 * options.z_coeff * log_sum) / total)
    _write_gradient(logits, x, tanh, labels, token_weights)
    return losses, log_sum.squeeze(1)


def _softmax_over_ranks(
    logits: Tensor,
    labels: Tensor,
    token_weights: Tensor | None,
    options: HeadOptions,
    tensor: TensorExchange,
    pieces: Sequence[slice],
) -> tuple[Tensor, Tensor]:
    """As `_softmax`, on ranks that have the logits of different tokens of the vocabulary."""
    numbers, is_own = own_rows(labels, logits.shape[1], tensor)
    found = [_statistics(logits[rows], numbers[rows], options) for rows in pieces]
    own_top, own_total, own_target = torch.cat(found).unbind(1)
    top = tensor.maximum(own_top)
    total, target = tensor.total(
        torch.stack((own_total * (own_top - top).exp(), own_target.where(is_own, 0.0)))
    )
    log_sum = total.log() + top
    if token_weights is not None:
        # As in `_softmax_of_piece`; exponentials are computed again instead of kept.
        factors = token_weights * (1.0 + 2.0 * options.z_coeff * log_sum) / total
        for rows in pieces:
            x, tanh = _capped(logits[rows].float(), options)
            x.sub_(top[rows, None]).exp_().mul_(factors[rows, None])
            weights = token_weights[rows] * is_own[rows]
            _write_gradient(logits[rows], x, tanh, numbers[rows], weights)
    return log_sum - target, log_sum


def _statistics(logits: Tensor, labels: Tensor, options: HeadOptions) -> Tensor:
    """The largest logit, the sum of exponentials of the distances to it, and the label's logit of
    each token: [tokens, 3] fp32.
    """
    x, _ = _capped(logits.to(torch.float32, copy=True), options)
    target = x.gather(1, labels.unsqueeze(1))
    top = x.amax(1, keepdim=True)
    return torch.cat((top, x.sub_(top).exp_().sum(1, keepdim=True), target), dim=1)


def _capped(x: Tensor, options: HeadOptions) -> tuple[Tensor, Tensor | None]:
    """(logits, None), or with a softcap (capped logits, its tanh). Overwrites `x`."""
    if options.softcap is None:
        return x, None
    tanh = x.div_(options.softcap).tanh_()
    return tanh * options.softcap, tanh


def _write_gradient(
    logits: Tensor, x: Tensor, tanh: Tensor | None, labels: Tensor, token_weights: Tensor
) -> None:
    """Overwrites logits with their gradient, from `x`, its part without the labels."""
    x[torch.arange(len(x), device=x.device), labels] -= token_weights
    if tanh is not None:
        x.mul_(tanh.square_().neg_().add_(1.0))
    if x.data_ptr() != logits.data_ptr():
        logits.copy_(x)


def _add_product(total: Tensor, logits: Tensor, hidden: Tensor) -> None:
    """Adds logits^T hidden, [vocab, hidden], to a total in fp32."""
    if logits.dtype == total.dtype:
        total.addmm_(logits.t(), hidden)
        return
    if is_slow(hidden):
        hidden = hidden.float()
    for rows in slices(len(total), max(1, BLOCK_NUMEL // total.shape[1])):
        total[rows] += logits[:, rows].t().to(hidden.dtype) @ hidden


def sizes_for(device_kind: str) -> Sizes:
    """How much is done at a time on a device of this kind."""
    return _CPU if device_kind == "cpu" else ACCELERATOR


def _of_autocast(tensor: Tensor) -> Tensor:
    """In the dtype that autocast, where it is on, would project in."""
    kind = tensor.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int) -> None:
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"Expected hidden states [..., hidden] and a weight [vocab, hidden], got "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}."
        )
    if labels.shape != hidden.shape[:-1] or labels.dtype != torch.int64:
        raise ValueError(
            f"Expected int64 labels of shape {tuple(hidden.shape[:-1])}, got {labels.dtype} "
            f"{tuple(labels.shape)}."
        )
    if not hidden.is_floating_point() or hidden.dtype != weight.dtype:
        raise ValueError(
            f"Expected hidden states and a weight of one floating dtype, got {hidden.dtype} and "
            f"{weight.dtype}."
        )
    # Reading labels elsewhere would stall the device, and its gather asserts the range in any case.
    if labels.device.type != "cpu" or labels.numel() == 0:
        return
    low, high = (int(bound) for bound in labels.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"Expected labels in [0, {vocab_size}), got labels from {low} to {high}.")
