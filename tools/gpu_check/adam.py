"""The Triton pass against the host kernel, bit for bit: dtypes, lengths, awkward values, steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from megatron.core.optimizer.kernels.adam import AdamPiece, AdamStep
from megatron.core.optimizer.kernels.host_adam import HostAdam
from tools.gpu_check.accelerator import Accelerator, open_accelerator
from tools.gpu_check.findings import Findings

_NUMEL = 1_000_003  # no multiple of a block
_SIMULATED_NUMEL = 5003
_NUM_STEPS = 3
_TIMED_NUMEL = 512 << 20
_BYTES_AN_ELEMENT = 28


class Variant(NamedTuple):
    """The dtypes of a piece's arrays."""

    grad: torch.dtype
    weight: torch.dtype
    moments: torch.dtype
    has_remainder: bool = False
    out: torch.dtype | None = None

    def __str__(self) -> str:
        parts = [f"{name} {_short(dtype)}" for name, dtype in zip("gwm", self[:3], strict=True)]
        parts += ["remainder"] if self.has_remainder else []
        parts += [] if self.out is None else [f"out {_short(self.out)}"]
        return ", ".join(parts)


_FP32, _BF16, _FP16 = torch.float32, torch.bfloat16, torch.float16
VARIANTS = [
    Variant(_FP32, _FP32, _FP32),
    Variant(_BF16, _FP32, _FP32, out=_BF16),
    Variant(_FP32, _FP32, _FP32, out=_FP16),
    Variant(_BF16, _FP32, _BF16, out=_BF16),
    Variant(_FP16, _FP16, _FP32),
    Variant(_BF16, _BF16, _BF16),
    Variant(_BF16, _BF16, _FP32, has_remainder=True),
    Variant(_FP32, _BF16, _BF16, has_remainder=True, out=_BF16),
    Variant(_FP32, _BF16, _FP32, has_remainder=True, out=_FP32),
]
# Of the first two variants, besides plain AdamW: L2, no bias correction, a small beta1, clipped.
_OTHER_STEPS = {
    "L2": {"adam_w_mode": False, "weight_decay": 0.1},
    "no bias correction": {"bias_correction": False},
    "beta1 0.3": {"beta1": 0.3},
    "clipped": {"grad_scale": 0.37},
}


def adam(findings: Findings) -> None:
    """All variants, then how fast the pass is."""
    accelerator = open_accelerator(findings)
    numel = _SIMULATED_NUMEL if findings.simulate else _NUMEL
    host = HostAdam()
    findings.figure("host body", host.body)
    start = time.monotonic()
    for variant in VARIANTS:
        _compare(findings, accelerator, host, variant, numel, str(variant), {"weight_decay": 0.01})
    for variant, (name, options) in itertools.product(VARIANTS[:2], _OTHER_STEPS.items()):
        _compare(findings, accelerator, host, variant, numel, f"{variant}, {name}", options)
    findings.figure("all variants, compilation included", time.monotonic() - start, "s")
    if not findings.simulate:
        _measure(findings, accelerator)


def _compare(
    findings: Findings,
    accelerator: Accelerator,
    host: HostAdam,
    variant: Variant,
    numel: int,
    name: str,
    options: Mapping[str, Any],
) -> None:
    """A few steps of both from the same arrays; then every bit of every array."""
    on_host = _piece(variant, numel, AdamStep(1, lr=1e-2))
    on_device = on_host.with_arrays(
        {key: tensor.to(accelerator.torch_device) for key, tensor in _arrays(on_host)}
    )
    before = on_host.weight.clone()
    for number in range(1, _NUM_STEPS + 1):
        step = AdamStep(number, lr=1e-2, **options)
        host.run([on_host._replace(step=step)])
        accelerator.run_adam([on_device._replace(step=step)])
    accelerator.synchronize()
    different = {
        key: count
        for key, tensor in _arrays(on_host)
        if (count := _num_different(tensor, on_device.arrays()[key].cpu()))
    }
    findings.expect(f"elements that differ: {name}", different, {})
    # A comparison of arrays that nobody has touched would be none.
    num_changed = _num_different(on_host.weight, before)
    findings.expect_at_least(f"weights that were stepped: {name}", num_changed, numel // 2)


def _piece(variant: Variant, numel: int, step: AdamStep) -> AdamPiece:
    """Arrays of all magnitudes, with zeros, infinities and subnormal numbers in the gradients."""
    generator = torch.Generator().manual_seed(5)

    def normal() -> torch.Tensor:
        return torch.randn(numel, generator=generator)

    grad = normal() * torch.exp(3 * normal())
    grad[:: numel // 100] = 0.0
    grad[1 :: numel // 50] = 1e-40
    grad[2 :: numel // 5] = torch.inf
    grad[3 :: numel // 5] = torch.nan
    weight, moments = normal(), [normal() * 1e-2, (normal() * 1e-2).square()]
    return AdamPiece(
        step,
        grad.to(variant.grad),
        weight.to(variant.weight),
        moments[0].to(variant.moments),
        moments[1].to(variant.moments),
        torch.randint(-(2**15), 2**15, (numel,), generator=generator).to(torch.int16)
        if variant.has_remainder
        else None,
        None if variant.out is None else torch.zeros(numel, dtype=variant.out),
    )


def _arrays(piece: AdamPiece) -> list[tuple[str, torch.Tensor]]:
    return list(piece.arrays().items())


def _num_different(one: torch.Tensor, other: torch.Tensor) -> int:
    """Elements whose bits differ. All NaNs count as one."""
    integer = {2: torch.int16, 4: torch.int32}[one.element_size()]
    differ = one.view(integer) != other.view(integer)
    if one.is_floating_point():
        differ &= ~(one.isnan() & other.isnan())
    return int(differ.sum())


def _measure(findings: Findings, accelerator: Accelerator) -> None:
    """Bandwidth of the pass over half a billion elements."""
    device = accelerator.torch_device
    grad = torch.full((_TIMED_NUMEL,), 1e-3, dtype=_BF16, device=device)
    weight, exp_avg, exp_avg_sq = (
        torch.full((_TIMED_NUMEL,), 1e-3, device=device) for _ in range(3)
    )
    piece = AdamPiece(AdamStep(10, lr=1e-4), grad, weight, exp_avg, exp_avg_sq, out=grad)
    accelerator.run_adam([piece])
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(5):
        accelerator.run_adam([piece])
    end.record()
    accelerator.synchronize()
    rate = 5 * _TIMED_NUMEL * _BYTES_AN_ELEMENT / (begin.elapsed_time(end) / 1e3)
    findings.figure("the pass on the device", rate / 1e12, "TB/s", is_telling=True)
    findings.share("device_adam", {"bytes_per_second": rate})


def _short(dtype: torch.dtype) -> str:
    return {_FP32: "fp32", _BF16: "bf16", _FP16: "fp16"}[dtype]
