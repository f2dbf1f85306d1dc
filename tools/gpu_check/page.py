"""The page at the end: a line for each stage, with its most telling figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.gpu_check.runner import STAGE_FAILED, Outcome

_MOST_CHARACTERS = 160  # of a line
_MOST_NOTE_CHARACTERS = 300


def line_of(outcome: Outcome) -> str:
    """`adam                ok       12.3 s  28 checks; ...`."""
    checks = [record for record in outcome.records if record["kind"] == "check"]
    telling = [
        _shown(record)
        for record in outcome.records
        if record["kind"] == "figure" and record["telling"]
    ]
    parts = [outcome.reason] if outcome.reason else []
    if checks:
        num_passed = sum(record["ok"] for record in checks)
        parts.append(f"{num_passed} of {len(checks)} checks")
    text = " ".join("; ".join([*parts, *telling]).split())[:_MOST_CHARACTERS]
    return f"{outcome.stage:<18} {outcome.outcome:<8} {outcome.seconds:6.1f} s  {text}"


def page_of(outcomes: Sequence[Outcome], *, simulate: bool, seconds: float) -> str:
    """The whole page. What failed is repeated in full below the table."""
    counts = {
        kind: sum(outcome.outcome == kind for outcome in outcomes)
        for kind in ("ok", "failed", "skipped")
    }
    where = (
        "on the simulated accelerator: correctness only, its times mean nothing"
        if simulate
        else "on this machine"
    )
    shown = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    lines = [f"gpu-check {where}: {shown}, {seconds:.0f} s", "", *map(line_of, outcomes)]
    failed = [
        f"{outcome.stage}: {text}"
        for outcome in outcomes
        if outcome.outcome == STAGE_FAILED
        for text in _failures(outcome)
    ]
    if failed:
        lines += ["", "what failed:", *failed]
    notes = [
        f"{outcome.stage}: {record['text']}"[:_MOST_NOTE_CHARACTERS]
        for outcome in outcomes
        for record in _of_kind(outcome, "note")
    ]
    if notes:
        lines += ["", "notes:", *notes]
    return "\n".join(lines) + "\n"


def _failures(outcome: Outcome) -> list[str]:
    checks = [
        f"{record['what']}: expected {record['expected']}, got {record['got']}"
        for record in _of_kind(outcome, "check")
        if not record["ok"]
    ]
    errors = [record["text"].strip().splitlines()[-1] for record in _of_kind(outcome, "error")]
    return [text[:400] for text in [*checks[:8], *errors[:4]]]


def _of_kind(outcome: Outcome, kind: str) -> list[dict[str, Any]]:
    return [record for record in outcome.records if record["kind"] == kind]


def _shown(record: dict[str, Any]) -> str:
    value = record["value"]
    number = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"{record['name']} {number} {record['unit']}".strip()
