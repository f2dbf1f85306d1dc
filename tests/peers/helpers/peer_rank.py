"""Shared by the jobs on their ranks: a tiny Llama, its batches, optimizers and engines."""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.core.distributed.fsdp import fully_shard
from megatron.core.optimizer import FusedAdam, HybridDeviceOptimizer

VOCABULARY = 64
LENGTH = 16  # tokens
NUM_STEPS = 4
SAVED_AFTER = 2
OPTIONS = {"lr": 1e-2, "weight_decay": 0.01}

# As a program names them: a class and its options.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, OPTIONS),
    "FusedAdam": (FusedAdam, OPTIONS),
    "HDO 0": (HybridDeviceOptimizer, OPTIONS | {"offload_fraction": 0.0}),
    "HDO 0.5": (HybridDeviceOptimizer, OPTIONS | {"offload_fraction": 0.5}),
    "HDO 1": (HybridDeviceOptimizer, OPTIONS | {"offload_fraction": 1.0}),
}
ENGINES: dict[str, Callable[..., Any]] = {"FSDP2": fsdp2.fully_shard, "ours": fully_shard}


def serve(train: Callable[..., list[float]]) -> None:
    """Calls `train` for each of the runs in `runs.json`; writes the result, or the error."""
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    outcomes = {}
    for name, settings in json.loads((directory / "runs.json").read_text()).items():
        try:
            outcomes[name] = {"numbers": train(**settings)}
        except BaseException:  # torch's CheckpointException is no Exception
            outcomes[name] = {"error": traceback.format_exc()}
    (directory / f"rank{dist.get_rank()}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


class Training(Protocol):
    """A model and its optimizer under a library that trains."""

    def step(self, number: int) -> list[float]:
        """Losses of its microbatches, and the norm of its gradients."""

    def save(self, path: str) -> None: ...

    def load(self, path: str) -> None: ...


def run_training(
    make: Callable[[str, str], Training],
    engine: str,
    optimizer: str,
    resume_on: Sequence[str] | None,
) -> list[float]:
    """What `step` returns for each step.

    Args:
        make: the training on an engine with an optimizer.
        resume_on: the engine and the optimizer of a second training, which repeats the steps after
            the save from the saved state.
    """
    torch._dynamo.reset()
    training = make(engine, optimizer)
    numbers = [number for step in range(SAVED_AFTER) for number in training.step(step)]
    if resume_on is not None:
        path = f"{common_directory()}/checkpoint"
        training.save(path)
        training = make(*resume_on)
        training.load(path)
    return numbers + [
        number for step in range(SAVED_AFTER, NUM_STEPS) for number in training.step(step)
    ]


def use_engine(engine: str) -> None:
    """Changes the import of programs that take `fully_shard` from PyTorch when they shard."""
    fsdp2.fully_shard = ENGINES[engine]


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    cls, options = OPTIMIZERS[name]
    return cls(parameters, **options)


def tiny_llama(is_tied: bool = False) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=is_tied,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def batch(number: int) -> dict[str, torch.Tensor]:
    """This rank's batch of that number."""
    generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def scalar(value: Any) -> float:
    """A loss or a norm, which may be a DTensor."""
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)


def common_directory() -> str:
    """A new directory, the same on all ranks."""
    paths = [tempfile.mkdtemp(dir=sys.argv[1])]
    dist.broadcast_object_list(paths)
    return str(paths[0])
