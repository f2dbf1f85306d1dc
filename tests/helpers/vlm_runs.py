"""Small runs of `pretrain_vlm.py` about drawn shapes."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_vlm
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.formats import open_checkpoint, read_piece
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.store import open_store
from megatron.training.checkpoint.resume import Resumer
from megatron.training.engine import SaveLoadMeta
from megatron.training.engines import ModuleEngine
from megatron.training.health.exits import ExitCode, ExitError
from megatron.training.images import ImageProcessing
from megatron_hybrid.preprocess_multimodal import SampleMaker, preprocess

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "qwen3_5_vl_proxy"
PROCESSING = ImageProcessing(patch_size=4, min_pixels=256)
TOWER = (
    "--vision-num-layers 2 --vision-hidden-size 16 --vision-ffn-hidden-size 24 "
    "--vision-num-attention-heads 2 --vision-patch-size 4 --vision-num-position-embeddings 36"
).split()
DECODER = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 40 --num-attention-heads 2 "
    "--kv-channels 16 --normalization RMSNorm --apply-layernorm-1p --swiglu --qk-layernorm "
    "--disable-bias-linear --attention-output-gate --rotary-percent 0.5 --linear-attention-freq 2 "
    "--linear-conv-kernel-dim 4 --linear-key-head-dim 8 --linear-value-head-dim 8 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --attention-dropout 0 --hidden-dropout 0"
).split()
TRAINING = (
    "--seq-length 160 --micro-batch-size 1 --global-batch-size 4 --train-iters 5 --eval-iters 0 "
    "--lr 3e-3 --lr-decay-style constant --num-workers 0 --log-interval 1 --split 100"
).split()
OFFLOADED = (
    "--optimizer-cpu-offload --optimizer-offload-fraction 1 --overlap-cpu-optimizer-d2h-h2d"
).split()


def load_example(name: str) -> Any:
    """A script of the example, as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw_shapes(folder: Path, num_train: int, num_held_out: int = 0) -> Path:
    """Draws and preprocesses pictures. Returns the directory, which has a `tokenizer`, too."""
    shapes = load_example("shapes")
    shapes.write_tokenizer(folder / "tokenizer")
    shapes.write_pictures(folder, "train", num_train, seed=0)
    if num_held_out:
        shapes.write_pictures(folder, "held_out", num_held_out, seed=0)
    maker = SampleMaker(str(folder / "tokenizer"), PROCESSING)
    preprocess([folder / "train.jsonl"], str(folder / "train"), maker)
    return folder


def data_flags(folder: Path) -> list[str]:
    return [
        *("--data-path", str(folder / "train")),
        *("--tokenizer-model", str(folder / "tokenizer")),
        *("--make-vocab-size-divisible-by", "8"),
    ]


def flags(folder: Path, *others: object) -> list[str]:
    """Those of a small model on the pictures of a directory."""
    return [*data_flags(folder), *TOWER, *DECODER, *TRAINING, *map(str, others)]


def run(argv: list[str]) -> str:
    """A run on this rank; returns its log."""
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        pretrain_vlm.run(argv)
    return log.getvalue()


def save_what_is_loaded(argv: list[str], folder: str) -> None:
    """On each rank: a run that saves its checkpoint anew as soon as it has loaded it, and ends."""
    load = Resumer.load

    def load_and_save(self: Resumer, engine: ModuleEngine, kept: None) -> Any:
        load(self, engine, kept)
        engine.save(SaveLoadMeta(f"{folder}/loaded", with_optim=True))
        raise ExitError(ExitCode.FINISHED, "it has saved")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Resumer, "load", load_and_save)
        with pytest.raises(ExitError, match="it has saved"):
            run(argv)


def tensors_of(root: Path, checkpoint_of: int | str) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by its iteration or its name, whole."""
    name = checkpoint_name(checkpoint_of) if isinstance(checkpoint_of, int) else checkpoint_of
    checkpoint = open_checkpoint(open_store(str(root)), name)
    return {
        key: read_piece(checkpoint, key, Box((0,) * len(saved.shape), tuple(saved.shape)))
        for key, saved in checkpoint.tensors.items()
    }


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two checkpoints have the same tensors to the bit."""
    return one.keys() == other.keys() and all(
        tensor.dtype == other[key].dtype and torch.equal(tensor, other[key])
        for key, tensor in one.items()
    )
