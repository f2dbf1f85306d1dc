"""Runs the recipes in `test_cases/`: whole runs of `pretrain_gpt.py`, held against golden losses
and each other.

A recipe is a directory with `config.yaml` (below) and `golden.json`: for each world size (dropout
draws other masks on other ranks) the losses by iteration and the evaluations at the end.

    kind: resume            # regular | resume | reshard | offload-parity
    world_sizes: [1, 2]     # the recipe runs on each
    interrupt_at: 4         # resume, offload-parity: the iteration where the run stops and restarts
    agreement: 1.0e-5       # relative difference of losses allowed between world sizes
    settings: {...}         # flags of pretrain_gpt.py, without dashes

Losses are compared with the golden values to 1e-3 (they may come from another machine), between
world sizes to `agreement`, and within one world size bit for bit. The data is the text of LICENSE
in bytes, which never changes.

`python -m tests.functional_tests.helpers.runner NAME...` runs recipes by hand; with `--update` it
writes their golden.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

import pretrain_gpt
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.training.tokenizer import ByteTokenizer
from tests.helpers.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[3]
CASES = Path(__file__).resolve().parents[1] / "test_cases"
GOLDEN_TOLERANCE = 1e-3
RUN_TIMEOUT = 1200.0  # seconds


@dataclass(frozen=True)
class Recipe:
    """A test case as its directory describes it."""

    name: str
    kind: str
    world_sizes: list[int]
    settings: dict[str, Any]
    agreement: float | None = None
    interrupt_at: int | None = None

    @classmethod
    def read(cls, name: str) -> Recipe:
        content = yaml.safe_load((CASES / name / "config.yaml").read_text())
        if content["kind"] not in KINDS:
            raise ValueError(
                f"{name}: expected a kind among {sorted(KINDS)}, got {content['kind']!r}."
            )
        return cls(name, **content)

    @property
    def golden_path(self) -> Path:
        return CASES / self.name / "golden.json"


@dataclass(frozen=True)
class Run:
    """What one run left behind."""

    losses: dict[int, float]  # by iteration, the last record of each
    evaluations: dict[str, float]  # at the end, by split
    checkpoint: dict[str, torch.Tensor]  # model and optimizer, whole tensors by key


def build_corpus(folder: Path) -> Path:
    """LICENSE in bytes, a document for each paragraph; returns the data prefix."""
    tokenizer = ByteTokenizer()
    prefix = folder / "license_text_document"
    with IndexedDatasetBuilder(str(prefix), np.uint16) as builder:
        for paragraph in (ROOT / "LICENSE").read_text().split("\n\n"):
            builder.add_document([*tokenizer.tokenize(paragraph), tokenizer.eod])
    return prefix


def execute(
    recipe: Recipe,
    folder: Path,
    data_prefix: Path,
    world_size: int,
    label: str = "run",
    **overrides: Any,
) -> Run:
    """Runs `pretrain_gpt.py` on `world_size` ranks with the recipe's settings; checkpoints go to
    `folder/label`.
    """
    home = folder / f"{label}_{world_size}"
    home.mkdir(exist_ok=True)
    metrics = home / "metrics.jsonl"
    settings = {
        "tokenizer-type": "ByteTokenizer",
        "data-path": [str(data_prefix)],
        "num-workers": 0,
        "save": str(home / "checkpoints"),
        "metrics-jsonl": str(metrics),
        **recipe.settings,
        **overrides,
    }
    config = home / f"config_{len(list(home.glob('config_*')))}.yaml"
    config.write_text(yaml.safe_dump(settings))
    run_ranks(world_size, _run_pretrain, ["--config", str(config)], timeout=RUN_TIMEOUT)
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Run(
        losses={
            record["iteration"]: record["loss"] for record in records if record["kind"] == "train"
        },
        evaluations={
            record["split"]: record["loss"] for record in records if record["kind"] == "eval"
        },
        checkpoint=read_checkpoint(home / "checkpoints"),
    )


def read_checkpoint(root: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint but the random states, whole, through DCP alone; an
    empty dict without a checkpoint.
    """
    folders = sorted(path for path in root.glob("iter_*") if not path.suffix)
    return read_tensors(folders[-1]) if folders else {}


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint but the random states, whole, through DCP alone."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith("rng.")
    }
    load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    return tensors


def run_regular(recipe: Recipe, folder: Path, data_prefix: Path) -> dict[int, Run]:
    """The same run on every world size."""
    return {size: execute(recipe, folder, data_prefix, size) for size in recipe.world_sizes}


def run_resume(recipe: Recipe, folder: Path, data_prefix: Path) -> dict[int, Run]:
    """An uninterrupted run, and one stopped and resumed: from there on the same bits, down to the
    final weights.
    """
    runs = {}
    for size in recipe.world_sizes:
        whole = runs[size] = execute(recipe, folder, data_prefix, size)
        assert_resumes(recipe, folder, data_prefix, whole, size, {}, {})
    return runs


def assert_resumes(
    recipe: Recipe,
    folder: Path,
    data_prefix: Path,
    whole: Run,
    size: int,
    before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    """A run stopped at `interrupt_at` and resumed, with other settings before and after, ends as
    `whole` did.
    """
    if recipe.interrupt_at is None:
        raise ValueError(
            f"{recipe.name}: expected interrupt_at in a recipe of kind {recipe.kind}, got none."
        )
    execute(
        recipe,
        folder,
        data_prefix,
        size,
        "resumed",
        **{"exit-interval": recipe.interrupt_at, **before},
    )
    load_from = str(folder / f"resumed_{size}" / "checkpoints")
    (folder / f"resumed_{size}" / "metrics.jsonl").unlink()
    resumed = execute(recipe, folder, data_prefix, size, "resumed", load=load_from, **after)
    expected = {k: loss for k, loss in whole.losses.items() if k > recipe.interrupt_at}
    assert expected, "the interruption comes before the end"
    assert resumed.losses == expected
    assert resumed.evaluations == whole.evaluations
    assert_same_tensors(resumed.checkpoint, whole.checkpoint)


def run_reshard(recipe: Recipe, folder: Path, data_prefix: Path) -> dict[int, Run]:
    """Trained on the first world size; the checkpoint evaluates alike on all of them."""
    first, *others = recipe.world_sizes
    trained = execute(recipe, folder, data_prefix, first)
    load_from = str(folder / f"run_{first}" / "checkpoints")
    for size in (first, *others):
        overrides = {"load": load_from, "skip-train": True, "save": None, "save-interval": None}
        loaded = execute(recipe, folder, data_prefix, size, "loaded", **overrides)
        assert loaded.losses == {}
        assert_close(
            loaded.evaluations, trained.evaluations, 1e-6, f"{recipe.name} on {size} ranks"
        )
    return {first: trained}


# The location of optimizer states and the time of their updates must not change a bit.
ON_DEVICE = {"optimizer-cpu-offload": False}
ON_BOTH = {"optimizer-offload-fraction": 0.5, "overlap-cpu-optimizer-d2h-h2d": True}
ON_HOST = {
    "optimizer-offload-fraction": 1.0,
    "overlap-cpu-optimizer-d2h-h2d": True,
    "overlap-optimizer-with-forward": True,
}


def run_offload_parity(recipe: Recipe, folder: Path, data_prefix: Path) -> dict[int, Run]:
    """The same run without offloading and with all states on the host; then one that moves half of
    them back.
    """
    runs = {}
    for size in recipe.world_sizes:
        whole = runs[size] = execute(recipe, folder, data_prefix, size, "device", **ON_DEVICE)
        other = execute(recipe, folder, data_prefix, size, "host", **ON_HOST)
        assert other.losses == whole.losses
        assert other.evaluations == whole.evaluations
        assert_same_tensors(other.checkpoint, whole.checkpoint)
        assert_resumes(recipe, folder, data_prefix, whole, size, ON_HOST, ON_BOTH)
    return runs


KINDS: dict[str, Callable[[Recipe, Path, Path], dict[int, Run]]] = {
    "regular": run_regular,
    "resume": run_resume,
    "reshard": run_reshard,
    "offload-parity": run_offload_parity,
}


def check(recipe: Recipe, folder: Path, data_prefix: Path) -> None:
    """Runs a recipe and holds it against its golden values and its world sizes against each
    other.
    """
    runs = KINDS[recipe.kind](recipe, folder, data_prefix)
    golden = json.loads(recipe.golden_path.read_text())
    for size, run in runs.items():
        where = f"{recipe.name} on {size} ranks"
        expected = golden[str(size)]
        assert_close(
            run.losses,
            {int(k): loss for k, loss in expected["losses"].items()},
            GOLDEN_TOLERANCE,
            where,
        )
        assert_close(run.evaluations, expected["evaluations"], GOLDEN_TOLERANCE, where)
    if recipe.agreement is not None:
        reference = runs[recipe.world_sizes[0]]
        for size, run in runs.items():
            assert_close(
                run.losses, reference.losses, recipe.agreement, f"{recipe.name} on {size} ranks"
            )


def assert_close(
    got: dict[Any, float], expected: dict[Any, float], tolerance: float, where: str
) -> None:
    """The same keys, and values that differ by at most `tolerance`, relatively."""
    assert got.keys() == expected.keys(), f"{where}: expected {sorted(expected)}, got {sorted(got)}"
    for key, value in expected.items():
        difference = abs(got[key] / value - 1)
        assert difference <= tolerance, (
            f"{where}, {key}: expected {value}, got {got[key]} ({difference:.1e} off)"
        )


def assert_same_tensors(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same keys, and the same bits under each."""
    assert got.keys() == expected.keys()
    assert expected, "there are tensors to compare"
    different = [key for key, value in expected.items() if not torch.equal(got[key], value)]
    assert different == []


def _run_pretrain(argv: list[str]) -> None:
    pretrain_gpt.run(argv)


def main() -> None:
    """Runs recipes by hand."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", help="recipes; default: all")
    parser.add_argument(
        "--work", type=Path, required=True, help="an empty folder for data and checkpoints"
    )
    parser.add_argument("--update", action="store_true", help="write golden.json from the results")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True)
    data_prefix = build_corpus(arguments.work)
    for name in arguments.names or sorted(path.name for path in CASES.iterdir()):
        recipe = Recipe.read(name)
        folder = arguments.work / name
        folder.mkdir()
        if arguments.update:
            runs = KINDS[recipe.kind](recipe, folder, data_prefix)
            content = {
                size: {"losses": run.losses, "evaluations": run.evaluations}
                for size, run in runs.items()
            }
            recipe.golden_path.write_text(json.dumps(content, indent=1) + "\n")
        else:
            check(recipe, folder, data_prefix)
        print(f"{name}: good", file=sys.stderr)


if __name__ == "__main__":
    main()
