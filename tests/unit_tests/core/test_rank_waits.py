"""Which code waits for other ranks: its declarations, and waits visible only in torch's frames."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor, Shard

from megatron.core import rank_waits
from megatron.core.device import Device
from megatron.core.dist_checkpointing.agreement import on_all_ranks, on_first_rank
from megatron.core.distributed.fsdp import collectives
from megatron.core.host_memory import check_memory_on_all_ranks
from megatron.core.lanes import ThreadEvent, ThreadLane
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.clip_grads import global_grad_norm
from megatron.core.rank_waits import rank_wait, waiting_for_ranks, waiting_for_thread
from megatron.training import pretrain, step
from megatron.training.launch import Launch
from megatron.training.model_loss import Told
from tests.helpers.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def inside() -> Iterator[Callable[..., int]]:
    """inside(function) -> a thread that has been inside of it for a moment. Threads end with the
    test.
    """
    is_over = threading.Event()
    threads: list[threading.Thread] = []

    def begin(function: Callable[[Callable[[], object]], object]) -> int:
        thread = threading.Thread(target=function, args=(is_over.wait,))
        thread.start()
        threads.append(thread)
        time.sleep(0.1)
        assert thread.ident is not None
        return thread.ident

    yield begin
    is_over.set()
    for thread in threads:
        thread.join()


def state(name: str, stand: Callable[[], object]) -> None:
    with waiting_for_ranks(name):
        stand()


def test_a_thread_waits_in_the_collective_that_it_has_stated(inside):
    assert rank_wait(inside(lambda stand: state("all-gather", stand))) == "all-gather"
    assert rank_wait(inside(lambda stand: stand())) is None


def test_a_statement_ends_with_its_block_also_by_an_error():
    own = threading.get_ident()
    with waiting_for_ranks("all-gather"):
        with contextlib.suppress(ValueError), waiting_for_ranks("exchange of notes"):
            assert rank_wait(own) == "exchange of notes"
            raise ValueError
        assert rank_wait(own) == "all-gather"
    assert rank_wait(own) is None
    assert own not in rank_waits._stated


def test_a_thread_that_waits_for_another_waits_for_ranks_only_if_that_one_does(inside):
    def wait_for_lane(stand: Callable[[], object]) -> None:
        with waiting_for_thread():
            stand()

    waiting, working = inside(wait_for_lane), inside(lambda stand: stand())
    assert rank_wait(waiting) is None
    inside(lambda stand: state("all-gather", stand))
    assert rank_wait(waiting) == "all-gather"
    assert rank_wait(working) is None, "it does something else meanwhile"


def test_a_thread_that_waits_for_a_lane_says_so(inside):
    is_over = threading.Event()
    lane = ThreadLane.make("test lane", is_shared=False)
    event = lane.enqueue(lambda: state("all-gather", is_over.wait))
    thread = inside(lambda _: event.wait())
    assert rank_wait(thread) == "all-gather"
    is_over.set()
    assert isinstance(event, ThreadEvent)
    assert event.wait_quietly(20.0)


def test_a_batch_that_does_not_come_is_no_wait_for_other_ranks(inside):
    """Even while a lane of the same rank is in a collective."""
    batches: queue.Queue[None] = queue.Queue()
    reader, writer = os.pipe()
    inside(lambda stand: state("all-gather", stand))
    assert rank_wait(inside(lambda _: batches.get())) is None
    assert rank_wait(inside(lambda _: os.read(reader, 1))) is None
    batches.put(None)
    os.write(writer, b"1")


def test_the_modules_of_torch_that_are_looked_for_exist_in_this_version():
    for name in (*rank_waits._COLLECTIVE_MODULES, rank_waits._BACKWARD_MODULE):
        importlib.import_module(name)
    assert "_engine_run_backward" in vars(torch.autograd.graph), (
        "where a backward waits for its threads"
    )


def _unstated_waits(tree: ast.AST) -> list[str]:
    """Calls of `work.wait()`, where messages and collectives block, outside of a statement."""
    stated = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        and re.match(r"(waiting_for_ranks|issuing)\(", ast.unparse(node.items[0]))
        for inner in ast.walk(node)
    }
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "work.wait"
        and id(node) not in stated
    ]


def test_every_wait_for_messages_between_ranks_is_stated():
    """`issuing` states the collectives: test_every_collective_of_the_project_leaves_a_record."""
    waits = [path for path in (ROOT / "megatron").rglob("*.py") if "work.wait(" in path.read_text()]
    assert waits
    for path in waits:
        assert _unstated_waits(ast.parse(path.read_text())) == [], path
    assert _unstated_waits(ast.parse("work.wait()")) == ["work.wait()"]


def _norm(mesh: DeviceMesh) -> None:
    parameter = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))
    parameter.grad = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    global_grad_norm([parameter])


def _ways_to_wait(mesh: DeviceMesh) -> dict[str, tuple[str, Callable[[], object]]]:
    """(the start of its description, a call) of each function in which a rank waits for others."""
    group, loss = mesh.get_group(), torch.ones((), dtype=torch.float64)
    told = Told(nn.Linear(2, 2), torch.device("cpu"))
    own, whole = torch.ones(2), torch.ones(4)
    how = collectives.Reduction(is_average=False)
    label = collectives.Label(collectives.tag_of(1, 2), "the weights of a layer")
    launch, cpu = Launch(), Device("cpu")
    reduce_scatter, all_reduce = collectives.reduce_scatter, collectives.all_reduce
    return {
        "all_gather": (
            "all-gather of the weights of a layer",
            lambda: collectives.all_gather(torch.empty(4), own, group, label),
        ),
        "reduce_scatter": (
            "reduce-scatter of 4 elements",
            lambda: reduce_scatter(torch.empty(2), whole, group, how),
        ),
        "all_reduce": (
            "reduce-scatter of 4 elements",
            lambda: all_reduce(torch.empty(4), whole, group, how),
        ),
        "_agree": (
            "all-reduce of the step's loss and votes",
            lambda: step._agree(told, [], [0.0], mesh),
        ),
        "_ranks_with_bad_loss": (
            "all-reduce of who has a bad loss",
            lambda: step._ranks_with_bad_loss(told, mesh),
        ),
        "_sum_over_ranks": (
            "all-reduce of the evaluation's loss",
            lambda: step._sum_over_ranks(loss, mesh),
        ),
        "check_memory_on_all_ranks": (
            "all-reduce of the host memory",
            lambda: check_memory_on_all_ranks([], 1, mesh),
        ),
        "_agreed_restart_count": (
            "all-reduce of the number of restarts",
            lambda: pretrain._agreed_restart_count(launch, cpu),
        ),
        "on_first_rank": ("all-gather of lengths", lambda: on_first_rank(lambda: None, "looking")),
        "on_all_ranks": ("all-gather of lengths", lambda: on_all_ranks(lambda: None)),
        "global_grad_norm": ("all-reduce of a measure", lambda: _norm(mesh)),
        "barrier": ("barrier of torch.distributed", dist.barrier),
        "wait_tensor": (
            "wait_tensor of torch.distributed",
            lambda: wait_tensor(all_gather_tensor(own, 0, group)),
        ),
    }


def _ways_that_show() -> list[str]:
    """Rank 0 makes each call alone, and rank 1 follows once rank 0 reports that it waits there."""
    mesh, store, seen = build_mesh("cpu", 2), _get_default_store(), []
    main = threading.get_ident()

    def look(name: str, expected: str) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if (rank_wait(main) or "").startswith(expected):
                seen.append(name)
                store.set(f"{name} shows", "")
                return
            time.sleep(0.002)

    for name, (expected, enter) in _ways_to_wait(mesh).items():
        if dist.get_rank() == 0:
            looking = threading.Thread(target=look, args=(name, expected))
            looking.start()
            enter()
            looking.join()
        else:
            store.wait([f"{name} shows"], timedelta(seconds=60))
            store.delete_key(f"{name} shows")
            enter()
    return seen


def test_a_rank_inside_any_collective_of_the_project_shows_as_one_that_waits():
    seen, _ = run_ranks(2, _ways_that_show)
    assert len(seen) == 13
