#!/usr/bin/env python3
"""What training here costs beyond a plain PyTorch loop: transformers' Llama with fused AdamW, in
DDP where there are several ranks.

    python -m benchmarks.plain_loop --ranks 1 2

Both models have the same shape and the same first weights. Ours trains by its engine (`no_shard`,
fp32 main weights, gradient norm and all that a run does); theirs by fp32 weights under autocast in
bf16, or in fp32. "model alone" is forward and backward in the compute dtype, without an optimizer.
Both sides run interleaved in one process group, in an order drawn anew each round. "ms" is by the
clock, "CPU ms" the time of all threads of rank 0.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.models import SEED, llama_config
from benchmarks.helpers.ranks import on_own_ranks
from benchmarks.helpers.result import Measurement, Ratio, Result, measured
from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.training.checkpoint.hf_weights import load_hf
from megatron.training.config import EngineConfig
from megatron.training.engines import MegatronEngine
from megatron.training.model_loss import mean_of_all

BENCHMARK = Benchmark(
    name="plain_loop",
    question="A training step against transformers' Llama in a plain loop, on 1 and 2 ranks",
    ranks=1,
    full=("--rounds=5",),
    quick=("--layers=2", "--vocabulary=8000", "--dtypes=bfloat16", "--rounds=5"),
)

LR, WARM_UP = 1e-4, 2
OURS, PLAIN = "ours", "plain PyTorch"
LOSSES_DIFFER = 0.02  # at most; bf16 rounds losses of 10 in steps of 0.06, but these are of fp32
Step = Callable[[], float]


class Comparison(NamedTuple):
    """Ours beside the plain loop."""

    measurements: tuple[Measurement, ...]
    ratios: tuple[Ratio, ...]


def our_model(arguments: argparse.Namespace) -> GPTModel:
    """A Llama."""
    config = llama_config(
        arguments.layers, arguments.hidden, ffn_hidden_size=arguments.ffn, norm_epsilon=1e-6
    )
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


def timed(step: Step) -> tuple[float, float]:
    """(milliseconds of CPU time, milliseconds by the clock) of a step."""
    dist.barrier()
    begun, used = time.perf_counter(), time.process_time()
    step()
    return (time.process_time() - used) * 1e3, (time.perf_counter() - begun) * 1e3


def measure(sides: dict[str, Step], group: str, num_rounds: int) -> Comparison:
    """Both sides' steps."""
    losses = {name: mean_over_ranks(step()) for name, step in sides.items()}
    assert abs(losses[OURS] - losses[PLAIN]) < LOSSES_DIFFER, losses

    works = {name: partial(timed, step) for name, step in sides.items()}
    pairs = report.interleaved(works, num_rounds, warm_up=WARM_UP, seed=SEED)
    cpu, clock = ({name: [one[i] for one in own] for name, own in pairs.items()} for i in (0, 1))
    ratios = (
        Ratio(f"{group}: {unit}, {OURS} / {PLAIN}", medians[OURS] / medians[PLAIN], at_most=1.05)
        for unit, medians in (("CPU ms", report.medians(cpu)), ("ms", report.medians(clock)))
    )
    return Comparison((*measured(cpu, "CPU ms", group), *measured(clock, "ms", group)), (*ratios,))


def mean_over_ranks(loss: float) -> float:
    """Of the ranks' losses; of an average, itself."""
    total = torch.tensor(loss)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def compare(rank: int, arguments: argparse.Namespace) -> list[Comparison]:
    """All comparisons on these ranks."""
    num_ranks, found = dist.get_world_size(), []
    for name in arguments.dtypes:
        dtype, batch = getattr(torch, name), batch_of(arguments, rank)
        where = f"{name}, {num_ranks} rank{'s' * (num_ranks > 1)}"
        for kind, build_ours, build_plain in (
            ("training", ours, plain),
            ("model alone", our_model_alone, their_model_alone),
        ):
            sides = {
                OURS: build_ours(arguments, dtype, batch),
                PLAIN: build_plain(arguments, dtype, batch),
            }
            found.append(measure(sides, f"{kind}, {where}", arguments.rounds))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measures."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--ffn", type=int, default=1024, help="width inside the MLP")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    arguments = parser.parse_args(argv)

    found = [
        comparison
        for num_ranks in arguments.ranks
        for comparison in on_own_ranks(num_ranks, compare, arguments)
    ]
    result = Result(
        tuple(one for comparison in found for one in comparison.measurements),
        tuple(ratio for comparison in found for ratio in comparison.ratios),
        settings=report.settings_of(arguments),
    )
    report.hand_over(result, arguments.output)


if __name__ == "__main__":
    main()
