"""Three billion parameters, 4096 tokens a microbatch: everything on the device, and with the
optimizer in host memory.

Each side is a stage, so that memory which one has taken, or did not find, is not another's.
`verdict.py` compares them.
"""

from __future__ import annotations

import functools
import gzip
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.units import sharding_units
from megatron.core.host_memory import HostMemoryError
from megatron.core.lane_timings import LaneTimings
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.training.engines import EngineConfig, build_engine
from megatron.training.step import Batch
from tools.gpu_check.accelerator import Accelerator, open_accelerator
from tools.gpu_check.findings import Findings, SkippedError
from tools.gpu_check.host_room import grown_host_memory
from tools.gpu_check.prediction import (
    THREE_BILLION,
    Machine,
    Prediction,
    Shape,
    compute_seconds,
    predict,
    rest_bytes,
)
from tools.gpu_check.ranks import join
from tools.gpu_check.training import forward_step
from tools.gpu_check.verdict import measured_machine

_SIMULATED = Shape(
    num_layers=2, hidden=32, ffn=64, vocabulary=128, sequence=8, micro_batch=2, num_microbatches=2
)
_HEAD_DIM = 128
_NUM_WARMUPS, _NUM_MEASURED = 2, 4
_LEARNING_RATE = 3e-4
_HOST_BYTES_AN_ELEMENT = (
    18  # FSDP2 needs the most: weights, gradients and moments in fp32, and what is pinned beside
)
_HOST_SHARE = 0.85  # of what is available
_MOST_TRACE_BYTES = 5 << 20


def _where_it_fits(stage: Callable[[Findings], None]) -> Callable[[Findings], None]:
    """The stage, skipped on machines that are too small for it."""

    @functools.wraps(stage)
    def wrapped(findings: Findings) -> None:
        try:
            stage(findings)
        except torch.OutOfMemoryError as error:
            raise SkippedError(f"does not fit on the device: {str(error)[:200]}") from error
        except HostMemoryError as error:
            raise SkippedError(f"does not fit into host memory: {error}") from error

    return wrapped


@_where_it_fits
def device(findings: Findings) -> None:
    """Everything on the device: what the others are compared with."""
    _measure_ours(findings, OptimizerConfig())


@_where_it_fits
def offload_all(findings: Findings) -> None:
    """All of the optimizer in host memory; then a trace."""
    _measure_ours(findings, _offloaded(1.0), traces=True)


@_where_it_fits
def offload_half(findings: Findings) -> None:
    _measure_ours(findings, _offloaded(0.5))


@_where_it_fits
def offload_bf16_moments(findings: Findings) -> None:
    """All of it, with moments of two bytes."""
    dtypes = {
        "exp_avg_dtype": "bf16",
        "exp_avg_sq_dtype": "bf16",
    }
    _measure_ours(findings, _offloaded(1.0, **dtypes), moments="bf16")


@_where_it_fits
def fsdp2(findings: Findings) -> None:
    """PyTorch's way: parameters, gradients and states on the host, and its fused AdamW."""
    accelerator, shape = _start(findings)
    model = _fsdp2_model(accelerator, shape)
    assert isinstance(model, FSDPModule), "fully_shard makes it one"
    sharded: FSDPModule = model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_LEARNING_RATE, fused=accelerator.kind == "cuda"
    )

    def step(batches: list[Batch]) -> float:
        loss = torch.zeros((), device=accelerator.torch_device)
        for number, batch in enumerate(batches):
            # Its gradients stay whole on the device until the last microbatch, which saves it most
            # of its transfers.
            sharded.set_requires_gradient_sync(number == len(batches) - 1)
            on_device = {
                name: tensor.to(accelerator.torch_device) for name, tensor in batch.items()
            }
            mean = forward_step(model, on_device) / len(batches)
            mean.backward()
            loss += mean.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    _measure(findings, accelerator, shape, step, num_warmups=1, num_measured=2)


def _offloaded(fraction: float, **options: Any) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer_cpu_offload=True,
        overlap_cpu_optimizer_d2h_h2d=True,
        overlap_optimizer_with_forward=True,
        optimizer_offload_fraction=fraction,
        **options,
    )


def _start(findings: Findings) -> tuple[Accelerator, Shape]:
    accelerator = open_accelerator(findings)
    join(findings, accelerator, rank=0, num_ranks=1)
    # Other stages want the same bits; this one wants the kernels that a run has.
    torch.use_deterministic_algorithms(False)
    return accelerator, _shape(findings)


def _shape(findings: Findings) -> Shape:
    """The model, with as many layers as fit into host memory. All sides take the first one's."""
    shared = findings.shared_by("speed_shape")
    if shared is not None:
        return Shape(**shared)
    shape = THREE_BILLION
    if findings.simulate:
        shape = _SIMULATED
    else:
        room = _HOST_SHARE * grown_host_memory(
            int(_HOST_BYTES_AN_ELEMENT * shape.numel / _HOST_SHARE)
        )
        while shape.num_layers > 1 and _HOST_BYTES_AN_ELEMENT * shape.numel > room:
            shape = Shape(**{**asdict(shape), "num_layers": shape.num_layers - 1})
        if shape != THREE_BILLION:
            findings.note(
                f"The host has room for {shape.num_layers} layers, {shape.numel / 1e9:.2f} billion "
                "elements."
            )
    findings.share("speed_shape", asdict(shape))
    return shape


def _model_config(shape: Shape) -> TransformerConfig:
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=max(1, shape.hidden // _HEAD_DIM),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        swiglu=True,
        add_bias_linear=False,
        normalization="RMSNorm",
    )


def _measure_ours(
    findings: Findings, optimizer: OptimizerConfig, *, moments: str = "fp32", traces: bool = False
) -> None:
    accelerator, shape = _start(findings)
    config = EngineConfig(
        optimizer,
        LRScheduleConfig(lr=_LEARNING_RATE, lr_decay_style="constant"),
        # The same on all sides: half of the bytes that cross the link.
        DataParallelConfig(main_grads_dtype="bf16"),
        train_iters=99,
        compute_dtype="bf16",
        records_timings=optimizer.optimizer_cpu_offload,
    )
    engine = build_engine(config, accelerator.device, build_mesh(accelerator.device.kind, 1))
    start = time.perf_counter()
    engine.initialize(lambda: GPTModel(_model_config(shape), shape.vocabulary))
    findings.figure("building", time.perf_counter() - start, "s")
    numel = sum(parameter.numel() for parameter in engine.model.parameters())
    findings.expect("parameters, as the prediction counts them", numel, shape.numel)
    plan = engine.state.optimizer.plan
    fraction = (
        0.0 if plan is None else plan.host_fraction
    )  # whole layers, so not just what was asked for
    findings.figure("in host memory", fraction)

    def step(batches: list[Batch]) -> float:
        return engine.train_batch(batches, forward_step).loss

    _measure(
        findings,
        accelerator,
        shape,
        step,
        timings=engine.state.optimizer.timings,
        fraction=fraction,
        moments=moments,
        expected=predict(shape, measured_machine(findings), fraction, moments=moments),
        least_bytes=rest_bytes(shape, fraction),
    )
    engine.state.optimizer.synchronize()
    if traces:
        _trace(findings, accelerator, shape, step)


def _fsdp2_model(accelerator: Accelerator, shape: Shape) -> GPTModel:
    with torch.device("meta"):
        model = GPTModel(_model_config(shape), shape.vocabulary)
    policy: dict[str, Any] = {
        "mesh": build_mesh(accelerator.device.kind, 1),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=accelerator.device.pins_host_memory),
    }
    for unit in sharding_units(model):
        fully_shard(unit, **policy)
    fully_shard(model, reshard_after_forward=False, **policy)
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        # Drawn on the device: a CPU takes longer for three billion numbers than all else here.
        local = parameter.detach().to_local()  # type: ignore[attr-defined]  # all are DTensors
        drawn = torch.randn(local.shape, device=accelerator.torch_device).mul_(0.02)
        local.copy_(drawn if "norm" not in name else torch.ones_like(drawn))
    return model


def _measure(
    findings: Findings,
    accelerator: Accelerator,
    shape: Shape,
    step: Callable[[list[Batch]], float],
    *,
    timings: Callable[[], LaneTimings | None] = lambda: None,
    fraction: float = 1.0,
    moments: str = "fp32",
    expected: Prediction | None = None,
    least_bytes: float = 1,
    num_warmups: int = _NUM_WARMUPS,
    num_measured: int = _NUM_MEASURED,
) -> None:
    """Times steps one after the other, as a run makes them: what one leaves to the next is in the
    next one's time.

    Args:
        expected: of our engine; None: the step is another's, of which nothing is predicted.
    """
    batches = _batches(shape, shape.num_microbatches)
    accelerator.synchronize()
    accelerator.reset_peak()
    losses, ends = [], []
    for number in range(num_warmups + num_measured):
        if number == num_warmups:
            timings()  # forget the first steps, which touch memory for the first time
        losses.append(step(batches))
        ends.append(time.perf_counter())
    seconds = statistics.median(
        later - earlier for earlier, later in _last_pairs(ends, num_measured)
    )
    peak, found = accelerator.peak(), timings()

    findings.figure("step", seconds, "s", is_telling=True)
    findings.figure(
        "steps", [later - earlier for earlier, later in _last_pairs(ends, num_measured)], "s"
    )
    findings.figure("tokens a second", round(shape.tokens / seconds), is_telling=True)
    findings.figure("arithmetic", shape.flops / seconds / 1e12, "TFLOP/s", is_telling=True)
    findings.figure("peak allocated", peak.allocated / 2**30, "GiB", is_telling=True)
    findings.figure("peak reserved", peak.reserved / 2**30, "GiB")
    findings.figure("losses", losses)
    for name, value in found._asdict().items() if found is not None else ():
        findings.figure(f"lanes: {name}", value)
    findings.expect_at_least(
        "loss of the first step less that of the last", losses[0] - losses[-1], 1e-4
    )
    findings.expect_at_least(
        "peak bytes, what rests on the device being a part", peak.allocated, least_bytes
    )
    if expected is not None:
        _show_prediction(findings, expected, shape)
    findings.share(
        findings.stage,
        {
            "seconds": seconds,
            "tokens": shape.tokens,
            "numel": shape.numel,
            "allocated": peak.allocated,
            "reserved": peak.reserved,
            "losses": losses,
            "fraction": fraction,
            "moments": moments,
            "shape": asdict(shape),
            "timings": found._asdict() if found is not None else {},
        },
    )


def _show_prediction(findings: Findings, expected: Prediction, shape: Shape) -> None:
    findings.figure(
        "predicted step, computation alone",
        [expected.seconds, compute_seconds(shape, Machine())],
        "s",
    )
    findings.figure("predicted peak", expected.peak_bytes / 2**30, "GiB")


def _last_pairs(ends: Sequence[float], number: int) -> Iterator[tuple[float, float]]:
    """(end of the step before, its own end) of the last so many steps."""
    return zip(ends[-number - 1 : -1], ends[-number:], strict=True)


def _batches(shape: Shape, number: int) -> list[Batch]:
    """The same text for every step, so that the loss falls."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(
        shape.vocabulary, (shape.micro_batch * number, shape.sequence + 1), generator=generator
    )
    return [
        {
            "tokens": part[:, :-1].contiguous().pin_memory(),
            "labels": part[:, 1:].contiguous().pin_memory(),
        }
        for part in text.split(shape.micro_batch)
    ]


def _trace(
    findings: Findings, accelerator: Accelerator, shape: Shape, step: Callable[[list[Batch]], float]
) -> None:
    """A compressed profile of two steps of one microbatch, and the kernels that take longest."""
    batches = _batches(shape, 1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if accelerator.kind == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    plain, packed = findings.scratch / "trace.json", findings.scratch / "trace.json.gz"
    try:
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(2):
                step(batches)
            accelerator.synchronize()
        profile.export_chrome_trace(str(plain))
        packed.write_bytes(gzip.compress(plain.read_bytes(), 6))
    except RuntimeError as error:
        findings.note(f"the profiler failed: {error}")
        return
    findings.figure("trace", packed.stat().st_size / 2**20, "MiB")
    if packed.stat().st_size > _MOST_TRACE_BYTES:
        findings.note(f"the trace of {packed.stat().st_size} bytes was left out")
    else:
        findings.keep(packed)
    top = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)[:12]
    findings.figure(
        "kernels, ms",
        {event.key[:60]: round(event.self_device_time_total / 1e3, 2) for event in top},
    )
