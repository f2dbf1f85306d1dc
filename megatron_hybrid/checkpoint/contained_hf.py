"""The folder `hf/` in a checkpoint, as `list` and `show` tell of it."""

from __future__ import annotations

from megatron.core.dist_checkpointing.format.manifest import Marker
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.host_memory import format_bytes
from megatron.training.checkpoint.hf_weights import HF_FOLDER

_PREFIX = f"{HF_FOLDER}/"


def hf_nbytes(marker: Marker) -> int:
    """The bytes of its files; 0 if there is none."""
    return sum(record.nbytes for file, record in marker.files.items() if file.startswith(_PREFIX))


def describe_hf(checkpoint: PublishedCheckpoint) -> dict[str, str]:
    """What there is to say of it, for the first line of `show`; empty if there is none."""
    nbytes = hf_nbytes(checkpoint.marker)
    if not nbytes:
        return {}
    chunks = (chunk for tensor in checkpoint.tensors.values() for chunk in tensor.chunks)
    has_weights = any(chunk.file.startswith(_PREFIX) for chunk in chunks)
    where = ", where the weights lie" if has_weights else ""
    return {_PREFIX: f"of {format_bytes(nbytes)}{where}"}
