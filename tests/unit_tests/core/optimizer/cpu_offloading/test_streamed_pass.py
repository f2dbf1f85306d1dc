"""Buckets that the device updates have the same bits as those that the host updates."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.utils._pytree import tree_leaves

from megatron.core.dtensors import local_tensor
from megatron.core.lanes import ThreadEvent
from megatron.core.optimizer.cpu_offloading import streamed_pass, update_split
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.kernels.piece import Piece
from megatron.core.optimizer.rules import Lion
from megatron.core.timeline import NO_TIMELINE
from tests.helpers.ranks import on_ranks, random_delays, rank_device, run_ranks
from tests.unit_tests.core.optimizer.cpu_offloading.helpers.nets import (
    EXECUTORS,
    Net,
    fsdp,
    same,
    weights,
)
from tests.unit_tests.core.optimizer.cpu_offloading.helpers.nets import train as train_net
from tests.unit_tests.core.optimizer.cpu_offloading.test_bits import (
    ALL,
    OPTIONS,
    Model,
    Setting,
    assert_same,
    backward,
    fused,
    hybrid,
    scaled,
    shard,
    train,
)

SETTING = Setting(num_microbatches=2, steps=3)
SHORT = 320  # elements of a slot: less than any bucket has, and no multiple of a parameter's
SHARES = (0.5, 1.0)
PATIENCE = 60.0  # seconds


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=8), st.integers(1, 30))
def test_chunks_are_runs_of_adjacent_elements_no_longer_than_a_slot(gaps_and_lengths, numel):
    weights, place, pieces = torch.arange(400), 0, []
    for gap, length in gaps_and_lengths:
        part = weights[place + gap : place + gap + length]
        pieces.append(Piece(len(pieces), part, part, {"state": part}))
        place += gap + length
    found = list(streamed_pass.chunks(pieces, numel))
    for chunk in found:
        joined = torch.cat([part.weight for part in chunk])
        assert len(joined) <= numel
        assert torch.equal(joined, torch.arange(joined[0], joined[0] + len(joined)))
    cut = [
        (part.step, value) for chunk in found for part in chunk for value in part.weight.tolist()
    ]
    assert cut == [(piece.step, value) for piece in pieces for value in piece.weight.tolist()]


def _streamed(setting: Setting, cases: Sequence[tuple[float, dict[str, Any]]], slot: int) -> None:
    streamed_pass.SLOT_NUMEL = slot
    expected = train(setting, fused)
    assert len(set(expected.losses)) == setting.steps
    for seed, (fraction, settings) in enumerate(cases):
        run = train(setting, hybrid(fraction, **settings), None if seed == 0 else seed)
        assert_same(run, expected)


CASES = [
    (fraction, {**overlaps, "update_on_device": share})
    for fraction, overlaps, share in itertools.product((0.5, 1.0), (ALL, {}), SHARES)
]


@pytest.mark.parametrize(
    ("world_size", "strategy", "dtype", "slot"),
    [
        (1, "optim_grads_params", torch.float32, SHORT),
        (2, "optim_grads_params", torch.bfloat16, SHORT),
        (2, "optim", torch.bfloat16, 1 << 20),
        pytest.param(2, "no_shard", torch.float16, SHORT, marks=pytest.mark.wide),
        pytest.param(4, "hfsdp", torch.bfloat16, SHORT, marks=pytest.mark.wide),
        pytest.param(4, "hsdp", torch.float32, SHORT, marks=pytest.mark.wide),
    ],
)
def test_streamed_steps_are_bit_equal_under_delays_on_every_lane(world_size, strategy, dtype, slot):
    setting = SETTING._replace(strategy=strategy, dtype=dtype)
    run_ranks(world_size, _streamed, setting, CASES, slot, timeout=300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streamed_steps_are_bit_equal_on_an_accelerator(accelerator, dtype):
    setting = SETTING._replace(dtype=dtype)
    run_ranks(2, _streamed, setting, CASES[::3], SHORT, timeout=300, device=accelerator)


def _measured() -> None:
    setting = SETTING._replace(steps=11)
    expected = train(setting, fused)
    for overlaps in (ALL, {}):
        assert_same(train(setting, hybrid(1.0, **overlaps, update_on_device=None), 3), expected)


def test_steps_that_measure_the_fastest_share_are_bit_equal():
    run_ranks(2, _measured, timeout=300)


def _other_states() -> None:
    options = {"lr": 1e-2, "weight_decay": 0.1}
    for settings in (
        {"rule": Lion(torch.bfloat16), **options},
        {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16, **OPTIONS},
    ):
        runs = [
            train(
                SETTING,
                lambda model, share=share, settings=settings: HybridDeviceOptimizer(
                    model.parameters(), 1.0, update_on_device=share, **ALL, **settings
                ),
                step=scaled(0.25),
            )
            for share in (0.0, *SHARES)
        ]
        assert_same(runs[1], runs[0])
        assert_same(runs[2], runs[0])


def test_other_rules_and_moments_and_a_factor_of_the_gradients_are_bit_equal():
    run_ranks(2, _other_states)


class Trained:
    """A model whose states are all in host memory, and its optimizer."""

    def __init__(self, share: float | None, **settings: Any) -> None:
        self.model = Model().to(rank_device())
        self.context = shard(self.model, SETTING, [*self.model.layers, self.model])
        self.optimizer = HybridDeviceOptimizer(
            self.model.parameters(),
            1.0,
            **{"update_on_device": share, **ALL, **settings},
            **OPTIONS,
        )

    @property
    def buckets(self) -> list[Any]:
        return self.optimizer._sides.host_side.buckets

    def step(self, number: int, change: Any = lambda _: None) -> float:
        loss = backward(self.model, self.context, SETTING, number)
        change(self.model)
        self.optimizer.step()
        return loss

    def values(self) -> list[torch.Tensor]:
        self.optimizer.synchronize()
        states = self.optimizer.state
        found = [value for p in self.model.parameters() for value in states[p].values()]
        return [torch.as_tensor(getattr(v, "_local_tensor", v)).clone() for v in found]


def _in_place() -> None:
    for share, expected in ((0.0, 0), (0.5, 2), (1.0, 4)):
        trained = Trained(share)
        assert sum(bucket.is_streamed for bucket in trained.buckets) == expected
        trained.step(0)
        trained.optimizer.synchronize()
        # Gradients of streamed buckets never leave the device.
        assert [not bucket.grad.any() for bucket in trained.buckets] == [
            bucket.is_streamed for bucket in trained.buckets
        ]


def test_gradients_of_streamed_buckets_stay_on_the_device(accelerator):
    run_ranks(1, _in_place, device=accelerator)


def _some_gradients() -> None:
    def drop(model: nn.Module) -> None:
        model.layers[1].first.weight.grad = None
        model.behind.weight.grad = None

    def assign(model: nn.Module) -> None:
        parameter = model.layers[1].first.weight
        parameter.grad = parameter.grad.clone().mul_(2)

    for change in (drop, assign):
        with random_delays(5):
            runs = []
            for share in (0.0, 1.0):
                trained = Trained(share)
                losses = []
                for number in range(3):
                    losses.append(trained.step(number, change if number == 1 else lambda _: None))
                    trained.optimizer.zero_grad()
                runs.append((losses, trained.values()))
        (losses, values), (others, theirs) = runs
        assert losses == others
        assert all(torch.equal(one, other) for one, other in zip(values, theirs, strict=True))


def test_parameters_without_a_gradient_and_with_an_assigned_one_are_stepped_as_on_the_host():
    run_ranks(2, _some_gradients)


def _zeroed_in_place() -> None:
    runs = []
    for share in (0.0, 1.0):
        with random_delays(11):
            trained = Trained(share)
            losses = []
            for number in range(3):
                losses.append(trained.step(number))
                trained.optimizer.zero_grad(set_to_none=False)
            runs.append((losses, trained.values()))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(one, other) for one, other in zip(runs[0][1], runs[1][1], strict=True))


def test_gradients_zeroed_in_place_are_read_before():
    run_ranks(1, _zeroed_in_place)


def test_gradients_zeroed_in_place_are_read_before_on_an_accelerator(accelerator):
    run_ranks(1, _zeroed_in_place, device=accelerator)


def _unused_layers() -> None:
    runs = []
    for share in (0.0, 1.0):
        trained = Trained(share)
        model, streamed = trained.model, trained.optimizer._sides.host_side._streamed
        if streamed is not None:
            kernel = streamed._kernel
            streamed._kernel = lambda *given, run=kernel: (time.sleep(0.3), run(*given))
        backward(model, trained.context, SETTING, 0)
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        # No gather waits for the update of the last layer, whose gradients this backward clears.
        model.forward = lambda x, own=model: own.behind(own.layers[0](own.before(x)))
        backward(model, trained.context, SETTING, 1)
        runs.append(trained.values())
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_gradients_of_unused_layers_are_read_before_a_backward_clears_them():
    run_ranks(1, _unused_layers)


def _read_late() -> None:
    trained = Trained(1.0)
    trained.step(0)
    units = trained.optimizer.state_units()
    trained.optimizer.synchronize()
    before, read = trained.values(), ThreadEvent()
    for unit in units:
        unit.hold(read)
    trained.step(1)
    time.sleep(0.3)
    states = [state for unit in units for state in unit.states]
    found = [torch.as_tensor(getattr(v, "_local_tensor", v)) for s in states for v in s.values()]
    moments = [value for value in found if value.dim()]  # steps are counted at once
    assert moments
    assert all(any(torch.equal(value, own) for own in before) for value in moments)
    read.finish(None)
    assert not all(map(torch.equal, trained.values(), before))


def test_states_that_are_being_read_are_not_updated_by_the_device():
    run_ranks(1, _read_late)


def _late_weights() -> None:
    runs = []
    for share in (0.0, 1.0):
        trained = Trained(share)
        parameter = trained.model.layers[1].first.weight
        backward(trained.model, trained.context, SETTING, 0)
        gradient, is_over = parameter.grad, threading.Event()
        trained.optimizer._sides.host_side.lanes.h2d.enqueue(
            lambda over=is_over: over.wait(PATIENCE)
        )
        for own in (gradient.clone().mul_(2), gradient):  # updated by the host, then by the device
            parameter.grad = own
            trained.optimizer.step()
        bucket = next(b for b in trained.buckets if any(s.parameter is parameter for s in b.slots))
        deadline = time.monotonic() + 1
        while not bucket.pending.updated.is_done() and time.monotonic() < deadline:
            time.sleep(0.01)
        is_over.set()
        runs.append((backward(trained.model, trained.context, SETTING, 1), trained.values()))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(one, other) for one, other in zip(runs[0][1], runs[1][1], strict=True))


def test_weights_of_the_host_that_are_still_on_their_way_up_are_no_later_than_the_devices():
    run_ranks(1, _late_weights)


def _added_later() -> None:
    runs = []
    for share in (0.0, 1.0):
        model = Net()
        fsdp(model)
        parts = [[*model.head.parameters()], [*model.layers.parameters()]]
        whole = HybridDeviceOptimizer(model.parameters(), 1.0, update_on_device=share, **ALL)
        # One rank has no rows of the first part.
        optimizer = HybridDeviceOptimizer(parts[0], 1.0, update_on_device=share, **ALL, **OPTIONS)
        optimizer.add_param_group({"params": parts[1]})
        assert optimizer.slots_nbytes == whole.slots_nbytes
        train_net(model, optimizer)
        runs.append(weights(model))
    assert same(*runs)


def test_slots_grow_with_buckets_that_are_added_later():
    run_ranks(2, _added_later)


def _all_back_to_the_host() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update_split, "_fastest", lambda *_: 0.0)
        trained = Trained(None)
        slots = weakref.ref(trained.optimizer._sides.host_side._streamed._slots[0])
        for number in range(9):
            assert trained.optimizer.slots_nbytes > 0
            trained.step(number)
            trained.optimizer.zero_grad()
        assert trained.optimizer.slots_nbytes == 0
        assert slots() is None
        trained.step(9)
        trained.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4))]})
        trained.step(10)
        assert trained.optimizer.slots_nbytes == 0
        trained.optimizer.synchronize()


def test_slots_are_freed_when_the_device_is_to_update_nothing():
    run_ranks(2, _all_back_to_the_host)


@pytest.mark.parametrize("asked", [False, True])
@on_ranks(1)
def test_times_that_only_choose_a_share_are_not_shown(asked):
    trained = Trained(None, records_timings=asked)
    for number in range(3):
        trained.step(number)
        trained.optimizer.zero_grad()
    trained.optimizer.synchronize()
    assert (trained.optimizer.timings() is not None) == asked
    with nullcontext() if asked else pytest.raises(RuntimeError, match="records_timings"):
        trained.optimizer.record_to(NO_TIMELINE)


def test_no_share_is_searched_for_parameters_that_the_device_cannot_stream():
    model = Net()
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, update_on_device=None, **OPTIONS)
    train_net(model, optimizer, range(10))
    chooser = optimizer._sides.host_side._chooser
    assert (chooser.fraction, chooser.is_done) == (0.0, False)


def _state_dicts() -> None:
    with random_delays(2):
        trained, other = Trained(1.0), Trained(0.0)
        for number in range(2):
            trained.step(number)
            trained.optimizer.zero_grad()
        # Without a wait of the caller: the states may be on their way.
        other.optimizer.load_state_dict(trained.optimizer.state_dict())
        other.model.load_state_dict(trained.model.state_dict())
        assert trained.step(2) == other.step(2)
        assert all(
            torch.equal(one, theirs)
            for one, theirs in zip(trained.values(), other.values(), strict=True)
        )


def test_states_are_read_and_loaded_after_they_have_come_home():
    run_ranks(2, _state_dicts)


READERS: dict[str, Callable[[Trained], Any]] = {
    "the model's state dict": lambda own: own.model.state_dict(),
    "the optimizer's": lambda own: own.optimizer.state_dict()["state"],
    "states": lambda own: list(own.optimizer.state.values()),
    "get_model_state_dict": lambda own: get_model_state_dict(own.model),
    "get_optimizer_state_dict": lambda own: get_optimizer_state_dict(own.model, own.optimizer),
    "get_model_state_dict, whole": lambda own: get_model_state_dict(
        own.model, options=StateDictOptions(full_state_dict=True)
    ),
    "full_tensor": lambda own: [value.full_tensor() for value in own.model.state_dict().values()],
}


def _read_at_once(settings: dict[str, Any]) -> None:
    waiting, reading = (Trained(0.0, **given) for given in ({}, settings))
    with random_delays(4):
        for number, (name, read) in enumerate(READERS.items()):
            for own in (waiting, reading):
                own.step(number)
                own.optimizer.zero_grad()
            found = _tensors(read(reading))
            waiting.optimizer.synchronize()
            expected = _tensors(read(waiting))
            assert len(found) == len(expected) > 0
            assert all(map(torch.equal, found, expected)), name


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Copies of this rank's parts, made at once: later writes are not in them."""
    return [local_tensor(leaf).clone() for leaf in tree_leaves(tree) if torch.is_tensor(leaf)]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_reader_of_weights_and_states_waits_for_their_update(executor):
    run_ranks(2, _read_at_once, EXECUTORS[executor])


def test_settings_without_a_streamed_pass_are_rejected():
    weights = [nn.Parameter(torch.zeros(4))]
    for share, settings in (
        (1.5, {}),
        (-0.5, {}),
        (0.5, {"overlap_cpu_optimizer_d2h_h2d": False}),
        (None, {"cpu_optimizer_cls": torch.optim.Adagrad, "lr": 1e-2}),
    ):
        with pytest.raises(ValueError, match="update_on_device"):
            HybridDeviceOptimizer(weights, 1.0, update_on_device=share, **settings)
