"""All-gather, reduce-scatter and all-reduce of flat tensors, the fastest way each device has.

[Note: exchange] gloo runs a reduce-scatter as an all-reduce and copies inside its all-gather. On the CPU the ranks
therefore exchange their parts directly: each sends every other rank just the part that is its own, and adds up what it
receives. That moves the least bytes there are, and a result is added up in a fixed order, so it is the same bits in
every run. Messages carry no sequence number: a rank that fails before one collective must not take part in the next, or
its peers would take one for the other. A lane sees to that: after a failure it does nothing more. On a GPU the
backend's own collectives do this.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

# torch 2.13 renamed them and warns of the old names, which are the only ones that torch 2.11 has.
_all_gather_on_device = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_on_device = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# Away from the small tags that other point-to-point messages on the same group may carry.
_TAG = 1009
_SUM_NUMEL = 65536  # elements added up at a time, so that they stay in the cache: 256 KiB in fp32


def all_gather(out: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fills `out` with the equal parts of all ranks, in the order of their ranks in `group`.

    Args:
        out: flat, contiguous; as many elements as all parts together.
        own: this rank's part; may be the very place in `out` where it belongs, but no other.
    """
    rank, parts = _parts(out, own, group)
    if out.device.type != "cpu":
        _all_gather_on_device(out, own, group=group)
        return
    others = [peer for peer in range(len(parts)) if peer != rank]
    works = [dist.irecv(parts[peer], group=group, group_src=peer, tag=_TAG) for peer in others]
    works += [dist.isend(own, group=group, group_dst=peer, tag=_TAG) for peer in others]
    if parts[rank].data_ptr() != own.data_ptr():
        parts[rank].copy_(own)
    _finish(works)


def reduce_scatter(
    out: torch.Tensor,
    whole: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    is_average: bool,
    scratch: torch.Tensor | None = None,
) -> None:
    """Fills `out` with the sum or average over all ranks of this rank's part of `whole`.

    On the CPU the parts travel in the dtype of `whole`, are added in fp32 (own part first, then the others' by rank)
    and rounded once, to the dtype of `out`. So bf16 gradients summed in fp32 send 2 bytes an element and give the bits
    that sending them widened would. On a GPU they are widened first, and added as NCCL does.

    Args:
        out: flat, contiguous; may be this rank's part of `whole` itself, but no other.
        whole: flat, contiguous; as many elements as all parts together. Left as it is, unless `out` lies in it.
        scratch: instead of a new tensor. On the CPU a flat tensor of `whole`'s dtype with room for the parts of all
            other ranks; on a GPU, used only where `whole` has to be widened, one of `out`'s dtype and `whole`'s length.
    """
    rank, parts = _parts(whole, out, group)
    if out.device.type != "cpu":
        if whole.dtype != out.dtype:
            whole = _scratch(scratch, whole.numel(), out).copy_(whole)
        op = dist.ReduceOp.AVG if is_average else dist.ReduceOp.SUM
        _reduce_scatter_on_device(out, whole, op=op, group=group)
        return
    others = [peer for peer in range(len(parts)) if peer != rank]
    received = _scratch(scratch, out.numel() * len(others), whole).view(len(others), out.numel())
    works = [
        dist.irecv(part, group=group, group_src=peer, tag=_TAG) for part, peer in zip(received, others, strict=True)
    ]
    works += [dist.isend(parts[peer], group=group, group_dst=peer, tag=_TAG) for peer in others]
    _finish(works)
    _add_up(out, [parts[rank], *received], is_average)


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, is_average: bool, scratch: torch.Tensor | None = None
) -> None:
    """Replaces `tensor` by its sum or average over all ranks, the same bits on every rank.

    On the CPU each rank adds up one part and the ranks exchange the sums; a tensor that cannot be cut evenly goes to
    the backend as it is.
    """
    num_ranks = dist.get_world_size(group)
    if tensor.device.type != "cpu" or tensor.numel() % num_ranks:
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG if is_average else dist.ReduceOp.SUM, group=group)
        return
    own = tensor.chunk(num_ranks)[dist.get_rank(group)]
    reduce_scatter(own, tensor, group, is_average=is_average, scratch=scratch)
    all_gather(tensor, own, group)


def _parts(whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> tuple[int, tuple[torch.Tensor, ...]]:
    """(this rank in the group, every rank's part of `whole`).

    Raises:
        ValueError: before anything is sent, if `own` has not the size of a part, or overlaps another than its own.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if own.numel() * num_ranks != whole.numel():
        raise ValueError(f"Expected {num_ranks} parts of {own.numel()} elements, got a whole of {whole.numel()}.")
    parts = whole.chunk(num_ranks)
    begin, end = whole.data_ptr(), whole.data_ptr() + whole.nbytes
    is_inside = own.numel() > 0 and own.data_ptr() < end and own.data_ptr() + own.nbytes > begin
    if is_inside and (own.data_ptr() != parts[rank].data_ptr() or own.dtype != whole.dtype):
        raise ValueError(f"Expected a part that is no part of the whole but that of rank {rank}, got an overlap.")
    return rank, parts


def _add_up(out: torch.Tensor, parts: list[torch.Tensor], is_average: bool) -> None:
    """out = sum or mean of `parts`, added in fp32 (fp64 if they are) and rounded once."""
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    for begin in range(0, out.numel(), _SUM_NUMEL):
        first, *others = (part[begin : begin + _SUM_NUMEL] for part in parts)
        result = out[begin : begin + _SUM_NUMEL]
        total = result.copy_(first) if out.dtype == dtype else first.to(dtype, copy=True)
        for piece in others:
            total.add_(piece)
        if is_average:
            total.div_(len(parts))
        if total is not result:
            result.copy_(total)


def _scratch(scratch: torch.Tensor | None, numel: int, like: torch.Tensor) -> torch.Tensor:
    """A flat tensor of `numel` elements. ValueError if what was given is too small or of another kind."""
    if scratch is None:
        return torch.empty(numel, dtype=like.dtype, device=like.device)
    if scratch.numel() < numel or scratch.dtype != like.dtype or scratch.device != like.device:
        raise ValueError(
            f"Expected a scratch tensor of at least {numel} elements, {like.dtype} on {like.device}, "
            f"got {scratch.numel()}, {scratch.dtype} on {scratch.device}."
        )
    return scratch[:numel]


def _finish(works: list[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
