"""What would this run take on a machine of mine, and how long would its steps be?

    python -m megatron_hybrid plan --hf-model models/Llama-3.1-8B --bf16 --gpu-memory 80GB \\
        --host-memory 256GB
    python -m megatron_hybrid plan --config run.yaml --gpus 2 --measure

Prints the memory of a rank by kind, the smallest offload fraction that fits, the largest that costs
nothing, the time of a step and what bounds it, and the size of a checkpoint; see docs/offload.md.
All flags of a run may be given too, and mean what they mean there. No weights are made.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from megatron.core.device import DeviceConfig
from megatron.core.drivers import kinds_of_accelerators
from megatron.core.help_format import ProgramParser
from megatron.core.host_memory import HostMemoryError
from megatron.core.log import printable
from megatron.core.options import ConfigError
from megatron.training.arguments import parse_config
from megatron_hybrid.plan.answer import Answer, Limits, answer
from megatron_hybrid.plan.measure import Measured, measure
from megatron_hybrid.plan.planned_run import PlannedRun, with_defaults
from megatron_hybrid.plan.quantities import parse_flops, parse_rate, parse_size, shown_size
from megatron_hybrid.plan.step_time import Machine
from megatron_hybrid.plan.table import format_answer

_EXIT_REFUSED = 2
# A CUDA context, NCCL's buffers, and memory that the allocator cannot join: not planned.
_LEAST_RESERVE, _RESERVED_SHARE = 2 * 10**9, 0.05
_MOST_CHARACTERS = 4000  # of an error's line
_RATES = ("flops", "link", "host_bandwidth")  # without which there is no time of a step


def build_parser(program: str) -> argparse.ArgumentParser:
    """The plan's own flags; those of a run are not among them."""
    parser = ProgramParser(
        prog=program,
        description=__doc__,
        allow_abbrev=False,
        epilog="Flags of a run may follow: python -m megatron_hybrid pretrain --help lists them.",
    )
    parser.add_argument("--gpus", default="1", metavar="N", help="ranks, all on one machine")
    parser.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="memory of each device, e.g. 80GB (default: not checked)",
    )
    parser.add_argument(
        "--gpu-reserve",
        metavar="SIZE",
        help="part of --gpu-memory left to CUDA, its libraries and gaps between tensors (default: "
        "5 %%, but at least 2GB)",
    )
    parser.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="host memory for all ranks of the machine, e.g. 256GB (default: not checked)",
    )
    parser.add_argument(
        "--flops",
        metavar="RATE",
        help="speed of a device in training, e.g. 400TFLOP/s (default: no step time)",
    )
    parser.add_argument(
        "--link",
        metavar="RATE",
        help="bandwidth between device and host, each way, e.g. 50GB/s (default: no step time)",
    )
    parser.add_argument(
        "--host-bandwidth",
        metavar="RATE",
        help="bandwidth of the host memory for all ranks, e.g. 300GB/s (default: no step time)",
    )
    parser.add_argument(
        "--gpu-bandwidth",
        metavar="RATE",
        help="bandwidth of a device's memory (default: not counted)",
    )
    parser.add_argument(
        "--interconnect",
        metavar="RATE",
        help="bandwidth at which a device sends and receives in collectives (default: not counted)",
    )
    parser.add_argument(
        "--disk",
        metavar="RATE",
        help="bandwidth at which all ranks write checkpoints (default: no checkpoint time)",
    )
    parser.add_argument(
        "--tokens-per-step",
        metavar="N",
        help="--global-batch-size in tokens instead of sequences (default: that of the run)",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure on this machine all rates that are not given; takes some seconds",
    )
    parser.add_argument(
        "--measure-disk",
        metavar="DIR",
        help="with --measure: directory in which to measure --disk (default: not measured)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(argv: Sequence[str] | None = None, program: str = "plan.py") -> int:
    """Plans. Returns the exit code: 2 for flags that cannot be used, and for what cannot fit."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments, flags = build_parser(program).parse_known_args(given)
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
    """The plan of a run with these flags.

    Raises:
        ConfigError: for flags that cannot be used, and for a run that does not fit.
        HostMemoryError: for a layer that is too large to be measured here.
    """
    world_size = _whole_number(arguments.gpus, "--gpus")
    kind = _device_kind(flags, arguments.measure)
    limits = _limits(arguments, kind)
    rates = _rates(arguments)
    run = PlannedRun(_run_flags(arguments, flags), world_size, kind)
    measured = None
    if arguments.measure:
        measured = measure(run, arguments.measure_disk)
    disk = rates["disk"]
    if disk is None and measured is not None:
        disk = measured.disk_bytes
    return answer(run, limits, _machine(rates, measured, world_size), disk)


def _limits(arguments: argparse.Namespace, device_kind: str) -> Limits:
    """The memory that there is, less what nobody plans."""
    device, host = _size(arguments, "gpu_memory"), _size(arguments, "host_memory")
    text, reserve = arguments.gpu_reserve, None
    if text is not None:
        reserve = parse_size(text, "--gpu-reserve", may_be_zero=True)
    if device is None:
        if reserve is not None:
            raise ConfigError("--gpu-reserve: expected --gpu-memory beside it, got none.")
        return Limits(None, host)

    if reserve is None:
        is_on_host = device_kind == "cpu"
        reserve = 0 if is_on_host else max(_LEAST_RESERVE, int(_RESERVED_SHARE * device))
    if reserve >= device:
        got = f"{shown_size(device)}, of which {shown_size(reserve)} are reserved (--gpu-reserve)"
        raise ConfigError(f"--gpu-memory: expected more than the reserve, got {got}.")
    return Limits(device - reserve, host, reserve)


def _run_flags(arguments: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    """The run's part of the command line."""
    names = [word.partition("=")[0] for word in flags]
    sources = [flag for flag in ("--hf-model", "--config") if flag in names]
    if len(sources) != 1:
        got = " and ".join(sources) or "neither"
        raise ConfigError(f"Expected --hf-model DIR or --config FILE, got {got}.")

    filled = [*flags]
    if sources == ["--hf-model"]:
        filled = with_defaults(_split_values(flags))
    if arguments.tokens_per_step is not None:
        if "--global-batch-size" in names:
            raise ConfigError("--tokens-per-step: expected no --global-batch-size beside it.")
        filled += ["--global-batch-size", str(_sequences(arguments, filled))]
    return filled


def _sequences(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """The sequences of a step of so many tokens."""
    tokens = _whole_number(arguments.tokens_per_step, "--tokens-per-step")
    # The length may come from a file: the run without a batch size knows it.
    world_size = _whole_number(arguments.gpus, "--gpus")
    length = parse_config(flags, world_size, needs_files=False).data.seq_length
    if tokens % length:
        raise ConfigError(
            f"--tokens-per-step: expected a multiple of the sequence length {length}, got {tokens}."
        )
    return tokens // length


def _split_values(flags: Sequence[str]) -> list[str]:
    """`--flag=value` as two words."""
    words: list[str] = []
    for word in flags:
        flag, equals, value = word.partition("=")
        words += [flag, value] if equals and word.startswith("--") else [word]
    return words


def _device_kind(flags: Sequence[str], is_measured: bool) -> str:
    """Of the device that the plan is for: this machine's if it is measured, else an accelerator."""
    words = _split_values(flags)
    named = dict(pairwise(words)).get("--device", "auto")
    if named != "auto":
        return named
    return DeviceConfig().kind if is_measured else kinds_of_accelerators()[0]


def _machine(
    rates: dict[str, float | None], measured: Measured | None, world_size: int
) -> Machine | None:
    """What each rank reaches: as given, and as measured for the rest. None: too little is known."""
    if measured is None and any(rates[name] is None for name in _RATES):
        given = [name for name in _RATES if rates[name] is not None]
        if given:
            lacking = [_flag(name) for name in _RATES if rates[name] is None]
            raise ConfigError(
                f"{_flag(given[0])}: expected {' and '.join(lacking)} beside it, or --measure, for "
                "the time of a step, got none."
            )
        return None

    # What is not given is as measured; without that, only what is given is counted.
    own = Machine(0.0, math.inf, 0.0, 0.0) if measured is None else measured.machine
    host = rates["host_bandwidth"]
    return Machine(
        flops=rates["flops"] or own.flops,
        device_bytes=rates["gpu_bandwidth"] or own.device_bytes,
        link_bytes=rates["link"] or own.link_bytes,
        # The machine's, which its ranks share.
        host_bytes=own.host_bytes if host is None else host / world_size,
        interconnect_bytes=rates["interconnect"] or own.interconnect_bytes,
        collective_seconds=own.collective_seconds,
        device_is_host=own.device_is_host,
    )


def _rates(arguments: argparse.Namespace) -> dict[str, float | None]:
    """The rates that are given, by the flag's name."""
    found: dict[str, float | None] = {}
    for name in ("link", "host_bandwidth", "gpu_bandwidth", "interconnect", "disk"):
        text = getattr(arguments, name)
        found[name] = None if text is None else parse_rate(text, _flag(name))
    text = arguments.flops
    found["flops"] = None if text is None else parse_flops(text, "--flops")

    folder = arguments.measure_disk
    if folder is not None and not (arguments.measure and Path(folder).is_dir()):
        expected = "--measure and a folder that exists"
        raise ConfigError(f"--measure-disk: expected {expected}, got {printable(folder, 80)!r}.")
    return found


def _size(arguments: argparse.Namespace, name: str) -> int | None:
    text = getattr(arguments, name)
    return None if text is None else parse_size(text, _flag(name))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _whole_number(text: str, flag: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**40):
        raise ConfigError(f"{flag}: expected a whole number from 1, got {printable(text, 80)!r}.")
    return int(text)
