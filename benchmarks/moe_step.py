#!/usr/bin/env python3
"""Training steps of a mixture of experts: this project's, and the same model as a user writes it in
plain PyTorch, a loop over all experts, under PyTorch FSDP2.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m benchmarks.moe_step

Both have the same weights, ZeRO-3 and fused AdamW; in the plain one each expert is a module with
separate linear layers. Then this project's with few and with many experts of one size, and the same
number for each token: a token costs as much arithmetic, and only the parameters grow. All sides run
interleaved in one process group, in an order drawn anew each round.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.models import SEED, llama_config, on_meta, shard
from benchmarks.helpers.ranks import launched
from benchmarks.helpers.result import Measurement, Ratio, Result, measured
from benchmarks.helpers.steps import Side, batch_of, measure
from megatron.core.device import Device
from megatron.core.distributed import torch_fsdp2
from megatron.core.distributed.fsdp import fully_shard_optimizer
from megatron.core.dtypes import DTYPES
from megatron.core.materialize import materialize
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.torch_optimizer import build_torch_optimizer
from megatron.core.transformer.moe_layer import MoELayer

# Relative to the loop over experts, at any number of tokens.
LEAST_SPEED = 1.5

BENCHMARK = Benchmark(
    name="moe_step",
    question="A step of a mixture of experts against a loop over experts under PyTorch FSDP2, "
    "and its growth with the number of experts",
    ranks=2,
    full=("--rounds=7",),
    quick=(
        "--layers=1",
        "--compared-micro-batches=2",
        "--grown-experts",
        "8",
        "64",
        "--growth-micro-batch=4",
        "--rounds=5",
    ),
)

OURS, PLAIN = "ours", "plain PyTorch"


class PlainExpert(nn.Module):
    """One expert, with separate linear layers."""

    def __init__(self, hidden_size: int, size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, size, bias=False)
        self.up = nn.Linear(hidden_size, size, bias=False)
        self.down = nn.Linear(size, hidden_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.down(F.silu(self.gate(tokens)) * self.up(tokens))
        return output


class PlainMixture(nn.Module):
    """A mixture as a loop over its experts, with the weights of this project's mixture."""

    def __init__(self, ours: MoELayer) -> None:
        super().__init__()
        num_experts, hidden_size = ours.router.weight.shape
        self.top_k = ours.spec.router.top_k
        self.router = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList(
            PlainExpert(hidden_size, ours.spec.expert.size) for _ in range(num_experts)
        )

        with torch.no_grad():
            self.router.weight.copy_(ours.router.weight)
            first = ours.experts.linear_fc1.weight.view(num_experts, 2, -1, hidden_size)
            second = ours.experts.linear_fc2.weight.view(num_experts, hidden_size, -1)
            for index, expert in enumerate(self.experts):
                expert.gate.weight.copy_(first[index, 0])
                expert.up.weight.copy_(first[index, 1])
                expert.down.weight.copy_(second[index])

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        largest, chosen = self.router(tokens).float().topk(self.top_k, dim=-1)
        weights = largest.softmax(dim=-1).to(tokens.dtype)
        output = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == index)
            output.index_add_(0, rows, expert(tokens[rows]) * weights[rows, slots, None])
        return output.view_as(hidden)


def model_of(arguments: argparse.Namespace, num_experts: int) -> GPTModel:
    """A GPT whose layers all have experts, without memory."""
    config = llama_config(
        arguments.layers,
        arguments.hidden,
        num_experts=num_experts,
        moe_router_topk=arguments.top_k,
        moe_ffn_hidden_size=arguments.expert_size,
    )
    return on_meta(config, arguments.vocabulary)


def build_ours(arguments: argparse.Namespace, num_experts: int, device: Device) -> Side:
    """Our model under our engine."""
    model = model_of(arguments, num_experts)
    num_ranks = dist.get_world_size()
    shard(
        model,
        build_mesh(device.kind, num_ranks),
        device,
        None,
        num_local_ranks=num_ranks,
        compute_dtype=DTYPES[arguments.dtype],
    )
    optimizer = build_torch_optimizer(model, OptimizerConfig(), 1e-4)
    fully_shard_optimizer(optimizer)
    return Side(model, optimizer)


def build_plain(arguments: argparse.Namespace, num_experts: int, device: Device) -> Side:
    """The plain model under FSDP2, with the same initial weights as this project's."""
    model = model_of(arguments, num_experts)
    materialize(model, device.torch_device, SEED)
    for layer in model.decoder.layers:
        layer.mlp = PlainMixture(layer.mlp)
    torch_fsdp2.shard_model(
        model,
        build_mesh(device.kind, dist.get_world_size()),
        compute_dtype=DTYPES[arguments.dtype],
        reshard_after_forward=True,
    )
    return Side(model, build_torch_optimizer(model, OptimizerConfig(), 1e-4))


def batch_for(
    arguments: argparse.Namespace, micro_batch: int, rank: int, device: Device
) -> tuple[Tensor, Tensor]:
    """A rank's batch of so many rows."""
    sized = argparse.Namespace(**{**vars(arguments), "micro_batch": micro_batch})
    return batch_of(sized, rank, device)


def compare(
    arguments: argparse.Namespace, micro_batch: int, rank: int, device: Device
) -> tuple[tuple[Measurement, ...], Ratio]:
    """This project's and the plain model, with the same number of experts."""
    count = arguments.compared_experts
    sides = {
        OURS: build_ours(arguments, count, device),
        PLAIN: build_plain(arguments, count, device),
    }
    batch = batch_for(arguments, micro_batch, rank, device)
    steps = measure(sides, batch, arguments.rounds)
    # Of the first step, or the sides would not compute the same.
    torch.testing.assert_close(steps.losses[OURS][0], steps.losses[PLAIN][0], rtol=1e-3, atol=0)

    group = f"{micro_batch * arguments.sequence} tokens a rank"
    medians = report.medians(steps.milliseconds)
    ratio = Ratio(
        f"{group}: tokens/s, ours / plain", medians[PLAIN] / medians[OURS], at_least=LEAST_SPEED
    )
    return measured(steps.milliseconds, "ms", group), ratio


def grow(
    arguments: argparse.Namespace, rank: int, device: Device
) -> tuple[tuple[Measurement, ...], tuple[Ratio, ...], dict[str, int]]:
    """This project's steps by the number of experts, their growth from the fewest experts on, and
    the parameters of each.
    """
    counts = {f"{count} experts": count for count in arguments.grown_experts}
    sides = {name: build_ours(arguments, count, device) for name, count in counts.items()}
    batch = batch_for(arguments, arguments.growth_micro_batch, rank, device)
    times = measure(sides, batch, arguments.rounds).milliseconds

    group = f"growth, {arguments.growth_micro_batch * arguments.sequence} tokens a rank"
    medians = report.medians(times)
    fewest, *others = medians
    ratios = (
        Ratio(f"{group}: {name} / {fewest}", medians[name] / medians[fewest]) for name in others
    )
    parameters = {
        name: sum(parameter.numel() for parameter in side.model.parameters())
        for name, side in sides.items()
    }
    return measured(times, "ms", group), tuple(ratios), parameters


def main(argv: Sequence[str] | None = None) -> None:
    """Measures; rank 0 reports."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--expert-size", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compared-experts", type=int, default=64)
    parser.add_argument("--compared-micro-batches", type=int, nargs="+", default=[2, 4, 16])
    parser.add_argument("--grown-experts", type=int, nargs="+", default=[8, 32, 64, 128])
    parser.add_argument("--growth-micro-batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args(argv)

    with launched() as (launch, device):
        compared = [
            compare(arguments, micro_batch, launch.rank, device)
            for micro_batch in arguments.compared_micro_batches
        ]
        grown, growth, parameters = grow(arguments, launch.rank, device)
    if launch.rank == 0:
        result = Result(
            (*(one for sides, _ in compared for one in sides), *grown),
            (*(ratio for _, ratio in compared), *growth),
            settings=report.settings_of(arguments),
            facts={"device": device.description, "parameters": parameters},
        )
        report.hand_over(result, arguments.output)


if __name__ == "__main__":
    main()
