"""MoELayer: a mixture of experts as the feed-forward network of a layer.

[Note: capacity] With a capacity factor an expert takes at most ceil(factor x an even share) of the
choices of a rank's microbatch, a number known from the shapes. A choice beyond it is dropped: the
expert does not compute the token, and the token goes without this part of its sum. The weights of
its other experts stay as they are, as in Megatron: an expert's share in a token does not depend
on how many others chose the same experts. A token all of whose choices are dropped passes through
the residual stream alone, and the shared experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from megatron.core.transformer.documents import Documents
from megatron.core.transformer.experts import Experts
from megatron.core.transformer.fused_weight import Linear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.router import Router, RouterReport, Routing
from megatron.core.transformer.sequence_slice import SequenceSlice
from megatron.core.transformer.spec import MoeSpec
from megatron.core.transformer.token_permutation import (
    TokenOrder,
    combine_tokens,
    order_by_expert,
    order_within_capacity,
    permute_tokens,
)


class Sent(NamedTuple):
    """Tokens where their experts are.

    Attributes:
        tokens: [tokens here, hidden], sorted by expert.
        counts: of each expert whose weights are here: [experts here] int64, on the tokens' device.
        way_back: what `TokenExchange.bring_back` needs.
    """

    tokens: Tensor
    counts: Tensor
    way_back: Any


class TokenExchange(Protocol):
    """How tokens get to the ranks that hold their experts, and back. Differentiable."""

    def send(self, tokens: Tensor, counts: Tensor) -> Sent:
        """Sends tokens to their experts.

        Args:
            tokens: [tokens, hidden], sorted by expert.
            counts: tokens of each expert: [all experts] int64.
        """

    def bring_back(self, outputs: Tensor, sent: Sent) -> Tensor:
        """What experts made of `sent.tokens`, in the order of the tokens given to `send`."""


class NoExchange:
    """The exchange of a rank that holds all experts."""

    def send(self, tokens: Tensor, counts: Tensor) -> Sent:
        return Sent(tokens, counts, None)

    def bring_back(self, outputs: Tensor, sent: Sent) -> Tensor:  # noqa: ARG002  a TokenExchange
        return outputs


class MoELayer(nn.Module):
    """A router, the experts it chooses from, and a network that computes every token besides.

    Attributes:
        exchange: how tokens get to experts. Expert parallelism replaces it.
        sequence_slice: the part of each sequence that the tokens are; None: all of it.
    """

    exchange: TokenExchange
    sequence_slice: SequenceSlice | None

    def __init__(
        self, spec: MoeSpec, hidden_size: int, *, init_std: float, output_init_std: float
    ) -> None:
        super().__init__()
        self.spec = spec
        self.exchange = NoExchange()
        self.sequence_slice = None
        self.router = Router(spec.router, hidden_size, init_std=init_std)
        self.experts = Experts(
            spec, hidden_size, init_std=init_std, output_init_std=output_init_std
        )
        self.shared_experts = (
            None
            if spec.shared is None
            else MLP(spec.shared, hidden_size, init_std=init_std, output_init_std=output_init_std)
        )
        self.shared_gate = (
            Linear(hidden_size, 1, bias=False, init_std=init_std) if spec.has_shared_gate else None
        )

    def forward(
        self, hidden: Tensor, documents: Documents | None = None
    ) -> tuple[Tensor, RouterReport]:
        """[batch, seq, hidden] -> the same, and the router's report.

        The padding of documents is left out of all of it: no expert computes it, it takes no room
        in an expert's capacity, and its result is zero.
        """
        part = self.sequence_slice
        within = None if part is None else part.of_rank(hidden.shape[1])
        lengths = None if documents is None else documents.without_padding(within)
        if documents is None or lengths is None:
            output, report = self._mix(hidden)
            return (
                output if self.shared_experts is None else output + self._shared(hidden)
            ), report

        # The number of real tokens is known to the host, which therefore does not wait.
        real, tokens = documents.real_positions(hidden.device, within), hidden.flatten(0, 1)
        num_tokens = sum(documents.without_padding() or ())
        own = tokens.index_select(0, real)
        output, report = self._mix(own, lengths, num_tokens)
        if self.shared_experts is not None and self.shared_experts.tensor is None:
            output = output + self._shared(own)
        elif self.shared_experts is not None:
            # Ranks exchange equally many positions: padding, too.
            output = output + self._shared(hidden).flatten(0, 1).index_select(0, real)
        padded = output.new_zeros(tokens.shape).index_copy(0, real, output)
        return padded.view_as(hidden), report

    def _mix(
        self, hidden: Tensor, lengths: Sequence[int] | None = None, num_tokens: int | None = None
    ) -> tuple[Tensor, RouterReport]:
        """As `forward`, of the routed experts and without padding. See `Router.forward` for the
        arguments.
        """
        routing = self.router(hidden, lengths, num_tokens)
        order = self._order(routing)

        sent = self.exchange.send(permute_tokens(hidden.flatten(0, -2), order), order.counts)
        outputs = self.exchange.bring_back(self.experts(sent.tokens, sent.counts), sent)
        return combine_tokens(outputs, routing.weights, order).view_as(hidden), routing.report

    def _order(self, routing: Routing) -> TokenOrder:
        """By expert, without the choices beyond the experts' capacity."""
        factor = self.spec.capacity_factor
        experts, load = routing.experts, routing.report.load
        if factor is None:
            return order_by_expert(experts, load)

        capacity = max(1, math.ceil(experts.numel() / len(load) * factor))
        return order_within_capacity(
            experts, load, capacity, self.spec.drop_policy, routing.weights
        )

    def _shared(self, hidden: Tensor) -> Tensor:
        assert self.shared_experts is not None, "asked for only where there are some"
        output: Tensor = self.shared_experts(hidden)
        return output if self.shared_gate is None else self.shared_gate(hidden).sigmoid() * output
