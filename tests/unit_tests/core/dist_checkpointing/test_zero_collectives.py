"""A save communicates nothing: whatever torch.distributed offers for that is watched, and the
sockets themselves.

functions   of torch.distributed, under every name that any module has for them
methods     of process groups, their backends and stores
operators   c10d's and those made of them, in the threads that save
sockets     bytes that have left this process, whoever sent them
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.checkpoint as dcp
import torch.distributed.distributed_c10d as c10d
import torch.distributed.nn.functional as nn_functional
import torch.distributed.rpc as rpc
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.metadata_reading import parse_metadata
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.save.manager import CheckpointManager, Retention
from megatron.core.dist_checkpointing.store import open_store
from megatron.core.distributed.fsdp.placement import SHARDING_STRATEGIES
from megatron.core.lanes import delays
from tests.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.models import (
    DELAY,
    DEVICE,
    HFSDP,
    HSDP,
    ITERATION,
    Setting,
    Trained,
    manager_of,
)

NUM_RANKS = 4
NUM_SEEDS = 3
STRATEGIES = (*SHARDING_STRATEGIES, HSDP, HFSDP)

# What asks or tells other processes something, and what does not. A name that is in neither fails a
# test.
COMMUNICATING = {
    "torch.distributed": """
        all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single all_reduce
        all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv broadcast broadcast_object_list
        gather gather_object init_process_group irecv isend monitored_barrier new_group new_subgroups
        new_subgroups_by_enumeration recv recv_object_list reduce reduce_scatter reduce_scatter_single
        reduce_scatter_tensor scatter scatter_object_list send send_object_list shrink_group split_group
        init_device_mesh rendezvous register_rendezvous_handler
    """,
    "functional collectives": """
        all_gather_inplace all_gather_into_tensor_backward all_gather_into_tensor_coalesced
        all_gather_into_tensor_coalesced_backward all_gather_single all_gather_single_autograd
        all_gather_single_coalesced all_gather_tensor all_gather_tensor_autograd all_gather_tensor_inplace all_reduce
        all_reduce_backward all_reduce_coalesced all_reduce_coalesced_backward all_reduce_inplace all_to_all_inplace
        all_to_all_single all_to_all_single_autograd all_to_all_single_backward batch_p2p_ops_inplace broadcast
        irecv_inplace isend_inplace permute_tensor reduce_scatter_single reduce_scatter_single_autograd
        reduce_scatter_single_coalesced reduce_scatter_tensor reduce_scatter_tensor_autograd
        reduce_scatter_tensor_backward reduce_scatter_tensor_coalesced reduce_scatter_tensor_coalesced_backward
        reduce_scatter_tensor_inplace wait_tensor wait_tensor_backward
    """,
    "torch.distributed.nn": """
        all_gather all_reduce all_to_all all_to_all_single broadcast gather reduce reduce_scatter scatter
    """,
    "torch.distributed.rpc": "init_rpc remote rpc_async rpc_sync shutdown",
    "process group": """
        _allgather_base _reduce_scatter_base _end_coalescing _set_sequence_number_for_group abort all_gather_single
        all_gather_single_coalesced all_to_all_single allgather allgather_coalesced allgather_into_tensor_coalesced
        allreduce allreduce_coalesced alltoall alltoall_base barrier broadcast gather merge_remote_group
        monitored_barrier recv recv_anysource reduce reduce_scatter reduce_scatter_single
        reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced scatter send shutdown split_group
        eager_connect_single_device shrink resume suspend
    """,
    "store": """
        add append barrier check compare_set delete_key get list_keys multi_get multi_set num_keys queue_len queue_pop
        queue_push set wait
    """,
}
LOCAL = {
    "torch.distributed": """
        destroy_process_group get_backend get_backend_config get_default_backend_for_device get_debug_level
        get_global_rank get_group_rank get_node_local_rank get_pg_count get_process_group_ranks get_rank
        get_world_size is_available is_backend_available is_gloo_available is_initialized is_mpi_available
        is_nccl_available is_torchelastic_launched is_ucc_available is_xccl_available record_comm set_debug_level
        set_debug_level_from_env supports_complex breakpoint
    """,
    "functional collectives": """
        all_gather_into_tensor_coalesced_setup_context all_gather_into_tensor_setup_context
        all_reduce_coalesced_setup_context all_reduce_setup_context all_to_all_single_setup_context
        allow_inflight_collective_as_graph_input_ctx reduce_scatter_tensor_coalesced_setup_context
        reduce_scatter_tensor_setup_context wait_tensor_setup_context
    """,
    "process group": """
        BackendType CUSTOM GLOO MPI NCCL UCC UNDEFINED XCCL Device Options _Options _backend_id _device_types
        _enable_collectives_timing _get_backend _get_backend_name _get_sequence_number_for_group _has_hooks _id
        _pybind11_conduit_v1_ _register_backend _register_on_completion_hook _set_default_backend _set_default_timeout
        _set_group_desc _set_group_name _start_coalescing _wait_for_pending_works allocate_tensor bound_device_id boxed
        create_default_device create_device get_group_store group_desc group_name mem_allocator memory_stats name
        options rank set_timeout setUsePgForSymmMemRendezvous size supports_coalescing supports_shrinking
        supports_splitting supports_tensor_alloc supports_time_estimate unbox use_pg_for_symm_mem_rendezvous
    """,
    "store": """
        _pybind11_conduit_v1_ _underlying_non_prefix_store clone has_extended_api host libuvBackend path port
        set_timeout timeout underlying_store
    """,
}
# Namespaces of operators; c10d's have others for the functional ones.
OPERATORS = ("c10d", "symm_mem", "_dtensor")


class Call(NamedTuple):
    """Something that communicates was called, or an operator ran."""

    what: str
    thread: str


class Watch:
    """What communicates while `watching` is open.

    Attributes:
        calls: from the threads of a save, and from this one inside `saving`.
        others: from everywhere else, training for one.
    """

    def __init__(self, *, passes_on: bool = True) -> None:
        """
        Args:
            passes_on: whether what is called runs, too.
        """
        self.calls: list[Call] = []
        self.others: list[Call] = []
        self._passes_on = passes_on
        self._thread = threading.current_thread()
        self._is_saving = False

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        with contextlib.ExitStack() as stack:
            for name, module in MODULES.items():
                self._watch_functions(stack, name, module)
            for name, classes in CLASSES.items():
                for cls in classes:
                    self._watch_methods(stack, name, cls)
            yield self

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What this thread does inside belongs to a save."""
        self._is_saving = True
        try:
            with _Operators(self):
                yield
        finally:
            self._is_saving = False

    def watch_lanes(self, manager: CheckpointManager) -> None:
        """Operators, too, are seen on the manager's lanes from here on."""
        for lane in (manager._lane, manager._disk):
            lane.enqueue = self._watched_enqueue(lane.enqueue)

    def record(self, what: str) -> None:
        thread = threading.current_thread()
        belongs = thread.name.startswith("checkpoint") or (
            thread is self._thread and self._is_saving
        )
        (self.calls if belongs else self.others).append(Call(what, thread.name))

    def _watched_enqueue(self, enqueue: Callable[..., Any]) -> Callable[..., Any]:
        def watched(work: Callable[[], object], after: Any = ()) -> Any:
            def watched_work() -> None:
                with _Operators(self):
                    work()

            return enqueue(watched_work, after)

        return watched

    def _watch_functions(self, stack: contextlib.ExitStack, name: str, module: ModuleType) -> None:
        wrappers = {
            id(vars(module)[function]): self._wrapped(function, vars(module)[function])
            for function in COMMUNICATING[name].split()
            if function in vars(module)
        }
        # Whoever has imported a function has it under a name of its own.
        for other in list(sys.modules.values()):
            for attribute, value in list(vars(other).items()):
                if id(value) in wrappers:
                    stack.callback(setattr, other, attribute, value)
                    setattr(other, attribute, wrappers[id(value)])

    def _watch_methods(self, stack: contextlib.ExitStack, name: str, cls: type) -> None:
        for method in COMMUNICATING[name].split():
            original = vars(cls).get(method)
            if original is not None:
                stack.callback(setattr, cls, method, original)
                setattr(cls, method, self._wrapped(f"{cls.__name__}.{method}", original))

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.record(name)
            return original(*args, **kwargs) if self._passes_on else None

        return call


class _Operators(TorchDispatchMode):
    """Operators that communicate, in the thread where it is entered."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What a tensor's own operators send is seen only if they run while this mode is entered.
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        if "c10d" in func.namespace or func.namespace in OPERATORS:
            self._watch.record(func.name())
        return func(*args, **(kwargs or {}))


def _subclasses(cls: type) -> list[type]:
    return [
        cls,
        *itertools.chain.from_iterable(_subclasses(child) for child in cls.__subclasses__()),
    ]


MODULES = {
    "torch.distributed": dist,
    "functional collectives": functional_collectives,
    "torch.distributed.nn": nn_functional,
    "torch.distributed.rpc": rpc,
}
CLASSES = {
    "process group": [
        *_subclasses(dist.ProcessGroup),
        *_subclasses(torch._C._distributed_c10d.Backend),
    ],
    "store": _subclasses(dist.Store),
}


def _public_functions(module: ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if _is_function(value) and not name.startswith("_")
    }


def _is_function(value: object) -> bool:
    # Not by `inspect`, which asks values for attributes, and some warn of that.
    return type(value) in (FunctionType, BuiltinFunctionType)


def test_every_function_and_method_of_torch_distributed_is_known_to_communicate_or_not_to():
    own = {
        name: {
            f for f in _public_functions(module) if vars(module)[f].__module__ == module.__name__
        }
        for name, module in MODULES.items()
    }
    found = {
        "torch.distributed": _public_functions(dist) | own["torch.distributed"],
        "functional collectives": own["functional collectives"],
        "torch.distributed.nn": own["torch.distributed.nn"],
        "process group": {*dir(dist.ProcessGroup), *dir(c10d.ProcessGroupGloo)},
        "store": {
            *dir(dist.Store),
            *dir(dist.PrefixStore),
            *dir(dist.FileStore),
            *dir(dist.TCPStore),
        },
    }
    for name, names in found.items():
        known = {*COMMUNICATING[name].split(), *LOCAL.get(name, "").split()}
        assert {n for n in names if not n.startswith("__")} <= known, name
        assert known & names > set()
    assert not {*COMMUNICATING["process group"].split()} & {*LOCAL["process group"].split()}


def _call_everything() -> list[str]:
    """The names that were called and not seen."""
    unseen = []
    watch = Watch(passes_on=False)
    with watch.watching(), watch.saving():
        for name, module in MODULES.items():
            for function in COMMUNICATING[name].split():
                if function in vars(module):
                    getattr(module, function)()
                    if watch.calls.pop().what != function:
                        unseen.append(function)
        for name, classes in CLASSES.items():
            for cls, method in itertools.product(classes, COMMUNICATING[name].split()):
                if method in vars(cls):
                    getattr(cls, method)(None)
                    if watch.calls.pop().what != f"{cls.__name__}.{method}":
                        unseen.append(method)
        assert not watch.calls
    return unseen


def test_every_one_of_them_would_be_seen():
    before = {name: value for name, value in vars(dist).items() if _is_function(value)}
    assert _call_everything() == []
    assert {name: value for name, value in vars(dist).items() if _is_function(value)} == before


def _really_communicate(root: str) -> None:
    """Each way to communicate, for real: what the watch sees of it, in the thread that calls and on
    a lane.
    """
    group, store = c10d._get_default_group(), c10d._get_default_store()
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    peer = dist.get_rank() ^ 1
    ones = torch.ones(NUM_RANKS)
    sharded = DTensor.from_local(ones, mesh, [Shard(0)])

    def swap() -> None:
        sent = dist.isend(ones, peer)
        dist.recv(torch.empty(NUM_RANKS), peer)
        sent.wait()

    ways: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(ones.clone()),
        "all_gather_object": lambda: dist.all_gather_object([None] * NUM_RANKS, 1),
        "broadcast_object_list": lambda: dist.broadcast_object_list([1]),
        "barrier": lambda: dist.barrier(),
        "monitored_barrier": lambda: dist.monitored_barrier(),
        "new_group": lambda: dist.new_group(),
        "isend": swap,
        "ProcessGroup.allreduce": lambda: group.allreduce(ones.clone()).wait(),
        "c10d::allreduce_": lambda: group.allreduce(ones.clone()).wait(),
        "_c10d_functional::all_reduce": lambda: functional_collectives.all_reduce(
            ones, "sum", mesh
        ).add(1),
        "_c10d_functional::all_gather_into_tensor": lambda: sharded.full_tensor(),
        "Store.set": lambda: store.set("key", "value"),
    }
    watch = Watch()
    manager = CheckpointManager(open_store(root), DEVICE, dist.get_rank(), NUM_RANKS, "test")
    with watch.watching():
        watch.watch_lanes(manager)
        for name, way in ways.items():
            with watch.saving():
                way()
            _expect_seen(watch, name, "MainThread")
            manager._lane.enqueue(way).synchronize()
            _expect_seen(watch, name, "checkpoint")
            manager._disk.enqueue(way).synchronize()
            _expect_seen(watch, name, "checkpoint disk")
            way()
            assert not watch.calls
            assert watch.others or "::" in name
    manager.close()


def _expect_seen(watch: Watch, name: str, thread: str) -> None:
    assert name in {call.what for call in watch.calls}, (name, watch.calls)
    assert {call.thread for call in watch.calls} == {thread}
    watch.calls.clear()


def test_what_really_goes_out_is_seen_in_every_thread_of_a_save(tmp_path):
    run_ranks(NUM_RANKS, _really_communicate, str(tmp_path))


# Saves


class Saved(NamedTuple):
    """What was seen of saves on one rank."""

    calls: list[Call]
    others: list[Call]
    names: list[str]  # of what is published in the end


def _save_watched(root: str, setting: Setting) -> Saved:
    """One save that is waited for, then one beside which training goes on and that makes the first
    superfluous.
    """
    trained = Trained(setting, seed=0)
    for number in range(2):
        trained.step(number)
    watch = Watch()
    manager = CheckpointManager(
        open_store(root), DEVICE, trained.rank, NUM_RANKS, "test", retention=Retention(keep_last=1)
    )
    watch.watch_lanes(manager)
    private = {"rng.torch": torch.get_rng_state()}
    with watch.watching():
        with watch.saving():
            manager.save(2, trained.contents(private=private), {"iteration": 2})
            manager.finish()
        others = list(watch.others)
        with watch.saving():
            manager.save(3, trained.contents(private=private), {"iteration": 3})
        for number in range(2, 4):
            trained.step(number)
        with watch.saving():
            assert manager.failure() is None
            manager.finish()
            manager.close()
    assert not others
    dist.barrier()
    return Saved(watch.calls, watch.others, open_store(root).folders())


@pytest.mark.parametrize(("strategy", "fraction"), list(itertools.product(STRATEGIES, (None, 0.5))))
def test_no_save_calls_anything_that_communicates(tmp_path, strategy, fraction):
    results = run_ranks(NUM_RANKS, _save_watched, str(tmp_path), Setting(strategy, fraction))
    for saved in results:
        assert saved.calls == []
        assert saved.names == [checkpoint_name(3)]
        # Training, which went on beside the second save, was seen to communicate.
        assert {"all_reduce", "ProcessGroup.allreduce"} <= {call.what for call in saved.others}


class _Loud:
    """A store that does what it should, and all ranks' communication besides."""

    def __init__(self, store: Any, method: str) -> None:
        self._store = store
        self._method = method

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            dist.barrier()
        return getattr(self._store, name)


def _save_loudly(root: str, method: str) -> list[Call]:
    trained = Trained(Setting(), seed=0)
    watch = Watch()
    manager = manager_of(_Loud(open_store(root), method), trained)
    watch.watch_lanes(manager)
    with watch.watching():
        with watch.saving():
            manager.save(1, trained.contents(), {})
        manager.finish()
    manager.close()
    return watch.calls


@pytest.mark.parametrize(
    ("method", "thread"), [("draft_name", "MainThread"), ("open_data", "checkpoint disk")]
)
def test_a_save_that_communicated_would_be_seen(tmp_path, method, thread):
    for calls in run_ranks(NUM_RANKS, _save_loudly, str(tmp_path), method):
        assert Call("barrier", thread) in calls
        assert Call("c10d::barrier", thread) in calls


class _Full:
    """A store without room for data."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        if name == "open_data":
            raise OSError(28, "No space left on device")
        return getattr(self._store, name)


def _fail_watched(root: str) -> tuple[list[Call], str]:
    trained = Trained(Setting(HSDP, fraction=1.0), seed=0)
    store, watch = open_store(root), Watch()
    manager = manager_of(_Full(store) if trained.rank == 2 else store, trained)
    watch.watch_lanes(manager)
    with watch.watching(), watch.saving():
        manager.save(1, trained.contents(), {})
        try:
            manager.finish()
            failure = ""
        except CheckpointError as error:
            failure = str(error)
        manager.close()
    return watch.calls, failure


def test_that_a_save_has_failed_on_one_rank_is_known_on_all_without_communication(tmp_path):
    for calls, failure in run_ranks(NUM_RANKS, _fail_watched, str(tmp_path)):
        assert calls == []
        assert "No space left on device" in failure


def _sent_bytes() -> int:
    """The bytes that this process has written to its connections, be they with its peers yet or
    not.
    """
    total = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (what is no path any more must not be an error)
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if (
                connection.family in (socket.AF_INET, socket.AF_INET6)
                and connection.type == socket.SOCK_STREAM
            ):
                total += _written_bytes(connection)
    return total


def _written_bytes(connection: socket.socket) -> int:
    def num_acknowledged() -> int:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked

    while True:
        before = num_acknowledged()
        (num_queued,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
        if num_acknowledged() == before:
            return before + num_queued


def _save_counted(root: str) -> tuple[int, int]:
    """(bytes that two saves send, bytes that one number sends)"""
    trained = Trained(Setting(fraction=0.5), seed=0)
    trained.step(0)
    trained.optimizer.synchronize()
    dist.barrier()
    before = _sent_bytes()
    manager = manager_of(root, trained)
    for iteration in (1, 2):
        manager.save(iteration, trained.contents(), {})
    manager.finish()
    manager.close()
    after = _sent_bytes()
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    return after - before, _sent_bytes() - after


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what its sockets have sent")
def test_not_a_byte_leaves_a_rank_that_saves(tmp_path):
    for saves, number in run_ranks(NUM_RANKS, _save_counted, str(tmp_path)):
        assert saves == 0
        assert number > 0


def _plan_watched(setting: Setting) -> tuple[list[Call], int]:
    """State dicts for PyTorch DCP, and its own plans of this rank's part, to save and to load."""
    trained = Trained(setting, seed=0)
    trained.step(0)
    trained.optimizer.synchronize()
    watch = Watch()
    with watch.watching(), watch.saving():
        state = trained.contents().state_dict()
        saving = dcp.DefaultSavePlanner()
        saving.set_up_planner(state, is_coordinator=trained.rank == 0)
        plan = saving.create_local_plan()
        for item in plan.items:
            saving.resolve_data(item)
    assert not watch.others
    return watch.calls, len(plan.items)


@pytest.mark.parametrize(
    "setting", [Setting(), Setting(HSDP, 0.5), Setting("no_shard"), Setting(HFSDP, 1.0)], ids=str
)
def test_chunks_come_to_a_state_dict_for_pytorch_without_communication(setting):
    results = run_ranks(NUM_RANKS, _plan_watched, setting)
    assert [calls for calls, _ in results] == [[]] * NUM_RANKS
    assert all(num_items > 0 for _, num_items in results)


# The same files, whatever the timing


class _Slow:
    """A store that takes its time, at random but by a seed, and opens no file for data before it
    may.
    """

    def __init__(self, store: Any, seed: str) -> None:
        self.may_write = threading.Event()
        self._store = store
        self._random = random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        if callable(value):
            time.sleep(self._random.random() * 0.03)
        if name == "open_data":
            self.may_write.wait()
            time.sleep(DELAY)
        return value


def _save_in_many_ways(root: str, setting: Setting) -> None:
    """The same state undisturbed; under delays; and under delays while every rank steps before it
    has read anything.
    """
    trained = Trained(setting, seed=0)
    for number in range(ITERATION):
        trained.delay_update()
        trained.step(number)
    private = {"rng.torch": torch.get_rng_state()}
    state = {"iteration": ITERATION}
    with manager_of(f"{root}/quiet", trained) as manager:
        manager.save(ITERATION, trained.contents(private=private), state)
        manager.finish()
    step = trained.optimizer.step
    for seed in range(NUM_SEEDS):
        store = _Slow(open_store(f"{root}/delayed-{seed}"), f"{seed}:{trained.rank}")
        with manager_of(store, trained) as manager, delays(10 * seed + trained.rank):
            time.sleep(random.Random(f"{trained.rank}:{seed}").random() * 0.1)
            manager.save(ITERATION, trained.contents(private=private), state)
            if seed < NUM_SEEDS - 1:
                store.may_write.set()
            else:
                trained.optimizer.step = lambda norm, store=store: (
                    store.may_write.set(),
                    step(norm),
                )
                for number in range(ITERATION, ITERATION + 2):
                    trained.step(number)
            manager.finish()
    dist.barrier()


@pytest.mark.parametrize(
    "setting", [Setting(HFSDP), Setting("no_shard", 1.0), Setting(HSDP, 0.5)], ids=str
)
def test_delays_change_no_byte_of_any_file(tmp_path, setting):
    run_ranks(NUM_RANKS, _save_in_many_ways, str(tmp_path), setting)
    quiet = _files(tmp_path / "quiet")
    assert len([name for name in quiet if name.endswith(".distcp")]) == NUM_RANKS
    source = str(tmp_path / "quiet")
    metadata = parse_metadata(quiet[".metadata"], source)
    for seed in range(NUM_SEEDS):
        delayed = _files(tmp_path / f"delayed-{seed}")
        assert delayed.keys() == quiet.keys()
        assert [name for name in quiet if delayed[name] != quiet[name]] == []
        assert parse_metadata(delayed[".metadata"], source) == metadata


def _files(root: Path) -> dict[str, bytes]:
    (folder,) = (path for path in root.iterdir() if path.is_dir())
    assert folder.name == checkpoint_name(ITERATION)
    return {path.name: path.read_bytes() for path in folder.iterdir()}
