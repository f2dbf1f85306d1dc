"""The folder `hf/` in a run's checkpoints: the weights as `from_pretrained` opens them.

    export = HfExport.of(model, torch.bfloat16, FolderExtras(tokenizer))   # all ranks together
    manager.save(iteration, contents, train_state, export=export)

The files are those that `save_hf` writes, byte for byte. All but the weights is made once, when the
run starts: what cannot be written is an error before the first step, and a save copies it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from megatron.core.dist_checkpointing.agreement import on_all_ranks, on_first_rank
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.manifest import FURTHER_FILE
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.save.export import ExportedRows, ExportedTensor, ExportFile
from megatron.core.models.families.row_map import RowMap
from megatron.training.checkpoint.hf_extras import FolderExtras
from megatron.training.checkpoint.hf_layout import (
    MAX_SHARD_BYTES,
    FolderLayout,
    Part,
    rows_in_file,
    tensors_of_parts,
)
from megatron.training.checkpoint.hf_plan import (
    collect_weights,
    file_dtypes,
    rows_of,
    write_small_files,
)
from megatron.training.checkpoint.hf_row_writer import expect_same_layout

HF_FOLDER = "hf"


@dataclass(frozen=True)
class HfExport:
    """See the module's docstring. An `Export` of `megatron/core/dist_checkpointing`."""

    layout: FolderLayout
    row_maps: Mapping[str, RowMap]  # of each entry, by its key
    # All weights or none: a checkpoint whose `.metadata` lists some of them would be one more kind.
    is_exact: bool
    small_files: dict[str, bytes]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        dtype: torch.dtype | None,
        extras: FolderExtras,
        *,
        max_length: int | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> HfExport:
        """Called by all ranks together, once for a run.

        Args:
            model, dtype, max_shard_bytes: as for `save_hf`.
            extras: rank 0's are written.
            max_length: as for `write_small_files`.

        Raises:
            ConfigError, CheckpointError: on all ranks, as `save_hf` does.
        """
        on_all_ranks(extras.check)
        export = on_all_ranks(lambda: cls._planned(model, dtype, max_shard_bytes))

        def render() -> str:
            export.small_files.update(_rendered(model, export.layout, extras, max_length))
            return export.layout.fingerprint

        fingerprint = on_first_rank(render, f"Expected to make the files of {HF_FOLDER}/, got")
        on_all_ranks(lambda: expect_same_layout(export.layout, fingerprint))
        return export

    @classmethod
    def _planned(
        cls, model: nn.Module, dtype: torch.dtype | None, max_shard_bytes: int
    ) -> HfExport:
        contents = collect_weights(model)
        rows, dtypes = rows_of(model, contents), file_dtypes(model, contents, dtype)
        saved = [entry.saved_as for entry in contents.entries]

        parts = (Part(rows[own.key], own.shape, dtypes[own.key]) for own in saved)
        layout = FolderLayout.of(tensors_of_parts(parts), max_shard_bytes)
        is_exact = all(dtypes[own.key] == own.dtype for own in saved)
        return cls(layout, {own.key: rows[own.key] for own in saved}, is_exact, {})

    @cached_property
    def files(self) -> dict[str, ExportFile]:
        return {
            f"{HF_FOLDER}/{file.name}": ExportFile(file.header, file.nbytes)
            for file in self.layout.files
        }

    @cached_property
    def tensors(self) -> dict[str, ExportedTensor]:
        return {own.name: ExportedTensor(own.dtype, own.shape) for own in self.layout.tensors}

    def rows(self, key: str, box: Box) -> Iterator[ExportedRows]:
        row_map = self.row_maps.get(key)
        if row_map is None:
            return
        for found in rows_in_file(row_map, box, self.layout.places[row_map.name]):
            yield found._replace(file=f"{HF_FOLDER}/{found.file}")


def _rendered(
    model: nn.Module, layout: FolderLayout, extras: FolderExtras, max_length: int | None
) -> dict[str, bytes]:
    """All files but those of weights, by their paths in the checkpoint."""
    # Tokenizers and configs of other libraries can only write themselves into a folder.
    with tempfile.TemporaryDirectory(prefix="hf-") as name:
        folder = Path(name)
        write_small_files(folder, model, layout, extras, max_length)
        found = {
            f"{HF_FOLDER}/{path.relative_to(folder).as_posix()}": path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }

    for file in found:
        if FURTHER_FILE.fullmatch(file) is None:
            raise CheckpointError(
                f"Expected names of files of letters, digits, '.', '-' and '_', got {file!r}."
            )
    return found
