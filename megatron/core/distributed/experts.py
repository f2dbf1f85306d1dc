"""Expert parallelism: the experts of a mixture divided over ranks, to which tokens travel.

Each rank of a group has its own tokens and an equal share of the experts: of 8 experts on 2 ranks
the first has 0 to 3, the second 4 to 7. `ExpertExchange` takes the place of `MoELayer.exchange`:

    send         counts     [ranks, experts here] int64, and the mixture's number: all-to-all
                 tokens     in the order of all experts: all-to-all of parts as long as counted
                 order      from (source rank, expert) to (expert, source rank), on the device
    bring_back   the same steps backwards

The backward of either is the other, on gradients. Both only copy, so neither rounds, and results do
not depend on when messages arrive. An expert gets its tokens in the order of the source ranks.

[Note: order of exchanges] An exchange is a collective of the group of ranks that share the experts,
issued by the thread that computes, on its current stream. FSDP's collectives run on lanes, over
other groups, in parallel. Together they cannot lock up, because of this invariant: all ranks run
the same program, one sequence of exchanges, of work put on lanes, and of waits for that work. Every
rank takes part in every exchange, with or without tokens, and every module with experts runs on it;
the sequence does not depend on how tokens are routed. Take the rank that is furthest behind in
the sequence. If it is about to exchange, each peer is at that exchange already or will get there
without it. If it waits for a lane, all ranks have queued that work before, since they are at least
as far, and a lane only waits for the same work on other ranks' lanes, in the order in which it was
queued, and for local copies and updates, which wait for no other rank. So this rank
makes progress, and with it every rank.

Ranks that disagree get an error from the mixture's number next to the counts, if they meet in that
exchange, and otherwise before the optimizer's step, where ranks compare their exchanges (`record`;
see fsdp/collective_history.py). Ranks that never meet wait until the watchdog or the timeout of the
groups ends them.

Nor can messages be taken for each other's. Where all ranks share the experts, their group is that
of the lanes, too. There gloo keeps the lanes' messages, which have tags, apart from collectives,
and NCCL runs a communicator's collectives in the order of their issue. That order is the program's:
on an accelerator, work is issued by the thread that puts it on a lane.

On a GPU the collectives of several NCCL communicators run side by side on several streams. Each
rank's host issues them in one order, the same everywhere, but devices may start them in another.
NCCL's kernels wait on the device for their peers, so two may block each other if one occupies what
the other lacks on another rank. The lanes of FSDP have this in common with every FSDP over several
meshes. A device with room for the kernels of three communicators at once (they take some tens of
thread blocks of a GPU's thousands) does not come into this position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.distributed.fsdp.group_plan import THE_MODEL
from megatron.core.issued_collectives import issuing
from megatron.core.transformer.moe_layer import MoELayer, Sent
from megatron.core.transformer.token_permutation import places_of


def divide_experts(
    model: nn.Module,
    group: dist.ProcessGroup,
    record: Callable[[nn.Module, bool], None] | None = None,
) -> None:
    """Has every mixture of experts in `model` send its tokens to the ranks of `group`, each of
    which has an equal share of the experts.

    Does not divide the weights: the engine must show each rank the weights of its experts.

    Args:
        record: called with a mixture's experts, and whether in backward, before tokens or their
            gradients travel, in the thread that computes.

    Raises:
        ValueError: for a mixture whose experts cannot be divided equally.
    """
    num_ranks = dist.get_world_size(group)
    mixtures = {
        name or THE_MODEL: module
        for name, module in model.named_modules()
        if isinstance(module, MoELayer)
    }
    for number, (name, module) in enumerate(mixtures.items()):
        num_experts = module.spec.router.num_experts
        if num_experts % num_ranks:
            raise ValueError(
                f"Expected a number of experts that {num_ranks} ranks can divide equally, got "
                f"{num_experts} in {name}."
            )
        module.exchange = ExpertExchange(
            group,
            number,
            tuple(mixtures),
            None if record is None else partial(record, module.experts),
        )


class ExpertExchange:
    """The exchange of one mixture's tokens among the ranks of a group. Implements `TokenExchange`.

    All ranks of the group call its methods in the same order, also ranks without tokens.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        number: int = 0,
        names: Sequence[str] = (THE_MODEL,),
        record: Callable[[bool], None] | None = None,
    ) -> None:
        """
        Args:
            number: index of the mixture among the mixtures of the model.
            names: of all mixtures of the model, for messages; the same on every rank.
            record: called before tokens travel (False), and before their gradients do (True).
        """
        self._group = group
        self._num_ranks = dist.get_world_size(group)
        self._number = number
        self._names = names
        self._record = record

    def send(self, tokens: Tensor, counts: Tensor) -> Sent:
        """See `TokenExchange.send`.

        On an accelerator the host waits here, once, until the counts arrive: a
        collective is issued with the lengths of its parts.

        Raises:
            RuntimeError: other ranks send tokens of another mixture.
        """
        # [ranks, experts of each]: the tokens that this rank sends and receives. A last
        # column has the number of the mixture.
        leaving = F.pad(counts.view(self._num_ranks, -1), (0, 1), value=self._number)
        coming = torch.empty_like(leaving)
        name = self._names[self._number]
        with issuing(f"all-to-all of the loads of {counts.numel()} experts in {name}", counts):
            dist.all_to_all_single(coming, leaving, group=self._group)
        leaving, coming, numbers = leaving[:, :-1], coming[:, :-1], coming[:, -1]
        num_leaving, num_coming, theirs = torch.stack(
            [leaving.sum(1), coming.sum(1), numbers]
        ).tolist()
        self._check_mixture(theirs)
        # Only now: of an exchange that did not match, all ranks of the group have just been told.
        if self._record is not None:
            self._record(False)

        order = _order_by_expert(coming, sum(num_coming))
        place = places_of(order, len(order))
        splits = _Splits(self._group, name, num_leaving, num_coming, self._record)
        apply: Any = _Send.apply  # torch declares it without types
        received: Tensor = apply(tokens, order, place, splits)
        return Sent(received, coming.sum(0), (order, place, splits))

    def bring_back(self, outputs: Tensor, sent: Sent) -> Tensor:
        """See `TokenExchange.bring_back`."""
        apply: Any = _BringBack.apply
        output: Tensor = apply(outputs, *sent.way_back)
        return output

    def _check_mixture(self, numbers: Sequence[int]) -> None:
        """RuntimeError unless the ranks of the group, whose mixtures have these numbers, send
        tokens of this one.
        """
        for peer, number in enumerate(numbers):
            if number != self._number:
                other = self._names[number] if number < len(self._names) else "an unknown mixture"
                raise RuntimeError(
                    f"Expected every rank to send tokens of {self._names[self._number]}, got "
                    f"{other} on rank {peer} of the ranks that share the experts."
                )


class _Splits(NamedTuple):
    """How many rows an exchange moves.

    Attributes:
        name: of the mixture.
        num_leaving, num_coming: tokens to, and from, each rank of the group.
        record: see `ExpertExchange`.
    """

    group: dist.ProcessGroup
    name: str
    num_leaving: list[int]
    num_coming: list[int]
    record: Callable[[bool], None] | None


def _order_by_expert(counts: Tensor, total: int) -> Tensor:
    """How to put tokens into the order of their experts.

    Args:
        counts: [source ranks, experts] int64. Tokens are in the order of (source rank, expert).
        total: the sum of `counts`, already on the host.

    Returns:
        [total] int64: for each place in the order of (expert, source rank) the token's old one. For
        counts [[2, 1], [1, 3]]: 0 1 3 | 2 4 5 6.
    """
    lengths = counts.T.flatten()  # of the runs, each of one source and one expert, in the new order
    ends = counts.flatten().cumsum(0).view_as(counts).T.flatten()  # of each run, in the old order
    new_ends = lengths.cumsum(0)
    shift = (ends - new_ends).repeat_interleave(lengths, output_size=total)
    return torch.arange(total, device=counts.device) + shift


def _send_rows(tokens: Tensor, order: Tensor, splits: _Splits) -> Tensor:
    """From the order of all experts, on the tokens' ranks, to each expert's tokens on its rank."""
    return _all_to_all(tokens, splits, splits.num_leaving, splits.num_coming)[order]


def _return_rows(outputs: Tensor, place: Tensor, splits: _Splits) -> Tensor:
    """The reverse of `_send_rows`."""
    return _all_to_all(outputs[place], splits, splits.num_coming, splits.num_leaving)


def _all_to_all(
    tensor: Tensor, splits: _Splits, leaving: Sequence[int], coming: Sequence[int]
) -> Tensor:
    """Sends each rank its rows. [sum of leaving, ...] -> [sum of coming, ...]."""
    received = tensor.new_empty(sum(coming), *tensor.shape[1:])
    with issuing(f"all-to-all of {len(tensor)} tokens for the experts in {splits.name}", tensor):
        dist.all_to_all_single(
            received, tensor.contiguous(), list(coming), list(leaving), group=splits.group
        )
    return received


# The indices are saved as tensors are: a recomputed layer keeps none until its backward.


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, place: Tensor, splits: _Splits) -> Tensor:
        ctx.save_for_backward(place)
        ctx.splits = splits
        return _send_rows(tokens, order, splits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return _return_rows(gradient, place, ctx.splits), None, None, None


class _BringBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, order: Tensor, place: Tensor, splits: _Splits) -> Tensor:
        ctx.save_for_backward(order)
        ctx.splits = splits
        return _return_rows(outputs, place, splits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        if ctx.splits.record is not None:
            ctx.splits.record(True)
        return _send_rows(gradient, order, ctx.splits), None, None, None
