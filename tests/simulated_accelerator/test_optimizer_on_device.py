"""The optimizer's step on an accelerator: waits of its threads, and the order of its launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.optimizer.kernels import torch_flat
from megatron.training import step as step_module
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.sim

WARM_UP, MEASURED = 3, 2


def _syncs(case: str) -> tuple[dict[str, int], int]:
    """How often each thread waited for the device in some steps, by name, and how many copies
    blocked.
    """
    import tests.simulated_accelerator.device as sim
    from tests.simulated_accelerator.helpers.engines import make_engine

    engine = make_engine(case, "sim")
    for step in range(WARM_UP):
        _one_step(engine, step)
    torch.accelerator.synchronize()
    before, copies = sim.syncs_by_thread(), sim.counters().pageable_copies
    for step in range(WARM_UP, WARM_UP + MEASURED):
        _one_step(engine, step)
    after = sim.syncs_by_thread()
    found = {
        name: count - before.get(name, 0)
        for name, count in after.items()
        if count > before.get(name, 0)
    }
    copies = sim.counters().pageable_copies - copies
    engine.state.optimizer.synchronize()
    return found, copies


def _one_step(engine: Any, step: int) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel  # which does not travel to the ranks

    from tests.simulated_accelerator.helpers.engines import batches, forward_step

    with sdpa_kernel(SDPBackend.MATH):
        engine.train_batch(batches(step, "sim"), forward_step)


def test_gradients_that_are_not_pinned_block_a_worker_and_not_the_backward():
    for syncs, copies in run_ranks(2, _syncs, "offload unpinned", device="sim"):
        assert copies >= MEASURED * 4, "a copy for each group and step does block"
        assert syncs["optimizer d2h issue"] >= MEASURED * 4
        assert "not Python's" not in syncs, "autograd's thread"


def _norm_kernels() -> tuple[int, int]:
    """Kernels of the norm of all gradients in a step, and how many gradients there are."""
    import tests.simulated_accelerator.device as sim
    from tests.simulated_accelerator.helpers.engines import make_engine

    engine = make_engine("zero3", "sim")
    optimizer = engine.state.optimizer
    grad_norm, found = optimizer.grad_norm, []

    def counted() -> torch.Tensor:
        before = sim.counters().kernels
        norm = grad_norm()
        gradients = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        found.append((sim.counters().kernels - before, len(gradients)))
        return norm

    optimizer.grad_norm = counted
    _one_step(engine, 0)
    return found[0]


def test_the_norm_takes_a_few_kernels_for_each_group_of_gradients():
    for kernels, num_gradients in run_ranks(2, _norm_kernels, device="sim"):
        assert num_gradients >= 30
        assert kernels < num_gradients, "one after the other, each would take seven"


def _planning(case: str) -> list[str]:
    """The order of a step's calls around the reading of its scalars."""
    from tests.simulated_accelerator.helpers.engines import make_engine

    engine = make_engine(case, "sim")
    _one_step(engine, 0)
    order: list[str] = []
    read, run, optimizer = step_module._read, torch_flat.run, engine.state.optimizer
    plan = optimizer.plan_step

    def noting(name: str, function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            order.append(name)
            return function(*args, **kwargs)

        return called

    step_module._read, torch_flat.run = noting("read", read), noting("launch", run)
    optimizer.plan_step = noting("plan", plan)
    optimizer.optimizer.plan_step = noting("plan of the optimizer", optimizer.optimizer.plan_step)
    try:
        _one_step(engine, 1)
    finally:
        step_module._read, torch_flat.run = read, run
    return order


def test_the_step_is_planned_once_and_before_its_scalars_are_read():
    for order in run_ranks(2, _planning, "zero3", device="sim"):
        assert order == ["plan", "plan of the optimizer", "read", "launch"]
