"""Lanes, pinned memory, the link to the device, and the host's own memory."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch

from megatron.core.device import Device
from megatron.core.host_memory import HostSlab
from megatron.core.optimizer.kernels.adam import AdamPiece, AdamStep
from megatron.core.optimizer.kernels.host_adam import HostAdam
from tools.gpu_check.accelerator import Accelerator, open_accelerator
from tools.gpu_check.findings import Findings

_GIB = 1 << 30
_PINNED_BYTES = 4 * _GIB
_COPIED_BYTES = 1 * _GIB
_SIMULATED_BYTES = 1 << 20
_PAUSE_SECONDS = 0.05
_SIMULATED_PAUSE_SECONDS = 2.0  # longer than a busy machine keeps a thread waiting
_ROUNDS = 5
_STEP = AdamStep(10, lr=1e-4, weight_decay=0.01)
_HOST_NUMEL = 256 << 20
_BYTES_AN_ELEMENT = 28  # bf16 gradient, fp32 states: see docs/offload.md


def lanes(findings: Findings) -> None:
    """Order between lanes, then what pinning costs and how fast copies are."""
    accelerator = open_accelerator(findings)
    pause_seconds = _SIMULATED_PAUSE_SECONDS if findings.simulate else _PAUSE_SECONDS
    _order(findings, accelerator, pause_seconds)
    _overlap(findings, accelerator, pause_seconds)
    pinned = _pin(findings, accelerator)
    _copies(findings, accelerator, pinned)


def host(findings: Findings) -> None:
    """The Adam pass over host memory, by number of threads."""
    numel = 1 << 16 if findings.simulate else _HOST_NUMEL
    cores = len(os.sched_getaffinity(0))
    counts = sorted({1, 2, 4, 8, 12, max(1, cores - 2), cores} & set(range(1, cores + 1)))
    piece = _host_piece(numel)
    rates: dict[str, float] = {}
    for num_threads in counts:
        kernel = HostAdam(num_threads)
        before = piece.weight[:1000].clone()
        seconds = _median_seconds(lambda kernel=kernel: kernel.run([piece]))  # type: ignore[misc]
        rates[str(num_threads)] = numel * _BYTES_AN_ELEMENT / seconds / 1e9
        changed = int((piece.weight[:1000] != before).sum())
        findings.expect_at_least(
            f"weights of 1000 that a step with {num_threads} threads changes", changed, 900
        )
    findings.figure("GB/s by threads", {name: round(rate, 1) for name, rate in rates.items()})
    best = max(rates, key=lambda name: rates[name])
    findings.figure("best pass", rates[best], "GB/s", is_telling=True)
    findings.figure("at threads", int(best), is_telling=True)
    findings.share("host", {"bytes_per_second": rates[best] * 1e9, "threads": int(best)})


def _order(findings: Findings, accelerator: Accelerator, pause_seconds: float) -> None:
    """Work on one lane that waits for another's sees what the other wrote, however late."""
    device = accelerator.device
    first, second = device.lane("first"), device.lane("second")
    values = torch.zeros(1000, device=accelerator.torch_device)
    copies: list[torch.Tensor] = []

    def write() -> None:
        accelerator.pause(pause_seconds)
        values.add_(1)

    for _ in range(3):
        written = first.enqueue(write, after=[device.event()])
        read = second.enqueue(lambda: copies.append(values.clone()), after=[written])
        read.wait()
    accelerator.synchronize()
    findings.expect(
        "what a lane reads after another's event",
        [float(copy.sum()) for copy in copies],
        [1e3, 2e3, 3e3],
    )

    event = first.enqueue(lambda: accelerator.pause(pause_seconds))
    findings.expect("an event is done while its work is paused", event.is_done(), False)
    event.synchronize()
    findings.expect("an event is done once it was waited for", event.is_done(), True)
    span = device.span()
    with span:
        accelerator.pause(pause_seconds)
    accelerator.synchronize()
    findings.figure("a span over its pause", (span.seconds or 0.0) / pause_seconds)
    findings.expect_at_least("a span's seconds", span.seconds or 0.0, 0.5 * pause_seconds)


def _overlap(findings: Findings, accelerator: Accelerator, pause_seconds: float) -> None:
    """Two lanes work at once: two pauses side by side take less than one after the other."""
    lanes = [accelerator.device.lane(f"lane {number}") for number in range(2)]

    def both() -> None:
        for lane in lanes:
            lane.enqueue(lambda: accelerator.pause(pause_seconds))
        accelerator.synchronize()

    def one() -> None:
        accelerator.pause(pause_seconds)
        accelerator.synchronize()

    both()
    together = _seconds(both)
    alone = _seconds(one)
    findings.figure("two pauses over one", together / alone, is_telling=True)
    if not findings.simulate:  # whose pauses share the cores of a busy machine
        findings.expect_at_most("two pauses side by side over one", round(together / alone, 2), 1.6)


def _pin(findings: Findings, accelerator: Accelerator) -> HostSlab:
    """How long pinning takes. Mapped memory becomes resident by it."""
    nbytes = _SIMULATED_BYTES if findings.simulate else _PINNED_BYTES
    start = time.perf_counter()
    slab = HostSlab(nbytes, accelerator.device, is_pinned=True, purpose="gpu-check")
    findings.figure(
        "pinning", (time.perf_counter() - start) / (nbytes / _GIB), "s/GiB", is_telling=True
    )
    findings.expect("the slab is pinned", slab.is_pinned, True)
    tensor = slab.tensor(0, 1000, torch.uint8)
    if accelerator.kind == "cuda":
        findings.expect("torch sees that it is pinned", tensor.is_pinned(), True)
    return slab


def _copies(findings: Findings, accelerator: Accelerator, pinned: HostSlab) -> None:
    """Bandwidth of copies, one way and both, from and to pinned and pageable memory."""
    nbytes = _SIMULATED_BYTES // 4 if findings.simulate else _COPIED_BYTES
    device, target = accelerator.device, accelerator.torch_device
    host = [pinned.tensor(number * nbytes, nbytes, torch.uint8) for number in range(2)]
    # Written to, since pages that nobody has touched are all one page of zeros.
    pageable = torch.full((nbytes,), 1, dtype=torch.uint8)
    on_device = [
        torch.full((nbytes,), 3 + number, dtype=torch.uint8, device=target) for number in range(2)
    ]
    up, down = device.lane("h2d"), device.lane("d2h")

    def send(source: torch.Tensor) -> None:
        up.enqueue(lambda: on_device[0].copy_(source, non_blocking=True)).synchronize()

    def fetch(result: torch.Tensor) -> None:
        down.enqueue(lambda: result.copy_(on_device[1], non_blocking=True)).synchronize()

    def both() -> None:
        events = [
            up.enqueue(lambda: on_device[0].copy_(host[0], non_blocking=True)),
            down.enqueue(lambda: host[1].copy_(on_device[1], non_blocking=True)),
        ]
        for event in events:
            event.synchronize()

    accelerator.synchronize()
    rates: dict[str, float] = {}
    for name, work, moved in (
        ("h2d pinned", lambda: send(host[0]), nbytes),
        ("d2h pinned", lambda: fetch(host[1]), nbytes),
        ("h2d pageable", lambda: send(pageable), nbytes),
        ("d2h pageable", lambda: fetch(pageable), nbytes),
        ("both pinned, each way", both, nbytes),
    ):
        rates[name] = moved / _median_seconds(work) / 1e9
        findings.figure(name, rates[name], "GB/s", is_telling="pinned" in name)
    findings.expect("what came down", int(host[1][-1]), 4)
    host[0].fill_(7)
    send(host[0])
    findings.expect("what went up", int(on_device[0][-1]), 7)
    findings.share("link", {name: rate * 1e9 for name, rate in rates.items()})


def _host_piece(numel: int) -> AdamPiece:
    """What a bucket's step works on, mapped as the optimizer does, and filled by many threads."""

    def array(dtype: torch.dtype, value: float) -> torch.Tensor:
        slab = HostSlab(numel * dtype.itemsize, Device("cpu"), is_pinned=False, purpose="gpu-check")
        return slab.tensor(0, numel, dtype).fill_(value)

    grad = array(torch.bfloat16, 1e-2)
    exp_avg, exp_avg_sq = (array(torch.float32, 1e-4) for _ in range(2))
    return AdamPiece(
        _STEP, grad, array(torch.float32, 1.0), exp_avg, exp_avg_sq, out=array(torch.bfloat16, 0.0)
    )


def _median_seconds(work: Callable[[], object]) -> float:
    """The median of a few rounds, after a warm-up."""
    work()
    return statistics.median(_seconds(work) for _ in range(_ROUNDS))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
