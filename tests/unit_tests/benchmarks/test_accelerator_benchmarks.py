"""The benchmarks that need an accelerator run, on the simulated one and on the CPU, with the small
sizes of `--quick`.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from benchmarks.helpers.result import Result
from benchmarks.runner import command
from benchmarks.runner.registry import registered
from tests.helpers.ranks import rank_device, run_ranks

NAMES = [name for name, one in registered().items() if one.needs_accelerator]


def _measured(name: str) -> dict[str, Any]:
    from megatron.core.device import Device

    module = importlib.import_module(f"benchmarks.{name}")
    device = Device(rank_device().type, rank_device().index or 0)
    result: Result = module.measure(device, module.parsed(module.BENCHMARK.quick))
    return result.to_json()


def measured(name: str, kind: str) -> Result:
    (content,) = run_ranks(1, _measured, name, device=kind)
    return Result.from_json(content)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("sim", marks=pytest.mark.sim)])
def test_lanes_gives_the_rates_that_the_planner_takes(kind: str) -> None:
    result = measured("lanes", kind)
    assert {one.group for one in result.measurements} == {"copies", "a pass of AdamW"}
    assert all(value > 0 for one in result.measurements for value in one.values)
    flags = result.facts["planner_flags"]
    assert list(flags) == ["--link", "--host-bandwidth", "--gpu-bandwidth"]

    from megatron_hybrid.plan.quantities import rate

    medians = {f"{one.group}: {one.side}": one.median for one in result.measurements}
    slower = min(medians[f"copies: {way}, pinned"] for way in ("h2d", "d2h"))
    assert rate(flags["--link"]) == pytest.approx(slower * 1e9, rel=0.01)
    on_host = max(rate for name, rate in medians.items() if ": host, " in name)
    assert rate(flags["--host-bandwidth"]) == pytest.approx(on_host * 1e9, rel=0.01)


@pytest.mark.parametrize(
    "kind",
    [pytest.param("cpu", marks=pytest.mark.wide), pytest.param("sim", marks=pytest.mark.sim)],
)
def test_gpu_step_trains_the_same_model_on_every_side(kind: str) -> None:
    from benchmarks import gpu_step

    result = measured("gpu_step", kind)
    assert result.not_run == ()
    losses = result.facts["losses"]
    assert list(losses) == [*gpu_step.SIDES]
    for side, own in losses.items():
        assert own[0] > own[-1], f"{side} learns the text that every step has"
    for side in gpu_step.OURS:
        assert losses[side] == losses["device"], "to the bit"

    lanes = result.facts["lanes_seconds_a_step"]
    assert lanes["device"] == lanes["FSDP2 offloaded"] == {}
    assert lanes["offloaded 0.8"]["host"] > 0
    peaks = {one.side: one.median for one in result.measurements if one.group == "peak memory"}
    if kind == "sim":
        assert peaks["offloaded 1"] < peaks["offloaded 0.8"] < peaks["device"]
        assert peaks["offloaded 1"] == pytest.approx(peaks["offloaded 1, planned"], rel=0.25)


def test_sides_for_which_no_time_is_left_are_named() -> None:
    from benchmarks import gpu_step

    def measure() -> dict[str, Any]:
        from megatron.core.device import Device

        arguments = gpu_step.parsed([*gpu_step.BENCHMARK.quick, "--seconds=0"])
        return gpu_step.measure(Device("cpu"), arguments).to_json()

    result = Result.from_json(run_ranks(1, measure)[0])
    assert [one.side for one in result.not_run] == [*gpu_step.SIDES]
    assert result.measurements == ()


@pytest.mark.parametrize("name", NAMES)
def test_without_an_accelerator_a_full_run_of_them_is_rejected(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "machine", lambda: {"accelerator": None})
    assert command.main([name]) == 2
    assert name in capsys.readouterr().err
