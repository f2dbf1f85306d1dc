#!/usr/bin/env python3
"""What training here costs beyond a plain PyTorch loop: transformers' Llama with fused AdamW, in
DDP where there are several ranks.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 1 benchmarks/plain_loop.py
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/plain_loop.py

Both models have the same shape and the same first weights. Ours trains by its engine (`no_shard`,
fp32 main weights, gradient norm and all that a run does); theirs by fp32 weights under autocast in
bf16, or in fp32. "model alone" is forward and backward in the compute dtype, without an optimizer.
All sides run interleaved in one process group, in an order drawn anew each round. Prints medians of
the CPU time of rank 0, all of its threads together, and of the time by the clock, with ratios to
the plain side, and writes them to benchmarks/results.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.helpers import report
from benchmarks.helpers.llama import llama_config
from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.training.checkpoint.hf_weights import load_hf
from megatron.training.engines import EngineConfig, MegatronEngine
from megatron.training.model_loss import mean_of_all

SEED, LR, WARM_UP = 0, 1e-4, 3
OURS, PLAIN = "ours", "plain"
LOSSES_DIFFER = 0.02  # at most; bf16 rounds losses of 10 in steps of 0.06, but these are of fp32
Step = Callable[[], float]


def our_model(arguments: argparse.Namespace) -> GPTModel:
    """A Llama."""
    config = llama_config(arguments, ffn_hidden_size=arguments.ffn, norm_epsilon=1e-6)
    return GPTModel(config, arguments.vocabulary)


def their_model(arguments: argparse.Namespace) -> LlamaForCausalLM:
    """The same, of transformers."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.ffn,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


def load_theirs(model: nn.Module, arguments: argparse.Namespace) -> None:
    """Gives our model the weights of theirs."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(their_model(arguments), f"{folder}/model.safetensors")
        load_hf(model, folder)


def batch_of(arguments: argparse.Namespace, rank: int) -> tuple[Tensor, Tensor]:
    """A rank's tokens and labels: [micro batch, sequence] int64."""
    generator = torch.Generator().manual_seed(rank)
    shape = (arguments.micro_batch, arguments.sequence + 1)
    text = torch.randint(arguments.vocabulary, shape, generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def ours(arguments: argparse.Namespace, dtype: torch.dtype, batch: tuple[Tensor, Tensor]) -> Step:
    """A step of our engine."""
    world_size = dist.get_world_size()
    config = EngineConfig(
        OptimizerConfig(clip_grad=1.0),
        LRScheduleConfig(lr=LR, lr_decay_style="constant"),
        DataParallelConfig(data_parallel_sharding_strategy="no_shard"),
        train_iters=1 << 20,
        compute_dtype="fp32" if dtype == torch.float32 else "bf16",
    )
    engine = MegatronEngine(config, Device("cpu"), build_mesh("cpu", world_size))
    engine.initialize(lambda: our_model(arguments))
    load_theirs(engine.model, arguments)
    tokens, labels = batch

    def forward_step(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        weights = mean_of_all(batch["labels"])
        loss: Tensor = model(batch["tokens"], batch["labels"], loss_weights=weights).loss
        return loss

    def step() -> float:
        result = engine.train_batch([{"tokens": tokens, "labels": labels}], forward_step)
        return result.loss

    return step


def plain(arguments: argparse.Namespace, dtype: torch.dtype, batch: tuple[Tensor, Tensor]) -> Step:
    """A step as a PyTorch user writes it."""
    model: nn.Module = their_model(arguments)
    if dist.get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    tokens, labels = batch

    def step() -> float:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(input_ids=tokens, labels=labels, shift_labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def our_model_alone(
    arguments: argparse.Namespace, dtype: torch.dtype, batch: tuple[Tensor, Tensor]
) -> Step:
    """Forward and backward of our model."""
    model = our_model(arguments)
    load_theirs(model, arguments)
    model.to(dtype)
    weights = mean_of_all(batch[1])
    return _alone(model, lambda: model(*batch, loss_weights=weights).loss)


def their_model_alone(
    arguments: argparse.Namespace, dtype: torch.dtype, batch: tuple[Tensor, Tensor]
) -> Step:
    """Forward and backward of theirs."""
    model = their_model(arguments).to(dtype)
    tokens, labels = batch
    return _alone(model, lambda: model(input_ids=tokens, labels=labels, shift_labels=labels).loss)


def _alone(model: nn.Module, forward: Callable[[], Tensor]) -> Step:
    def step() -> float:
        loss = forward()
        loss.backward()
        model.zero_grad()
        return float(loss.detach())

    return step


def measure(sides: dict[str, Step], num_rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of each side's steps: of the processor, and by the clock. The losses of
    the first steps show that both compute the same.
    """
    times: dict[str, dict[str, list[float]]] = {
        name: {"cpu_ms": [], "clock_ms": []} for name in sides
    }
    first_losses: dict[str, float] = {}
    schedule = report.schedule(list(sides), num_rounds + WARM_UP, seed=SEED)
    for number, name in enumerate(schedule):
        dist.barrier()
        begun, used = time.perf_counter(), time.process_time()
        loss = sides[name]()
        elapsed, spent = time.perf_counter() - begun, time.process_time() - used
        if number >= WARM_UP * len(sides):
            times[name]["cpu_ms"].append(spent * 1e3)
            times[name]["clock_ms"].append(elapsed * 1e3)
        first_losses.setdefault(name, mean_over_ranks(loss))
    assert abs(first_losses[OURS] - first_losses[PLAIN]) < LOSSES_DIFFER, first_losses
    return {
        name: {"first_loss": first_losses[name], **report.medians(values)}
        for name, values in times.items()
    }


def mean_over_ranks(loss: float) -> float:
    """Of the ranks' losses; of an average, itself."""
    total = torch.tensor(loss)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--ffn", type=int, default=1024, help="width inside the MLP")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15, help="that are counted")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for name in arguments.dtypes:
        dtype, batch = getattr(torch, name), batch_of(arguments, rank)
        found[name] = {
            "training": measure(
                {
                    OURS: ours(arguments, dtype, batch),
                    PLAIN: plain(arguments, dtype, batch),
                },
                arguments.rounds,
            ),
            "model alone": measure(
                {
                    OURS: our_model_alone(arguments, dtype, batch),
                    PLAIN: their_model_alone(arguments, dtype, batch),
                },
                arguments.rounds,
            ),
        }
    if rank == 0:
        show(found)
        content = {"settings": vars(arguments), "ranks": dist.get_world_size(), "found": found}
        print(report.write(f"plain_loop_{dist.get_world_size()}_ranks", content))
    dist.destroy_process_group()


def show(found: dict[str, Any]) -> None:
    """Prints the table."""
    for dtype, by_kind in found.items():
        for kind, sides in by_kind.items():
            for unit in ("cpu_ms", "clock_ms"):
                mine, theirs = sides[OURS][unit], sides[PLAIN][unit]
                print(
                    f"{dtype:>9} {kind:>12} {unit:>9}: ours {mine:8.1f}, plain {theirs:8.1f}, "
                    f"ratio {mine / theirs:.3f}"
                )


if __name__ == "__main__":
    main()
