"""Trainings of `pretrain_gpt.py` on the text of `make data`, for benchmarks of losses."""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.helpers.processes import started
from benchmarks.runner.registry import ROOT

NUM_RANKS = 2


def run(folder: Path, *words: str) -> None:
    """Runs Python in a folder. RuntimeError with its last lines of output, if it fails."""
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
