#!/usr/bin/env python3
"""Tensor parallelism with sequence parallelism: layers that two ranks divide, against PyTorch's
`parallelize_module` and against one rank.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m benchmarks.tensor

Forward and backward of layers with attention and a gated MLP, in fp32. PyTorch's side is the same
model from `torch.nn`, with `ColwiseParallel`, `RowwiseParallel` and `SequenceParallel`; `wq`,
`wk` and `wv` are separate layers, as in torchtitan, since `ColwiseParallel` cannot divide sections.
All sides have the same weights and inputs, and their losses are compared. They run interleaved, in
an order drawn anew each round; a step ends when the slower rank ends. The peak is what torch
allocates on the rank that allocates most. Bytes are counted as this project's ranks send them in a
layer, and must equal the planner's formula.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks.context import seconds, total
from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.divided_layers import take_parts
from benchmarks.helpers.memory import peak_bytes
from benchmarks.helpers.models import SEED, llama_config
from benchmarks.helpers.ranks import launched
from benchmarks.helpers.result import Measurement, Ratio, measured
from megatron.core.distributed import tensor
from megatron.core.models.gpt.activations import Microbatch
from megatron.core.models.gpt.gpt_model import Places, TransformerBlock
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.rotary import RotaryAngles, apply_rotary
from megatron.core.transformer.spec import ModelSpec
from megatron_hybrid.plan.workload import sent_by_layer

BENCHMARK = Benchmark(
    name="tensor",
    question="Time, memory and bytes of layers that two ranks divide, against PyTorch's "
    "parallelize_module and against one rank",
    ranks=2,
    full=("--sequences", "1024", "4096", "--rounds=7"),
    quick=("--sequences", "256", "--rounds=3"),
)

WHOLE, OURS, TORCH = "one rank", "two ranks", "PyTorch's parallelize_module"
Step = Callable[[], Tensor]


class TorchAttention(nn.Module):
    """Grouped-query attention from `torch.nn`."""

    def __init__(self, ours: nn.Module) -> None:
        super().__init__()
        self.head_dim = ours.spec.head_dim
        sections = ours.linear_qkv.fused.sizes
        weights = ours.linear_qkv.weight.detach().split(sections)
        self.wq, self.wk, self.wv = map(linear_of, weights)
        self.wo = linear_of(ours.linear_proj.weight.detach())

    def forward(self, hidden: Tensor, angles: RotaryAngles) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        query, key, value = (
            layer(hidden).unflatten(-1, (-1, self.head_dim))
            for layer in (self.wq, self.wk, self.wv)
        )
        query, key = apply_rotary(query, angles), apply_rotary(key, angles)
        heads = [part.transpose(1, 2) for part in (query, key, value)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        output: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return output


class TorchMlp(nn.Module):
    """A gated MLP from `torch.nn`."""

    def __init__(self, ours: nn.Module) -> None:
        super().__init__()
        gate, up = ours.linear_fc1.weight.detach().chunk(2)
        self.w1, self.w3 = linear_of(gate), linear_of(up)
        self.w2 = linear_of(ours.linear_fc2.weight.detach())

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        output: Tensor = self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))
        return output


class TorchLayer(nn.Module):
    """A layer from `torch.nn` with the weights of one of this project's layers."""

    def __init__(self, ours: nn.Module, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden_size, eps)
        self.attention = TorchAttention(ours.self_attention)
        self.ffn_norm = nn.RMSNorm(hidden_size, eps)
        self.feed_forward = TorchMlp(ours.mlp)

    def forward(self, hidden: Tensor, angles: RotaryAngles) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        hidden = hidden + self.attention(self.attention_norm(hidden), angles)
        output: Tensor = hidden + self.feed_forward(self.ffn_norm(hidden))
        return output


class TorchBlock(nn.Module):
    """Layers and the norm behind them."""

    def __init__(self, ours: TransformerBlock, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TorchLayer(each, hidden_size, eps) for each in ours.layers)
        self.norm = nn.RMSNorm(hidden_size, eps)

    def forward(self, hidden: Tensor, angles: RotaryAngles) -> Tensor:
        """[batch, seq / ranks, hidden] of each rank, in and out."""
        for layer in self.layers:
            hidden = layer(hidden, angles)
        output: Tensor = self.norm(hidden)
        return output


def linear_of(weight: Tensor) -> nn.Linear:
    """A linear layer with a copy of this weight."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone())
    return layer


def parallelized(block: TorchBlock) -> nn.Module:
    """The block with torchtitan's plan for sequence parallelism."""
    plan: dict[str, Any] = {"norm": SequenceParallel()}
    for number in range(len(block.layers)):
        layer = f"layers.{number}"
        plan |= {
            f"{layer}.attention_norm": SequenceParallel(),
            f"{layer}.ffn_norm": SequenceParallel(),
            f"{layer}.attention": PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ),
            f"{layer}.feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
        }
        columns = (
            "attention.wq",
            "attention.wk",
            "attention.wv",
            "feed_forward.w1",
            "feed_forward.w3",
        )
        plan |= {f"{layer}.{name}": ColwiseParallel() for name in columns}
        plan |= {
            f"{layer}.{name}": RowwiseParallel(output_layouts=Shard(1))
            for name in ("attention.wo", "feed_forward.w2")
        }
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(block, mesh, plan)


def spec_of(arguments: argparse.Namespace) -> ModelSpec:
    """The layers of all sides."""
    config = llama_config(
        arguments.layers,
        arguments.hidden,
        group_query_attention=True,
        num_query_groups=arguments.key_heads,
    )
    return model_spec(config)


def build(arguments: argparse.Namespace) -> TransformerBlock:
    """Layers with the same weights on each rank and for each side."""
    torch.manual_seed(SEED)
    return TransformerBlock(spec_of(arguments), None)


def divided(block: TransformerBlock) -> TransformerBlock:
    """The block with this rank's parts of its weights."""
    tensor.divide_tensor(block, dist.group.WORLD)
    take_parts(block, dist.get_rank(), dist.get_world_size())
    return block


def step_of(arguments: argparse.Namespace, name: str, length: int) -> Step:
    """Forward and backward of one row; returns this rank's part of the loss."""
    block = build(arguments)
    generator = torch.Generator().manual_seed(SEED)
    hidden, factors = (
        torch.randn(1, length, arguments.hidden, generator=generator) for _ in range(2)
    )
    places = Places(torch.arange(length)[None])
    rotary = block.layers[0].self_attention.spec.rotary
    angles = places.angles(rotary, hidden)
    if name != WHOLE:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        hidden, factors = (each.chunk(num_ranks, 1)[rank].clone() for each in (hidden, factors))

    model: nn.Module
    if name == TORCH:
        model = parallelized(TorchBlock(block, arguments.hidden, block.final_layernorm.eps))
        forward = partial(model, hidden, angles)
    else:
        model = divided(block) if name == OURS else block
        forward = partial(model, hidden, places)

    def step() -> Tensor:
        if name == WHOLE and dist.get_rank() > 0:
            return torch.zeros(())
        output = forward()
        output = output[0] if isinstance(output, tuple) else output
        output = output.to_local() if hasattr(output, "to_local") else output
        loss = (output * factors).sum()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return step


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Counts the bytes that this rank sends to others in exchanges of tensor parallelism."""
    sent, others = [0], dist.get_world_size() - 1
    all_to_all, all_gather = tensor.dist.all_to_all_single, tensor.all_gather

    def count_parts(received: Tensor, parts: Tensor, **options: Any) -> Any:
        sent[0] += parts.nbytes * others // (others + 1)
        return all_to_all(received, parts, **options)

    def count_copies(received: Tensor, part: Tensor, *rest: Any) -> Any:
        sent[0] += part.nbytes * others
        return all_gather(received, part, *rest)

    with (
        mock.patch.object(tensor.dist, "all_to_all_single", count_parts),
        mock.patch.object(tensor, "all_gather", count_copies),
    ):
        yield sent


def compare(
    arguments: argparse.Namespace, length: int
) -> tuple[tuple[Measurement, ...], tuple[Ratio, ...]]:
    """Times, peaks and bytes for a row of this length."""
    steps = {name: step_of(arguments, name, length) for name in (WHOLE, OURS, TORCH)}
    losses: dict[str, float] = {}
    peaks: dict[str, list[float]] = {}
    for name, step in steps.items():  # which warms it up, too
        own: list[Tensor] = []
        with counted_bytes() as sent:
            peak = peak_bytes(lambda step=step, own=own: own.append(step()))  # type: ignore[misc]
        if name == OURS:
            of_layer = sent[0] / arguments.layers
        losses[name] = total(own[0].double())
        peaks[name] = [total(torch.tensor(peak / 2**20), dist.ReduceOp.MAX)]
        assert abs(losses[name] - losses[WHOLE]) < 1e-3 * length**0.5, (name, losses)

    works = {name: partial(seconds, step) for name, step in steps.items()}
    times = report.interleaved(works, arguments.rounds, seed=SEED)
    group = f"{length} tokens"
    figures = {"time": report.medians(times), "peak": report.medians(peaks)}
    ratios = [
        Ratio(f"{group}: {what}, {OURS} / {other}", found[OURS] / found[other], at_most=bar)
        for what, found in figures.items()
        for other, bar in ((WHOLE, None), (TORCH, 1.0 if what == "time" else None))
    ]
    layer = spec_of(arguments).layers[0]
    batch = Microbatch(1, length, 4, "cpu", tensor_size=dist.get_world_size())
    planned = sent_by_layer(layer, arguments.hidden, batch)
    ratios.append(
        Ratio(f"{group}: bytes of a layer / formula", of_layer / planned, at_least=1.0, at_most=1.0)
    )
    return (*measured(times, "s", group), *measured(peaks, "MiB", group)), tuple(ratios)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures; rank 0 reports."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args(argv)

    with launched() as (launch, _):
        found = [compare(arguments, length) for length in arguments.sequences]
    if launch.rank == 0:
        report.hand_over_all(found, arguments)


if __name__ == "__main__":
    main()
