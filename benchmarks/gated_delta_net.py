#!/usr/bin/env python3
"""The gated delta net beside the transformers library's, forward and backward, by length.

    python benchmarks/gated_delta_net.py --threads 1

Three pairs of sides: the gated delta rule alone, the causal convolution alone (with PyTorch's), and
the whole module. transformers computes by PyTorch here, as where flash-linear-attention is not
installed. All sides and lengths run once a round, in an order drawn anew each round.

Prints medians as microseconds of CPU time per token, which with one thread is what they take alone
on a machine, however busy this one is; their growth from the shortest sequence to the longest; and
the bytes per token that each side keeps for backward. Writes benchmarks/results.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from benchmarks.helpers import report
from megatron.core.transformer.causal_conv import causal_conv_by_torch, causal_conv_in_blocks
from megatron.core.transformer.delta_rule import gated_delta_rule
from megatron.core.transformer.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.spec import GatedDeltaNetSpec

LENGTHS = (1024, 2048, 4096, 8192)
# Each side of ours, and what it is compared with.
PAIRS = {
    "rule": "rule, transformers",
    "convolution": "convolution, torch",
    "net": "net, transformers",
}


def modules(arguments: argparse.Namespace) -> dict[str, nn.Module]:
    """Ours and that of transformers, of equal sizes."""
    heads, dim = (arguments.key_heads, arguments.value_heads), arguments.head_dim
    spec = GatedDeltaNetSpec(*heads, dim, dim, conv_kernel=4, norm_eps=1e-6)
    config = qwen.Qwen3_5TextConfig(
        hidden_size=arguments.hidden,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=spec.num_key_heads,
        linear_num_value_heads=spec.num_value_heads,
        linear_key_head_dim=spec.key_head_dim,
        linear_value_head_dim=spec.value_head_dim,
        linear_conv_kernel_dim=spec.conv_kernel,
    )
    ours = GatedDeltaNet(spec, arguments.hidden, init_std=0.02, output_init_std=0.02)
    theirs: nn.Module = qwen.Qwen3_5GatedDeltaNet(config, layer_idx=0)
    # Equal weights give equal outputs, and equal decays: those that forget at once, with which
    # theirs begins, make subnormal numbers and its arithmetic several times slower.
    theirs.load_state_dict(their_weights(ours))
    return {"net": ours, "net, transformers": theirs}


def their_weights(net: GatedDeltaNet) -> dict[str, Tensor]:
    """Our weights by the names of transformers."""
    rows = {name: slice(*net.in_proj.fused.row_range(name)) for name in net.in_proj.fused.names}
    weight = net.in_proj.weight.detach()
    return {
        "in_proj_qkv.weight": weight[: rows["value"].stop],
        "in_proj_z.weight": weight[rows["z"]],
        "in_proj_b.weight": weight[rows["beta"]],
        "in_proj_a.weight": weight[rows["alpha"]],
        "conv1d.weight": net.conv1d.weight,
        "A_log": net.decay.A_log,
        "dt_bias": net.decay.dt_bias,
        "norm.weight": net.out_norm.weight,
        "out_proj.weight": net.out_proj.weight,
    }


def rule_inputs(arguments: argparse.Namespace, net: GatedDeltaNet, length: int) -> list[Tensor]:
    """Queries, keys, values, log decays and betas."""
    value_heads, dim = arguments.value_heads, arguments.head_dim
    query, key = (torch.randn(1, length, arguments.key_heads, dim) for _ in range(2))
    value = torch.randn(1, length, value_heads, dim)
    log_decay = net.decay(torch.randn(1, length, value_heads))
    beta = torch.rand(1, length, value_heads)
    return [x.detach().requires_grad_() for x in (query, key, value, log_decay, beta)]


def sides_of(
    arguments: argparse.Namespace, nets: dict[str, nn.Module], length: int
) -> dict[str, Callable[[], Tensor]]:
    """Forward of every side for one length."""
    net = nets["net"]
    assert isinstance(net, GatedDeltaNet)
    rule = rule_inputs(arguments, net, length)
    channels = net.conv1d.weight.shape[0]
    mixed = torch.randn(1, length, channels, requires_grad=True)
    hidden = torch.randn(1, length, arguments.hidden, requires_grad=True)
    return {
        "rule": lambda: gated_delta_rule(*rule),
        "rule, transformers": lambda: qwen.torch_chunk_gated_delta_rule(
            *rule, use_qk_l2norm_in_kernel=True
        )[0],
        "convolution": lambda: causal_conv_in_blocks(mixed, net.conv1d.weight),
        "convolution, torch": lambda: causal_conv_by_torch(mixed, net.conv1d.weight),
        "net": lambda: nets["net"](hidden),
        "net, transformers": lambda: nets["net, transformers"](hidden),
    }


def check_pairs(sides: dict[str, Callable[[], Tensor]]) -> None:
    """AssertionError unless both sides of each pair compute the same."""
    for name, other in PAIRS.items():
        with torch.no_grad():
            ours, theirs = sides[name](), sides[other]()
        tolerance = 1e-4 * theirs.abs().max().item()
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=tolerance, msg=lambda m, n=name: n + m
        )


def kept_bytes(forward: Callable[[], Tensor]) -> int:
    """The bytes of the storages that a forward keeps for backward, inputs and weights included."""
    storages: dict[int, int] = {}
    kept = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)  # or the address might be another's later
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        forward()
    return sum(storages.values())


def measure(sides: dict[str, Callable[[], Tensor]], num_rounds: int) -> dict[str, float]:
    """Median seconds of CPU time, forward and backward. The first round warms up and is not
    timed.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number, name in enumerate(report.schedule(list(sides), num_rounds + 1)):
        forward = sides[name]
        start = time.process_time()
        forward().sum().backward()
        if number >= len(sides):
            times[name].append(time.process_time() - start)
    return report.medians(times)


def show(by_length: dict[int, dict[str, float]], growth: dict[str, float]) -> None:
    """Prints a table."""
    print(
        f"{'CPU us per token':>20}" + "".join(f"{length:9}" for length in by_length) + "   growth"
    )
    for name, times_growth in growth.items():
        row = "".join(f"{medians[name]:9.2f}" for medians in by_length.values())
        print(f"{name:>20}{row} {times_growth:8.2f}")
    for name, other in PAIRS.items():
        row = "".join(f"{medians[other] / medians[name]:8.2f}x" for medians in by_length.values())
        print(f"{name + ', faster by':>20}{row}")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--value-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()

    nets = modules(arguments)
    sides = {length: sides_of(arguments, nets, length) for length in LENGTHS}
    check_pairs(sides[LENGTHS[0]])
    # Lengths are interleaved too: their ratio is one of the results.
    medians = measure(
        {
            f"{name} {length}": forward
            for length, forwards in sides.items()
            for name, forward in forwards.items()
        },
        arguments.rounds,
    )
    by_length = {
        length: {name: medians[f"{name} {length}"] / length * 1e6 for name in forwards}
        for length, forwards in sides.items()
    }
    kept = {name: kept_bytes(forward) / LENGTHS[-1] for name, forward in sides[LENGTHS[-1]].items()}

    growth = {name: by_length[LENGTHS[-1]][name] / by_length[LENGTHS[0]][name] for name in kept}
    show(by_length, growth)
    print(f"kept for backward, bytes per token of {LENGTHS[-1]}:")
    for name, num_bytes in kept.items():
        print(f"{name:>20} {num_bytes:9.0f}")
    content: dict[str, Any] = {
        "settings": vars(arguments),
        "transformers": transformers.__version__,
        "median_cpu_us_per_token": by_length,
        "growth": growth,
        "theirs_over_ours": {
            name: {length: times[other] / times[name] for length, times in by_length.items()}
            for name, other in PAIRS.items()
        },
        "kept_bytes_per_token": kept,
    }
    print(report.write("gated_delta_net", content))


if __name__ == "__main__":
    main()
