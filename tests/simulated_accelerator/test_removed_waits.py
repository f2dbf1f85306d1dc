"""The simulated accelerator detects that a wait between two streams was removed.

A test that passes proves little unless it can fail. The streams come in an order
that makes the missing wait matter every time: the lanes last, or the computation last. Where other
waits would hide it, the step's own synchronisation above all, a stream is held past them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.dtensors import local_tensor
from megatron.core.lanes import ThreadEvent
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.kernels.piece import HostKernel
from megatron.core.optimizer.rules import Muon
from megatron.training.engines import ModuleEngine
from tests.helpers.ranks import run_ranks
from tests.simulated_accelerator.helpers import engines, matrices
from tests.simulated_accelerator.helpers.behaviours import DEFAULT_LAST, LANES_LAST, Behaviour
from tests.simulated_accelerator.helpers.removed_waits import REMOVALS, recorded_lanes, removed
from tests.unit_tests.core.optimizer.cpu_offloading.test_early_updates import Trained

pytestmark = pytest.mark.sim

STEPS = range(3)
# Longer than what keeps a busy machine from its work: a stream that comes last must not come before
# its time.
PATIENCE_MS = 20_000
HELD_SECONDS = 0.5


def _train(case: str, behaviour: Behaviour, without: str | None) -> Any:
    """The numbers of a training, or the error that it ended with."""
    import tests.simulated_accelerator.device as sim

    with behaviour.applied():
        try:
            with sim.configured(patience_ms=PATIENCE_MS):
                engine = engines.make_engine(case, "sim")
                with _without(without):
                    return engines.train(engine, "sim", STEPS).numbers
        except Exception as error:
            return repr(error)
        finally:
            # Late work of a run without a wait must not write to the memory of the next run.
            torch.accelerator.synchronize()


def _forward_before_the_step(case: str, without: str | None) -> float:
    """The loss of a forward between the backward and the step, which must see the weights from
    before the step.

    The device has not started that forward when the step is issued: updated weights must not be
    copied up yet.
    """
    engine = engines.make_engine(case, "sim")
    engines.train(engine, "sim", range(1))
    state, (batch, *_) = engine.state, engines.batches(7, "sim")
    batch = {name: tensor.to(engine.device.torch_device) for name, tensor in batch.items()}
    engines.forward_step(state.model, batch).backward()
    # The step would compare the ranks' collectives, for which it waits.
    state.model.context.check_agreement()

    with (
        _without(without),
        _held_until_delivered(engine, torch.accelerator.current_stream(), without),
    ):
        with torch.no_grad():
            loss = engines.forward_step(state.model, batch)
        state.optimizer.step(1.0)
    return loss.item()


@contextmanager
def _lane_held_after_a_step(lane: str, case: str, without: str | None) -> Iterator[ModuleEngine]:
    """An engine after a step that is over. While open, a wait is missing and a lane is held."""
    with recorded_lanes() as lanes:
        engine = engines.make_engine(case, "sim")
    engines.train(engine, "sim", range(1))
    engine.state.optimizer.synchronize()
    with _without(without), _held_until_delivered(engine, lanes[lane], without):
        yield engine


def _gradients_that_come_late(case: str, without: str | None) -> float:
    """The loss after a step whose gradients come down long after the step has synchronised with the
    device.
    """
    with _lane_held_after_a_step("optimizer d2h", case, without) as engine:
        engine.train_batch(engines.batches(7, "sim"), engines.forward_step)
    return engine.eval_batch(engines.batches(8, "sim"), engines.forward_step)


def _updates_that_come_late(case: str, without: str | None) -> float:
    """The loss after a step whose update on the device comes after its states could be back in host
    memory.
    """
    with _lane_held_after_a_step("optimizer states update", case, without) as engine:
        engine.train_batch(engines.batches(7, "sim"), engines.forward_step)
    engine.train_batch(engines.batches(8, "sim"), engines.forward_step)
    return engine.eval_batch(engines.batches(9, "sim"), engines.forward_step)


def _updates_on_the_host_after_the_device(case: str, without: str | None) -> float:
    """The loss after a step of the host over states that are not back yet from the device."""
    with _lane_held_after_a_step("optimizer states down", case, without) as engine:
        engine.train_batch(engines.batches(7, "sim"), engines.forward_step)
        for bucket in engine.state.optimizer.optimizer._sides.host_side.buckets:
            bucket.is_streamed = False
        engine.train_batch(engines.batches(8, "sim"), engines.forward_step)
    return engine.eval_batch(engines.batches(9, "sim"), engines.forward_step)


def _reductions_that_come_late(case: str, without: str | None) -> float:
    """The loss after a step whose gradients are reduced long after they could have come down."""
    import tests.simulated_accelerator.device as sim

    # The engine creates the callback that has this wait.
    with recorded_lanes() as lanes, _without(without):
        engine = engines.make_engine(case, "sim")
    engines.train(engine, "sim", range(1))
    state, (batch, *_) = engine.state, engines.batches(7, "sim")
    batch = {name: tensor.to(engine.device.torch_device) for name, tensor in batch.items()}
    torch.accelerator.synchronize()

    with sim.held(lanes["fsdp reduction"]):
        engines.forward_step(state.model, batch).backward()
        deadline = time.monotonic() + (HELD_SECONDS if without is None else PATIENCE_MS / 1000)
        while not lanes["optimizer d2h"].query() and time.monotonic() < deadline:
            time.sleep(0.01)
    state.optimizer.step(1.0)
    state.optimizer.zero_grad()
    return engine.eval_batch(engines.batches(8, "sim"), engines.forward_step)


def _until(is_done: Callable[[], bool], without: str | None) -> None:
    """Waits for what happens soon if a wait is missing; with all waits, it does not happen."""
    deadline = time.monotonic() + (HELD_SECONDS if without is None else PATIENCE_MS / 1000)
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.01)


def _after_a_step() -> Trained:
    trained = Trained()
    trained.backward(0)
    trained.optimizer.step()
    return trained


def _early_during_reads(_case: str, without: str | None) -> list[float]:
    """The states that a reader finds after the next backward."""
    trained, read = _after_a_step(), ThreadEvent()
    trained.step(None)
    trained.optimizer.synchronize()
    for unit in trained.optimizer.state_units():
        unit.hold(read)
    with _without(without):
        trained.backward(1, waits=False)
    _until(lambda: all(early.done.is_done() for early in trained.early), without)
    found = [bucket.main_weight.double().sum().item() for bucket in trained.side.buckets]
    read.finish(None)
    return found


def _early_that_starts_late(_case: str, without: str | None) -> list[float]:
    """The weights after an early update that starts long after it was queued."""
    trained, may_start = _after_a_step(), threading.Event()
    trained.step(None)
    kernel = trained.side._early._kernel
    trained.side._early._kernel = HostKernel(lambda *work: lambda: kernel(*work))
    trained.side.lanes.start.enqueue(lambda: may_start.wait(PATIENCE_MS / 1000))
    with _without(without):
        trained.backward(1, waits=False)
    early = trained.early
    _until(lambda: all(each.done.is_done() for each in early), without)
    may_start.set()
    trained.side.lanes.start.enqueue(lambda: None).synchronize()
    trained.step()
    return [value.double().sum().item() for value in trained.values()]


def _early_that_is_undone_soon(_case: str, without: str | None) -> list[float]:
    """The weights after a step between whose early update and its end states were read."""
    trained, may_end = _after_a_step(), threading.Event()
    trained.step(None)
    kernel = trained.side._early._kernel
    trained.side._early._kernel = HostKernel(
        lambda *work: lambda: (may_end.wait(PATIENCE_MS / 1000), kernel(*work))
    )
    trained.backward(1, waits=False)
    trained.side.lanes.d2h.enqueue(lambda: None).synchronize()
    _until(lambda: not trained.early[-1].is_queued, "the first of all")
    with _without(without):
        reader = threading.Thread(target=trained.side.buckets[-1].settle)
        reader.start()
        _until(lambda: not reader.is_alive(), without)
    may_end.set()
    reader.join()
    trained.side.lanes.host.enqueue(lambda: None).synchronize()
    trained.step()
    return [value.double().sum().item() for value in trained.values()]


def _matrices_whose_gradients_come_late(_case: str, without: str | None) -> list[float]:
    """The values after a step of Muon whose gradients come down long after it was queued."""
    import tests.simulated_accelerator.device as sim

    with recorded_lanes() as lanes:
        layers, optimizer = _matrices("no_shard")
    matrices.step(layers, optimizer, 0)
    optimizer.synchronize()
    momentum = local_tensor(optimizer.state[layers[0].weight]["momentum_buffer"])
    before = momentum.clone()
    for layer in layers:
        layer(1).backward()
    torch.accelerator.synchronize()
    with _without(without), sim.held(lanes["optimizer d2h"]):
        optimizer.step(grad_scale=0.5)
        _until(lambda: not torch.equal(momentum, before), without)
    return [value.double().sum().item() for value in matrices.values_of(layers, optimizer)]


def _matrices_that_come_late(_case: str, without: str | None) -> list[float]:
    """The values after a step of Muon whose matrices are orthogonalized long after their rows have
    been written.
    """
    import tests.simulated_accelerator.device as sim

    with recorded_lanes() as lanes:
        layers, optimizer = _matrices("no_shard")
    matrices.step(layers, optimizer, 0)
    optimizer.synchronize()
    main_weight = optimizer._sides.host_side.buckets[0].main_weight
    before = main_weight.clone()
    for layer in layers:
        layer(1).backward()
    torch.accelerator.synchronize()
    with _without(without), sim.held(lanes["optimizer matrices"]):
        optimizer.step(grad_scale=0.5)
        _until(lambda: not torch.equal(main_weight, before), without)
    return [value.double().sum().item() for value in matrices.values_of(layers, optimizer)]


def _matrices_during_reads(_case: str, without: str | None) -> list[float]:
    """The states that a reader finds after the next step was queued."""
    layers, optimizer = _matrices("no_shard")
    matrices.step(layers, optimizer, 0)
    optimizer.synchronize()
    buckets, read = optimizer._sides.host_side.buckets, ThreadEvent()
    for unit in optimizer.state_units():
        unit.hold(read)
    before = buckets[0].main_weight.clone()
    with _without(without):
        matrices.step(layers, optimizer, 1)
        _until(lambda: not torch.equal(before, buckets[0].main_weight), without)
    found = [bucket.main_weight.double().sum().item() for bucket in buckets]
    read.finish(None)
    optimizer.synchronize()
    return found


def _exchanges_that_come_late(_case: str, without: str | None) -> bool:
    """Whether a step returns before its exchanges have been issued."""
    layers, optimizer = _matrices("optim_grads_params")
    may_start = threading.Event()
    optimizer._sides.host_side.lanes.start.enqueue(lambda: may_start.wait(PATIENCE_MS / 1000))
    with _without(without):
        step = threading.Thread(target=matrices.step, args=(layers, optimizer, 0))
        step.start()
        _until(lambda: not step.is_alive(), without)
    found = not step.is_alive()
    may_start.set()
    step.join()
    optimizer.synchronize()
    return found


def _matrices(strategy: str) -> tuple[nn.ModuleList, HybridDeviceOptimizer]:
    """Layers and their offloaded optimizer, whose steps overlap with the next forward."""
    layers = matrices.layers_of(strategy, torch.bfloat16)
    groups = matrices.groups_of(layers)
    return layers, HybridDeviceOptimizer(
        groups, 1.0, rule=Muon(), lr=0.02, overlap_step_with_forward=True
    )


def _without(wait: str | None) -> AbstractContextManager[None]:
    return nullcontext() if wait is None else removed(wait)


@contextmanager
def _held_until_delivered(
    engine: ModuleEngine, stream: torch.Stream, without: str | None
) -> Iterator[None]:
    """Holds a stream until the optimizer has delivered its weights all the same, which it does if a
    wait is missing.

    With all waits it does not, so this does not insist.
    """
    import tests.simulated_accelerator.device as sim

    delivery = threading.Thread(target=engine.state.optimizer.synchronize, daemon=True)
    with sim.held(stream):
        yield
        delivery.start()
        delivery.join(HELD_SECONDS if without is None else PATIENCE_MS / 1000)
    delivery.join()


SCENES = {
    "of the computation for gathered weights": ("zero3", LANES_LAST),
    "of the gather for the computation": ("zero3", DEFAULT_LAST),
    "of the gather for the delivery": ("offload forward half", LANES_LAST),
    "of the activations' way down for the layer": ("activations no_shard", DEFAULT_LAST),
    "of the next layer but one for activations to be gone": ("activations", LANES_LAST),
    "of the activations' way up for the computation": ("activations no_shard", DEFAULT_LAST),
    "of the backward for activations": ("activations", LANES_LAST),
    "of the reduction for the backward": ("zero3", DEFAULT_LAST),
    "of the gradients' memory for their reduction": ("zero3", LANES_LAST),
    "of the states' way up for their slot": ("offload streamed", LANES_LAST),
    "of the device's update for the states": ("offload streamed", LANES_LAST),
}
BY_DEFAULT = "of the gather for the computation"
HELD = {
    "of the gradients' way down for their reduction": (
        _reductions_that_come_late,
        "offload forward half",
    ),
    "of the host for the gradients": (_gradients_that_come_late, "offload forward half"),
    "of the weights' way up for the computation": (_forward_before_the_step, "offload zero1"),
    "of the device's update for the computation": (
        _forward_before_the_step,
        "offload streamed half",
    ),
    "of the host's update for the states' way down": (
        _updates_on_the_host_after_the_device,
        "offload streamed half",
    ),
    "of the states' way down for the device's update": (
        _updates_that_come_late,
        "offload streamed",
    ),
    "of the early update for the gradients": (_gradients_that_come_late, "offload early fp16"),
    "of the early update for readers of states": (_early_during_reads, ""),
    "of the early update for the states' way down": (
        _updates_on_the_host_after_the_device,
        "offload early fp16",
    ),
    "of the early update's end for its start": (_early_that_starts_late, ""),
    "of old values for the early update": (_early_that_is_undone_soon, ""),
    "of matrices for the gradients": (_matrices_whose_gradients_come_late, ""),
    "of matrices for readers of states": (_matrices_during_reads, ""),
    "of rows' way down for their matrices": (_matrices_that_come_late, ""),
    "of the host for rows": (_matrices_that_come_late, ""),
    "of the step for exchanges": (_exchanges_that_come_late, ""),
}


def test_every_wait_has_a_scene_and_is_where_it_is_removed():
    assert {*SCENES, *HELD} == set(REMOVALS)
    for wait in REMOVALS:
        with removed(wait):
            pass  # otherwise a training without the wait would end with this error, and differ


@pytest.mark.parametrize(
    "wait",
    [wait if wait == BY_DEFAULT else pytest.param(wait, marks=pytest.mark.wide) for wait in SCENES],
)
def test_a_removed_wait_is_detected(wait):
    case, behaviour = SCENES[wait]
    whole = run_ranks(2, _train, case, behaviour, None, device="sim", timeout=300)
    assert whole[0] == whole[1], "with all waits, ranks agree"
    assert not isinstance(whole[0], str), whole[0]
    assert run_ranks(2, _train, case, behaviour, wait, device="sim", timeout=300) != whole


@pytest.mark.parametrize(
    "wait",
    [pytest.param(wait, marks=pytest.mark.wide if "way" in wait else ()) for wait in HELD],
)
def test_a_removed_wait_is_detected_by_holding_a_lane_if_no_order_reveals_it(wait):
    scene, case = HELD[wait]
    whole = run_ranks(2, scene, case, None, device="sim")
    assert run_ranks(2, scene, case, wait, device="sim") != whole
