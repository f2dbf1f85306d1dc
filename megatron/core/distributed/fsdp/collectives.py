"""All-gather, reduce-scatter and all-reduce of flat tensors, the fastest way each device has.

[Note: exchange] gloo runs a reduce-scatter as an all-reduce and copies inside its all-gather. On
the CPU the ranks therefore exchange their parts directly: each sends every other rank only the
part of that rank, and adds up the received parts, a piece at a time, while the next piece is in
flight. That moves the fewest possible bytes, takes no more memory than two pieces, and adds up in a
fixed order, so the result is the same bits in every run. On a GPU the backend's own collectives do
this; over a single rank, one kernel of torch adds or copies.

[Note: tags] Ranks that disagree about the next collective must not mix up its parts with the parts
of another. On the CPU every message has the tag of its collective, so such ranks wait for each
other until the watchdog or the process group's timeout ends them. A disagreement in which no rank
waits, such as a gradient that only some ranks have, is found before the optimizer's step: see
`CollectiveHistory`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager, _world

from megatron.core.issued_collectives import issuing
from megatron.core.rank_waits import waiting_for_ranks

# torch 2.13 renamed them and warns about the old names, the only ones in torch 2.11.
all_gather_on_device = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_on_device = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

# The first tag of this module, far from the small tags of a program's other messages.
FIRST_TAG = 2**30
# Elements of a part exchanged at a time. A message costs about 0.1 ms whatever its length.
_PIECE_NUMEL = 1048576
# Elements added up at a time, few enough to stay in the cache: 256 KiB in fp32.
_SUM_NUMEL = 65536
# Elements divided at a time on a device, where that takes a copy: 64 MiB in fp32.
_DIVIDED_NUMEL = 1 << 24


class Label(NamedTuple):
    """Identifies a collective.

    Attributes:
        tag: of its messages on the CPU; see [Note: tags]. Two threads that communicate over one
            group must not use the same.
        name: of the tensors, for the watchdog and for errors.
        ends: what follows the collective is appended to this list, for one that `carry_out` starts
            together with others; None: it is done at once.
    """

    tag: int = FIRST_TAG
    name: str = ""
    ends: list[Callable[[], None]] | None = None

    def describe(self, operation: str, numel: int) -> str:
        """Completes "waiting in the ..."."""
        return f"{operation} of {self.name or f'{numel} elements'}"

    def end(self, work: Callable[[], None]) -> None:
        """Does what follows the collective, now or when all have been started."""
        if self.ends is None:
            work()
        else:
            self.ends.append(work)


UNLABELLED = Label()
# Gathered in the program's threads, while a lane may be exchanging parts over the same group.
WHOLE_TENSOR = Label(FIRST_TAG + 1, "a whole tensor")


def tag_of(*key: int) -> int:
    """A tag for a key. Two keys of one thread may share a tag, since a correct program sends and
    receives the messages of a tag in the same order.
    """
    return FIRST_TAG + 2 + zlib.crc32(repr(key).encode()) % (2**31 - FIRST_TAG - 2)


class Move(NamedTuple):
    """Work that a lane carries out.

    Attributes:
        work: calls collectives, with the label that it gets.
        group: the process group of its only all-gather or reduce-scatter; None for other work.
        buffer: the tensor that the collective sends.
        dtype: in which a GPU's backend sends it.
    """

    work: Callable[[Label], None]
    group: dist.ProcessGroup | None
    buffer: torch.Tensor
    dtype: torch.dtype
    label: Label


def carry_out(moves: Sequence[Move]) -> None:
    """Carries out moves of one kind. Collectives over the same group start together: on the CPU all
    messages are in flight at once, and a GPU's backend launches one kernel for all of a dtype.
    """
    together: dict[object, list[Move]] = {}
    for number, move in enumerate(moves):
        key = number if move.group is None else (move.group, move.dtype)
        together.setdefault(key, []).append(move)
    for own in together.values():
        _start_together(own)


def _start_together(moves: Sequence[Move]) -> None:
    first, ends = moves[0], list[Callable[[], None]]()
    if len(moves) == 1:
        first.work(first.label)
        return

    with ExitStack() as stack:
        if first.buffer.device.type != "cpu":
            numel = sum(move.buffer.numel() for move in moves)
            name = first.label.describe(f"{len(moves)} collectives", numel)
            stack.enter_context(issuing(name, first.buffer))
            # After an error, torch would still queue collectives over the group and start none.
            group = first.group
            assert group is not None, "work of no group comes alone"
            stack.callback(lambda: _world.pg_coalesce_state.pop(group, None))
            stack.enter_context(_coalescing_manager(group))
        for move in moves:
            move.work(move.label._replace(ends=ends))
    for end in ends:
        end()


@dataclass(frozen=True)
class Reduction:
    """How the ranks' parts become one: (sum or mean) / divisor, or the maximum of each element.

    Attributes:
        accumulates: add to the result instead of overwriting it.
        device_dtype: in which a GPU's backend sends and adds; default: the result's.
        is_maximum: of tensors on the CPU, without an average, a divisor and accumulation.
    """

    is_average: bool = False
    divisor: float = 1.0
    accumulates: bool = False
    device_dtype: torch.dtype | None = None
    is_maximum: bool = False


def all_gather(
    out: torch.Tensor,
    own: torch.Tensor,
    group: dist.ProcessGroup,
    label: Label = UNLABELLED,
) -> None:
    """Fills `out` with the equal parts of all ranks, in the order of their ranks in `group`.

    Args:
        out: flat, contiguous; as many elements as all parts together.
        own: this rank's part; may be the very place in `out` where it belongs, but no other.
    """
    rank, parts = _parts(out, own, group)
    name = label.describe("all-gather", out.numel())
    if out.device.type != "cpu" and len(parts) > 1:
        with issuing(name, out):
            all_gather_on_device(out, own, group=group)
        return

    # Receives are posted before sends, and the own part is copied while messages are in flight.
    others, tag = _others(rank, len(parts)), label.tag
    works = [dist.irecv(parts[peer], group=group, group_src=peer, tag=tag) for peer in others]
    works += [dist.isend(own, group=group, group_dst=peer, tag=tag) for peer in others]
    if parts[rank].data_ptr() != own.data_ptr():
        parts[rank].copy_(own)
    label.end(lambda: _finish(works, name))


def combine(tensor: torch.Tensor, group: dist.ProcessGroup, *, by_maximum: bool = False) -> None:
    """All-reduces a small tensor in place, by sum or, element by element, by maximum."""
    with issuing(f"all-reduce of {tensor.numel()} elements", tensor):
        dist.all_reduce(tensor, dist.ReduceOp.MAX if by_maximum else dist.ReduceOp.SUM, group=group)


def combine_maxima(
    tensor: torch.Tensor, group: dist.ProcessGroup, label: Label = UNLABELLED
) -> None:
    """All-reduces a tensor in place by maximum, element by element, on a lane: on the CPU other
    threads may be exchanging tensors over the same group meanwhile.

    Args:
        tensor: flat, contiguous; on the CPU its length is a multiple of the number of ranks.
    """
    if tensor.device.type != "cpu":
        combine(tensor, group, by_maximum=True)
    else:
        all_reduce(tensor, tensor, group, Reduction(is_maximum=True), label)


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Overwrites `tensor` with the one of the group's first rank."""
    with issuing(f"broadcast of {tensor.numel()} elements", tensor):
        dist.broadcast(tensor, group=group, group_src=0)


def reduce_scatter(
    out: torch.Tensor,
    whole: torch.Tensor,
    group: dist.ProcessGroup,
    how: Reduction,
    label: Label = UNLABELLED,
) -> None:
    """Fills `out` with the sum or average over all ranks of this rank's part of `whole`, or adds it
    to `out`.

    On the CPU the parts travel in the dtype of `whole`, are added in fp32 (own part first, then the
    others' by rank) and rounded once, to the dtype of `out`. So bf16 gradients summed in fp32 send
    2 bytes an element and give the bits that sending them widened would. On a GPU they are cast to
    `how.device_dtype` first, unless they have it, and added as NCCL does.

    Args:
        out: flat, contiguous; may be this rank's part of `whole` itself, but no other.
        whole: flat, contiguous; as many elements as all parts together. Unchanged, unless `out`
            is part of it; on a GPU this rank's part may be overwritten.
    """
    rank, parts = _parts(whole, out, group)
    if out.device.type == "cpu":
        _exchange_and_add(out, parts, rank, group, how, label)
    elif len(parts) > 1:
        _reduce_scatter_with_backend(out, whole, group, how, label)
    else:
        _alone(out, whole, how)


def all_reduce(
    out: torch.Tensor,
    whole: torch.Tensor,
    group: dist.ProcessGroup,
    how: Reduction,
    label: Label = UNLABELLED,
) -> None:
    """Fills `out` with the sum or average of `whole` over all ranks, the same bits on every rank.

    Each rank adds up one part, as `reduce_scatter` does, and the ranks exchange the sums.

    Args:
        out: flat, contiguous, as long as `whole`; may be `whole` itself. Where the reduction
            accumulates, the same on every rank.
        whole: flat, contiguous; its length a multiple of the number of ranks.
    """
    num_ranks = dist.get_world_size(group)
    if out.shape != whole.shape or out.numel() % num_ranks:
        raise ValueError(
            f"Expected an output of the same length, a multiple of {num_ranks}, got {out.numel()} "
            f"for {whole.numel()}."
        )

    own = out.chunk(num_ranks)[dist.get_rank(group)] if out.numel() else out
    reduce_scatter(own, whole, group, how, label)
    all_gather(out, own, group, label)


def _parts(
    whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup
) -> tuple[int, tuple[torch.Tensor, ...]]:
    """(this rank in the group, every rank's part of `whole`).

    Raises:
        ValueError: before anything is sent, if `own` does not have the size of a part, or overlaps
            another part than this rank's.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if own.numel() * num_ranks != whole.numel():
        raise ValueError(
            f"Expected {num_ranks} parts of {own.numel()} elements, got a whole of {whole.numel()}."
        )

    parts = whole.split(own.numel()) if own.numel() else (whole,) * num_ranks
    begin, end = whole.data_ptr(), whole.data_ptr() + whole.nbytes
    is_inside = own.numel() > 0 and own.data_ptr() < end and own.data_ptr() + own.nbytes > begin
    if is_inside and (own.data_ptr() != parts[rank].data_ptr() or own.dtype != whole.dtype):
        raise ValueError(
            f"Expected a part that is no part of the whole but that of rank {rank}, got an overlap."
        )
    return rank, parts


def _others(rank: int, num_ranks: int) -> list[int]:
    return [peer for peer in range(num_ranks) if peer != rank]


def _exchange_and_add(
    out: torch.Tensor,
    parts: Sequence[torch.Tensor],
    rank: int,
    group: dist.ProcessGroup,
    how: Reduction,
    label: Label,
) -> None:
    """The reduce-scatter of [Note: exchange]."""
    tag = label.tag
    others = _others(rank, len(parts))
    # Two pieces from each peer: one is added up while the next one arrives.
    length = min(_PIECE_NUMEL, out.numel())
    begins = range(0, out.numel(), length) if length else range(0)
    received = torch.empty(min(2, len(begins)), len(others), length, dtype=parts[0].dtype)

    def receive(number: int) -> list[dist.Work | None]:
        if number >= len(begins):
            return []
        size = min(length, out.numel() - begins[number])
        pieces = received[number % 2, :, :size]
        return [
            dist.irecv(piece, group=group, group_src=peer, tag=tag)
            for piece, peer in zip(pieces, others, strict=True)
        ]

    works = receive(0)
    # All sends at once: they do not read this rank's part, which `out` may be.
    sends = [
        dist.isend(parts[peer][begin : begin + length], group=group, group_dst=peer, tag=tag)
        for begin in begins
        for peer in others
    ]

    name = label.describe("reduce-scatter", out.numel() * len(parts))

    def finish() -> None:
        arriving = works
        for number, begin in enumerate(begins):
            _finish(arriving, name)
            arriving = receive(number + 1)
            size = min(length, out.numel() - begin)
            own = parts[rank][begin : begin + size]
            _add_up(out[begin : begin + size], [own, *received[number % 2, :, :size]], how)
        _finish(sends, name)

    label.end(finish)


def _reduce_scatter_with_backend(
    out: torch.Tensor,
    whole: torch.Tensor,
    group: dist.ProcessGroup,
    how: Reduction,
    label: Label,
) -> None:
    dtype = how.device_dtype or out.dtype
    is_direct = out.dtype == dtype and not how.accumulates
    sent = whole.to(dtype)
    # In place where the result is not yet `out`, as NCCL allows: it takes no more memory.
    result = out if is_direct else sent.narrow(0, dist.get_rank(group) * out.numel(), out.numel())
    op = dist.ReduceOp.AVG if how.is_average else dist.ReduceOp.SUM
    with issuing(label.describe("reduce-scatter", whole.numel()), whole):
        _reduce_scatter_on_device(result, sent, op=op, group=group)

    def finish() -> None:
        if how.divisor != 1:
            result.div_(how.divisor)
        if how.accumulates:
            out.add_(result)
        elif not is_direct:
            out.copy_(result)

    label.end(finish)


def _alone(out: torch.Tensor, whole: torch.Tensor, how: Reduction) -> None:
    """The reduction over one rank, on a device."""
    # The backend would take a cast copy first, and its result would be copied once more.
    dtype = torch.promote_types(whole.dtype, torch.float32)
    length = max(1, whole.numel()) if how.divisor == 1 else _DIVIDED_NUMEL
    for result, part in zip(out.split(length), whole.split(length), strict=True):
        if how.divisor != 1:
            part = part.to(dtype, copy=True).div_(how.divisor)
        if how.accumulates:
            result.add_(part)
        elif result.data_ptr() != part.data_ptr() or result.dtype != part.dtype:
            result.copy_(part)


def _add_up(out: torch.Tensor, parts: list[torch.Tensor], how: Reduction) -> None:
    """out = or += sum or mean of `parts` / divisor, in fp32 (fp64 if they are), rounded once."""
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    is_direct = out.dtype == dtype and not how.accumulates
    divisor = how.divisor * (len(parts) if how.is_average else 1)

    for begin in range(0, out.numel(), _SUM_NUMEL):
        first, *others = (part[begin : begin + _SUM_NUMEL] for part in parts)
        result = out[begin : begin + _SUM_NUMEL]
        total = result.copy_(first) if is_direct else first.to(dtype, copy=True)
        for piece in others:
            if how.is_maximum:
                torch.maximum(total, piece, out=total)
            else:
                total.add_(piece)

        if divisor != 1:
            total.div_(divisor)
        if how.accumulates:
            total.add_(result)
        if not is_direct:
            result.copy_(total)


def _finish(works: Sequence[dist.Work | None], name: str) -> None:
    """Waits until messages have been exchanged; `name` completes "waiting in the ..."."""
    try:
        with waiting_for_ranks(name):
            for work in works:
                if work is not None:
                    work.wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"The {name} failed: another rank has ended, or did not come to it. {error}"
        ) from error
