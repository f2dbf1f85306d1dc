#!/usr/bin/env python3
"""Training steps of a mixture of experts: ours, and the same model as its user writes it in plain
PyTorch, a loop over all experts, under PyTorch FSDP2.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/moe_step.py

Both have the same weights, ZeRO-3 and fused AdamW; in the plain one each expert is a module with
linear layers of its own. Then ours with few and with many experts, of which each token has as many,
of one size: a token costs as much arithmetic, and only the parameters grow. All sides run
interleaved in one process group, in an order drawn anew each round. Prints medians, the ratio of
tokens a second and the growth, and writes them to benchmarks/results.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.helpers import report
from benchmarks.helpers.llama import llama_config
from benchmarks.helpers.steps import SEED, Side, batch_of, measure
from megatron.core.device import Device, DeviceConfig
from megatron.core.distributed import megatron_fsdp, torch_fsdp2
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp import fully_shard_optimizer
from megatron.core.dtypes import DTYPES
from megatron.core.materialize import materialize, seeded_reset
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.torch_optimizer import build_torch_optimizer
from megatron.core.transformer.moe_layer import MoELayer
from megatron.training.launch import Launch


class PlainExpert(nn.Module):
    """One expert, with linear layers of its own."""

    def __init__(self, hidden_size: int, size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, size, bias=False)
        self.up = nn.Linear(hidden_size, size, bias=False)
        self.down = nn.Linear(size, hidden_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.down(F.silu(self.gate(tokens)) * self.up(tokens))
        return output


class PlainMixture(nn.Module):
    """A mixture as a loop over its experts, with the weights of ours."""

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
        arguments,
        num_experts=num_experts,
        moe_router_topk=arguments.top_k,
        moe_ffn_hidden_size=arguments.expert_size,
    )
    with torch.device("meta"):
        return GPTModel(config, arguments.vocabulary)


def ours(arguments: argparse.Namespace, num_experts: int, device: Device) -> Side:
    """Our model under our engine."""
    model = model_of(arguments, num_experts)
    megatron_fsdp.shard_model(
        model,
        build_mesh(device.kind, dist.get_world_size()),
        device,
        DataParallelConfig(),
        compute_dtype=DTYPES[arguments.dtype],
        reset_parameters=seeded_reset(model, device.torch_device, SEED),
    )
    optimizer = build_torch_optimizer(model, OptimizerConfig(), 1e-4)
    fully_shard_optimizer(optimizer)
    return Side(model, optimizer)


def plain(arguments: argparse.Namespace, num_experts: int, device: Device) -> Side:
    """The plain model under FSDP2, with the weights with which ours begins."""
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


def compare(arguments: argparse.Namespace, device: Device, rank: int) -> dict[str, Any]:
    """Ours and the plain model, of the same number of experts, by tokens in a rank's microbatch."""
    count = arguments.compared_experts
    found = {}
    for micro_batch in arguments.compared_micro_batches:
        sides = {
            "ours": ours(arguments, count, device),
            "plain": plain(arguments, count, device),
        }
        arguments.micro_batch = micro_batch
        times, losses = measure(sides, batch_of(arguments, rank, device), arguments.rounds)
        # Of the first step, or the sides would not compute the same.
        torch.testing.assert_close(losses["ours"][0], losses["plain"][0], rtol=1e-3, atol=0)
        medians = report.medians(times)
        tokens = micro_batch * arguments.sequence
        found[tokens] = {
            "median_ms": medians,
            "tokens_per_second": {
                name: tokens * dist.get_world_size() / value * 1e3
                for name, value in medians.items()
            },
            "ratio_to_plain": medians["plain"] / medians["ours"],
            "last_losses": {name: values[-1] for name, values in losses.items()},
        }
    return found


def grow(arguments: argparse.Namespace, device: Device, rank: int) -> dict[str, Any]:
    """Ours by the number of experts: microseconds for each token of a rank."""
    arguments.micro_batch = arguments.growth_micro_batch
    sides = {str(count): ours(arguments, count, device) for count in arguments.grown_experts}
    times, _ = measure(sides, batch_of(arguments, rank, device), arguments.rounds)
    tokens = arguments.micro_batch * arguments.sequence
    per_token = {count: ms * 1e3 / tokens for count, ms in report.medians(times).items()}
    fewest = min(per_token.values())
    return {
        "tokens_of_a_rank": tokens,
        "parameters": {
            count: sum(parameter.numel() for parameter in side.model.parameters())
            for count, side in sides.items()
        },
        "us_per_token": per_token,
        "growth": {
            count: value / per_token[str(arguments.grown_experts[0])]
            for count, value in per_token.items()
        },
        "of_the_quickest": {count: value / fewest for count, value in per_token.items()},
    }


def show(compared: dict[str, Any], grown: dict[str, Any]) -> None:
    """Prints both tables."""
    for tokens, found in compared.items():
        rates = ", ".join(f"{n} {rate:.0f}" for n, rate in found["tokens_per_second"].items())
        print(f"{tokens:6} tokens a rank, tokens/s: {rates}; ratio {found['ratio_to_plain']:.2f}")
    print(f"{grown['tokens_of_a_rank']} tokens a rank, by the number of experts:")
    for count, per_token in grown["us_per_token"].items():
        millions = grown["parameters"][count] / 1e6
        print(
            f"{count:>6} experts, {millions:6.1f}M parameters: {per_token:7.2f} us a token, "
            f"{grown['growth'][count]:.2f} of the first"
        )


def main() -> None:
    """Measures; rank 0 reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    settings = dict(vars(arguments))

    launch = Launch.from_environment()
    device = Device.for_rank(DeviceConfig().kind, launch.local_rank, launch.local_world_size)
    dist.init_process_group(device.collective_backend)
    compared = compare(arguments, device, launch.rank)
    grown = grow(arguments, device, launch.rank)
    if launch.rank == 0:
        show(compared, grown)
        content = {
            "device": device.description,
            "ranks": launch.world_size,
            # More than the ranks' own means that other programs took part of the machine.
            "load_average_15_minutes": os.getloadavg()[2],
            "settings": settings,
            "compared": compared,
            "grown": grown,
        }
        print(report.write("moe_step", content))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
