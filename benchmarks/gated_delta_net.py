#!/usr/bin/env python3
"""The gated delta net against the transformers library's, forward and backward, by length.

    python -m benchmarks.gated_delta_net

Three pairs of sides: the gated delta rule alone, the causal convolution alone (with PyTorch's), and
the whole module. transformers computes by PyTorch here, as where flash-linear-attention is not
installed. All sides and lengths run once a round, in an order drawn anew each round.

Times are microseconds of CPU time per token, which with one thread is the wall time on an idle
machine, even if this one is busy. The facts have the bytes per token that each side keeps for
backward.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import transformers
from torch import Tensor, nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.result import Measurement, Ratio, Result
from megatron.core.transformer.causal_conv import causal_conv_by_torch, causal_conv_in_blocks
from megatron.core.transformer.delta_rule import gated_delta_rule
from megatron.core.transformer.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.spec import GatedDeltaNetSpec

BENCHMARK = Benchmark(
    name="gated_delta_net",
    question="The gated delta net against the transformers library's, by length",
    ranks=1,
    full=("--lengths", "1024", "2048", "8192", "--rounds=5"),
    quick=("--lengths", "512", "1024", "--rounds=3"),
)

# Each of this project's sides, and the side to compare it with.
PAIRS = {
    "rule": "rule, transformers",
    "convolution": "convolution, torch",
    "net": "net, transformers",
}


def modules(arguments: argparse.Namespace) -> dict[str, nn.Module]:
    """This project's module and the transformers library's, of equal sizes."""
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
    # Equal weights give equal outputs, and equal decays: the initial decays of transformers forget
    # at once, which makes subnormal numbers and its arithmetic several times slower.
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


def cpu_seconds(forward: Callable[[], Tensor]) -> float:
    """CPU time of forward and backward."""
    start = time.process_time()
    forward().sum().backward()
    return time.process_time() - start


def ratios(medians: dict[tuple[str, int], float], lengths: Sequence[int]) -> Iterator[Ratio]:
    """The speed-up, and how much longer a token takes in the longest sequence."""
    for name, other in PAIRS.items():
        for length in lengths:
            ratio = medians[other, length] / medians[name, length]
            yield Ratio(f"{length} tokens: {other} / {name}", ratio, at_least=1.0)
    for name in (name for pair in PAIRS.items() for name in pair):
        growth = medians[name, lengths[-1]] / medians[name, lengths[0]]
        yield Ratio(f"{name}: time per token, {lengths[-1]} / {lengths[0]} tokens", growth)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--value-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()

    nets = modules(arguments)
    sides = {length: sides_of(arguments, nets, length) for length in arguments.lengths}
    check_pairs(sides[arguments.lengths[0]])
    # Lengths are interleaved too: their ratio is one of the results.
    works = {
        (name, length): partial(cpu_seconds, forward)
        for length, forwards in sides.items()
        for name, forward in forwards.items()
    }
    seconds = report.interleaved(works, arguments.rounds, warm_up=1)
    # In microseconds per token, so that lengths compare.
    times = {key: [value / key[1] * 1e6 for value in values] for key, values in seconds.items()}

    longest = arguments.lengths[-1]
    result = Result(
        tuple(
            Measurement(f"{length} tokens", name, "us/token", tuple(values))
            for (name, length), values in times.items()
        ),
        tuple(ratios(report.medians(times), arguments.lengths)),
        settings=report.settings_of(arguments),
        facts={
            "kept_bytes_per_token": {
                name: kept_bytes(forward) / longest for name, forward in sides[longest].items()
            }
        },
    )
    report.hand_over(result, arguments.output)


if __name__ == "__main__":
    main()
