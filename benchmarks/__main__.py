"""The command line; see docs/benchmarks.md."""

from __future__ import annotations

import argparse
import importlib
import sys

# Imported when asked for: `list` takes no torch.
COMMANDS = {
    "run": ("benchmarks.runner.command", "run benchmarks and file their results"),
    "list": ("benchmarks.runner.registry", "name the benchmarks, their questions and durations"),
    "report": ("benchmarks.reporting.command", "draw the stored results and write the tables"),
}


def main() -> int:
    """Hands all that follows the command's name to it."""
    described = "\n".join(f"  {name:8} {help}" for name, (_, help) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"Commands:\n{described}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    module = importlib.import_module(COMMANDS[arguments.command][0])
    returned: int = module.main(arguments.arguments)
    return returned


if __name__ == "__main__":
    sys.exit(main())
