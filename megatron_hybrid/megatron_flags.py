"""Rewrites a launch script of Megatron-LM for this program.

    python -m megatron_hybrid megatron-flags train.sh > train_here.sh
    python -m megatron_hybrid megatron-flags train.sh --in-place

Flags with another name here are replaced, and flags without effect are deleted. Unsupported flags
are left in the script unless --remove-unsupported is given, because a run without them may be
pointless. Flags that depend on a variable with an unknown value are left, too. All other text is
unchanged. The script is read, not executed.

A report goes to stderr. Exit code: 0 if no flag is left to decide, 1 if some are, 2 for bad input.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.core.files import published
from megatron.core.options import ConfigError
from megatron.training.flag_report import FlagLine, laid_out
from megatron_hybrid import parsers
from megatron_hybrid.endings import one_line_errors
from megatron_hybrid.launch_script import CHANGES, LEFT, Handling, Rewritten, rewrite
from megatron_hybrid.shell_words import ShellSyntaxError

EXIT_LEFT, EXIT_BAD_INPUT = 1, 2
_MAX_BYTES = 4 * 2**20


def main(argv: Sequence[str], program: str = "megatron-flags") -> int:
    """Rewrites a script and returns the exit code. Error messages start with `program`."""
    arguments = parsers.megatron_flags(program).parse_args(argv)
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
        return EXIT_LEFT if any(one.handling in LEFT for one in rewritten.findings) else 0
    return EXIT_BAD_INPUT


def report(path: Path, rewritten: Rewritten) -> list[str]:
    """Returns the lines of the report, grouped by handling."""
    findings = rewritten.findings
    if not rewritten.num_flags and not findings:
        what = "its program's name starts with pretrain, train or finetune and ends in .py"
        return [f"{path}: no training command with flags was found; {what}. Nothing changed."]
    changed, left = (sum(one.handling in kind for one in findings) for kind in (CHANGES, LEFT))
    heading = f"{path}: {rewritten.num_flags} flags; {changed} changed, {left} left to you."
    groups: dict[str, dict[FlagLine, None]] = {handling.value: {} for handling in Handling}
    for one in findings:
        verb = "now" if one.handling is Handling.REPLACED else "use"
        use = f"{verb} {' '.join(one.use)}" if one.use else ""
        entry = FlagLine(f"line {one.line}: {one.given}", one.why, use)
        if one.handling is Handling.DELETED and one.given.startswith("--"):
            entry = FlagLine(one.given)  # flag_answers.yaml has the reasons
        groups[one.handling.value][entry] = None  # once: a flag may be in several branches
    return [heading, *laid_out(groups)]


def _read(path: Path) -> str:
    """Returns the script. Bytes that are not UTF-8 survive encoding with `_write`."""
    if not path.is_file():
        raise ConfigError(f"Expected a bash script, got {path}, which is no file.")
    with path.open("rb") as stream:
        content = stream.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path}: expected a bash script, got more than {_MAX_BYTES} bytes.")
    return content.decode("utf-8", "surrogateescape")


def _target(path: Path, output: Path | None, in_place: bool) -> Path | None:
    if in_place:
        return path.resolve()  # a link stays one
    if output is not None and output.exists() and output.samefile(path):
        raise ConfigError(f"--output: expected another file than {path}, or --in-place.")
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        got = f"the directory {output}" if output.is_dir() else f"{output}"
        raise ConfigError(f"--output: expected a file in an existing directory, got {got}.")
    return output


def _write(text: str, target: Path | None, original: Path) -> None:
    """Writes the script atomically, with the permissions of the original."""
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
