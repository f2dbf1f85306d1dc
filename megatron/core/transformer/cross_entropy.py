"""Cross entropy over a large vocabulary without a second copy of the logits.

[Note: the gradient takes the logits' place]
Logits are the largest activation of a small GPT: rows x vocabulary. Their gradient has the same
size and is wanted exactly when the logits are wanted no more, so backward writes it over them, a
few rows at a time; only those rows exist in fp32. What makes that safe:
- The rows are overwritten by ordinary in-place operations, which raise the storage's version: any
  other operation that saved the logits and runs backward later is stopped by autograd.
- A second backward would read gradients where it expects logits; it is refused.
- A leaf's values belong to the caller; leaves that want a gradient, and views of them, are refused.
The caller must not read the logits after backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Elements of logits that exist in fp32 at a time: 64 MiB, enough to keep an accelerator busy.
CHUNK_NUMEL = 1 << 24


def vocab_cross_entropy(logits: Tensor, labels: Tensor, chunk_numel: int = CHUNK_NUMEL) -> Tensor:
    """-log softmax(logits)[label] of every row. Backward overwrites `logits` with its gradient, see
    the note above.

    Args:
        logits: [..., vocab], any floating dtype, contiguous. Every column takes part in the
            softmax, padding included.
        labels: [...] int64, each in [0, vocab). Checked on the CPU; elsewhere the device's own
            assertion stops the run.
        chunk_numel: how many elements of the logits to convert to fp32 at a time (at least one
            row).

    Returns:
        losses: [...] fp32, of the labels' shape.

    Raises:
        ValueError: shapes or dtypes that do not fit, a label out of range, or logits that want a
            gradient and are a leaf or a view of one.
        RuntimeError: in backward, when it runs a second time or is itself to be differentiated.
    """
    if logits.dim() < 1 or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"Expected logits [..., vocab] and labels [...], got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}."
        )
    if not logits.is_floating_point() or labels.dtype != torch.int64:
        raise ValueError(
            f"Expected floating point logits and int64 labels, got {logits.dtype} and "
            f"{labels.dtype}."
        )
    if not logits.is_contiguous():
        raise ValueError(
            f"Expected contiguous logits, got strides {logits.stride()} for shape "
            f"{tuple(logits.shape)}."
        )

    owner = logits if logits._base is None else logits._base
    if torch.is_grad_enabled() and logits.requires_grad and owner.is_leaf:
        raise ValueError(
            "Expected logits that an operation made, got a leaf's values, which backward would "
            "overwrite."
        )

    _check_labels(labels, logits.shape[-1])
    apply: Any = _VocabCrossEntropy.apply  # torch declares it without types
    losses: Tensor = apply(logits, labels, chunk_numel)
    return losses


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, chunk_numel: int) -> Tensor:
        flat_logits, flat_labels = _rows(logits, labels)
        num_rows, device = len(flat_labels), logits.device
        log_sum_exp = torch.empty(num_rows, dtype=torch.float32, device=device)  # [n]
        target = torch.empty_like(log_sum_exp)  # [n], each row's logit of its label
        for rows in _row_chunks(flat_logits, chunk_numel):
            chunk = flat_logits[rows].float()  # [rows, vocab]
            log_sum_exp[rows] = torch.logsumexp(chunk, dim=1)
            target[rows] = chunk.gather(1, flat_labels[rows].unsqueeze(1)).squeeze(1)

        ctx.save_for_backward(logits, labels, log_sum_exp)
        ctx.chunk_numel = chunk_numel
        ctx.holds_gradient = False
        # Not a view of a flat result: sharding wrappers register hooks on a module's output and
        # warn about views.
        return log_sum_exp.view_as(labels) - target.view_as(labels)

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Expected a backward without create_graph, got one with it: "
                "the gradient of vocab_cross_entropy cannot be differentiated."
            )
        if ctx.holds_gradient:
            raise RuntimeError(
                "Expected one backward through vocab_cross_entropy, got a second: "
                "the first wrote the gradient over the logits."
            )

        logits, labels, log_sum_exp = ctx.saved_tensors
        ctx.holds_gradient = True
        flat_logits, flat_labels = _rows(logits, labels)
        flat_grad = grad_losses.flatten()  # [n]
        for rows in _row_chunks(flat_logits, ctx.chunk_numel):
            chunk = flat_logits[rows]
            # The probabilities, [rows, vocab]. Subtracting an fp32 column makes the difference fp32
            # in one pass.
            gradient = (chunk - log_sum_exp[rows].unsqueeze(1)).exp_()
            gradient[torch.arange(len(gradient), device=gradient.device), flat_labels[rows]] -= 1.0
            chunk.copy_(gradient.mul_(flat_grad[rows].unsqueeze(1)))

        return logits.detach(), None, None


def _rows(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the logits as [n, vocab] and of the labels as [n] (a copy of the labels, if they are
    not contiguous).
    """
    return logits.view(labels.numel(), logits.shape[-1]), labels.flatten()


def _row_chunks(logits: Tensor, chunk_numel: int) -> Iterator[slice]:
    num_rows, vocab_size = logits.shape
    step = max(1, chunk_numel // max(1, vocab_size))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _check_labels(labels: Tensor, vocab_size: int) -> None:
    # Reading labels elsewhere would stall the device, and its gather asserts the range in any case.
    if labels.device.type != "cpu" or labels.numel() == 0:
        return
    low, high = (int(bound) for bound in labels.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"Expected labels in [0, {vocab_size}), got labels from {low} to {high}.")
