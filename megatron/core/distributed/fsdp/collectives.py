"""All-gather, reduce-scatter and all-reduce of flat tensors, the fastest way each device has.

[Note: exchange] gloo runs a reduce-scatter as an all-reduce and copies inside its all-gather. On the CPU the ranks
therefore exchange their parts directly: each sends every other rank just the part that is its own, and adds up what it
receives. That moves the least bytes there are, and a result is added up in a fixed order, so it is the same bits in
every run. On a GPU the backend's own collectives do this.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

# torch 2.13 renamed them and warns of the old names, which are the only ones that torch 2.11 has.
_all_gather_on_device = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_on_device = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_gather(out: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fills `out` with the equal parts of all ranks, in the order of their ranks in `group`.

    Args:
        out: flat, contiguous; as many elements as all parts together.
        own: this rank's part; may be the very place in `out` where it belongs.
    """
    if out.device.type != "cpu":
        _all_gather_on_device(out, own, group=group)
        return
    rank, parts = dist.get_rank(group), out.chunk(dist.get_world_size(group))
    others = [peer for peer in range(len(parts)) if peer != rank]
    works = [dist.irecv(parts[peer], group=group, group_src=peer) for peer in others]
    works += [dist.isend(own, group=group, group_dst=peer) for peer in others]
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

    The parts are added in the dtype of `out`. On the CPU they travel in the dtype of `whole`: bf16 gradients summed in
    fp32 send 2 bytes an element and give the bits that sending them widened would. The own part comes first, then the
    others' by rank.

    Args:
        out: flat, contiguous; may be this rank's part of `whole` itself.
        whole: flat, contiguous; as many elements as all parts together. Left as it is, unless `out` lies in it.
        scratch: CPU only: a flat tensor like `whole` with room for the parts of all other ranks, instead of a new one.
    """
    if out.device.type != "cpu":
        op = dist.ReduceOp.AVG if is_average else dist.ReduceOp.SUM
        _reduce_scatter_on_device(out, whole.to(out.dtype), op=op, group=group)
        return
    rank, parts = dist.get_rank(group), whole.chunk(dist.get_world_size(group))
    others = [peer for peer in range(len(parts)) if peer != rank]
    received = _scratch(scratch, parts[rank], len(others))
    works = [dist.irecv(received[i], group=group, group_src=peer) for i, peer in enumerate(others)]
    works += [dist.isend(parts[peer], group=group, group_dst=peer) for peer in others]
    if out.data_ptr() != parts[rank].data_ptr():
        out.copy_(parts[rank])
    _finish(works)
    for part in received:
        out.add_(part)
    if is_average:
        out.div_(len(parts))


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
    own = tensor.chunk(num_ranks)[dist.get_rank(group)] if tensor.numel() else tensor
    reduce_scatter(own, tensor, group, is_average=is_average, scratch=scratch)
    all_gather(tensor, own, group)


def _scratch(scratch: torch.Tensor | None, part: torch.Tensor, num_parts: int) -> list[torch.Tensor]:
    """Room for `num_parts` tensors like `part`. ValueError if what was given is too small or of another kind."""
    numel = part.numel() * num_parts
    if scratch is None:
        scratch = torch.empty(numel, dtype=part.dtype, device=part.device)
    elif scratch.numel() < numel or scratch.dtype != part.dtype or scratch.device != part.device:
        raise ValueError(
            f"Expected a scratch tensor of at least {numel} elements, {part.dtype} on {part.device}, "
            f"got {scratch.numel()}, {scratch.dtype} on {scratch.device}."
        )
    return [scratch[i * part.numel() : (i + 1) * part.numel()] for i in range(num_parts)]


def _finish(works: list[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
