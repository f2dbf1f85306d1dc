"""Updates that start before the norm is known never change a run by one bit."""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.device import Device
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.dtensors import local_tensor
from megatron.core.lanes import InlineLane
from megatron.core.optimizer.cpu_offloading.early_updates import EarlyUpdates
from megatron.core.optimizer.cpu_offloading.host_layout import BucketShape, HostLayout, HostRules
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.kernels.piece import HostKernel
from megatron.core.optimizer.loss_scaler import ConstantLossScaler
from megatron.core.optimizer.rules import SGD, Lion
from tests.helpers.ranks import random_delays, rank_device, run_ranks
from tests.unit_tests.core.optimizer.cpu_offloading.test_bits import (
    ALL,
    DIM,
    OPTIONS,
    Model,
    Setting,
    backward,
    shard,
)

SETTING = Setting(num_microbatches=2)
BF16 = torch.bfloat16
ROOM = 1 << 30
PATIENCE = 60.0  # seconds
RULES: dict[str, dict[str, Any]] = {
    "fp32 moments": OPTIONS,
    "bf16 moments": {**OPTIONS, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    "Lion": {"rule": Lion(BF16), "lr": 1e-2, "weight_decay": 0.1},
    "SGD": {"rule": SGD(), "lr": 1e-2, "weight_decay": 0.1},
}
# Factors of the gradients of each step; None: the step is skipped.
FACTORS: dict[str, list[float | None]] = {
    "inactive": [1.0] * 4,
    "active": [0.5, 0.25, 0.5, 0.5],
    "mixed": [1.0, 1.0, 0.5, 1.0, 1.0, 0.5],
    "not finite": [1.0, 1.0, None, 1.0, 1.0],
}


class Trained:
    """A model whose states are all in host memory, and its optimizer."""

    def __init__(self, room: int = ROOM, setting: Setting = SETTING, **settings: Any) -> None:
        self.setting = setting
        self.model = Model(setting.dtype).to(rank_device())
        self.context = shard(self.model, setting, [*self.model.layers, self.model])
        settings = {**ALL, **(settings or OPTIONS)}
        self.optimizer = HybridDeviceOptimizer(
            self.model.parameters(), 1.0, early_update_bytes=room, records_timings=True, **settings
        )

    @property
    def side(self) -> Any:
        return self.optimizer._sides.host_side

    @property
    def early(self) -> list[Any]:
        """The pending early updates."""
        return [bucket.early for bucket in self.side.buckets if bucket.early is not None]

    def backward(self, number: int, *, waits: bool = True) -> float:
        """Returns the loss. Early updates have finished, unless the arguments specify otherwise."""
        for group in self.optimizer.param_groups:
            group["lr"] = OPTIONS["lr"] / (number + 1)
        loss = backward(self.model, self.context, self.setting, number)
        for early in self.early if waits else ():
            early.done.synchronize()
        return loss

    def step(self, factor: float | None = 1.0) -> None:
        if factor is not None:
            self.optimizer.step(grad_scale=factor)
        self.optimizer.zero_grad()

    def share(self) -> float:
        """The share of the last steps' updates that was early."""
        self.optimizer.synchronize()
        self.side.timings.end()
        found = self.optimizer.timings()
        return 0.0 if found is None else found.early_share

    def values(self) -> list[torch.Tensor]:
        """Weights, and states with their counts of steps."""
        self.optimizer.synchronize()
        state, weights = self.optimizer.state, self.model.state_dict().values()
        states = [value for p in self.model.parameters() for value in state[p].values()]
        return [local_tensor(value).detach().clone() for value in (*weights, *states)]


class Course(NamedTuple):
    losses: list[float]
    values: list[torch.Tensor]
    shares: list[float]


def assert_same(course: Course, other: Course) -> None:
    assert course.losses == other.losses
    assert all(map(torch.equal, course.values, other.values))


Between = Callable[[Trained, int], object]
Change = Callable[[Trained], object]


def course(
    trained: Trained,
    factors: Sequence[float | None] = FACTORS["inactive"],
    *,
    between: Between = lambda *_: None,
    seed: int | None = None,
) -> Course:
    """Trains; `between` is called between backward and step, and a seed delays all lanes."""
    losses, shares = [], []
    with nullcontext() if seed is None else random_delays(seed):
        for number, factor in enumerate(factors):
            losses.append(trained.backward(number, waits=seed is None))
            between(trained, number)
            trained.step(factor)
            if seed is None:
                shares.append(trained.share())
        return Course(losses, trained.values(), shares)


def _factors(setting: Setting, rules: Sequence[str]) -> None:
    for options in map(RULES.__getitem__, rules):
        for factors in FACTORS.values():
            expected = course(Trained(0, setting, **options), factors)
            assert expected.shares == [0.0] * len(factors)
            found = course(Trained(ROOM, setting, **options), factors)
            assert_same(found, expected)
            if factors is FACTORS["inactive"]:
                assert found.shares == [0.0, 1.0, 1.0, 1.0]
            for seed in (1, 2):
                again = course(Trained(ROOM, setting, **options), factors, seed=seed)
                assert_same(again, expected)


@pytest.mark.parametrize(
    ("world_size", "dtype", "rules"),
    [
        (1, torch.float32, ["fp32 moments", "SGD"]),
        (1, BF16, ["bf16 moments", "Lion"]),
        (2, BF16, ["fp32 moments", "Lion"]),
        pytest.param(2, torch.float32, ["bf16 moments", "SGD"], marks=pytest.mark.wide),
        pytest.param(4, torch.float16, list(RULES), marks=pytest.mark.wide),
    ],
)
def test_regardless_of_the_norm_says_the_bits_match_a_step_after_it(world_size, dtype, rules):
    run_ranks(world_size, _factors, SETTING._replace(dtype=dtype), rules, timeout=300)


def _flat(tensors: Any) -> torch.Tensor:
    return torch.cat([local_tensor(each).detach().reshape(-1) for each in tensors])


def _unit(trained: Trained) -> torch.Tensor:
    units = trained.optimizer.state_units()
    for unit in units:
        unit.updated.synchronize()
    return _flat(p for unit in units for p in unit.parameters)


def _recovered(trained: Trained) -> torch.Tensor:
    """The output of a forward whose weights are made anew from the main weights."""
    groups = [group_of(layer.first.weight) for layer in trained.model.layers]
    for group in (*groups, group_of(trained.model.before.weight)):
        group.recover()
    with torch.no_grad():
        return trained.model(torch.ones(1, DIM, dtype=trained.setting.dtype))


def _state(name: str) -> Callable[[Trained], torch.Tensor]:
    def read(trained: Trained) -> torch.Tensor:
        state = trained.optimizer.state
        return _flat(state[parameter][name] for parameter in trained.model.parameters())

    return read


READS: dict[str, Callable[[Trained], torch.Tensor]] = {
    "state": _state("exp_avg"),
    "state dict": lambda trained: _flat(
        state["exp_avg_sq"] for state in trained.optimizer.state_dict()["state"].values()
    ),
    "weights": lambda trained: _flat(trained.model.state_dict().values()),
    "whole weights": lambda trained: _flat(p.full_tensor() for p in trained.model.parameters()),
    "operators": lambda trained: _flat(p * 2 for p in trained.model.parameters()),
    "optimizers": lambda trained: _flat(
        group["params"][0]
        for optimizer in trained.optimizer.cpu_optimizers
        for group in optimizer.param_groups
    ),
    "units": _unit,
    "compute weights": _recovered,
}


def _reads() -> None:
    for name, read in READS.items():
        seen: list[torch.Tensor] = []

        def between(trained: Trained, number: int, seen: Any = seen, read: Any = read) -> None:
            if number == 2:
                assert len(trained.early) == (4 if trained.side.early_nbytes else 0)
                seen.append(read(trained).clone())
                assert not trained.early

        expected = course(Trained(0), between=between)
        found = course(Trained(), between=between)
        assert seen[0].any()
        assert torch.equal(*seen), name
        assert_same(found, expected)
        assert found.shares == [0.0, 1.0, 0.0, 1.0]


def test_readers_between_backward_and_step_see_the_values_before_it():
    run_ranks(2, _reads, timeout=300)


def _changes(changes: Mapping[str, Change], share: float) -> None:
    for name, change in changes.items():

        def between(trained: Trained, number: int, change: Change = change) -> None:
            if number == 2:
                change(trained)

        expected = course(Trained(0), between=between)
        found = course(Trained(), between=between)
        assert_same(found, expected)
        assert found.shares[1] == found.shares[3] == 1.0
        assert 0 <= found.shares[2] <= share, name
        assert_same(course(Trained(), between=between, seed=3), expected)


def _gradients(trained: Trained) -> list[torch.Tensor]:
    return [parameter.grad for parameter in trained.model.parameters()]


def _drop(trained: Trained) -> None:
    for layer in trained.model.layers:
        layer.first.weight.grad = None


def _assign(trained: Trained) -> None:
    for parameter in trained.model.parameters():
        parameter.grad = parameter.grad.clone()


def _write(trained: Trained) -> None:
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.mul_(1.5)


def _load(trained: Trained) -> None:
    states = copy.deepcopy(trained.optimizer.state_dict())
    for state in states["state"].values():
        state["exp_avg"].mul_(0.5)
        state["step"].add_(3)
    trained.optimizer.load_state_dict(states)


def _options(**values: Any) -> Change:
    return lambda trained: [group.update(values) for group in trained.optimizer.param_groups]


def _regroup(trained: Trained) -> None:
    (group,) = trained.optimizer.param_groups
    first, *others = group["params"]
    trained.optimizer.param_groups[:] = [
        {**group, "params": [first], "lr": 1e-4},
        {**group, "params": others},
    ]


def _another_backward(trained: Trained) -> None:
    # At the same rate.
    backward(trained.model, trained.context, trained.setting, 7)


def _skip(trained: Trained) -> None:
    trained.optimizer.zero_grad()
    _another_backward(trained)


def _another_step(trained: Trained) -> None:
    trained.optimizer.step()


REPEATED: dict[str, Change] = {
    "scaled gradients": lambda trained: [gradient.mul_(0.5) for gradient in _gradients(trained)],
    "gradients zeroed in place": lambda trained: trained.optimizer.zero_grad(set_to_none=False),
    "assigned gradients": _assign,
    "rate": _options(lr=3e-3),
    "betas": _options(betas=(0.8, 0.9)),
    "loaded states": _load,
    "written weights": _write,
    "a second backward": _another_backward,
    "a skipped step": _skip,
}
PARTS: dict[str, Change] = {
    "missing gradients": _drop,
    "groups": _regroup,
    "a second step": _another_step,
}


def test_what_changes_between_backward_and_step_counts():
    run_ranks(2, _changes, REPEATED, 0.3, timeout=500)


def test_what_changes_for_a_part_repeats_that_part():
    run_ranks(2, _changes, PARTS, 1.0, timeout=300)


def _paused() -> list[int]:
    """The numbers of the early updates in steps with these factors."""
    trained, found = Trained(), []
    for number, factor in enumerate([1.0, *[0.5] * 11, *[1.0] * 3]):
        trained.backward(number)
        found.append(len(trained.early))
        trained.step(factor)
    return found


def test_early_updates_pause_twice_as_long_after_each_other_factor_in_a_row():
    # The first step has no options to start from.
    assert run_ranks(1, _paused) == [[0, 4, 0, 4, 0, 0, 4, 0, 0, 0, 0, 4, 0, 0, 0]]


def test_a_pause_is_at_most_64_steps_and_short_again_after_an_expected_factor():
    early = EarlyUpdates(
        InlineLane(Device("cpu")), InlineLane(Device("cpu")), HostKernel(lambda *_: lambda: None)
    )
    pauses = []
    for factor in (*[0.5] * 9, 1.0, 0.5):
        early.step_ended(factor)
        pauses.append(0)
        while early.is_paused:
            early.step_ended(1.0)
            pauses[-1] += 1
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 64, 64, 0, 1]


def _held() -> None:
    """The host's threads are busy until the step: only two updates have started by then."""
    expected = course(Trained(0))
    trained, may_end = Trained(), threading.Event()
    kernel = trained.side._early._kernel
    trained.side._early._kernel = HostKernel(lambda *work: lambda: may_end.wait() and kernel(*work))
    losses, started = [trained.backward(0)], []
    trained.step()
    for number in range(1, 4):
        may_end.clear()
        losses.append(trained.backward(number, waits=False))
        early = trained.early
        trained.side.lanes.d2h.enqueue(lambda: None).synchronize()
        deadline = time.monotonic() + PATIENCE
        while early[-2].is_queued and time.monotonic() < deadline:
            time.sleep(0.01)
        started.append([not each.is_queued for each in early])
        trained.optimizer.step()
        may_end.set()
        trained.optimizer.synchronize()
        trained.optimizer.zero_grad()
    assert started == [[False, False, True, True]] * 3
    assert_same(Course(losses, trained.values(), []), expected)
    assert 0 < trained.share() < 1


def test_updates_that_have_not_started_by_the_step_are_done_in_its_order():
    run_ranks(1, _held)


def _beside() -> None:
    expected = course(Trained(0))
    for settings, num_streamed, share in (
        ({"update_on_device": 0.5}, 2, 1.0),
        ({"update_on_device": None}, 4, 0.0),  # the first steps measure each side alone
        ({"overlap_step_with_forward": False}, 0, 1.0),
    ):
        trained = Trained(ROOM, **OPTIONS, **settings)
        found = course(trained)
        assert_same(found, expected)
        assert sum(bucket.is_streamed for bucket in trained.side.buckets) == num_streamed
        assert found.shares[1:] == [share] * 3


def _becomes_streamed() -> None:
    def between(trained: Trained, number: int) -> None:
        # As when parameters are added, with which the split is chosen again.
        for bucket in trained.side.buckets if number == 2 else ():
            bucket.is_streamed = trained.side.early_nbytes > 0

    trained = Trained(ROOM, **OPTIONS, update_on_device=1e-6)
    found = course(trained, between=between)
    assert_same(found, course(Trained(0), between=between))
    assert found.shares == [0.0, 1.0, 0.0, 0.0]


def test_streamed_buckets_have_no_early_updates():
    run_ranks(2, _beside)
    run_ranks(2, _becomes_streamed)


def _outlived() -> None:
    for room in (0, ROOM):
        trained = Trained(room)
        trained.backward(0)
        trained.step()
        before = trained.values()[: len(list(trained.model.parameters()))]
        trained.backward(1)
        assert len(trained.early) == (4 if room else 0)
        model = trained.model
        del trained
        gc.collect()
        after = [local_tensor(value).detach() for value in model.state_dict().values()]
        assert all(map(torch.equal, after, before))


def test_a_model_that_outlives_its_optimizer_has_the_weights_of_the_last_step():
    run_ranks(1, _outlived)


def _taken_over() -> None:
    weights = []
    for room in (0, ROOM):
        trained = Trained(room)
        trained.backward(0)
        trained.step()
        trained.backward(1)
        # It updates the same main weights from now on, and the first one never again.
        other = HybridDeviceOptimizer(trained.model.parameters(), 1.0, **ALL, **OPTIONS)
        other.step()
        other.zero_grad()
        trained.backward(2)
        assert not trained.early
        other.step()
        weights.append([local_tensor(v).clone() for v in trained.model.state_dict().values()])
    assert all(map(torch.equal, *weights))


def test_an_optimizer_whose_parameters_another_one_has_taken_over_updates_none_early():
    run_ranks(1, _taken_over)


def _failing() -> None:
    trained = Trained()
    trained.backward(0)
    trained.step()

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    trained.side._early._kernel = HostKernel(fail)
    trained.backward(1, waits=False)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            trained.optimizer.synchronize()
    trained.step()
    with pytest.raises(ZeroDivisionError):
        trained.optimizer.synchronize()


def test_an_error_of_an_early_update_is_raised_by_whoever_waits_for_the_states():
    run_ranks(1, _failing)


def _scaled_loss() -> None:
    trained = Trained()
    optimizer = DistributedOptimizer(
        trained.optimizer, clip_grad=0.0, loss_scaler=ConstantLossScaler(4.0)
    )
    for number in range(3):
        optimizer.scale_loss(torch.ones(()))
        trained.backward(number)
        optimizer.step(1.0)
        optimizer.zero_grad()
        assert trained.share() == (1.0 if number else 0.0)


def test_the_scale_of_the_loss_is_an_expected_factor():
    run_ranks(1, _scaled_loss)


def _read_meanwhile() -> None:
    trained = Trained()
    trained.backward(0)
    trained.step()
    trained.backward(1)
    bucket = trained.side.buckets[0]
    early, is_restoring, may_end = bucket.early, threading.Event(), threading.Event()
    restore, order = early.restore, []

    def restore_slowly() -> None:
        is_restoring.set()
        assert may_end.wait(PATIENCE)
        restore()
        order.append("restored")

    def expire() -> None:
        bucket.expire_early()
        order.append("expired")

    early.restore = restore_slowly
    reader, backward = threading.Thread(target=bucket.settle), threading.Thread(target=expire)
    reader.start()
    assert is_restoring.wait(PATIENCE)
    backward.start()
    backward.join(0.5)  # as long as it takes without a wait
    may_end.set()
    for thread in (reader, backward):
        thread.join(PATIENCE)
    assert order == ["restored", "expired"]


def test_the_next_early_update_starts_after_a_reader_has_the_old_values_back():
    run_ranks(1, _read_meanwhile)


SHAPES = st.lists(
    st.builds(
        BucketShape,
        numel=st.integers(0, 500),
        main_dtype=st.just(torch.float32),
        grad_dtype=st.sampled_from([torch.float32, BF16]),
        weight_dtype=st.just(BF16),
        has_main=st.booleans(),
        main_numel=st.none(),
        weight_numel=st.none(),
        is_watched=st.booleans(),
    ),
    max_size=6,
)


@given(SHAPES, st.integers(0, 20_000))
def test_the_undo_log_takes_no_more_than_its_room_from_the_last_bucket_on(shapes, room):
    states = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    rules = HostRules(states, True, True, False, True)
    without, found = (
        HostLayout(shapes, rules),
        HostLayout(shapes, rules._replace(early_nbytes=room)),
    )
    assert found.early_nbytes <= room
    costs = {n: (14 if s.grad_dtype == BF16 else 12) * s.numel for n, s in enumerate(shapes)}
    added = sum(found.nbytes_by_state.values()) - sum(without.nbytes_by_state.values())
    # Arrays start at whole cache lines.
    assert 0 <= added - sum(costs[n] for n in found.early) <= 6 * 64 * len(shapes)
    left = room
    for number in reversed(range(len(shapes))):
        if number in found.early:
            assert shapes[number].is_watched
            left -= costs[number]
        elif shapes[number].is_watched and shapes[number].numel:
            assert costs[number] + 3 * 64 * len(shapes) > left
    assert all(not need.is_pinned for need in found.needs if need.what == "undo log")


def _little_room() -> None:
    whole = Trained()
    room = whole.side.early_nbytes // 2
    trained = Trained(room)
    assert 0 < trained.side.early_nbytes <= room
    assert (
        trained.optimizer.host_bytes - Trained(0).optimizer.host_bytes == trained.side.early_nbytes
    )
    has_log = [bool(bucket.undo) for bucket in trained.side.buckets]
    assert has_log[-1]
    assert not all(has_log)
    expected, found = course(Trained(0)), course(trained)
    assert_same(found, expected)
    assert 0 < found.shares[1] < 1
    # Reads of parameters without a shard cannot be detected.
    replicas = Trained(ROOM, SETTING._replace(strategy="no_shard"))
    assert replicas.side.early_nbytes == 0


def test_the_last_buckets_have_the_room_that_there_is():
    run_ranks(2, _little_room)


def test_settings_without_early_updates_are_rejected():
    for room, settings in (
        (-1, ALL),
        (ROOM, {"overlap_step_with_forward": True}),
        (ROOM, {**ALL, "use_decoupled_grad": True}),
        (ROOM, {**ALL, "cpu_optimizer_cls": torch.optim.Adagrad, "lr": 1e-2}),
    ):
        with pytest.raises(ValueError, match="early_update_bytes"):
            HybridDeviceOptimizer(
                [torch.nn.Parameter(torch.zeros(4))], 1.0, early_update_bytes=room, **settings
            )
