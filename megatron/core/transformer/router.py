"""Router: which experts compute each token, and with which weights.

An accelerator's host never waits here. Routers are no `Fp32Module`: with bf16 compute their
weights are rounded like all others, as in the published models, of which some compute with them in
fp32 (`RouterSpec.dtype`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.autocast import without_autocast
from megatron.core.products import linear
from megatron.core.transformer.fused_weight import reset_linear
from megatron.core.transformer.sequence_slice import SequenceSlice
from megatron.core.transformer.spec import Balancing, RouterSpec, Scores

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}  # of RouterSpec.dtype
_TINY = 1e-20  # keeps a token's weights finite where all its scores are zero


class RouterReport(NamedTuple):
    """A router's report besides its choices, for one microbatch.

    Attributes:
        balance_loss, z_loss: times their coefficients; scalars, fp32, differentiable. Zero where
            the spec has none.
        load: tokens that chose each expert, dropped ones too: [experts] int64.
    """

    balance_loss: Tensor
    z_loss: Tensor
    load: Tensor


class Routing(NamedTuple):
    """The choices of all tokens, in the order of the tokens.

    Attributes:
        experts: [tokens, top_k] int64, different ones in each row.
        weights: [tokens, top_k], of each expert's result; fp32 or fp64.
    """

    experts: Tensor
    weights: Tensor
    report: RouterReport


class Router(nn.Module):
    """A linear layer whose outputs, one for each expert, score the experts for a token.

    Attributes:
        weight: [experts, hidden].
        bias: [experts], or None.
        expert_bias: [experts], a persistent buffer, or None. Added to the scores where experts are
            chosen, not in the weights. fp32 whatever the module is converted to.
        sequence_slice: the part of each sequence that the tokens are; None: all of it.
    """

    expert_bias: Tensor | None
    sequence_slice: SequenceSlice | None = None

    def __init__(self, spec: RouterSpec, hidden_size: int, *, init_std: float) -> None:
        super().__init__()
        self.spec = spec
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(spec.num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(spec.num_experts)) if spec.has_bias else None
        # On the CPU, even where parameters are made on meta: no other code would fill it.
        bias = torch.zeros(spec.num_experts, device="cpu") if spec.has_expert_bias else None
        self.register_buffer("expert_bias", bias)
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the initial weights: see `reset_linear`."""
        reset_linear(self.weight, self.bias, self.init_std)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """As for any module (`to`, `bfloat16`, ...), but the bias keeps its dtype: in 16 bits the
        small steps that it moves by would be lost.
        """
        before = self.expert_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self.expert_bias
        if before is not None and after is not None and after.dtype != before.dtype:
            self.expert_bias = before.to(after.device)
        return self

    def forward(
        self,
        hidden: Tensor,
        lengths: Sequence[int] | None = None,
        num_tokens: int | None = None,
    ) -> Routing:
        """Routes tokens. The losses are means over the tokens of whole sequences, of which this
        rank may have a part (`sequence_slice`): the balance loss is of all of them, and the z-loss
        such that the mean over the ranks is.

        Args:
            hidden: [batch, seq, hidden]; with `lengths` [tokens, hidden].
            lengths: tokens of each sequence, one behind the other.
            num_tokens: of whole sequences together; None: each rank has equally many.
        """
        logits = self._logits(hidden.flatten(0, -2))
        if lengths is None:
            lengths = (hidden.shape[1],) * hidden.shape[0]
        chosen, weights = self._choose(logits)

        # Not torch.bincount, for whose length an accelerator's host waits.
        load = chosen.new_zeros(self.spec.num_experts)
        load.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
        report = RouterReport(
            self._balance_loss(logits, chosen, lengths), self._z_loss(logits, num_tokens), load
        )
        return Routing(chosen, weights, report)

    def _logits(self, tokens: Tensor) -> Tensor:
        """[tokens, experts], fp32 or wider."""
        if self.spec.dtype is None:
            # In the compute dtype, that of autocast where it is on.
            logits = linear(tokens, self.weight, self.bias)
            return logits.float() if logits.dtype.itemsize < 4 else logits

        dtype = _DTYPES[self.spec.dtype]
        bias = None if self.bias is None else self.bias.to(dtype)
        with without_autocast(tokens.device):
            return linear(tokens.to(dtype), self.weight.to(dtype), bias)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token and their weights, both [tokens, top_k]."""
        spec = self.spec
        if not spec.is_scored_first:
            chosen = self._largest(logits)
            return chosen, logits.gather(1, chosen).softmax(dim=-1) * spec.scale

        scores = logits.softmax(dim=-1) if spec.scores is Scores.SOFTMAX else logits.sigmoid()
        chosen = self._largest(scores)
        weights = scores.gather(1, chosen)
        if spec.is_normalized:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _TINY)
        return chosen, weights * spec.scale

    @torch.no_grad()
    def _largest(self, scores: Tensor) -> Tensor:
        """The experts of each token: [tokens, top_k]. Among equal scores `topk` decides, as it does
        in the models' published code.
        """
        spec = self.spec
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        if spec.num_groups > 1:
            grouped = scores.unflatten(1, (spec.num_groups, -1))
            best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
            taken = best.topk(spec.top_groups, dim=-1).indices
            is_out = torch.ones_like(best, dtype=torch.bool).scatter(1, taken, False)
            scores = grouped.masked_fill(is_out[..., None], -torch.inf).flatten(1)
        return scores.topk(spec.top_k, dim=-1).indices

    def _balance_loss(self, logits: Tensor, chosen: Tensor, lengths: Sequence[int]) -> Tensor:
        """Of each part of the tokens, the number of experts times the sum over them of (share of
        the choices) x (mean score), which is 1 where all experts are chosen alike (Fedus et al.
        2021, arXiv:2101.03961); its mean over the parts. fp32.

        A part is the microbatch, or a sequence. As in Megatron and in DeepSeek-V3
        (arXiv:2412.19437), choices are by the scores alone: a bias and groups, which balance in
        their own way, do not hide from this loss that scores are uneven.
        """
        spec = self.spec
        is_on = spec.balancing is not Balancing.NONE and spec.balance_coeff and self.training
        # The mean over no tokens would be NaN; but of a sequence other ranks may have some.
        if not is_on or (self.sequence_slice is None and not len(logits)):
            return _no_loss(logits)

        if spec.scores is Scores.SOFTMAX:
            scores = logits.softmax(dim=-1)
        else:
            scores = logits.sigmoid()
            scores = scores / (scores.sum(dim=-1, keepdim=True) + _TINY)
        if self.expert_bias is not None or spec.num_groups > 1:
            chosen = scores.topk(spec.top_k, dim=-1).indices

        parts = lengths if spec.balancing is Balancing.SEQUENCE else (len(logits),)
        counts = torch.zeros_like(scores).scatter_(1, chosen, 1.0)
        share, mean_score = self._shares(counts, scores, parts)
        loss: Tensor = spec.num_experts * (share * mean_score).sum(dim=-1).mean()
        return (loss * spec.balance_coeff).float()

    def _shares(
        self, counts: Tensor, scores: Tensor, parts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Each expert's share of the choices, and its mean score: [parts, experts] both.

        Args:
            counts: [tokens, experts], 1 for each choice.
        """
        part = self.sequence_slice
        if part is None:
            return _means(counts, parts) / self.spec.top_k, _means(scores, parts)

        both = torch.cat((counts, scores), dim=1)
        counts, scores = part.total(_sums(both, parts)).chunk(2, dim=1)
        num_choices = counts.sum(dim=1, keepdim=True)
        return counts / num_choices, scores * (self.spec.top_k / num_choices)

    def _z_loss(self, logits: Tensor, num_tokens: int | None) -> Tensor:
        """The mean of the squared log-sum-exp of a token's logits. fp32."""
        if not self.spec.z_coeff or not self.training or not len(logits):
            return _no_loss(logits)
        loss: Tensor = logits.logsumexp(dim=-1).square().mean() * self.spec.z_coeff
        if self.sequence_slice is not None and num_tokens is not None:
            loss = loss * (len(logits) * self.sequence_slice.size / num_tokens)
        return loss.float()


def _means(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """The mean row of each of so many consecutive rows: [lengths, columns]."""
    if len(set(lengths)) == 1:
        means: Tensor = rows.unflatten(0, (len(lengths), -1)).mean(dim=1)
        return means
    return torch.stack([part.mean(dim=0) for part in rows.split(list(lengths))])


def _sums(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """The sum of each of so many consecutive rows: [lengths, columns]."""
    return torch.stack([part.sum(dim=0) for part in rows.split(list(lengths))])


def _no_loss(logits: Tensor) -> Tensor:
    return logits.new_zeros((), dtype=torch.float32)
