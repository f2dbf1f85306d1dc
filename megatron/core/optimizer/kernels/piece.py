"""`Piece`: the flat arrays of one step of a rule, as kernels take them.

[Note: remainder] A fp32 weight is kept as its bf16 rounding, `weight`, and a signed 16-bit
`remainder`: as integers, the weight's bits shifted left by 16 plus the remainder are the fp32
weight's bits. This is lossless, but of two equally near bf16 values `weight` is always the one of
larger magnitude: one in 65536 random weights is such a tie, and half of these go the other way in
rounding to nearest even. A NaN becomes the one whose remainder is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from megatron.core.dtypes import FLOAT_DTYPES, UNSCALED_STATE_DTYPES
from megatron.core.low_precision.formats import E4M3
from megatron.core.low_precision.scaling import ScaleKind, Scaling, WeightQuantizer

GROUP_NUMEL = 32  # elements of a row of the narrowest tile; kGroup of host_adam.cpp


class PieceCodes(NamedTuple):
    """Makes codes of new weights, rounded to bf16, that are some rows of a matrix or several.

    Attributes:
        codes: e4m3, as many as the piece has elements.
        maxima: of the tiles of the whole weight, fp32. A pass writes those of tiles of which the
            piece has rows, over these rows.
        last_maxima: those of the whole weight before this pass, or zeros; only read. A pass that
            finds maxima with the same scales, if these are powers of two, is faster. If
            `has_one_scale`, codes are by these, whatever the pass finds.
        quantizer: one that `is_supported`.
        first_row: number of the piece's first row in the whole weight.
        shape: of the whole weight.
    """

    codes: torch.Tensor
    maxima: torch.Tensor
    last_maxima: torch.Tensor
    quantizer: WeightQuantizer
    first_row: int
    shape: tuple[int, int]

    @staticmethod
    def is_supported(scaling: Scaling) -> bool:
        """Whether a pass can make codes of this scaling: a matrix has one scale in fp32, or few
        rows share a scale, and all columns or a power of two.
        """
        rows, columns = scaling.tile
        plain = Scaling(E4M3, scaling.tile, scaling.kind, margin=scaling.margin)
        if scaling != plain or scaling.kind is ScaleKind.TWO_LEVELS:
            return False
        if rows is None:
            return columns is None and scaling.kind is ScaleKind.FP32
        return columns is None or (columns >= GROUP_NUMEL and columns.bit_count() == 1)

    @property
    def has_one_scale(self) -> bool:
        """Whether each matrix has one scale."""
        return self.quantizer.scaling.tile[0] is None

    def check(self, numel: int) -> None:
        """ValueError unless these are the codes of `numel` weights, which are whole rows."""
        rows, columns = self.shape
        end = self.first_row * columns + numel
        expected = (torch.float32, torch.Size(self.quantizer.maxima_shape(self.shape)))
        if numel % max(1, columns) or not 0 <= self.first_row * columns <= end <= rows * columns:
            raise ValueError(
                f"Expected rows of {self.shape} from {self.first_row} on, got {numel} weights."
            )
        for maxima in (self.maxima, self.last_maxima):
            got = (maxima.dtype, maxima.shape)
            if got != expected or not maxima.is_contiguous():
                raise ValueError(f"Expected contiguous maxima of {expected}, got {got}.")
        if not self.is_supported(self.quantizer.scaling):
            raise ValueError(f"Expected scales that a pass can use, got {self.quantizer}.")


class Piece(NamedTuple):
    """Flat, contiguous arrays of one length and device, and the step that they take.

    Attributes:
        step: the scalars of the step, such as an `AdamStep`; hashable, without the factor of the
            gradients.
        grad: fp32, bf16 or fp16; only read.
        weight: fp32, bf16 or fp16; with a remainder: bf16.
        states: by name, all fp32 or all bf16.
        remainder: int16, see [Note: remainder].
        out: fp32, bf16 or fp16: takes the new weight, rounded from fp32 to nearest even; in bf16
            with a remainder, the value that `weight` takes. May be `grad` itself, which is then
            written over as it is read.
        undo: takes the old values of `weight` and of each state, under these names, before they are
            written over; None: they are not kept. Never with a remainder.
        codes: take the new weight instead of `out`, of a fp32 weight on the CPU; such a piece can
            be neither divided nor joined.
    """

    step: Any
    grad: torch.Tensor
    weight: torch.Tensor
    states: Mapping[str, torch.Tensor]
    remainder: torch.Tensor | None = None
    out: torch.Tensor | None = None
    undo: Mapping[str, torch.Tensor] | None = None
    codes: PieceCodes | None = None

    @property
    def numel(self) -> int:
        """Elements of each array."""
        return self.weight.numel()

    @property
    def traffic(self) -> int:
        """Bytes that a pass over the arrays reads and writes."""
        both = [self.weight, *self.states.values()]
        both += [] if self.remainder is None else [self.remainder]
        once = [self.grad] if self.out is None else [self.grad, self.out]
        once += (self.undo or {}).values()
        once += [] if self.codes is None else [self.codes.codes]
        return 2 * sum(array.nbytes for array in both) + sum(array.nbytes for array in once)

    def check(self) -> None:
        """Raises for pieces that no kernel can run.

        Raises:
            ValueError: for arrays of unequal length or device, not contiguous, of a dtype that is
                not listed above, for an `out` that shares only a part of `grad`'s memory, for an
                `undo` that is not like the weight and the states, and for `codes` of other weights.
        """
        _check_dtype("grad", self.grad, FLOAT_DTYPES)
        _check_dtype(
            "weight", self.weight, FLOAT_DTYPES if self.remainder is None else (torch.bfloat16,)
        )
        allowed: tuple[torch.dtype, ...] = UNSCALED_STATE_DTYPES
        for name, state in self.states.items():
            _check_dtype(name, state, allowed)
            allowed = (state.dtype,)

        if self.remainder is not None:
            _check_dtype("remainder", self.remainder, (torch.int16,))
        if self.out is not None:
            _check_dtype("out", self.out, FLOAT_DTYPES)
            self._check_overlap(self.out)
        if self.undo is not None:
            self._check_undo(self.undo)
        if self.codes is not None:
            _check_dtype("weight with codes", self.weight, (torch.float32,))
            _check_dtype("codes", self.codes.codes, (E4M3.dtype,))
            self.codes.check(self.numel)

        # Kernels get addresses and one length.
        for name, tensor in self.arrays().items():
            if tensor.numel() != self.numel:
                raise ValueError(
                    f"Expected {name} of {self.numel} elements as weight has, got {tensor.numel()}."
                )
            if tensor.device != self.weight.device:
                raise ValueError(
                    f"Expected {name} on {self.weight.device} as weight is, got {tensor.device}."
                )
            if not tensor.is_contiguous():
                raise ValueError(f"Expected a contiguous {name}, got strides {tensor.stride()}.")

    def arrays(self) -> dict[str, torch.Tensor]:
        """The tensors that are there, by name."""
        arrays = {"grad": self.grad, "weight": self.weight, **self.states}
        if self.remainder is not None:
            arrays["remainder"] = self.remainder
        if self.out is not None:
            arrays["out"] = self.out
        if self.codes is not None:
            arrays["codes"] = self.codes.codes
        return arrays | {f"undo {name}": kept for name, kept in (self.undo or {}).items()}

    def keep_old(self) -> None:
        """Copies weight and states to `undo`, if any. Called by kernels that do not copy them as
        they read them.
        """
        for name, kept in (self.undo or {}).items():
            kept.copy_(self._kept(name))

    def restore_old(self) -> None:
        """Copies weight and states back from `undo`."""
        assert self.undo is not None, "asked for where old values are kept"
        for name, kept in self.undo.items():
            self._kept(name).copy_(kept)

    def part(self, start: int, numel: int) -> Piece:
        """The arrays' elements from `start` on, as views."""
        return self.mapped(lambda tensor: tensor.detach().view(-1)[start : start + numel])

    def parts(self, numel: int) -> Iterator[Piece]:
        """The piece as views of at most `numel` elements."""
        for start in range(0, self.numel, numel):
            yield self.part(start, min(numel, self.numel - start))

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Piece:
        """The same step over other arrays."""
        assert self.codes is None, "tiles could be cut"
        return Piece(
            self.step,
            change(self.grad),
            change(self.weight),
            {name: change(state) for name, state in self.states.items()},
            None if self.remainder is None else change(self.remainder),
            None if self.out is None else change(self.out),
            None if self.undo is None else {n: change(kept) for n, kept in self.undo.items()},
        )

    def _kept(self, name: str) -> torch.Tensor:
        return self.weight if name == "weight" else self.states[name]

    def _check_undo(self, undo: Mapping[str, torch.Tensor]) -> None:
        expected = {"weight": self.weight.dtype, **{n: s.dtype for n, s in self.states.items()}}
        got = {name: kept.dtype for name, kept in undo.items()}
        if got != expected or self.remainder is not None:
            raise ValueError(f"Expected undo of {expected} without a remainder, got {got}.")

    def _check_overlap(self, out: torch.Tensor) -> None:
        # Element by element, each gradient is read before its place is written to.
        begin, end = self.grad.data_ptr(), self.grad.data_ptr() + self.grad.nbytes
        apart = out.data_ptr() >= end or out.data_ptr() + out.nbytes <= begin
        same = out.data_ptr() == begin and out.element_size() == self.grad.element_size()
        if not apart and not same:
            raise ValueError(
                f"Expected out apart from grad or over it element by element, got {out.dtype} at "
                f"byte {out.data_ptr() - begin} of a {self.grad.dtype} grad."
            )


ROW_NUMEL = 64  # elements of a row of `RowLog`; kTile of host_adam.cpp
NOT_STARTED = -1
COUNTER_STRIDE = 8  # of int64: a cache line


class RowLog(NamedTuple):
    """Where a kernel keeps the old values of rows that it is updating, and how far it is, so that
    another process can finish the pieces of a bucket; see kept_updates.py.

    Attributes:
        counters: int64: elements that are done of each chunk, of all pieces one after the other;
            `NOT_STARTED` until the kernel starts it. Threads write theirs after every row: with a
            stride of `COUNTER_STRIDE`, neighbouring chunks' counters are in separate cache lines.
        sums: int64, one for each chunk: the sum (see kept_updates.py) of the elements that the
            kernel updates is added to it before the chunk's counter gets full.
        slots: two for each thread, of `ROW_NUMEL` elements; uint8: [slots, bytes].
        chunk: elements of a chunk.
        step, bucket: numbers that a slot has with its row.
    """

    counters: torch.Tensor
    sums: torch.Tensor
    slots: torch.Tensor
    chunk: int
    step: int
    bucket: int


# Carries out pieces, given the factor of the gradients, which is known last.
Kernel: TypeAlias = Callable[[Iterable[Piece], float], None]
# Writes the codes of tiles of which pieces have some rows only, by maxima of the whole tiles.
Encode: TypeAlias = Callable[[Sequence[Piece]], None]


class HostKernel:
    """A kernel whose threads may be given the next pieces while they work on others.

    Attributes:
        submit: starts pieces with the factor of their gradients, and returns a function that waits
            until they are done, which must be called. It may do the work itself.
        submit_logged: the same with a log; None where the kernel keeps none.
        encode: None: the kernel takes no pieces with codes.
    """

    def __init__(
        self,
        submit: Callable[[Iterable[Piece], float], Callable[[], None]],
        submit_logged: Callable[[Sequence[Piece], float, RowLog], Callable[[], None]] | None = None,
        encode: Encode | None = None,
    ) -> None:
        self.submit = submit
        self.submit_logged = submit_logged
        self.encode = encode

    @classmethod
    def of(cls, kernel: Kernel) -> HostKernel:
        """The kernel itself, or one that does its work where it is awaited."""
        if isinstance(kernel, HostKernel):
            return kernel
        return cls(lambda pieces, grad_scale: partial(kernel, pieces, grad_scale))

    def __call__(self, pieces: Iterable[Piece], grad_scale: float) -> None:
        self.submit(pieces, grad_scale)()


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The same work in fewer, longer pieces: pieces whose arrays are all adjacent are joined.

    Pieces are put in the order of their weights' addresses; empty ones are left out. Only pieces of
    equal steps, dtypes and storages join. Pass pieces that `Piece.check` accepts.
    """
    # Pieces join only if all of their arrays do: sorting by one of these finds the neighbours.
    ordered = sorted((piece for piece in pieces if piece.numel), key=_address)
    runs: list[list[Piece]] = []
    for piece in ordered:
        if runs and _continues(runs[-1][-1], piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [joined(run) for run in runs]


def check_grad_scale(grad_scale: float) -> None:
    """ValueError for the factor that the norm of gradients that are not finite gives."""
    if not math.isfinite(grad_scale):
        raise ValueError(
            f"Expected a finite grad_scale, got {grad_scale}: a gradient is not finite. Nothing "
            "was stepped. Look at the loss, or skip such steps: zero_grad() without step()."
        )


def check_unset(options: Mapping[str, Any], algorithm: str, names: Iterable[str]) -> None:
    """ValueError for options of another algorithm that are set."""
    others = [name for name in names if options.get(name)]
    if others:
        raise ValueError(
            f"Expected a parameter group of {algorithm} without {' and '.join(others)}, got some "
            "set."
        )


def check_rates(**rates: float) -> None:
    """ValueError for a rate or factor that is negative or not finite."""
    for name, rate in rates.items():
        if not 0.0 <= rate < math.inf:
            raise ValueError(f"Expected a finite {name} of at least 0, got {rate}.")


def check_betas(**betas: float) -> None:
    """ValueError for a decay rate outside [0, 1)."""
    for name, beta in betas.items():
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Expected {name} in [0, 1), got {beta}.")


def _address(piece: Piece) -> tuple[str, int]:
    return str(piece.weight.device), piece.weight.data_ptr()


def _continues(piece: Piece, following: Piece) -> bool:
    """Whether every array of `following` starts where that of `piece` ends."""
    if piece.step != following.step or piece.codes or following.codes:
        return False

    ends, begins = piece.arrays(), following.arrays()
    return ends.keys() == begins.keys() and all(
        _adjacent(ends[name], begins[name]) for name in ends
    )


def _adjacent(tensor: torch.Tensor, following: torch.Tensor) -> bool:
    return (
        tensor.data_ptr() + tensor.nbytes == following.data_ptr()
        and tensor.dtype == following.dtype
        and tensor.untyped_storage().data_ptr() == following.untyped_storage().data_ptr()
    )


def joined(run: Sequence[Piece]) -> Piece:
    """Pieces whose arrays are all adjacent as one, with the first one's step."""
    if len(run) == 1:
        return run[0]

    # The storage reaches so far, since the last piece is in it.
    numel = sum(piece.numel for piece in run)
    return run[0].mapped(lambda tensor: tensor.detach().as_strided((numel,), (1,)))


def _check_dtype(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        raise ValueError(
            f"Expected {name} of {' or '.join(map(str, allowed))}, got {tensor.dtype}."
        )
