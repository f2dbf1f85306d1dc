"""Runs tests on separate ranks: `@on_ranks(2)` above a test, or `run_ranks(2, function, *args)`
in one that does something before or after.

A pool of ranks per world size lives as long as the test session: each is a process with a gloo
group of that size, and runs the functions it is handed. Importing torch anew would cost every test
seconds per rank. A function that raises or hangs on any rank takes its pool down, and the next call
starts a fresh one.

With `device="sim"` the ranks have the simulated accelerator (tests/simulated_accelerator), with
`device="cuda"` a GPU, which ranks share where there are fewer GPUs than ranks. The process group
carries their tensors, too; where there are enough devices, rank r's current one has index r.

Under torchrun (`torchrun --nproc-per-node 2 -m pytest ...`) the ranks that are there run the
function themselves; tests for other world sizes are skipped.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import inspect
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d

from megatron.core.distributed.fsdp.collective_history import _histories
from megatron.core.lanes import delays
from tests.helpers import gpu
from tests.simulated_accelerator import build

DEFAULT_TIMEOUT = 600.0  # seconds: compilations take minutes on a machine that is busy

# Together they import nearly all of the project, and start no thread, which no fork would have.
PRELOADED = ["megatron.training.pretrain", "tests.helpers.ranks"]


class RankError(AssertionError):
    """What went wrong on the ranks, with their tracebacks."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = DEFAULT_TIMEOUT,
    device: str = "cpu",
) -> list[Any]:
    """Calls `function(*args)` on every rank of a process group of `world_size`; returns the
    results by rank.

    The function is sent by value, so it may be a local one; results must be picklable.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _run_under_torchrun(world_size, function, args, device)
    if device == "sim":
        prepare_simulator()
    pool = _pools.get((world_size, device))
    if pool is None:
        pool = _pools[world_size, device] = _Pool(world_size, device)
    try:
        return pool.run(function, args, timeout)
    except BaseException:
        _pools.pop((world_size, device), None)
        pool.kill()
        raise


def on_ranks(
    world_size: int, *, timeout: float = DEFAULT_TIMEOUT, device: str = "cpu"
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a test that every rank of a process group of `world_size` runs.

    The test's parameters and fixtures are sent to the ranks, so they must be picklable.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        names = list(inspect.signature(body).parameters)

        @functools.wraps(body)
        def test(**given: Any) -> None:
            arguments = [given[name] for name in names]
            run_ranks(world_size, body, *arguments, timeout=timeout, device=device)

        return test

    return decorate


def prepare_simulator() -> None:
    """Builds the simulated accelerator, if that has not been done; skips the test where it cannot
    be.
    """
    missing = build.missing_for_build()
    if missing is not None:
        pytest.skip(missing)
    # Here, so that the ranks' time does not include it.
    build.ensure_built()


def rank_device() -> torch.device:
    """In a function that ranks run: the device of this rank, where a test's tensors belong."""
    return _rank_device[0]


@contextmanager
def random_delays(seed: int) -> Iterator[None]:
    """While open, asynchronous work starts after random pauses: on lanes, and on a device's
    streams.
    """
    with ExitStack() as stack:
        stack.enter_context(delays(seed))
        if rank_device().type == "cuda":
            stack.enter_context(gpu.pauses(seed))
        elif rank_device().type != "cpu":
            from tests.simulated_accelerator import device

            stack.enter_context(device.configured(max_pause_us=300, seed=seed))
        yield


# The device of the ranks that this process is one of.
_rank_device = [torch.device("cpu")]


_LAST_WORDS = 5.0  # seconds, for a rank that has closed its pipe

_TIDY = b"tidy"  # sent to the ranks when all of them have returned


class _Pool:
    """The processes of one process group."""

    def __init__(self, world_size: int, device: str) -> None:
        # Forks of a process that has imported the project: importing anew takes three seconds of a
        # core, and memory that this process has touched already is cheaper than new one.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._store = tempfile.TemporaryDirectory(prefix="ranks-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world_size, device, str(Path(self._store.name) / "store"), theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        for value in (function, *args):
            _send_by_value(value)

        job = cloudpickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(job)
        waiting = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        results: list[Any] = [None] * len(self._pipes)
        while waiting:
            ready = wait(list(waiting), timeout)
            if not ready:
                raise RankError(
                    f"Expected an answer within {timeout} s, got none from ranks "
                    f"{sorted(waiting.values())}."
                )
            for pipe in ready:
                rank = waiting.pop(pipe)
                results[rank] = self._receive(pipe, rank)
        # Only now: a rank that is done must not close its end of a group that a slower one is still
        # connecting.
        for pipe in self._pipes:
            pipe.send_bytes(_TIDY)
        return results

    def _receive(self, pipe: Any, rank: int) -> Any:
        try:
            is_good, result = cloudpickle.loads(pipe.recv_bytes())
        except EOFError:
            process = self._processes[rank]
            process.join(_LAST_WORDS)
            raise RankError(
                f"Expected an answer from rank {rank}, got its death, exit code "
                f"{process.exitcode}. Its threads' stacks, if a signal ended it, are in stderr."
            ) from None
        if not is_good:
            raise RankError(f"rank {rank} failed:\n{result}")
        return result

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._store.cleanup()


def _send_by_value(value: Any) -> None:
    """Sends definitions of a test file by value: ranks cannot import test files.

    A helper calls `run_ranks` with its functions, and passes on the functions of tests.
    Helpers are imported under their whole name, which ranks can do, too.
    """
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is not None and module.__name__.rpartition(".")[2].startswith("test_"):
        cloudpickle.register_pickle_by_value(module)


def _serve(rank: int, world_size: int, device: str, store: str, pipe: Connection) -> None:
    """Joins the group, then runs the jobs of the pool."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    torch.set_num_threads(1)
    faulthandler.enable()  # a crash in C prints the Python stacks of all threads
    # Modules imported before the fork are no garbage; scanning them would copy their memory.
    gc.freeze()
    backend = "gloo" if device == "cpu" else _start_device(device, rank, world_size)
    dist.init_process_group(
        backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    seed = torch.initial_seed()
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            return
        if job == _TIDY:
            # A test that failed ranks at different points must not have failed the next one.
            for history in list(_histories.values()):
                history.forget()
            _destroy_subgroups()
            continue
        function, args = cloudpickle.loads(job)
        # As in a new process: an earlier test may have seeded the ranks differently, and models are
        # drawn alike on all of them.
        torch.default_generator.manual_seed(seed)
        try:
            answer = (True, function(*args))
            if device == "cpu":
                _check_no_accelerator(function)
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(cloudpickle.dumps(answer))
        del function, args, answer


def _check_no_accelerator(function: Callable[..., Any]) -> None:
    """Fails where a function has made the simulator known to ranks of the CPU: tests that come
    after it on these ranks would meet an accelerator.
    """
    if "tests.simulated_accelerator.device" in sys.modules:
        raise RankError(
            "Expected a function for ranks of the CPU not to import the simulated accelerator, got "
            f"{function}, which does; run it with device='sim'."
        )


def _destroy_subgroups() -> None:
    """Destroys the process groups that a test has made.

    Each has threads that look for messages several times a second: a few hundred of them take a
    core.
    """
    world = dist.group.WORLD
    for group in list(distributed_c10d._world.pg_map):
        if group is not world:
            dist.destroy_process_group(group)


def _start_device(kind: str, rank: int, world_size: int) -> str:
    """Makes a device this rank's current one; returns its backend for `init_process_group`."""
    from megatron.core.device import Device

    if kind == "cuda":
        gpu.prepare_rank(rank, world_size)
    else:
        # Not before: with it, torch has an accelerator.
        from tests.simulated_accelerator import device as _  # noqa: F401
    device = Device(kind, rank % torch.get_device_module(kind).device_count())
    device.make_current()
    _rank_device[0] = device.torch_device
    return device.collective_backend


def _run_under_torchrun(
    world_size: int, function: Callable[..., Any], args: tuple[Any, ...], device: str
) -> list[Any]:
    if device != "cpu":
        pytest.skip("torchrun's ranks have no accelerator")
    if int(os.environ["WORLD_SIZE"]) != world_size:
        pytest.skip(f"needs {world_size} ranks, torchrun started {os.environ['WORLD_SIZE']}")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    results: list[Any] = [None] * world_size
    dist.all_gather_object(results, function(*args))
    return results


_pools: dict[tuple[int, str], _Pool] = {}


@atexit.register
def _kill_pools() -> None:
    for pool in _pools.values():
        pool.kill()
