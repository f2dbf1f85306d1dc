"""Muon with states in host memory has the bits of one process with all states on the device. As in
test_muon_ranks.py, gradients are small integers, whose means are exact.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.fsdp_checkpoint import load_checkpoint, save_checkpoint
from megatron.core.distributed.fsdp import microbatch
from megatron.core.lanes import delays
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.rule_optimizer import RuleOptimizer
from megatron.core.optimizer.rules import Muon
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.optimizer.test_muon_ranks import (
    CLIP,
    EP,
    STEPS,
    Model,
    differing,
    optimizer_of,
    sharded,
    train,
    trained_alone,
    values,
)

FRACTIONS = (0.0, 0.4, 1.0)
KEPT = ("matrix_rows", "use_muon")  # options of groups
OVERLAPPED = {"fetch_during_backward": True, "overlap_step_with_forward": True}
OVERLAPS = ({"overlap_cpu_optimizer_d2h_h2d": False}, {}, OVERLAPPED)


def offloaded(model: nn.Module, fraction: float, **options: bool) -> HybridDeviceOptimizer:
    groups = [
        {name: value for name, value in group.items() if name in ("params", *KEPT)}
        for group in optimizer_of(model).param_groups
    ]
    return HybridDeviceOptimizer(
        groups,
        fraction,
        rule=Muon(),
        lr=0.02,
        weight_decay=0.1,
        param_update_in_fp32=True,
        num_host_threads=2,
        **options,
    )


def _differing(way: str, fractions: tuple[float, ...]) -> dict[tuple[float, int], list[str]]:
    num_blocks = EP if way.endswith("-ep") else 1
    expected, found = trained_alone(STEPS, num_blocks), {}
    for fraction in fractions:
        for number, options in enumerate(OVERLAPS):
            model, context = sharded(way)
            optimizer = offloaded(model, fraction, **options)
            with delays(number):
                train(model, optimizer, range(STEPS), context, num_blocks)
                optimizer.synchronize()
                found[fraction, number] = differing(values(model, optimizer), expected)
    return {key: names for key, names in found.items() if names}


@pytest.mark.parametrize(
    ("num_ranks", "way"),
    [
        (1, "optim_grads_params"),
        (2, "optim_grads_params"),
        (2, "no_shard"),
        (2, "fsdp2"),
        (2, "optim_grads_params-ep"),
        *[
            pytest.param(number, way, marks=pytest.mark.wide)
            for number, way in (
                (2, "optim"),
                (2, "optim_grads"),
                *[(3, way) for way in ("optim_grads_params", "no_shard", "optim", "optim_grads")],
                *[(3, "fsdp2"), (4, "optim_grads_params")],
                *[(4, way) for way in ("hsdp", "hfsdp", "optim_grads_params-ep", "hsdp-ep")],
            )
        ],
    ],
)
def test_every_way_of_sharding_has_the_bits_of_one_process(num_ranks, way):
    """At every fraction and overlap, under delays, with two microbatches, clipping, stacked
    matrices, frozen weights, and a missing gradient.
    """
    assert run_ranks(num_ranks, _differing, way, FRACTIONS) == [{}] * num_ranks


def _save(folder: str, fraction: float, num_steps: int) -> None:
    model, context = sharded("optim_grads_params")
    optimizer = offloaded(model, fraction, **OVERLAPPED)
    train(model, optimizer, range(num_steps), context)
    save_checkpoint(model, optimizer, folder)


def _load_and_go_on(folder: str, first: int) -> list[list[str]]:
    found = []
    for fraction in FRACTIONS:
        model, context = sharded("optim_grads_params")
        optimizer = offloaded(model, fraction, **OVERLAPPED)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load_checkpoint(model, optimizer, folder)
        train(model, optimizer, range(first, STEPS), context)
        optimizer.synchronize()
        found.append(differing(values(model, optimizer), trained_alone(STEPS)))
    return found


@pytest.mark.parametrize("fraction", [pytest.param(0.0, marks=pytest.mark.wide), 0.4])
def test_a_run_saved_on_four_ranks_continues_on_one_and_three_at_any_fraction(tmp_path, fraction):
    folder = str(tmp_path / "checkpoint")
    run_ranks(4, _save, folder, fraction, 2)
    for num_ranks in (1, 3):
        assert run_ranks(num_ranks, _load_and_go_on, folder, 2) == [[[]] * 3] * num_ranks


def _returns_early() -> tuple[bool, list[str]]:
    """Whether a step returns before its matrices are updated, and what differs after it."""
    model, context = sharded("optim_grads_params")
    optimizer = offloaded(model, 1.0, **OVERLAPPED)
    side, may_start = optimizer._sides.host_side, threading.Event()
    before = [bucket.main_weight.clone() for bucket in side.buckets]
    side.lanes.start.enqueue(lambda: may_start.wait(60))
    train(model, optimizer, range(1), context)
    after = [bucket.main_weight.clone() for bucket in side.buckets]
    may_start.set()
    optimizer.synchronize()
    return all(map(torch.equal, before, after)), differing(
        values(model, optimizer), trained_alone(1)
    )


def test_a_step_on_one_rank_returns_before_its_matrices_are_updated():
    assert run_ranks(1, _returns_early) == [(True, [])]


def _stepped_twice() -> list[str]:
    """What differs after two steps, the second of which is queued before the first has begun."""
    alone, (model, context) = Model(), sharded("optim_grads_params")
    single, optimizer = optimizer_of(alone), offloaded(model, 1.0, **OVERLAPPED)
    alone(0).backward()
    assert context is not None
    with microbatch(context, is_last=True):
        model(0).backward()
    for _ in range(2):
        single.step(grad_scale=CLIP)

    may_start = threading.Event()
    optimizer._sides.host_side.lanes.start.enqueue(lambda: may_start.wait(60))
    steps = threading.Thread(target=lambda: [optimizer.step(grad_scale=CLIP) for _ in range(2)])
    steps.start()
    steps.join(0.5)
    may_start.set()
    steps.join()
    return differing(values(model, optimizer), values(alone, single))


def test_a_second_step_with_the_same_gradients_does_not_wait_for_itself():
    assert run_ranks(1, _stepped_twice) == [[]]


def _is_as_on_the_device(dtype: torch.dtype, fraction: float) -> bool:
    def trained(fraction: float | None) -> list[Tensor]:
        model = Model().to(dtype)
        optimizer: RuleOptimizer | HybridDeviceOptimizer
        if fraction is None:
            optimizer = optimizer_of(model, master_weights=True)
        else:
            optimizer = offloaded(model, fraction)
        train(model, optimizer, range(STEPS), None)
        states = [optimizer.state[p] for p in model.parameters() if p.requires_grad]
        tensors = [state[name] for state in states for name in sorted(state)]
        return [*(p.detach() for p in model.parameters()), *tensors]

    pairs = zip(trained(fraction), trained(None), strict=True)
    return all(torch.equal(found, expected) for found, expected in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_single_tensors_of_every_dtype_have_the_bits_of_the_device(dtype, fraction):
    """16-bit compute weights are written over the gradients that they came from."""

    assert run_ranks(1, _is_as_on_the_device, dtype, fraction) == [True]


def test_the_host_has_eight_bytes_for_an_element_of_a_matrix_and_twelve_for_others():
    model = nn.ParameterList([nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(64))])
    groups = [{"params": [model[0]]}, {"params": [model[1]], "use_muon": False}]
    optimizer = HybridDeviceOptimizer(groups, 1.0, rule=Muon())
    nbytes = optimizer.host_bytes_by_state()
    names = ("main weights", "momentum_buffer", "exp_avg", "exp_avg_sq")
    assert sum(nbytes[name] for name in names) == 8 * 64 * 64 + 12 * 64


@pytest.mark.parametrize("options", [{"update_on_device": 0.5}, {"early_update_bytes": 1 << 20}])
def test_matrices_are_neither_streamed_nor_updated_early(options):
    parameter = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match="muon"):
        HybridDeviceOptimizer([parameter], 1.0, rule=Muon(), **OVERLAPPED, **options)
