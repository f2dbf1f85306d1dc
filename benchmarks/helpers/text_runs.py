"""Trainings of `pretrain_gpt.py` on the text of `make data`, for benchmarks of losses."""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.helpers.processes import started
from benchmarks.helpers.result import Measurement, measured
from benchmarks.runner.registry import ROOT

NUM_RANKS = 2
LAST = 25  # iterations, of which the training losses are


def run(folder: Path, *words: str) -> None:
    """Runs Python in a directory. RuntimeError with its last lines of output, if it fails."""
    log = folder / "log.txt"
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",  # ranks that share cores slow each other down
    }
    with (
        log.open("wb") as stream,
        started((sys.executable, *words), folder, environment, stream) as process,
    ):
        returned = process.wait()
    if returned:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"Expected exit code 0 of {words[0]}, got {returned}:\n{last}")


def prepare_text(folder: Path, num_documents: int | None) -> None:
    """Makes the text that the examples read, with a tokenizer trained on it."""
    data = folder / "data"
    data.mkdir()
    whole, text = data / "whole.jsonl", data / "stdlib.jsonl"
    run(folder, str(ROOT / "tools" / "build_stdlib_corpus.py"), "--output", str(whole))
    with whole.open() as documents, text.open("w") as chosen:
        chosen.writelines(itertools.islice(documents, num_documents))
    run(
        folder,
        "-m",
        "megatron_hybrid",
        "preprocess",
        *("--input", str(text), "--json-keys", "text", "--output-prefix", "data/stdlib"),
        *("--train-tokenizer", "--vocab-size", "4096", "--append-eod"),
        *("--tokenizer-type", "HuggingFaceTokenizer"),
        *("--tokenizer-model", "data/stdlib_tokenizer.json"),
    )


def train_on_text(folder: Path, example: str, options: Sequence[str]) -> list[dict[str, Any]]:
    """Trains a file of examples/ with further options, and returns the records of its metrics."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        metrics = Path(own) / "metrics.jsonl"
        run(
            folder,
            *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"),
            *(str(ROOT / "pretrain_gpt.py"), "--config", str(ROOT / "examples" / example)),
            *("--save", f"{own}/run", "--metrics-jsonl", str(metrics)),
            *options,
        )
        return [json.loads(line) for line in metrics.read_text().splitlines()]


def losses_on_text(folder: Path, num_iterations: int, options: Sequence[str]) -> dict[str, Any]:
    """Trains examples/gpt_cpu.yaml with further options. Returns the last training losses and the
    last validation loss.
    """
    records = train_on_text(
        folder,
        "gpt_cpu.yaml",
        (
            *(f"--train-iters={num_iterations}", "--log-interval=1"),
            *(f"--lr-warmup-iters={num_iterations * 8 // 100}",),
            *(f"--eval-interval={num_iterations}", *options),
        ),
    )
    losses = [one["loss"] for one in records if one["kind"] == "train"]
    validation = [one["loss"] for one in records if one.get("split") == "validation"]
    return {"training": losses[-LAST:], "validation": validation[-1]}


def measured_losses(
    runs: Mapping[str, Mapping[str, Any]], num_iterations: int
) -> list[Measurement]:
    """The losses of runs of `losses_on_text`, by side."""
    training = {side: run["training"] for side, run in runs.items()}
    validation = {side: [run["validation"]] for side, run in runs.items()}
    after = f"after {num_iterations} iterations"
    return [
        *measured(training, "nats", f"training loss {after}"),
        *measured(validation, "nats", f"validation loss {after}"),
    ]
