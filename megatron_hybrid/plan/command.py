"""Plans a run: the memory that it needs on a machine, and the time of its steps.

    python -m megatron_hybrid plan --hf-model models/Llama-3.1-8B --bf16 --gpu-memory 80GB \\
        --host-memory 256GB
    python -m megatron_hybrid plan --config run.yaml --gpus 2 --measure

Prints the memory of a rank by kind, the smallest offload fraction that fits, the largest that costs
no time, the time of a step and its bottleneck, and the size of a checkpoint; see docs/offload.md.
Takes all flags of a run, too. No weights are allocated.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from itertools import pairwise

from megatron.core.device import check_kind, kind_of, reserve_of
from megatron.core.drivers import kinds_of_accelerators
from megatron.core.host_memory import HostMemoryError
from megatron.core.log import printable
from megatron.core.options import ConfigError
from megatron_hybrid import parsers
from megatron_hybrid.plan.answer import Answer, Limits, answer
from megatron_hybrid.plan.measure import measure
from megatron_hybrid.plan.planned_run import PlannedRun, with_defaults
from megatron_hybrid.plan.quantities import shown_size
from megatron_hybrid.plan.step_time import Machine
from megatron_hybrid.plan.table import format_answer

_EXIT_REFUSED = 2
_MOST_CHARACTERS = 4000  # of an error's line
_RATES = ("flops", "link", "host_bandwidth")  # required for the time of a step


def main(argv: Sequence[str] | None = None, program: str = "plan") -> int:
    """Prints the plan. Returns the exit code: 2 for bad flags and for a run that does not fit."""
    arguments, flags = parsers.plan(program).parse_known_args(argv)
    try:
        found = plan(arguments, flags)
    except (ConfigError, HostMemoryError) as error:
        lines = error.lines if isinstance(error, ConfigError) else (str(error),)
        text = "\n  ".join(printable(line, _MOST_CHARACTERS) for line in lines)
        print(f"{program}: {text}", file=sys.stderr)
        return _EXIT_REFUSED

    print(json.dumps(found.to_json(), indent=2) if arguments.json else format_answer(found))
    return 0


def plan(arguments: argparse.Namespace, flags: Sequence[str]) -> Answer:
    """Returns the plan of a run with these flags.

    Raises:
        ConfigError: bad flags, or a run that does not fit.
        HostMemoryError: a layer that is too large to be measured on this machine.
    """
    kind = _device_kind(flags, arguments.measure)
    limits = _limits(arguments, kind)
    run = PlannedRun(_run_flags(flags), arguments.gpus, kind)

    measured = measure(run) if arguments.measure else None
    return answer(run, limits, _machine(arguments, measured))


def _limits(arguments: argparse.Namespace, device_kind: str) -> Limits:
    """Returns the memory that can be planned."""
    device, reserve = arguments.gpu_memory, arguments.gpu_reserve
    if device is None:
        if reserve is not None:
            raise ConfigError("--gpu-reserve: expected --gpu-memory with it, got none.")
        return Limits(None, arguments.host_memory)

    if reserve is None:
        is_on_host = device_kind == "cpu"
        reserve = 0 if is_on_host else reserve_of(device)
    if reserve >= device:
        got = f"{shown_size(device)}, of which {shown_size(reserve)} are reserved (--gpu-reserve)"
        raise ConfigError(f"--gpu-memory: expected more than the reserve, got {got}.")
    return Limits(device - reserve, arguments.host_memory, reserve)


def _run_flags(flags: Sequence[str]) -> Sequence[str]:
    """Returns the flags of the run."""
    names = [word.partition("=")[0] for word in flags]
    sources = [flag for flag in ("--hf-model", "--config") if flag in names]
    if len(sources) != 1:
        got = " and ".join(sources) or "neither"
        raise ConfigError(f"Expected --hf-model DIR or --config FILE, got {got}.")

    return with_defaults(_split_values(flags)) if sources == ["--hf-model"] else flags


def _split_values(flags: Sequence[str]) -> list[str]:
    """Splits `--flag=value` into two words."""
    words: list[str] = []
    for word in flags:
        flag, equals, value = word.partition("=")
        words += [flag, value] if equals and word.startswith("--") else [word]
    return words


def _device_kind(flags: Sequence[str], is_measured: bool) -> str:
    """Returns the planned device's kind: this machine's if measured, otherwise an accelerator."""
    words = _split_values(flags)
    named = dict(pairwise(words)).get("--device", "auto")
    if is_measured:
        return kind_of(named)
    check_kind(named)
    return kinds_of_accelerators()[0] if named == "auto" else named


def _machine(arguments: argparse.Namespace, measured: Machine | None) -> Machine | None:
    """Returns the given rates, and measured ones for the rest; None if too few are known."""
    missing = ["--" + name.replace("_", "-") for name in _RATES if not getattr(arguments, name)]
    if measured is None and missing:
        if len(missing) < len(_RATES):
            raise ConfigError(
                f"Expected {' and '.join(missing)}, or --measure, for the time of a step, got none."
            )
        return None

    # Without a measurement, only the given rates are counted.
    default = Machine(0.0, math.inf, 0.0, 0.0) if measured is None else measured
    host, dram = arguments.host_bandwidth, arguments.dram_bandwidth
    return Machine(
        flops=arguments.flops or default.flops,
        device_bytes=arguments.gpu_bandwidth or default.device_bytes,
        link_bytes=arguments.link or default.link_bytes,
        # The ranks share the machine's bandwidth.
        host_bytes=default.host_bytes if host is None else host / arguments.gpus,
        interconnect_bytes=arguments.interconnect or default.interconnect_bytes,
        collective_seconds=default.collective_seconds,
        device_is_host=default.device_is_host,
        memory_bytes=None if dram is None else dram / arguments.gpus,
    )
