from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.device import Device
from megatron.core.distributed.torch_fsdp2 import shard_model
from megatron.core.lanes import ThreadLane
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, build_optimizer
from megatron.core.optimizer.kernels.host_adam import HostAdam
from megatron.core.transformer.layer import TransformerLayer
from megatron.training import step as step_module
from megatron.training.arguments import parse_config
from megatron.training.engines import build_engine
from megatron.training.step import ForwardStep, StepResult, evaluate, train_step
from tests.helpers.ranks import on_ranks, run_ranks

CPU = torch.device("cpu")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def squared_error(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def root_of_zero(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) * 0.0).abs().sqrt().mean()


def batches(numbers: list[int], poison: float | None = None) -> Iterator[dict[str, torch.Tensor]]:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        y = torch.randn(2, 1, generator=generator)
        yield {
            "x": torch.randn(2, 4, generator=generator),
            "y": y if poison is None else y * poison,
        }


def step(
    model: nn.Module,
    mine: list[int],
    votes=(0.0, 0.0),
    poison=None,
    clip_grad=0.0,
    forward_step=squared_error,
) -> StepResult:
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), clip_grad)
    return run_step(model, optimizer, mine, poison, forward_step, votes)


def run_step(
    model: nn.Module,
    optimizer: DistributedOptimizer,
    mine: list[int],
    poison: float | None = None,
    forward_step: ForwardStep = squared_error,
    votes: tuple[float, float] = (0.0, 0.0),
) -> StepResult:
    return train_step(
        model,
        optimizer,
        batches(mine, poison),
        forward_step=forward_step,
        num_microbatches=len(mine),
        device=CPU,
        mesh=build_mesh("cpu", dist.get_world_size()),
        votes=lambda: votes,
    )


def _sharded_step(
    shares: list[list[int]], clip_grad: float
) -> tuple[StepResult, list[torch.Tensor]]:
    model = make_model()
    model[1].p = 0.0
    mesh = build_mesh("cpu", dist.get_world_size())
    shard_model(model, mesh, compute_dtype=torch.float32, reshard_after_forward=True)
    outcome = step(model, shares[dist.get_rank()], clip_grad=clip_grad)
    return outcome, [parameter.full_tensor().detach() for parameter in model.parameters()]


@pytest.mark.parametrize("clip_grad", [0.0, 0.05])
def test_ranks_and_microbatches_are_one_mean(clip_grad):
    """Four microbatches on one rank, or two on each of two, are the step of plain PyTorch on all
    eight samples.
    """
    model = make_model()
    model[1].p = 0.0
    everything = list(batches([1, 2, 3, 4]))
    whole = {name: torch.cat([batch[name] for batch in everything]) for name in ("x", "y")}
    loss = squared_error(model, whole)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip_grad or math.inf)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for world_size, shares in ((1, [[1, 2, 3, 4]]), (2, [[1, 3], [2, 4]])):
        for outcome, weights in run_ranks(world_size, _sharded_step, shares, clip_grad):
            assert outcome.loss == pytest.approx(loss.item(), rel=1e-6)
            assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-5)
            for ours, expected in zip(weights, model.parameters(), strict=True):
                torch.testing.assert_close(ours, expected.detach(), rtol=1e-5, atol=1e-7)


def _poisoned_step(
    bad_rank: int, poison: float, forward_step=squared_error
) -> tuple[StepResult, bool]:
    model = make_model()
    mesh = build_mesh("cpu", dist.get_world_size())
    shard_model(model, mesh, compute_dtype=torch.float32, reshard_after_forward=True)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    mine = poison if dist.get_rank() == bad_rank else None
    outcome = step(model, [1], poison=mine, forward_step=forward_step)
    is_same = all(
        torch.equal(parameter.to_local(), old)
        for parameter, old in zip(model.parameters(), before, strict=True)
    )
    return outcome, is_same


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_bad_loss_on_one_rank_stops_the_update_on_all_and_the_rank_is_named(poison):
    for outcome, is_same in run_ranks(2, _poisoned_step, 1, poison):
        assert outcome.is_skipped
        assert not math.isfinite(outcome.loss)
        assert outcome.bad_ranks == (1,)
        assert is_same


class _Refusing(DistributedOptimizer):
    def plan_step(self):
        raise ValueError("of the plan")


def _steps_with_a_plan_that_is_refused(poison: float | None) -> StepResult:
    model = make_model()
    optimizer = _Refusing(torch.optim.SGD(model.parameters(), lr=0.1), 0.0)
    return run_step(model, optimizer, [0, 1], poison)


def test_a_rejected_plan_does_not_change_the_ranks_agreement_on_a_step():
    """A rejected plan raises no error: the step is skipped or runs as the ranks agreed."""
    assert all(
        outcome.is_skipped for outcome in run_ranks(2, _steps_with_a_plan_that_is_refused, math.nan)
    )
    assert not any(
        outcome.is_skipped for outcome in run_ranks(2, _steps_with_a_plan_that_is_refused, None)
    )


def test_a_finite_loss_with_a_gradient_that_is_not_is_skipped_too():
    """The square root of zero is finite, its slope is not."""
    for outcome, is_same in run_ranks(2, _poisoned_step, 0, 1.0, root_of_zero):
        assert math.isfinite(outcome.loss)
        assert outcome.bad_ranks == ()
        assert not math.isfinite(outcome.grad_norm)
        assert outcome.is_skipped
        assert is_same


def _voting_step() -> StepResult:
    model = make_model()
    shard_model(
        model,
        build_mesh("cpu", dist.get_world_size()),
        compute_dtype=torch.float32,
        reshard_after_forward=True,
    )
    return step(model, [dist.get_rank()], votes=(float(dist.get_rank() == 1), 0.0))


def test_votes_are_summed_over_ranks():
    assert [outcome.votes for outcome in run_ranks(2, _voting_step)] == [(1.0, 0.0), (1.0, 0.0)]


# A scaled loss


class Gradients:
    """The largest gradient that a backward leaves, before anything else reads it."""

    def __init__(self, model: nn.Module) -> None:
        self.largest = 0.0
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: nn.Parameter) -> None:
        self.largest = max(self.largest, float(parameter.grad.abs().max()))


def steps_of_one_run(
    settings: dict[str, Any], clip_grad: float, loss_scale: float | None
) -> tuple[list[StepResult], list[torch.Tensor], float]:
    """Three steps of fp32 compute: results, weights, the largest gradient sent."""
    model = make_model()
    model[1].p = 0.0
    seen = Gradients(model)
    config = OptimizerConfig(
        **settings, clip_grad=clip_grad, loss_scale=loss_scale, log_num_zeros_in_grad=True
    )
    optimizer = build_optimizer(
        model, config, 0.1, num_local_ranks=1, scales_loss=loss_scale is not None
    )
    found = [run_step(model, optimizer, [number, number + 1]) for number in range(3)]
    optimizer.synchronize()
    return found, [parameter.detach().clone() for parameter in model.parameters()], seen.largest


@pytest.mark.parametrize("clip_grad", [0.0, 0.05])
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd"},
        {},
        {"gpu_optimizer": "torch"},
        {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True},
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "optimizer": "sgd"},
    ],
    ids=str,
)
@on_ranks(1)
def test_a_loss_scaled_by_a_power_of_two_gives_the_bits_of_one_that_is_not(
    settings: dict[str, Any], clip_grad: float
) -> None:
    expected, weights, largest = steps_of_one_run(settings, clip_grad, None)
    found, own_weights, scaled_largest = steps_of_one_run(settings, clip_grad, 2.0**20)
    assert scaled_largest == largest * 2.0**20 > 0, "gradients were scaled"
    assert [dataclasses.replace(outcome, loss_scale=None) for outcome in found] == expected
    assert [outcome.loss_scale for outcome in found] == [2.0**20] * 3
    assert {outcome.loss_scale for outcome in expected} == {None}
    assert all(not outcome.is_skipped and outcome.num_zeros is not None for outcome in found)
    assert all(torch.equal(*pair) for pair in zip(own_weights, weights, strict=True))
    start = list(make_model().parameters())
    assert not any(torch.equal(*pair) for pair in zip(weights, start, strict=True)), (
        "steps change all weights"
    )


def _overflow(
    poison: float | None, forward_step: ForwardStep
) -> tuple[list[StepResult], list[bool]]:
    """A clean step, one that is not finite on rank 1 alone, and a clean one; whether each left
    the weights unchanged.
    """
    model = make_model()
    model[1].p = 0.0
    mesh = build_mesh("cpu", dist.get_world_size())
    shard_model(model, mesh, compute_dtype=torch.float32, reshard_after_forward=True)
    config = OptimizerConfig(initial_loss_scale=64.0, hysteresis=1, loss_scale_window=2)
    optimizer = build_optimizer(model, config, 0.1, num_local_ranks=1, scales_loss=True)

    def everything() -> list[torch.Tensor]:
        states = [value for state in optimizer.optimizer.state.values() for value in state.values()]
        tensors = [
            *model.parameters(),
            *(value for value in states if isinstance(value, torch.Tensor)),
        ]
        return [(x.to_local() if isinstance(x, DTensor) else x).detach().clone() for x in tensors]

    results, unchanged = [], []
    run_step(model, optimizer, [7])
    for is_bad in (False, True, False):
        before = everything()
        assert len(before) > 4, "there are weights and states"
        is_mine = is_bad and dist.get_rank() == 1
        results.append(
            run_step(
                model,
                optimizer,
                [1],
                poison if is_mine else None,
                forward_step if is_mine else squared_error,
            )
        )
        unchanged.append(all(torch.equal(*pair) for pair in zip(everything(), before, strict=True)))
        assert all(parameter.grad is None for parameter in model.parameters())
    return results, unchanged


@pytest.mark.parametrize(
    ("poison", "forward_step"), [(None, root_of_zero), (math.inf, squared_error)]
)
def test_an_overflow_on_one_rank_is_skipped_by_all_halves_the_scale_and_changes_nothing_else(
    poison, forward_step
):
    """Of a gradient, where the loss is finite, and of the loss."""
    for results, unchanged in run_ranks(2, _overflow, poison, forward_step):
        assert [outcome.is_skipped for outcome in results] == [False, True, False]
        assert unchanged == [False, True, False]
        assert [outcome.loss_scale for outcome in results] == [128.0, 64.0, 64.0]
        assert math.isfinite(results[1].loss) == (poison is None)


def infinite_but_for_its_slope(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return squared_error(model, batch) + math.inf


def _step_of_an_infinite_loss() -> StepResult:
    model = make_model()
    config = OptimizerConfig(initial_loss_scale=64.0, hysteresis=1)
    optimizer = build_optimizer(model, config, 0.1, num_local_ranks=1, scales_loss=True)
    return run_step(model, optimizer, [1], forward_step=infinite_but_for_its_slope)


def test_a_bad_loss_counts_as_an_overflow_even_if_all_gradients_are_finite():
    (outcome,) = run_ranks(1, _step_of_an_infinite_loss)
    assert math.isfinite(outcome.grad_norm)
    assert outcome.is_skipped
    assert outcome.loss_scale == 32.0


# A model that computes in fp16

GPT = [
    *(
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data"
    ).split(),
    *(
        "--tokenizer-type NullTokenizer --vocab-size 31 --hidden-dropout 0 --attention-dropout 0"
    ).split(),
    *"--micro-batch-size 2 --train-iters 40 --lr 0.01 --normalization RMSNorm".split(),
]


def _train_gpt(flags: list[str], num_steps: int) -> tuple[list[StepResult], set[torch.dtype]]:
    """Steps on one batch; returns their results, and the dtypes of layers and logits."""
    size = dist.get_world_size()
    config = parse_config([*GPT, *flags], size)
    device, mesh = Device("cpu"), build_mesh("cpu", size)
    engine = build_engine(config.engine(), device, mesh)
    engine.initialize(lambda: GPTModel(config.model, 32))
    state = engine.state
    dtypes: set[torch.dtype] = set()
    for module in state.model.modules():
        if isinstance(module, (TransformerLayer, nn.Linear)):
            module.register_forward_hook(lambda _module, _inputs, output: dtypes.add(output.dtype))
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(32, (2, 17), generator=generator)
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def step_once() -> StepResult:
        return train_step(
            state.model,
            state.optimizer,
            iter([batch]),
            forward_step=lambda model, batch: model(batch["tokens"], batch["labels"]).mean(),
            num_microbatches=1,
            device=CPU,
            mesh=mesh,
        )

    found = [step_once() for _ in range(num_steps)]
    state.optimizer.synchronize()
    return found, dtypes


@pytest.mark.parametrize(
    "engine",
    [
        ["--use-torch-fsdp2"],
        [
            "--optimizer-cpu-offload",
            "--overlap-cpu-optimizer-d2h-h2d",
            "--overlap-optimizer-with-forward",
        ],
    ],
    ids=lambda flags: flags[0],
)
def test_fp16_skips_until_its_scale_fits_and_then_trains_as_fp32_does(engine):
    """From 2^32 on, an overflow after the other; from there the losses of fp32 to fp16's three
    digits.
    """
    for (found, dtypes), (expected, _) in zip(
        run_ranks(2, _train_gpt, ["--fp16", *engine], 25),
        run_ranks(2, _train_gpt, engine, 8),
        strict=True,
    ):
        assert dtypes == {torch.float16}
        stepped = [outcome for outcome in found if not outcome.is_skipped]
        num_skipped = len(found) - len(stepped)
        assert all(outcome.is_skipped for outcome in found[:5])
        assert len(stepped) >= len(expected)
        assert found[-1].loss_scale == 2.0 ** (33 - num_skipped), "the first overflow is forgiven"
        assert all(math.isfinite(outcome.loss) for outcome in found)
        for ours, fp32 in zip(stepped, expected, strict=False):
            assert ours.loss == pytest.approx(fp32.loss, rel=5e-3)
            assert ours.grad_norm == pytest.approx(fp32.grad_norm, rel=3e-2)
        assert expected[-1].loss < 0.8 * expected[0].loss, "it learns"


# Waits of the device


def _calls_of_a_step(flags: list[str], num_layers: int) -> dict[str, int]:
    """Python's calls in this thread while a step is planned, and between reading its scalars and
    its first launch.
    """
    config = parse_config([*GPT, "--num-layers", str(num_layers), *flags], 1)
    engine = build_engine(config.engine(), Device("cpu"), build_mesh("cpu", 1))
    engine.initialize(lambda: GPTModel(config.model, 32))
    batch = {
        "tokens": torch.zeros(2, 16, dtype=torch.int64),
        "labels": torch.zeros(2, 16, dtype=torch.int64),
    }
    calls: dict[str, int] = {"planning": 0, "after the read": 0}
    phase: str | None = None

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal phase
        if event == "return" and frame.f_code is step_module._agree.__code__:
            phase = "planning"
        if event == "return" and frame.f_code is step_module._read.__code__:
            phase = "after the read"
        if event == "call" and phase is not None:
            calls[phase] += 1
            # What hands work over: the kernel's threads, and another lane's.
            if phase == "after the read" and frame.f_code in (
                HostAdam.submit.__code__,
                ThreadLane.enqueue.__code__,
            ):
                phase = None
                sys.setprofile(None)

    def forward(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["tokens"], batch["labels"]).mean()

    engine.train_batch(iter([batch]), forward, num_microbatches=1)
    sys.setprofile(count)
    try:
        engine.train_batch(iter([batch]), forward, num_microbatches=1)
    finally:
        sys.setprofile(None)
    engine.state.optimizer.synchronize()
    return calls


@pytest.mark.parametrize(
    "flags",
    [
        [],
        [
            "--optimizer-cpu-offload",
            "--overlap-cpu-optimizer-d2h-h2d",
            "--overlap-optimizer-with-forward",
        ],
    ],
    ids=["device", "offloaded"],
)
def test_a_step_is_planned_before_its_scalars_are_read(flags):
    """Between the read and the first launch, the host makes at most a call for each piece, and few
    for each step.
    """
    few, many = (run_ranks(1, _calls_of_a_step, flags, num_layers)[0] for num_layers in (2, 10))
    planned = many["planning"] - few["planning"]
    left = many["after the read"] - few["after the read"]
    assert planned > 8 * 50, "planning takes dozens of calls for each layer"
    assert left <= planned / 20
    assert few["after the read"] < 200


def _evaluation(shares: list[list[int]]) -> tuple[float, float, bool]:
    model = make_model()
    mesh = build_mesh("cpu", dist.get_world_size())
    shard_model(model, mesh, compute_dtype=torch.float32, reshard_after_forward=True)
    mine = shares[dist.get_rank()]

    def loss() -> float:
        return evaluate(
            model,
            batches(mine),
            forward_step=squared_error,
            num_microbatches=len(mine),
            device=CPU,
            mesh=mesh,
        )

    return loss(), loss(), model.training


def test_evaluation_has_no_dropout_and_does_not_depend_on_the_number_of_ranks():
    ((one, again, is_training),) = run_ranks(1, _evaluation, [[1, 2, 3, 4]])
    assert one == again
    assert is_training
    for two, _, _ in run_ranks(2, _evaluation, [[1, 3], [2, 4]]):
        assert two == pytest.approx(one, rel=1e-6)
