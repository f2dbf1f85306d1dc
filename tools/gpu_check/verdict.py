"""What stages have left for each other, compared: bits of runs, and speeds with the bars and the
prediction.

Without torch, so that these stages take no time.
"""

from __future__ import annotations

from typing import Any

from tools.gpu_check.findings import Findings, SkippedError
from tools.gpu_check.prediction import MOST_MEMORY, MOST_TIME, Machine, Shape, predict

_RUNS = ("one_rank", "one_rank_delayed", "one_rank_blocking")
_SIDES = ("speed_offload", "speed_bf16", "speed_half")  # that the bars are for
_LANES = ("d2h", "host", "h2d")


def bits(findings: Findings) -> None:
    """The three runs gave the same bits, configuration by configuration. Needs no accelerator."""
    runs = {name: shared for name in _RUNS if (shared := findings.shared_by(name))}
    if len(runs) < 2:
        raise SkippedError(f"needs two of {', '.join(_RUNS)}, and {', '.join(runs) or 'none'} ran")
    first, *others = runs
    for other in others:
        names = runs[first].keys() & runs[other].keys()
        findings.expect_at_least(f"configurations of {first} and of {other}", len(names), 1)
        different = sorted(name for name in names if runs[first][name] != runs[other][name])
        findings.expect(
            f"configurations whose bits are others in {other} than in {first}", different, []
        )


def speed(findings: Findings) -> None:
    """The bars, and what was measured beside what was predicted."""
    device = findings.shared_by("speed_device")
    others = {name: found for name in _SIDES if (found := findings.shared_by(name))}
    if device is None or not others:
        raise SkippedError("needs speed_device and a side that offloads, and they did not end well")
    findings.expect(
        "all sides trained the same model",
        {found["numel"] for found in others.values()},
        {device["numel"]},
    )
    passing = []
    for name, found in others.items():
        time_ratio, memory_ratio = (
            found["seconds"] / device["seconds"],
            found["allocated"] / device["allocated"],
        )
        findings.figure(f"{name} over device", round(time_ratio, 3), "x", is_telling=True)
        findings.figure(f"{name} memory", round(memory_ratio, 3), is_telling=True)
        apart = abs(found["losses"][0] - device["losses"][0])
        findings.expect_at_most(f"{name}: first losses apart", apart, 0.02 * device["losses"][0])
        _compare_with_prediction(findings, name, found, device)
        if time_ratio <= MOST_TIME and memory_ratio <= MOST_MEMORY:
            passing.append(name)
    peer = findings.shared_by("speed_fsdp2")
    if peer is not None:
        best = min(found["seconds"] for found in others.values())
        findings.figure(
            "FSDP2 offloaded over our best", round(peer["seconds"] / best, 2), "x", is_telling=True
        )
    if not findings.simulate:
        findings.expect_at_least(
            f"sides within {MOST_TIME}x of the time and {MOST_MEMORY} of the memory",
            len(passing),
            1,
        )
        findings.expect_at_least("tokens a step", device["tokens"], 47_000)


def _compare_with_prediction(
    findings: Findings, name: str, found: dict[str, Any], device: dict[str, Any]
) -> None:
    """Compares with a prediction from this machine's bandwidths and compute time."""
    shape = Shape(**found["shape"])
    machine = measured_machine(findings)
    compute = device["seconds"] - predict(shape, machine, 0.0, compute=0.0).time.device_pass
    expected = predict(shape, machine, found["fraction"], moments=found["moments"], compute=compute)
    # What is not in host memory is still stepped on the device, which is no cost of offloading.
    time = expected.time
    exposed = found["seconds"] - compute - time.device_pass
    waited = (
        {lane: found["timings"].get(f"waited_{lane}") for lane in _LANES}
        if found["timings"]
        else {}
    )
    rows = {
        "step": [found["seconds"], expected.seconds],
        "exposed": [exposed, expected.exposed],
        "host pass": [found["timings"].get("host"), time.host_pass],
        "down": [found["timings"].get("d2h"), time.down],
        "up": [found["timings"].get("h2d"), time.up],
        "waited for the host": [waited.get("host"), time.exposed_host],
        "waited for gradients": [waited.get("d2h"), time.exposed_link],
        "peak bytes": [found["allocated"], expected.peak_bytes],
    }
    for what, values in rows.items():
        findings.figure(f"{name}, {what}: measured, predicted", values)
    findings.expect_at_least(f"{name}: predicted seconds", expected.seconds, 1e-9)


def measured_machine(findings: Findings) -> Machine:
    """The bandwidths that earlier stages have measured, and typical ones for the others."""
    machine = Machine()
    link, host = findings.shared_by("link") or {}, findings.shared_by("host") or {}
    pass_on_device = findings.shared_by("device_adam") or {}
    return Machine(
        machine.flops,
        pass_on_device.get("bytes_per_second", machine.device_bytes),
        min(link.get("h2d pinned", machine.link_bytes), link.get("d2h pinned", machine.link_bytes)),
        host.get("bytes_per_second", machine.host_bytes),
    )
