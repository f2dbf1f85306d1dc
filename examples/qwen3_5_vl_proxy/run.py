"""Runs the proxy from its data to its accuracy, in a few minutes on two cores:

    python examples/qwen3_5_vl_proxy/run.py

draws pictures, trains with the optimizer in host memory, saves at iterations 10 and 12, resumes
from each checkpoint and compares the losses, trains to the end, and captions held-out pictures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_PROJECT = _HERE.parents[1]
_FIRST, _SECOND, _BEYOND = 10, 12, 16  # iterations of two saves, and the last one of resumed runs


def run(*command: str | Path) -> None:
    """Runs a Python program of this project. Exits with its code if it fails."""
    words = [str(word) for word in command]
    print(f"\n$ python {' '.join(words)}", flush=True)
    # More threads slow down ranks that share cores.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(_PROJECT)}
    done = subprocess.run([sys.executable, *words], cwd=_PROJECT, env=environment, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def train(arguments: argparse.Namespace, save: Path, *flags: str) -> None:
    """Trains to the last iteration, or to the one that `flags` set."""
    launch = ("-m", "megatron_hybrid", "launch", "--standalone")
    run(
        *launch,
        *("--nproc-per-node", str(arguments.ranks)),
        *("pretrain_vlm.py", "--config", _HERE / "train.yaml"),
        *("--data-path", str(arguments.data / "train")),
        *("--tokenizer-model", str(arguments.data / "tokenizer")),
        *("--train-iters", str(arguments.iterations), "--save", save),
        *("--metrics-jsonl", save / "metrics.jsonl"),
        *flags,
    )


def losses(save: Path) -> dict[int, float]:
    """Returns the loss of each logged iteration of a run."""
    found: dict[int, float] = {}
    for line in (save / "metrics.jsonl").read_text().splitlines():
        record: dict[str, Any] = json.loads(line)
        if record["kind"] == "train":
            found[record["iteration"]] = record["loss"]
    return found


def resume_from_each(arguments: argparse.Namespace) -> None:
    """Trains past both saves, resumes from each, and compares the losses to the last bit."""
    each = ("--log-interval", "1", "--exit-interval", str(_BEYOND))
    straight = arguments.runs / "straight"
    train(arguments, straight, "--save-interval", "2", *each)
    expected = losses(straight)
    for iteration in (_FIRST, _SECOND):
        resumed = arguments.runs / f"from_{iteration}"
        train(arguments, resumed, "--load", straight / f"iter_{iteration:07d}", *each)
        found = losses(resumed)
        after = range(iteration + 1, _BEYOND + 1)
        if [found[n] for n in after] != [expected[n] for n in after]:
            sys.exit(f"The run resumed at iteration {iteration} had other losses: {found}.")
        print(f"resumed at iteration {iteration}: the losses equal the undisturbed run's")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the Qwen3.5-VL proxy and measures it.")
    parser.add_argument("--data", type=Path, default=Path("data/shapes"))
    parser.add_argument("--runs", type=Path, default=Path("runs/qwen3_5_vl_proxy"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pictures", type=int, default=6000, help="to train on")
    parser.add_argument("--iterations", type=int, default=350)
    parser.add_argument("--questions", type=int, default=400, help="about held-out pictures")
    arguments = parser.parse_args()

    shutil.rmtree(arguments.runs, ignore_errors=True)
    shapes = _HERE / "shapes.py"
    run(shapes, "--output", arguments.data, "--train", str(arguments.pictures))
    run(
        *("-m", "megatron_hybrid", "preprocess-multimodal"),
        *("--input", arguments.data / "train.jsonl"),
        *("--output-prefix", arguments.data / "train"),
        *("--tokenizer-model", arguments.data / "tokenizer"),
        *("--patch-size", "4", "--min-pixels", "256", "--workers", "2"),
    )
    resume_from_each(arguments)
    whole = arguments.runs / "whole"
    train(arguments, whole, "--load", arguments.runs / "straight" / f"iter_{_SECOND:07d}")
    run(
        *(_HERE / "accuracy.py", "--load", whole, "--data", arguments.data),
        *("--count", str(arguments.questions)),
    )


if __name__ == "__main__":
    main()
