"""Runs an elementwise update over flat arrays with torch operators.

Arrays are widened to fp32 in scratch memory, a chunk at a time that stays in the caches, updated
there in place, and rounded when they are stored again. An update treats every element alike, so
neither chunks nor threads change a bit.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeAlias

import torch

from megatron.core.optimizer.kernels.piece import HostKernel, Piece

# Updates weight and states in place, all fp32, one-dimensional and of one length, given the scalars
# of the step. It may write to the gradient too: `(step, grad, weight, states)`.
Update: TypeAlias = Callable[[Any, torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]], None]

_CPU_CHUNK_NUMEL = 128 * 1024  # of a thread that has torch's threads to help it
_THREAD_CHUNK_NUMEL = 32 * 1024  # too short for torch's operators to start threads for
_PARTS_PER_THREAD = 4
_DEVICE_CHUNK_NUMEL = 4 << 20  # long enough that a kernel takes longer than its launch
_VECTOR_NUMEL = 64  # a multiple of every width that torch's vectors have


@torch.no_grad()
def run(pieces: Iterable[Piece], grad_scale: float, update: Update) -> None:
    """Carries the pieces' steps out, in place, one after the other.

    Args:
        pieces: on any one device; `Piece.check` accepts them.
    """
    scratch = _Scratch()
    for part in itertools.chain.from_iterable(map(_chunks, pieces)):
        _step(part, grad_scale, update, scratch)


def pooled(update: Update, num_threads: int) -> HostKernel:
    """A kernel for CPU tensors that divides the work among threads, which end with it.

    It raises what one of them raised, once all have ended; RuntimeError in a forked child.
    """
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="host update")
    local, process = threading.local(), os.getpid()

    @torch.no_grad()
    def step(part: Piece, grad_scale: float) -> None:
        if not hasattr(local, "scratch"):
            local.scratch = _Scratch()
        for chunk in part.parts(_THREAD_CHUNK_NUMEL):
            _step(chunk, grad_scale, update, local.scratch)

    def submit(pieces: Iterable[Piece], grad_scale: float) -> Callable[[], None]:
        if os.getpid() != process:
            raise RuntimeError(
                f"Expected process {process}, which has this kernel's threads, got its child "
                f"{os.getpid()}."
            )
        # A few parts for each thread, so that all end at about the same time.
        given = list(pieces)
        share = sum(piece.numel for piece in given) // (_PARTS_PER_THREAD * num_threads)
        numel = _THREAD_CHUNK_NUMEL * (1 + share // _THREAD_CHUNK_NUMEL)
        parts = [part for piece in given for part in piece.parts(numel)]
        return partial(_finish, [pool.submit(step, part, grad_scale) for part in parts])

    return HostKernel(submit)


def _finish(steps: list[Future[None]]) -> None:
    # All of them, after an error too: the caller may then write to the arrays, or free them.
    wait(steps)
    errors = list(filter(None, (each.exception() for each in steps)))
    if errors:
        # The raised error refers to this frame, which must not refer to the error.
        steps.clear()
        raise errors.pop(0)


def _chunks(piece: Piece) -> Iterator[Piece]:
    on_cpu = piece.weight.device.type == "cpu"
    return piece.parts(_CPU_CHUNK_NUMEL if on_cpu else _DEVICE_CHUNK_NUMEL)


class _Scratch:
    """fp32 memory for one chunk of each array, made when first needed."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in fp32, zeros behind it up to whole vectors."""
        # Whole vectors: torch's scalar tail may round otherwise than its vectors.
        numel = tensor.numel()
        padded_numel = -(-numel // _VECTOR_NUMEL) * _VECTOR_NUMEL
        memory = self._memory.get(name)
        if memory is None or memory.numel() < padded_numel or memory.device != tensor.device:
            memory = torch.empty(padded_numel, dtype=torch.float32, device=tensor.device)
            self._memory[name] = memory

        padded = memory[:padded_numel]
        padded[:numel].copy_(tensor)
        padded[numel:].zero_()
        return padded

    def widened(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself if it is fp32 in whole vectors, otherwise a copy."""
        if tensor.dtype == torch.float32 and tensor.numel() % _VECTOR_NUMEL == 0:
            return tensor
        return self.copy(name, tensor)


def _step(piece: Piece, grad_scale: float, update: Update, scratch: _Scratch) -> None:
    """One chunk. `piece`'s arrays are one-dimensional."""
    piece.keep_old()
    # Always a copy: the caller's gradient stays as it is.
    grad = scratch.copy("grad", piece.grad)
    if grad_scale != 1.0:
        grad.mul_(grad_scale)
    weight = scratch.widened("weight", _full_weight(piece))
    states = {name: scratch.widened(name, state) for name, state in piece.states.items()}
    update(piece.step, grad, weight, states)

    for name, state in piece.states.items():
        _store(states[name], state)
    if piece.remainder is None:
        _store(weight, piece.weight)
    else:
        _split_weight(weight[: piece.numel], piece.weight, piece.remainder)

    # With a remainder, `out` is the bf16 weight's bits: where two bf16 numbers are equally near,
    # rounding once more might choose the other one.
    if piece.out is not None:
        rounded_already = piece.remainder is not None and piece.out.dtype == torch.bfloat16
        _store(piece.weight if rounded_already else weight, piece.out)


def _store(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source[: target.numel()])


def _full_weight(piece: Piece) -> torch.Tensor:
    """The weight, in fp32 if there is a remainder. See [Note: remainder] in piece.py."""
    if piece.remainder is None:
        return piece.weight

    # As integers: a negative remainder borrows from the upper half.
    bits = piece.weight.view(torch.int16).to(torch.int32) << 16
    return bits.add_(piece.remainder).view(torch.float32)


def _split_weight(full: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    """Writes fp32 values as bf16 and remainder. A NaN becomes the one whose remainder is zero."""
    bits = torch.where(full.isnan(), torch.nan, full).view(torch.int32)
    # On a little-endian machine the lower half comes first.
    remainder.copy_(bits.view(torch.int16)[0::2])
    weight.view(torch.int16).copy_(bits.add_(0x8000) >> 16)
