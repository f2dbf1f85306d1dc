"""`SaveLoadMeta`: a request to save or load, passed to an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron.training.checkpoint.hf_layout import check_dtype

WEIGHT_FORMATS = ("dcp", "hf")


@dataclass(frozen=True)
class SaveLoadMeta:
    """What to save or load, and where.

    Attributes:
        path: the checkpoint's directory. `save` creates it unless it exists and is empty; its name
            must not be one that a run's own checkpoints have. `dcp` of `MegatronEngine` takes an
            fsspec URL, too.
        weight_format: `dcp`: PyTorch DCP, sharded, to resume from on any number of ranks. `hf`:
            safetensors with config.json, as transformers loads it; weights alone.
        with_optim: also the optimizer's states, the schedule, the random states and the counters.
        tokenizer, processor: saved with `hf` weights; any object with `save_pretrained(directory)`.
        base_model_path: with `hf`, the directory of the model that training started from. Files
            that the save does not write itself are copied from there, weights excepted.
        hf_dtype: with `hf`, of all weights in the files but for fp32 parameters of an `Fp32Module`,
            which stay fp32; None: bf16 for weights with fp32 main weights. `torch.float32` keeps
            main weights exactly, so that `load` restores them bit for bit.
        adds_rows: with `hf`, whether the model may have more vocabulary rows than the directory;
            `load_hf` describes how they are initialized.

    Raises:
        ValueError: for another format, options that `hf` does not support, and other dtypes.
    """

    path: str
    weight_format: str = "dcp"
    with_optim: bool = False
    tokenizer: Any = None
    processor: Any = None
    base_model_path: str | None = None
    hf_dtype: torch.dtype | None = None
    adds_rows: bool = False

    def __post_init__(self) -> None:
        if self.weight_format not in WEIGHT_FORMATS:
            raise ValueError(
                f"Expected a weight format among {WEIGHT_FORMATS}, got {self.weight_format!r}."
            )
        if self.weight_format == "hf" and self.with_optim:
            raise ValueError(
                "Expected weights alone in the format hf, got with_optim=True; dcp holds states "
                "too."
            )
        check_dtype(self.hf_dtype)
        for name in ("tokenizer", "processor", "base_model_path", "hf_dtype"):
            if self.weight_format == "dcp" and getattr(self, name) is not None:
                raise ValueError(
                    f"Expected a {name} only with the format hf, got one with dcp, which has no "
                    "use for it."
                )
