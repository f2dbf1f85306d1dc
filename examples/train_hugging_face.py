#!/usr/bin/env python3
"""Trains a Hugging Face causal LM with its optimizer in host memory: an engine in a custom program.

python -m megatron_hybrid launch --nproc-per-node 2 examples/train_hugging_face.py \\
    --output runs/hugging_face

The default model is a tiny Qwen3 with random weights, and the data is random: the program only
shows the calls. It needs `pip install '.[hf]'` in the clone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from megatron.core import log
from megatron.core.device import Device, kind_of
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.training.config import EngineConfig
from megatron.training.engine import SaveLoadMeta
from megatron.training.engines import MegatronEngine
from megatron.training.health.exits import exit_process
from megatron.training.launch import Launch, process_group
from megatron.training.step import Batch

TINY = Qwen3Config(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
)


def forward_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean loss of a microbatch; transformers shifts the labels itself."""
    loss: torch.Tensor = model(
        input_ids=batch["tokens"], labels=batch["tokens"], use_cache=False
    ).loss
    return loss.float()


def main() -> None:
    """Trains, saves in both formats, loads the checkpoint, and evaluates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="directory or name of a pretrained model")
    parser.add_argument(
        "--output", type=Path, required=True, help="output directory; must not exist"
    )
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    launch = Launch.from_environment()
    device = Device.for_rank(kind_of(), launch.local_rank, launch.local_world_size)
    log.configure(launch.rank)
    with process_group(launch, device, timeout_minutes=10.0):
        torch.manual_seed(0)  # real weights must be the same on every rank
        model = AutoModelForCausalLM.from_config(TINY)
        if arguments.model is not None:
            model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
        config = EngineConfig(
            OptimizerConfig(optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True),
            LRScheduleConfig(lr=1e-3, lr_decay_style="cosine"),
            DataParallelConfig(),
            train_iters=2 * arguments.steps,
            compute_dtype="bf16",
        )
        engine = MegatronEngine(
            config,
            device,
            build_mesh(device.kind, launch.world_size),
            num_local_ranks=launch.local_world_size,
        )
        engine.initialize(model)
        tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(launch.rank))
        for _ in range(arguments.steps):
            result = engine.train_batch(
                [{"tokens": tokens[:2]}, {"tokens": tokens[2:]}], forward_step
            )
            if launch.rank == 0:
                print(
                    f"step {engine.step_info().iteration}: loss {result.loss:.4f}, grad norm "
                    f"{result.grad_norm:.3f}"
                )
        weights = SaveLoadMeta(str(arguments.output / "weights"), "hf")
        whole = SaveLoadMeta(str(arguments.output / "step"), "dcp", with_optim=True)
        for meta in (weights, whole):
            engine.save(meta)
        engine.load(whole)
        loss = engine.eval_batch([{"tokens": tokens}], forward_step)
        if launch.rank == 0:
            print(f"saved in {arguments.output} and loaded again: loss {loss:.4f}")


if __name__ == "__main__":
    main()
    exit_process(0)
