"""`python -m megatron_hybrid COMMAND ...`: the programs of this project, from any directory.

    python -m megatron_hybrid preprocess --input texts/ --output-prefix data/mine ...
    python -m megatron_hybrid launch -m megatron_hybrid pretrain --config run.yaml
    python -m megatron_hybrid status runs/mine
    python -m megatron_hybrid checkpoint export runs/mine exports/mine
    python -m megatron_hybrid generate --load exports/mine --prompt "def main():"

Each program has its own `--help`, exit codes and messages.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PROGRAM = "python -m megatron_hybrid"
_PACKAGE = Path(__file__).resolve().parents[1] / "megatron"
_EXIT_USAGE = 2


class Command(NamedTuple):
    """A program: `main(argv, program)` of the module returns its exit code."""

    module: str
    help: str


COMMANDS = {
    "pretrain": Command("pretrain_gpt", "train a GPT; on several ranks under launch or torchrun"),
    "pretrain-vlm": Command("pretrain_vlm", "train a model that reads images and text"),
    "plan": Command("plan.command", "plan the memory of a run and the time of its steps"),
    "launch": Command("launcher", "torchrun, without its tracebacks"),
    "preprocess": Command("preprocess_data", "tokenize text into token files"),
    "preprocess-multimodal": Command(
        "preprocess_multimodal", "make training files of conversations about pictures"
    ),
    "checkpoint": Command("checkpoint.command", "list, show, verify, diff, export checkpoints"),
    "generate": Command("generate", "sample text from a checkpoint or an exported model"),
    "status": Command("run_status", "show the status of a run"),
    "timeline": Command("timeline", "show the work of lanes in a recorded iteration"),
}

_HANDLE_SIGNALS = ("pretrain", "pretrain-vlm", "launch")  # themselves


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one program; returns its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] in (["-h"], ["--help"]):
        print(_usage())
        return 0
    if not given or given[0] not in COMMANDS:
        print(f"{_usage()}\n", file=sys.stderr)
        got = repr(given[0]) if given else "none"
        print(f"{PROGRAM}: expected a command of these, got {got}.", file=sys.stderr)
        return _EXIT_USAGE

    command, arguments = given[0], given[1:]
    program = f"{PROGRAM} {command}"
    try:
        check_package()
    except ImportError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return _EXIT_USAGE

    # argparse prints it in usage lines.
    sys.argv = [program, *arguments]
    # Until the run starts, Ctrl-C ends the process without a traceback from an import. Afterwards
    # the run's watchdog handles it.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if command == "pretrain" and is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    if not {"-h", "--help"}.isdisjoint(arguments):
        from megatron_hybrid.endings import quiet_pipes
        from megatron_hybrid.parsers import show_help_if_asked

        with quiet_pipes():
            show_help_if_asked(command, program, arguments)

    # Imports only this program: `status` starts without importing torch.
    module = importlib.import_module(f"megatron_hybrid.{COMMANDS[command].module}")
    if command in _HANDLE_SIGNALS:
        status: int = module.main(arguments, program)
    else:
        from megatron_hybrid.endings import run  # after the check: it imports megatron

        status = run(lambda: module.main(arguments, program))
    if command == "pretrain":
        from megatron.training.health.exits import exit_process

        exit_process(status)
    return status


def check_package() -> None:
    """Raises ImportError if `megatron` is another project's package."""
    import megatron  # checks itself for another project's files

    found = [str(Path(path).resolve()) for path in megatron.__path__]
    if found[:1] != [str(_PACKAGE)]:
        raise ImportError(
            f"Expected the package megatron of megatron-hybrid at {_PACKAGE}, got that of another "
            f"distribution at {', '.join(found)}. Uninstall it (e.g. megatron-core), or remove it "
            "from PYTHONPATH."
        )


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"usage: {PROGRAM} COMMAND ...   (COMMAND --help: its flags)", ""]
    lines += [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(lines)
