"""The environments of `make peers`: their interpreters, and what cannot run in them here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.helpers.result import NotRun
from benchmarks.runner.registry import ROOT

PROBES = Path(__file__).resolve().parent / "probes"
# The optimizer that each probe builds, by the name of its environment.
PROBED = {
    "torchao": "torchao CPUOffloadOptimizer",
    "megatron-core": "Megatron-LM HybridDeviceOptimizer",
}


def interpreter(peer: str, root: Path | None = None) -> Path | None:
    """The Python of a peer's environment; None if it has not been made.

    Args:
        root: of the environments; default: this repository.
    """
    python = (root or ROOT) / ".venv-peers" / peer / "bin" / "python"
    return python if python.exists() else None


def not_made(side: str, peer: str) -> NotRun:
    """For a side whose environment is missing."""
    return NotRun(side, f".venv-peers/{peer} has not been made: make peers")


def probe(peer: str) -> str | None:
    """Builds the offloaded optimizer of a peer in its environment. Returns the error, or None."""
    python = interpreter(peer)
    assert python is not None, "the caller has looked"
    # Isolated: the script's directory and the working directory may have modules of these names.
    script = PROBES / f"{peer.replace('-', '_')}.py"
    done = subprocess.run(
        [python, "-I", script], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode == 0:
        return None
    return done.stderr.rstrip().rpartition("\n")[2] or f"exit code {done.returncode}"


def peers_that_cannot_run() -> Iterator[NotRun]:
    """The peers that have a probe, each with the reason, also if it could run."""
    for peer, side in PROBED.items():
        if interpreter(peer) is None:
            yield not_made(side, peer)
            continue
        error = probe(peer)
        if error is None:
            yield NotRun(side, "it runs on this machine, but this benchmark has no side for it yet")
        else:
            yield NotRun(side, f"its constructor fails on this machine: {error}")


if __name__ == "__main__":
    for row in peers_that_cannot_run():
        print(f"{row.side}: {row.why}", file=sys.stdout)
