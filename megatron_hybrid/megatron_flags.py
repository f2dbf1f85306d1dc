"""Rewrites a launch script of Megatron-LM's for this program.

    python -m megatron_hybrid megatron-flags train.sh > train_here.sh
    python -m megatron_hybrid megatron-flags train.sh --in-place

Flags that are called otherwise here are replaced, and those without effect are deleted. Flags that
are not supported stay, unless --remove-unsupported is given: what a run without them is worth is
for you to say. So does a flag whose answer depends on a variable that the script does not assign.
All other text stays as it is, and the script is not executed.

What has changed and what is left is said on stderr. Exit code: 0 if nothing is left to decide, 1 if
something is, 2 if there is no such script.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.core.files import published
from megatron.core.help_format import ProgramParser
from megatron.core.options import ConfigError
from megatron.training.flag_report import FlagGroup, FlagLine, laid_out
from megatron_hybrid.endings import one_line_errors
from megatron_hybrid.megatron_scripts.rewrite import Outcome, Rewritten, left_over, rewrite
from megatron_hybrid.megatron_scripts.shell_words import ShellSyntaxError

EXIT_LEFT, EXIT_BAD_INPUT = 1, 2
_MAX_BYTES = 4 * 2**20
_TITLES = {
    Outcome.REPLACED: "Called otherwise here (rewritten)",
    Outcome.DELETED: "No effect here (deleted)",
    Outcome.REMOVED: "Not supported here (deleted, as told)",
    Outcome.UNSUPPORTED: "Not supported here (left: remove, or stay with Megatron-LM)",
    Outcome.UNDECIDED: "Could not be decided (left)",
    Outcome.UNKNOWN: "Unknown to both programs (left)",
    Outcome.DEFAULT: "Not given, with another default here",
}
# A list of these is enough: docs/coming-from-megatron.md has the reasons.
_WITHOUT_REASONS = (Outcome.DELETED,)


def main(argv: Sequence[str] | None = None, program: str = "megatron_flags.py") -> int:
    """Rewrites a script; returns the exit code.

    Args:
        argv: the arguments; default: the command line's.
        program: the name that error messages begin with.
    """
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    path: Path = arguments.script
    with one_line_errors(program, (ConfigError, OSError)):
        text = _read(path)
        target = _target(path, arguments.output, arguments.in_place)
        try:
            rewritten = rewrite(text, removes_unsupported=arguments.remove_unsupported)
        except ShellSyntaxError as error:
            raise ConfigError(f"{path}, {error}") from error
        _write(rewritten.text, target, path)

        print("\n".join(report(path, rewritten)), file=sys.stderr)
        return EXIT_LEFT if left_over(rewritten.findings) else 0
    return EXIT_BAD_INPUT


def report(path: Path, rewritten: Rewritten) -> list[str]:
    """What has been done, grouped by what to do about it."""
    findings = rewritten.findings
    if not rewritten.num_flags and not findings:
        what = "its program's name ends in .py and begins with pretrain, train or finetune"
        return [f"{path}: no training command with flags was found; {what}. Nothing changed."]
    left = len(left_over(findings))
    changed = sum(one.outcome.is_change for one in findings)
    heading = f"{path}: {rewritten.num_flags} flags; {changed} changed, {left} left to you."
    groups = []
    for outcome, title in _TITLES.items():
        entries = [
            FlagLine(f"line {one.line}: {one.given}", one.why, one.use)
            if outcome not in _WITHOUT_REASONS
            else FlagLine(one.given)
            for one in findings
            if one.outcome is outcome
        ]
        verb = "now" if outcome is Outcome.REPLACED else "use"
        # The same flag may stand in several branches.
        groups.append(FlagGroup(title, tuple(dict.fromkeys(entries)), verb))
    return [heading, *laid_out(groups)]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ProgramParser(
        description="Rewrites a launch script of Megatron-LM's for this program. Reports what it\n"
        "changed and what is left to decide.",
        epilog="exit code: 0 if nothing is left to decide, 1 if something is, 2 for bad input",
        allow_abbrev=False,
    )
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="a bash script")
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="file for the rewritten script (default: standard output)",
    )
    target.add_argument("--in-place", action="store_true", help="overwrite SCRIPT")
    parser.add_argument(
        "--remove-unsupported",
        action="store_true",
        help="also delete flags that are not supported here",
    )
    return parser.parse_args(argv)


def _read(path: Path) -> str:
    """The script. Bytes that are no UTF-8 come back as they are when it is written."""
    if not path.is_file():
        raise ConfigError(f"Expected a bash script, got {path}, which is no file.")
    with path.open("rb") as stream:
        content = stream.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES or b"\0" in content:
        kind = "a binary file" if b"\0" in content else f"more than {_MAX_BYTES} bytes"
        raise ConfigError(f"{path}: expected a bash script, got {kind}.")
    return content.decode("utf-8", "surrogateescape")


def _target(path: Path, output: Path | None, in_place: bool) -> Path | None:
    if in_place:
        return path.resolve()  # a link stays one
    if output is not None and output.exists() and output.samefile(path):
        raise ConfigError(f"--output: expected another file than {path}, or --in-place.")
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        got = f"the folder {output}" if output.is_dir() else f"{output}, whose folder is missing"
        raise ConfigError(f"--output: expected a file in a folder that exists, got {got}.")
    return output


def _write(text: str, target: Path | None, original: Path) -> None:
    """Writes all of it or nothing, with the permissions of the original."""
    content = text.encode("utf-8", "surrogateescape")
    if target is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    mode = original.stat().st_mode & 0o7777
    with published(target) as stream:
        stream.write(content)
    target.chmod(mode)


if __name__ == "__main__":
    sys.exit(main())
