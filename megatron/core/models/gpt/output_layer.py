"""From hidden states to logits, or to losses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.products import linear
from megatron.core.transformer.fused_weight import Linear
from megatron.core.transformer.linear_cross_entropy import (
    HeadOptions,
    WeightedLoss,
    linear_cross_entropy,
    weighted_cross_entropy,
)
from megatron.core.transformer.tensor_exchange import TensorExchange

# Logits, the losses of tokens, or their weighted sum.
Output = Tensor | WeightedLoss


@dataclass(frozen=True, eq=False)
class Targets:
    """Targets of a model.

    Attributes:
        labels: [batch, seq] int64, the token that follows each.
        weights: [batch, seq] fp32, how much the loss of each counts in the sum that is wanted;
            None: the loss of each is wanted.
    """

    labels: Tensor
    weights: Tensor | None = None

    def check(self, tokens: Tensor) -> None:
        """ValueError unless they are of the shape of `tokens`. Their dtypes are the loss's
        matter.
        """
        for name, part in (("labels", self.labels), ("loss weights", self.weights)):
            if part is not None and part.shape != tokens.shape:
                raise ValueError(
                    f"Expected {name} of shape {tuple(tokens.shape)}, got {tuple(part.shape)}."
                )


def project(
    hidden: Tensor,
    weight: Tensor,
    options: HeadOptions,
    targets: Targets | None,
    tensor: TensorExchange | None = None,
) -> Output:
    """Returns a model's output.

    Args:
        hidden: [batch, seq, hidden]; with an exchange, [batch, seq / ranks, hidden].
        weight: [vocab, hidden]; with an exchange, this rank's part of the rows.

    Returns:
        logits [batch, seq, vocab] in the compute dtype, if there are no targets; of the tokens
        whose rows are in `weight`.
    """
    if tensor is not None:
        hidden = tensor.gather(hidden)
        options = replace(options, tensor=tensor)
    if targets is None:
        logits = linear(hidden, weight)
        cap = options.softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
    if targets.weights is None:
        return linear_cross_entropy(hidden, weight, targets.labels, options)
    return weighted_cross_entropy(hidden, weight, targets.labels, targets.weights, options)


class OutputLayer(Linear):
    """The output projection of a model whose embeddings are not tied to it.

    It computes losses, too, since a sharded weight is whole while its module runs.
    """

    is_hidden = False

    def __init__(
        self, hidden_size: int, vocab_size: int, options: HeadOptions, *, init_std: float
    ) -> None:
        super().__init__(hidden_size, vocab_size, bias=False, init_std=init_std, tensor_dim=0)
        self.options = options

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        targets: Targets | None = None,
        tensor: TensorExchange | None = None,
    ) -> Output:
        """See `project`."""
        return project(hidden, self.weight, self.options, targets, tensor)
