"""Lists, shows, verifies, compares and exports checkpoints.

    python -m megatron_hybrid checkpoint list runs/gpt_cpu
    python -m megatron_hybrid checkpoint show runs/gpt_cpu/iter_0000300 --key 'model.layers.0.*'
    python -m megatron_hybrid checkpoint verify runs/gpt_cpu/iter_0000300
    python -m megatron_hybrid checkpoint diff runs/gpt_cpu/iter_0000300 runs/other/iter_0000300
    python -m megatron_hybrid checkpoint export runs/gpt_cpu exports/gpt

Runs in one process on the CPU. A checkpoint is a directory, or a URL that fsspec supports. `list`,
`show`, `diff` and `export` also take `torch_dcp` checkpoints, and others by
torch.distributed.checkpoint. `list` and `show` mark checkpoints without a run's state, from which
`--finetune` loads the weights. Exit code: 0, 1 if `verify` finds a problem or `diff` a difference,
2 for errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from megatron.core.dist_checkpointing.config import FSDP_DTENSOR, TORCH_DCP
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.manifest import MARKER_FILE, Marker, dtype_name
from megatron.core.dist_checkpointing.format.names import (
    parse_folder,
)
from megatron.core.dist_checkpointing.formats import (
    ReadableCheckpoint,
    format_of,
    open_checkpoint,
)
from megatron.core.dist_checkpointing.layout.saved import SavedTensor
from megatron.core.dist_checkpointing.load.checkpoint import (
    PublishedCheckpoint,
    check_size,
    read_marker,
    read_train_state,
)
from megatron.core.dist_checkpointing.store import (
    SIGN_FILE,
    TRACKER_FILE,
    Store,
    expect_folder,
    open_store,
    path_of,
)
from megatron.core.dtypes import DTYPES
from megatron.core.host_memory import format_bytes
from megatron.core.log import counted, printable
from megatron.core.models.hugging_face import hf_config
from megatron.training.checkpoint.hf_config import FolderExtras
from megatron.training.checkpoint.hf_export import bytes_to_export, export_hf
from megatron.training.checkpoint.hf_weights import HF_FOLDER
from megatron.training.checkpoint.run_info import is_of_a_run
from megatron_hybrid import parsers
from megatron_hybrid.checkpoint.audit import Audit
from megatron_hybrid.checkpoint.comparison import KeyComparison, compare
from megatron_hybrid.endings import one_line_errors
from megatron_hybrid.saved_model import find_model

_MAX_WIDTH = 200
_MAX_LINE = 4000  # characters of text from a checkpoint

_NO_RUN = "no run's state: --finetune loads its weights"
_DRAFT_SUFFIXES = {".saving": "draft", ".deleting": "being deleted", ".damaged": "damaged"}


class Location(NamedTuple):
    """A checkpoint's place, which may be empty."""

    store: Store
    name: str

    @property
    def path(self) -> str:
        return path_of(self.store, self.name)


def main(argv: Sequence[str] | None = None, program: str = "checkpoint") -> int:
    """Runs one command; returns the exit code."""
    arguments = parsers.checkpoint(program).parse_args(argv)
    with one_line_errors(program, (CheckpointError, OSError, ValueError)):
        return _COMMANDS[arguments.command](arguments)
    return 2


def list_checkpoints(arguments: argparse.Namespace) -> int:
    """Lists the checkpoints in a directory, published or not."""
    store = open_store(arguments.root)
    if store.is_rename_atomic and not Path(store.root).is_dir():
        raise CheckpointError(f"Expected a directory of checkpoints at {store.root}, got none.")
    tracker = store.read(TRACKER_FILE) if store.exists(TRACKER_FILE) else b""
    tracked = tracker.decode(errors="replace").strip()
    rows = [_summary(store, name, tracked) for name in store.folders() if parse_folder(name)]
    if arguments.json:
        _print_json(rows)
        return 0

    for row in rows:
        size = "" if row["num_bytes"] is None else format_bytes(row["num_bytes"])
        ranks = "" if row["world_size"] is None else counted(row["world_size"], "rank")
        note = f"  {row['problem']}" if row["problem"] else ""
        if row["is_run"] is False:
            note = f"  {_NO_RUN}"
        latest = "  <- latest" if row["is_latest"] else ""
        hf = "  with hf/" if row["has_hf"] else ""
        _print(
            f"{row['name']:<14} {row['format'] or '-':<12} {row['state']:<10} {ranks:>9} "
            f"{size:>11}{hf}{latest}{note}"
        )
    return 0


def _summary(store: Store, name: str, tracked: str) -> dict[str, Any]:
    """Returns a row of `list`. Compares sizes without reading data."""
    found = parse_folder(name)
    assert found is not None, "callers choose such names"
    row: dict[str, Any] = {"name": name, "iteration": found.iteration}
    row |= {"format": None, "state": "draft", "world_size": None, "num_bytes": None}
    row |= {"problem": None, "is_latest": False, "is_run": None, "has_hf": None}
    if found.suffix:
        row["state"] = _DRAFT_SUFFIXES.get(Path(name).suffix, "unknown")
        return row
    if store.exists(f"{name}/{SIGN_FILE}") and not store.exists(f"{name}/{MARKER_FILE}"):
        return row  # in a remote store, a checkpoint is published by its marker

    row["format"] = format_of(store, name)
    row["is_latest"] = tracked == str(row["iteration"])
    try:
        if row["format"] == FSDP_DTENSOR:
            marker = read_marker(store, name)
            row["world_size"] = marker.world_size
            row["num_bytes"] = sum(file.nbytes for file in marker.files.values())
            row["has_hf"] = _hf_nbytes(marker) > 0
            for file in marker.files:
                check_size(store, name, file, marker)
            row["is_run"] = is_of_a_run(read_train_state(store, name))
            if marker.iteration != found.iteration:
                saved = f"saved as iteration {marker.iteration}"
                row["problem"] = f"{saved}: no run resumes from it under this name"
        elif row["format"] == TORCH_DCP:
            checkpoint = open_checkpoint(store, name)
            tensors = checkpoint.tensors.values()
            row["world_size"] = len({chunk.file for each in tensors for chunk in each.chunks})
            row["num_bytes"] = sum(tensor.nbytes for tensor in tensors)
            row["is_run"] = is_of_a_run(checkpoint.train_state)
        if row["format"] is not None:
            row["state"] = "published"
    except CheckpointError as error:
        is_damaged = isinstance(error, CheckpointDamagedError)
        row |= {"state": "damaged" if is_damaged else "unreadable", "problem": str(error)}
    return row


def show(arguments: argparse.Namespace) -> int:
    """Shows the content of a checkpoint, its files, and the ranks that wrote it."""
    checkpoint = _open(arguments.checkpoint)
    tensors = [
        _described(saved)
        for saved in checkpoint.tensors.values()
        if _is_wanted(saved.key, arguments.key)
    ]
    plain = [{"key": key} for key in checkpoint.plain if _is_wanted(key, arguments.key)]

    head: dict[str, Any] = {"checkpoint": checkpoint.path, "format": TORCH_DCP}
    if isinstance(checkpoint, PublishedCheckpoint):
        marker = checkpoint.marker
        head |= {"format": FSDP_DTENSOR, "iteration": marker.iteration}
        head |= {"world_size": marker.world_size, "save_id": marker.save_id}
        head |= _hf_folder(checkpoint)
    is_run = is_of_a_run(checkpoint.train_state)
    if arguments.json:
        state = {"is_run": is_run, "train_state": checkpoint.train_state}
        _print_json({**head, **state, "tensors": tensors, "plain": plain})
        return 0

    words = [f"{name} {value}" for name, value in head.items()]
    _print(", ".join(words if is_run else [*words, _NO_RUN]))
    width = _width(row["key"] for row in (*tensors, *plain))
    for row in tensors:
        _print_tensor(row, width, arguments.chunks)
    for row in plain:
        _print(f"{row['key']:<{width}}  plain data")
    total = sum(row["nbytes"] for row in tensors)
    print(f"{len(tensors)} tensors of {format_bytes(total)}, {len(plain)} pieces of plain data")
    return 0


def _hf_nbytes(marker: Marker) -> int:
    """Returns the size of the files in `hf/`; 0 without the directory."""
    names = [file for file in marker.files if file.startswith(f"{HF_FOLDER}/")]
    return sum(marker.files[name].nbytes for name in names)


def _hf_folder(checkpoint: PublishedCheckpoint) -> dict[str, str]:
    """Returns a description of `hf/` for the first line of `show`; empty without the directory."""
    nbytes = _hf_nbytes(checkpoint.marker)
    if not nbytes:
        return {}
    chunks = (chunk for tensor in checkpoint.tensors.values() for chunk in tensor.chunks)
    has_weights = any(chunk.file.startswith(f"{HF_FOLDER}/") for chunk in chunks)
    contents = ", which contains the weights" if has_weights else ""
    return {f"{HF_FOLDER}/": f"of {format_bytes(nbytes)}{contents}"}


def _described(saved: SavedTensor) -> dict[str, Any]:
    chunks = [
        {"offsets": list(chunk.box.offsets), "sizes": list(chunk.box.sizes)}
        | {"rank": chunk.rank if chunk.rank >= 0 else None, "file": chunk.file}
        | {"offset": chunk.offset, "nbytes": saved.chunk_nbytes(chunk)}
        for chunk in saved.chunks
    ]
    row = {"key": saved.key, "dtype": dtype_name(saved.dtype), "shape": list(saved.shape)}
    return {**row, "nbytes": saved.nbytes, "chunks": chunks}


def _print_tensor(row: dict[str, Any], width: int, with_chunks: bool) -> None:
    chunks = row["chunks"]
    what = f"{row['dtype']:<9} {row['shape']!s:<16} {format_bytes(row['nbytes']):>11}"
    _print(f"{row['key']:<{width}}  {what}  {len(chunks)} chunks, {_writers(chunks)}")
    for chunk in chunks if with_chunks else ():
        pairs = zip(chunk["offsets"], chunk["sizes"], strict=True)
        box = ", ".join(f"{offset}:{offset + size}" for offset, size in pairs)
        place = f"{chunk['file']}, {chunk['nbytes']} bytes at {chunk['offset']}"
        _print(f"    [{box}]  {_writers([chunk])}: {place}")


def _writers(places: Iterable[dict[str, Any]]) -> str:
    """Returns the ranks that wrote chunks: "rank 3", "ranks 0-3, 7"."""
    found = {place["rank"] for place in places}
    ranks = sorted(rank for rank in found if rank is not None)
    if len(ranks) < len(found) or not ranks:
        return "of unknown ranks" if found else "of no rank"

    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def verify(arguments: argparse.Namespace) -> int:
    """Reads every byte of a checkpoint, and lists all problems."""
    location = _locate(arguments.checkpoint)
    found = format_of(*location)
    if found == TORCH_DCP:
        raise CheckpointError(
            f"Expected a checkpoint with digests in {location.path}, got one of the format "
            f"{TORCH_DCP}, which has none."
        )
    if found is None:
        expect_folder(location.store, location.name)

    with _progress_bar("verify", _data_nbytes(location)) as progress:
        audit = Audit(*location, progress)
        audit.run()
    if arguments.json:
        report = {"checkpoint": location.path, "is_intact": not audit.problems}
        _print_json({**report, "num_bytes": audit.num_bytes, "problems": audit.problems})
    else:
        for problem in audit.problems:
            _print(problem)
        outcome = f"{len(audit.problems)} problems" if audit.problems else "intact"
        print(f"{location.path}: {outcome}, {format_bytes(audit.num_bytes)} of data files read")
    return 1 if audit.problems else 0


def _data_nbytes(location: Location) -> int | None:
    """Returns the size of all data files; None if it is unknown."""
    try:
        return sum(
            file.nbytes for file in read_marker(*location).files.values() if file.digest is None
        )
    except CheckpointError:
        return None


def diff(arguments: argparse.Namespace) -> int:
    """Compares two checkpoints key by key."""
    a, b = _open(arguments.a), _open(arguments.b)
    both = dict.fromkeys([*a.tensors, *a.plain, *b.tensors, *b.plain])
    keys = [key for key in both if _is_wanted(key, arguments.key)]
    total = sum(saved.nbytes for key, saved in a.tensors.items() if key in keys)
    with _progress_bar("diff", total) as progress:
        found = list(compare(a, b, keys, progress))

    if arguments.json:
        _print_json({"a": a.path, "b": b.path, "keys": [_as_json(each) for each in found]})
    else:
        width = _width(each.key for each in found)
        for each in found:
            _print(f"{each.key:<{width}}  {_sentence(each)}")
        num_equal = sum(each.outcome == "equal" for each in found)
        print(f"{num_equal} of {len(found)} keys are equal")
    return int(any(each.outcome != "equal" for each in found))


def _sentence(each: KeyComparison) -> str:
    if each.outcome == "equal":
        return "equal" if each.max_difference is None else "bit-equal"
    if each.outcome == "values" and each.max_difference is not None:
        return f"{each.num_different} elements differ, by {each.max_difference:g} at most"
    if each.outcome == "kind":
        return "is a tensor in one and plain data in the other"
    return each.outcome if not each.detail else f"differs in {each.outcome}: {each.detail}"


def _as_json(each: KeyComparison) -> dict[str, Any]:
    row = dataclasses.asdict(each)
    if each.max_difference is not None and not math.isfinite(each.max_difference):
        row["max_difference"] = "inf"  # JSON has no number for it
    return row


def export(arguments: argparse.Namespace) -> int:
    """Exports a run's model for the transformers library: weights, config and tokenizer.

    Raises:
        CheckpointError, ConfigError: as `find_model` and `export_hf`, and for an exported
            directory.
    """
    model = find_model(
        arguments.run, arguments.ckpt_step, arguments.config, arguments.tokenizer_model
    )
    if model.checkpoint is None:
        raise CheckpointError(
            f"Expected a run or its checkpoint, got {model.path}, which is a Hugging Face "
            "directory."
        )

    checkpoint, description = open_checkpoint(*model.checkpoint), model.description
    if description.config.max_position_embeddings is None:
        # Without a length, other programs use their default.
        config = dataclasses.replace(description.config, max_position_embeddings=model.seq_length)
        description = description._replace(config=config)

    base_model = model.base_model
    if base_model is not None and not Path(base_model).is_dir():
        print(
            f"export: {printable(base_model)}, the base model of the run, does not exist: the "
            "export has no generation settings except the tokenizer's ids",
            file=sys.stderr,
        )
        base_model = None

    extras = FolderExtras.of_model(model.tokenizer, model.tokenizer_path, base_model)
    with _progress_bar("export", bytes_to_export(checkpoint, description)) as progress:
        exported = export_hf(
            checkpoint,
            arguments.out,
            description,
            tokenizer=extras.tokenizer,
            base_model_path=base_model,
            dtype=None if arguments.dtype is None else DTYPES[arguments.dtype],
            max_shard_bytes=arguments.max_shard_size,
            progress=progress,
        )
    summary = {
        "source": checkpoint.path,
        "target": arguments.out,
        "architecture": hf_config(description)["architectures"][0],
        "num_tensors": exported.num_tensors,
        "num_bytes": exported.num_bytes,
        "dtype": str(exported.dtype).removeprefix("torch."),
    }
    if arguments.json:
        _print_json(summary)
    else:
        size = format_bytes(exported.num_bytes)
        what = f"{exported.num_tensors} tensors of {size} in {summary['dtype']}"
        architecture, source = summary["architecture"], summary["source"]
        _print(f"{arguments.out}: {architecture}, {what}, of {source}")
    return 0


@contextmanager
def _progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], object]]:
    """Shows a bar on stderr if that is a terminal. Yields a function to call with bytes done.

    Args:
        what: a label.
        total: bytes; None: unknown.
    """
    with tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=None) as bar:
        yield bar.update


def _locate(checkpoint: str) -> Location:
    if "://" in checkpoint:
        root, _, name = checkpoint.rstrip("/").rpartition("/")
        return Location(open_store(root), name)
    path = Path(checkpoint).resolve()
    return Location(open_store(path.parent), path.name)


def _open(checkpoint: str) -> ReadableCheckpoint:
    return open_checkpoint(*_locate(checkpoint))


def _is_wanted(key: str, patterns: Sequence[str] | None) -> bool:
    return patterns is None or any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _width(keys: Iterable[str]) -> int:
    """Returns the width of a column of keys; longer keys overflow."""
    return max((len(key) for key in keys if len(key) <= _MAX_WIDTH), default=0)


def _print(line: str) -> None:
    """Prints text from a checkpoint without escape codes."""
    print(printable(line, _MAX_LINE))


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=1))


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": list_checkpoints,
    "show": show,
    "verify": verify,
    "diff": diff,
    "export": export,
}
