"""The host kernel's face: steps of Adam on CPU tensors, carried out by a pool of C++ threads.

    kernel = HostAdam()
    kernel.run([Piece(step, grad, weight, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq})])

One pass reads the gradient and reads and writes weight and moments; casts and the clip coefficient
cost no extra pass. Where the library was not built, torch computes the same bits, slower
(torch_adam.py).

[Note: versions] The kernel writes through raw pointers, so the version counters by which autograd
detects changes of saved tensors do not move. A caller whose tensors may be saved for a backward
pass must call `torch.autograd.graph.increment_version`.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron.core.dtypes import FLOAT_DTYPES
from megatron.core.local_ranks import local_world_size, num_sharing_ranks, num_usable_cores
from megatron.core.low_precision.scaling import ScaleKind
from megatron.core.optimizer.kernels import torch_adam
from megatron.core.optimizer.kernels.adam import AdamScalars, AdamStep
from megatron.core.optimizer.kernels.piece import Piece, PieceCodes, RowLog

LIBRARY = Path(__file__).with_name("libhost_adam.so")
logger = logging.getLogger(__name__)

_VERSION = 5  # of the library's structs and signatures
_BODIES = {"avx512": 2, "avx2": 1, "baseline": 0}  # the fastest first
_TYPES: dict[torch.dtype | None, int] = {
    None: 0,
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
}
_SCALE_KINDS = {ScaleKind.FP32: 0, ScaleKind.POWER_OF_TWO: 1, ScaleKind.E8M0: 2}
_ONE_SCALE = 3  # any fp32 scale of a matrix, by the last maximum
_STEP, _TOUCH, _ENCODE = 0, 1, 2  # modes of a job
# The type of the weight marks a remainder.
_SPLIT = 4


class _Arrays(ctypes.Structure):
    """`Arrays` of host_adam.cpp."""

    _fields_ = (
        ("grad", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("remainder", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("undo_weight", ctypes.c_void_p),
        ("undo_exp_avg", ctypes.c_void_p),
        ("undo_exp_avg_sq", ctypes.c_void_p),
        ("grad_type", ctypes.c_int32),
        ("weight_type", ctypes.c_int32),
        ("moment_type", ctypes.c_int32),
        ("out_type", ctypes.c_int32),
        ("stream", ctypes.c_int32),
        ("streams_undo", ctypes.c_int32),
        ("log", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("ahead", ctypes.c_int64),
    )


class _Scalars(ctypes.Structure):
    """`Scalars` of host_adam.cpp: the fields of `AdamScalars`, in their order."""

    _fields_ = (
        ("grad_scale", ctypes.c_float),
        ("l2", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("lerp", ctypes.c_float),
        ("square", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("minus_step_size", ctypes.c_float),
        ("sqrt_correction2", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("lerps_from_grad", ctypes.c_int32),
    )


class _Codes(ctypes.Structure):
    """`Codes` of host_adam.cpp."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("maxima", ctypes.c_void_p),
        ("last_maxima", ctypes.c_void_p),
        ("first_row", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("matrix_rows", ctypes.c_int64),
        ("tile_rows", ctypes.c_int64),
        ("tile_columns", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("largest", ctypes.c_float),
    )


class _Piece(ctypes.Structure):
    """`HostAdamPiece` of host_adam.cpp."""

    _fields_ = (
        ("arrays", _Arrays),
        ("scalars", _Scalars),
        ("numel", ctypes.c_int64),
        ("first_chunk", ctypes.c_int64),
        ("codes", _Codes),
    )


class _Log(ctypes.Structure):
    """`HostAdamLog` of host_adam.cpp."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("chunk", ctypes.c_int64),
        ("counters", ctypes.c_void_p),
        ("counter_stride", ctypes.c_int64),
        ("sums", ctypes.c_void_p),
        ("step", ctypes.c_int64),
        ("bucket", ctypes.c_int64),
    )


class HostAdam:
    """A pool of threads that carries out steps of Adam. Any number of Python threads may use one.

    It belongs to the process that made it: a forked child makes its own.
    """

    def __init__(
        self,
        num_threads: int | None = None,
        *,
        body: str = "auto",
        cores: Collection[int] | None = None,
    ) -> None:
        """Starts the threads.

        Args:
            num_threads: by default the cores that this process may use, divided among the ranks of
                the machine that share them; see local_ranks.py. The torch body takes torch's
                threads instead.
            body: the instructions used, one of `available_bodies()`, all of the same bits; "auto"
                is the first of them.
            cores: on which the threads run, as far as the system lets them; default: the cores
                of the calling thread. The torch body ignores this.

        Raises:
            ValueError: for less than one thread, for a body that is unknown or that cannot run
                here.
            RuntimeError: if the threads cannot be started.
        """
        self._num_threads = default_num_threads() if num_threads is None else num_threads
        if self._num_threads < 1:
            raise ValueError(f"Expected at least one thread, got {num_threads}.")

        available = available_bodies()
        if body != "auto" and body not in available:
            raise ValueError(f"Expected a body among auto, {', '.join(available)}, got {body}.")
        self._body = available[0] if body == "auto" else body
        if body == "auto" and self._body == "torch":
            _warn_once(LIBRARY)

        # Threads do not survive a fork, so a child must not wait for these.
        self._process = os.getpid()
        self._pool: int | None = None
        library = _library(LIBRARY)
        if self._body != "torch" and library is not None:
            # New threads inherit the cores of the one that starts them.
            with _running_on(cores):
                self._pool = library.host_adam_pool_create(self._num_threads)
            if not self._pool:
                raise RuntimeError(
                    f"Expected to start {self._num_threads} threads, got none from the system."
                )
            # At the program's end, other threads may still hand it work.
            weakref.finalize(self, _close, library, self._pool, self._process).atexit = False

    @property
    def body(self) -> str:
        """One of `available_bodies()`."""
        return self._body

    @property
    def num_threads(self) -> int:
        return self._num_threads

    def run(self, pieces: Iterable[Piece], grad_scale: float = 1.0) -> None:
        """Carries the steps out and returns when all is written. See [Note: versions].

        No element may be written by two pieces. Pass all pieces at once, joined by `merged` where
        they are many: the threads then never wait for the caller.

        Args:
            grad_scale: gradients are multiplied with it as they are read.

        Raises:
            ValueError: for a piece that is not on the CPU, and whatever `Piece.check` raises.
            RuntimeError: in a forked child of the process that made this.
        """
        self.submit(list(pieces), grad_scale).wait()

    def submit(
        self,
        pieces: Sequence[Piece],
        grad_scale: float = 1.0,
        *,
        touch: bool = False,
        log: RowLog | None = None,
    ) -> Ticket:
        """Starts `run` in the background; the torch body finishes before it returns.

        Args:
            pieces, grad_scale: as for `run`. Callers must not touch the arrays before they have
                waited for the ticket.
            touch: read and write the arrays in the same pattern but do no arithmetic, which leaves
                garbage. For benchmarks with a 16-bit gradient, a 16-bit `out` or none, and no
                codes; the torch body does not support it.
            log: of these pieces of one bucket, without a remainder and codes; the torch body does
                not support it.

        Raises:
            As `run` does.
        """
        self._check(pieces)
        if touch and any(piece.codes is not None for piece in pieces):
            raise ValueError("Expected pieces without codes to touch, got some.")

        # A loss that is not finite reaches nearly every gradient: one element is a free check. What
        # can be undone may have been started before it was known.
        is_final = bool(pieces) and not touch and pieces[0].undo is None
        if is_final and not pieces[0].grad.view(-1)[:1].isfinite().all():
            _warn_of_non_finite()
        library = self._usable_library()
        if library is None:
            torch_adam.run(pieces, grad_scale)
            return Ticket(None, (), self._process)
        if log is not None and len(log.slots) < 2 * self._num_threads:
            raise ValueError(
                f"Expected a log of two slots for each of {self._num_threads} threads, got "
                f"{len(log.slots)}."
            )
        return self._submitted(library, pieces, grad_scale, _TOUCH if touch else _STEP, log)

    def encode(self, pieces: Sequence[Piece]) -> None:
        """Writes, of pieces with codes that were stepped, the codes of tiles of which a piece has
        some rows only, by the maxima of the whole tiles; or all codes, by the last maxima, where
        matrices have one scale. Returns when they are written.

        Raises:
            As `run` does.
        """
        self._check(pieces)
        library = self._usable_library()
        if library is not None:
            self._submitted(library, pieces, 1.0, _ENCODE).wait()

    def _check(self, pieces: Sequence[Piece]) -> None:
        # The library trusts addresses, types and lengths.
        for piece in pieces:
            piece.check()
            if piece.weight.device.type != "cpu":
                raise ValueError(f"Expected tensors on the CPU, got {piece.weight.device}.")
            if piece.codes is not None and self._body == "torch":
                raise ValueError("Expected pieces without codes for the torch body, got some.")

    def _submitted(
        self,
        library: ctypes.CDLL,
        pieces: Sequence[Piece],
        grad_scale: float,
        mode: int,
        log: RowLog | None = None,
    ) -> Ticket:
        structs = (_Piece * len(pieces))(*[_described(piece, grad_scale) for piece in pieces])
        if log is not None:
            _number_chunks(structs, log.chunk)
        described = None if log is None else ctypes.byref(_described_log(log))
        handle = library.host_adam_submit(
            self._pool, _BODIES[self._body], structs, len(pieces), mode, described
        )
        if not handle:
            raise MemoryError(f"Expected memory for a job of {len(pieces)} pieces, got none.")

        # The threads have addresses only: the ticket keeps the pool and the arrays alive.
        wait = functools.partial(library.host_adam_wait, handle)
        return Ticket(wait, (self, log, *pieces), self._process)

    def squared_norm(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of squares of a CPU tensor of any shape, in fp32, bf16 or fp16. Scalar, fp64.

        The bits do not depend on body or number of threads; see [Note: squares in fp64] in
        torch_adam.py.

        Raises:
            ValueError: for another device or dtype.
            RuntimeError: in a forked child of the process that made this.
        """
        if tensor.device.type != "cpu" or tensor.dtype not in FLOAT_DTYPES:
            allowed = " or ".join(map(str, FLOAT_DTYPES))
            raise ValueError(
                f"Expected a CPU tensor of {allowed}, got {tensor.dtype} on {tensor.device}."
            )

        library = self._usable_library()
        if library is None:
            return torch_adam.squared_norm(tensor)

        # A copy where the tensor is strided: the library reads flat memory.
        flat = tensor.detach().contiguous()
        result = ctypes.c_double()
        body, kind = _BODIES[self._body], _TYPES[flat.dtype]
        if not library.host_adam_squared_norm(
            self._pool, body, flat.data_ptr(), kind, flat.numel(), result
        ):
            raise MemoryError(
                f"Expected memory for the partial sums of {flat.numel()} elements, got none."
            )
        return torch.tensor(result.value, dtype=torch.float64)

    def _usable_library(self) -> ctypes.CDLL | None:
        """The library, or None for the torch body."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"Expected process {self._process}, which made this pool, got its child "
                f"{os.getpid()}."
            )
        return None if self._pool is None else _library(LIBRARY)


class Ticket:
    """Pending work. Deleting the ticket waits for the work: its threads write the arrays until
    then.
    """

    def __init__(
        self, wait: Callable[[], None] | None, keeps: tuple[object, ...], process: int
    ) -> None:
        self._finish = None if wait is None else weakref.finalize(self, _wait, wait, keeps, process)

    def wait(self) -> None:
        """Returns when all is written. Once is enough, more is harmless; one thread at a time."""
        if self._finish is not None:
            self._finish()


@functools.cache
def _warn_of_non_finite() -> None:
    """Once in a process: what follows is seldom news."""
    logger.warning(
        "an optimizer steps with gradients that are not finite: the weights become NaN. Look at "
        "the loss, or skip such steps: global_grad_norm(parameters).isfinite() tells"
    )


@functools.cache
def shared_host_adam(process: int) -> HostAdam:
    """The pool with default settings, shared by callers without other settings.

    Args:
        process: os.getpid(): a forked child gets its own.
    """
    del process
    return HostAdam()


def available_bodies() -> list[str]:
    """The bodies that can run here, the fastest first; "torch" is always the last."""
    library = _library(LIBRARY)
    if library is None:
        return ["torch"]
    return [
        *(name for name, number in _BODIES.items() if library.host_adam_has_body(number)),
        "torch",
    ]


@functools.cache
def _library(path: Path) -> ctypes.CDLL | None:
    """The library with its signatures, or None where it was not built or is another version's."""
    # A library of another version has other structs, and must not be called.
    try:
        library = ctypes.CDLL(str(path))
        if library.host_adam_version() != _VERSION:
            return None
    except (OSError, AttributeError):
        return None

    # Without signatures ctypes would pass and return addresses as 32-bit integers.
    pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    for name, result, arguments in (
        ("host_adam_has_body", int32, [int32]),
        ("host_adam_pool_create", pointer, [int32]),
        ("host_adam_pool_destroy", None, [pointer]),
        (
            "host_adam_submit",
            pointer,
            [pointer, int32, ctypes.POINTER(_Piece), int64, int32, pointer],
        ),
        ("host_adam_wait", None, [pointer]),
        (
            "host_adam_squared_norm",
            int32,
            [pointer, int32, pointer, int32, int64, ctypes.POINTER(ctypes.c_double)],
        ),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@functools.cache
def _warn_once(path: Path) -> None:
    logger.warning(
        "The host kernel %s is not there or out of date: torch computes the optimizer's step "
        "instead, to the same bits but slower. Install a C++17 compiler and run "
        "`pip install --editable .` again.",
        path.name,
    )


def default_num_threads() -> int:
    """The cores that this process may use, divided among the ranks that share them."""
    return max(1, num_usable_cores() // num_sharing_ranks(local_world_size()))


@contextmanager
def _running_on(cores: Collection[int] | None) -> Iterator[None]:
    """While open, this thread runs on these cores, and threads that it starts do so for good."""
    if cores is None or not hasattr(os, "sched_setaffinity"):
        yield
        return

    # Unavailable cores are no reason to fail: the bits do not depend on them.
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        logger.debug("Threads of the host kernel run on any core: %s.", error)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _described(piece: Piece, grad_scale: float) -> _Piece:
    remainder, out = piece.remainder, piece.out
    exp_avg, exp_avg_sq = piece.states["exp_avg"], piece.states["exp_avg_sq"]
    undo = {} if piece.undo is None else {n: kept.data_ptr() for n, kept in piece.undo.items()}
    arrays = _Arrays(
        piece.grad.data_ptr(),
        piece.weight.data_ptr(),
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        None if remainder is None else remainder.data_ptr(),
        None if out is None else out.data_ptr(),
        undo.get("weight"),
        undo.get("exp_avg"),
        undo.get("exp_avg_sq"),
        _TYPES[piece.grad.dtype],
        _TYPES[piece.weight.dtype] if remainder is None else _SPLIT,
        _TYPES[exp_avg.dtype],
        _TYPES[None if out is None else out.dtype],
    )
    scalars = _scalars(piece.step, grad_scale)
    return _Piece(arrays, scalars, piece.numel, 0, _described_codes(piece.codes))


def _described_codes(codes: PieceCodes | None) -> _Codes:
    if codes is None:
        return _Codes()
    (rows, columns), quantizer = codes.shape, codes.quantizer
    (tile_rows, tile_columns), matrix_rows = quantizer.scaling.tile, quantizer.matrix_rows or rows
    return _Codes(
        codes.codes.data_ptr(),
        codes.maxima.data_ptr(),
        codes.last_maxima.data_ptr(),
        codes.first_row,
        columns,
        matrix_rows,
        matrix_rows if tile_rows is None else tile_rows,
        columns if tile_columns is None else tile_columns,
        _ONE_SCALE if codes.has_one_scale else _SCALE_KINDS[quantizer.scaling.kind],
        quantizer.scaling.largest,
    )


def _described_log(log: RowLog) -> _Log:
    return _Log(
        log.slots.data_ptr(),
        log.slots.stride(0),
        log.chunk,
        log.counters.data_ptr(),
        log.counters.stride(0),
        log.sums.data_ptr(),
        log.step,
        log.bucket,
    )


def _number_chunks(pieces: ctypes.Array[_Piece], chunk: int) -> None:
    """Numbers the chunks of all pieces one after the other."""
    count = 0
    for piece in pieces:
        piece.first_chunk = count
        count += -(-piece.numel // chunk)


# The pieces of a step share few sets of constants.
@functools.lru_cache(maxsize=16)
def _scalars(step: AdamStep, grad_scale: float) -> _Scalars:
    return _Scalars(*AdamScalars.of(step, grad_scale))


def _close(library: ctypes.CDLL, pool: int, process: int) -> None:
    """Ends the threads."""
    # They are not there in a forked child.
    if os.getpid() == process:
        library.host_adam_pool_destroy(pool)


def _wait(wait: Callable[[], None], keeps: tuple[object, ...], process: int) -> None:
    """Waits for the threads, which are not there in a forked child."""
    if os.getpid() == process:
        wait()
    del keeps  # the arrays and the pool, until here
