#!/usr/bin/env python3
"""The cost of training here over plain PyTorch: time against a loop over transformers' Llama, and
memory against FSDP2.

    python -m benchmarks.plain_loop --rounds 15

Time: one rank, both models of one shape and with the same first weights. This project uses an
engine (with the gradient norm, as in a run); the plain loop fused AdamW over fp32 weights, under
autocast in bf16, or in fp32. "model alone" is forward and backward in the compute dtype, without an
optimizer. All sides run interleaved in one process, in an order drawn anew each round. "ms" is by
the clock, "CPU ms" the time of all threads. Dtypes that PyTorch multiplies by a reference loop on
this CPU (megatron/core/products.py) are not timed.

Memory: the most bytes of tensors that rank 0 has at a time from building to the end of the third
step. Both sides shard this project's model by layer.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.memory import peak_bytes
from benchmarks.helpers.models import SEED, llama_config
from benchmarks.helpers.ranks import on_own_ranks
from benchmarks.helpers.result import Measurement, NotRun, Ratio, Result, measured
from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.units import sharding_units
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.products import is_slow
from megatron.training.checkpoint.hf_weights import load_hf
from megatron.training.config import EngineConfig
from megatron.training.engines import MegatronEngine
from megatron.training.model_loss import mean_of_all

BENCHMARK = Benchmark(
    name="plain_loop",
    question="A training step's time against transformers' Llama in a plain loop on one rank, and "
    "its peak memory against PyTorch FSDP2 on 1 and 2 ranks",
    ranks=1,
    full=("--rounds=15",),
    quick=("--layers=2", "--vocabulary=8000", "--dtypes=float32", "--rounds=3"),
)

LR, WARM_UP = 1e-4, 2
OURS, PLAIN, FSDP2 = "ours", "plain PyTorch", "FSDP2"
TRAINING = "training"
NUM_STEPS = 3  # of which the peak is taken: the first makes the optimizer's states
LOSSES_DIFFER = 0.02  # at most; bf16 rounds losses of 10 in steps of 0.06, but these are of fp32
Step = Callable[[], float]


class Comparison(NamedTuple):
    """This project against the plain loop."""

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
    """Loads the weights of the transformers model into this project's model."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(their_model(arguments), f"{folder}/model.safetensors")
        load_hf(model, folder)


def batch_of(arguments: argparse.Namespace, rank: int) -> tuple[Tensor, Tensor]:
    """A rank's tokens and labels: [micro batch, sequence] int64."""
    generator = torch.Generator().manual_seed(rank)
    shape = (arguments.micro_batch, arguments.sequence + 1)
    text = torch.randint(arguments.vocabulary, shape, generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def engine_of(arguments: argparse.Namespace, dtype: torch.dtype) -> MegatronEngine:
    """This project's engine, with initial weights."""
    config = EngineConfig(
        OptimizerConfig(clip_grad=1.0),
        LRScheduleConfig(lr=LR, lr_decay_style="constant"),
        DataParallelConfig(),
        train_iters=1 << 20,
        compute_dtype="fp32" if dtype == torch.float32 else "bf16",
    )
    engine = MegatronEngine(config, Device("cpu"), build_mesh("cpu", dist.get_world_size()))
    engine.initialize(lambda: our_model(arguments))
    return engine


def step_of(engine: MegatronEngine, batch: tuple[Tensor, Tensor]) -> Step:
    """A step of our engine."""
    tokens, labels = batch

    def forward_step(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        weights = mean_of_all(batch["labels"])
        loss: Tensor = model(batch["tokens"], batch["labels"], loss_weights=weights).loss
        return loss

    def step() -> float:
        result = engine.train_batch([{"tokens": tokens, "labels": labels}], forward_step)
        return result.loss

    return step


def ours(arguments: argparse.Namespace, dtype: torch.dtype, batch: tuple[Tensor, Tensor]) -> Step:
    """A step of our engine from the weights of transformers' model."""
    engine = engine_of(arguments, dtype)
    load_theirs(engine.model, arguments)
    return step_of(engine, batch)


def plain(arguments: argparse.Namespace, dtype: torch.dtype, batch: tuple[Tensor, Tensor]) -> Step:
    """A step as a PyTorch user writes it."""
    model = their_model(arguments)
    tokens, labels = batch

    def loss_of() -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss: Tensor = model(input_ids=tokens, labels=labels, shift_labels=labels).loss
        return loss

    return _trained(model, loss_of)


def _trained(model: nn.Module, forward: Callable[[], Tensor]) -> Step:
    """A step with fused AdamW, its gradients clipped by their norm."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return _passed(model, forward, update)


def _passed(
    model: nn.Module, forward: Callable[[], Tensor], update: Callable[[], object] = lambda: None
) -> Step:
    """Forward and backward, then `update`."""

    def step() -> float:
        loss = forward()
        loss.backward()
        update()
        model.zero_grad()
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
    return _passed(model, lambda: model(*batch, loss_weights=weights).loss)


def their_model_alone(
    arguments: argparse.Namespace, dtype: torch.dtype, batch: tuple[Tensor, Tensor]
) -> Step:
    """Forward and backward of the transformers model."""
    model = their_model(arguments).to(dtype)
    tokens, labels = batch
    return _passed(model, lambda: model(input_ids=tokens, labels=labels, shift_labels=labels).loss)


def timed(step: Step) -> tuple[float, float]:
    """(milliseconds of CPU time, milliseconds by the clock) of a step."""
    dist.barrier()
    begun, used = time.perf_counter(), time.process_time()
    step()
    return (time.process_time() - used) * 1e3, (time.perf_counter() - begun) * 1e3


def measure(sides: dict[str, Step], group: str, num_rounds: int) -> Comparison:
    """Both sides' steps."""
    losses = {name: step() for name, step in sides.items()}
    assert abs(losses[OURS] - losses[PLAIN]) < LOSSES_DIFFER, losses

    works = {name: partial(timed, step) for name, step in sides.items()}
    pairs = report.interleaved(works, num_rounds, warm_up=WARM_UP, seed=SEED)
    cpu, clock = ({name: [one[i] for one in own] for name, own in pairs.items()} for i in (0, 1))
    bar = 1.0 if group.startswith(TRAINING) else None  # models alone only explain the difference
    ratios = (
        Ratio(f"{group}: {unit}, {OURS} / {PLAIN}", medians[OURS] / medians[PLAIN], at_most=bar)
        for unit, medians in (("CPU ms", report.medians(cpu)), ("ms", report.medians(clock)))
    )
    return Comparison((*measured(cpu, "CPU ms", group), *measured(clock, "ms", group)), (*ratios,))


def compare_times(rank: int, arguments: argparse.Namespace) -> list[Comparison]:
    """Steps against the plain loop, and models alone, in dtypes of fast products."""
    found = []
    for name in arguments.dtypes:
        if is_slow(torch.empty(0, dtype=getattr(torch, name))):
            continue
        dtype, batch = getattr(torch, name), batch_of(arguments, rank)
        for kind, build_ours, build_plain in (
            (TRAINING, ours, plain),
            ("model alone", our_model_alone, their_model_alone),
        ):
            sides = {
                OURS: build_ours(arguments, dtype, batch),
                PLAIN: build_plain(arguments, dtype, batch),
            }
            found.append(measure(sides, f"{kind}, {name}", arguments.rounds))
    return found


def by_fsdp2(
    arguments: argparse.Namespace, dtype: torch.dtype, batch: tuple[Tensor, Tensor]
) -> Step:
    """A step of our model as a user of FSDP2 writes it."""
    model = our_model(arguments)
    mesh = build_mesh("cpu", dist.get_world_size())
    narrow = None if dtype == torch.float32 else dtype
    policy = MixedPrecisionPolicy(param_dtype=narrow, cast_forward_inputs=False)
    for unit in [*sharding_units(model), model]:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    weights = mean_of_all(batch[1])
    return _trained(model, lambda: model(*batch, loss_weights=weights).loss)


def peak_of(rank: int, side: str, arguments: argparse.Namespace, dtype: torch.dtype) -> int:
    """The most bytes of tensors of a side."""
    batch = batch_of(arguments, rank)

    def train() -> None:
        if side == OURS:
            step = step_of(engine_of(arguments, dtype), batch)
        else:
            step = by_fsdp2(arguments, dtype, batch)
        for _ in range(NUM_STEPS):
            step()

    return peak_bytes(train)


def compare_peaks(num_ranks: int, arguments: argparse.Namespace) -> Iterator[Comparison]:
    """The peaks of this project and of FSDP2, each on new ranks."""
    for name in arguments.dtypes:
        group = f"peak memory, {name}, {num_ranks} rank{'s' * (num_ranks > 1)}"
        dtype = getattr(torch, name)
        found = {
            side: on_own_ranks(num_ranks, peak_of, side, arguments, dtype) / 2**20
            for side in (OURS, FSDP2)
        }
        ratio = Ratio(f"{group}: {OURS} / {FSDP2}", found[OURS] / found[FSDP2], at_most=1.0)
        sides = {side: [value] for side, value in found.items()}
        yield Comparison(measured(sides, "MiB", group), (ratio,))


def main(argv: Sequence[str] | None = None) -> None:
    """Measures."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="of peak memory")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--ffn", type=int, default=1024, help="width inside the MLP")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    arguments = parser.parse_args(argv)

    found = on_own_ranks(1, compare_times, arguments)
    for num_ranks in arguments.ranks:
        found += compare_peaks(num_ranks, arguments)
    result = Result(
        tuple(one for comparison in found for one in comparison.measurements),
        tuple(ratio for comparison in found for ratio in comparison.ratios),
        tuple(
            NotRun(f"times in {name}", "on this CPU, PyTorch multiplies them by a reference loop")
            for name in arguments.dtypes
            if is_slow(torch.empty(0, dtype=getattr(torch, name)))
        ),
        settings=report.settings_of(arguments),
    )
    report.hand_over(result, arguments.output)


if __name__ == "__main__":
    main()
