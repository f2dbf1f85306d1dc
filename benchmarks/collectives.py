"""Our all-gather and reduce-scatter against torch.distributed's, on flat CPU tensors over gloo.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m benchmarks.collectives

Both sides run interleaved in one process group, in an order drawn anew each round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.ranks import launched
from benchmarks.helpers.result import Measurement, Ratio, Result, measured
from megatron.core.distributed.fsdp import collectives

BENCHMARK = Benchmark(
    name="collectives",
    question="All-gather and reduce-scatter of this project against torch.distributed's, over gloo",
    ranks=2,
    full=("--mib", "1", "4", "16", "64", "--rounds=25"),
    quick=("--mib", "1", "16", "--rounds=5"),
)

MIB = 2**20
OURS, TORCH = "ours", "torch"


def variants(num_bytes: int) -> dict[tuple[str, str], Callable[[], None]]:
    """What is compared, by operation and side: the whole tensor has `num_bytes` in fp32, half of
    that in bf16.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    whole = torch.randn(num_bytes // 4 // size * size)
    gathered, part = torch.empty_like(whole), torch.empty(whole.numel() // size)
    half = whole.bfloat16()
    mean = collectives.Reduction(is_average=True)
    own = gathered.chunk(size)[rank]

    def scatter(source: torch.Tensor) -> None:
        collectives.reduce_scatter(part, source, group, mean)

    def scatter_with_torch(source: torch.Tensor) -> None:
        dist.reduce_scatter_tensor(part, source.float(), op=dist.ReduceOp.AVG)

    return {
        ("all-gather fp32", OURS): lambda: collectives.all_gather(gathered, own, group),
        ("all-gather fp32", TORCH): lambda: dist.all_gather_into_tensor(gathered, part),
        ("reduce-scatter fp32", OURS): lambda: scatter(whole),
        ("reduce-scatter fp32", TORCH): lambda: scatter_with_torch(whole),
        ("reduce-scatter bf16 in fp32", OURS): lambda: scatter(half),
        ("reduce-scatter bf16 in fp32", TORCH): lambda: scatter_with_torch(half),
    }


def milliseconds(work: Callable[[], None]) -> float:
    """Of this rank, from when all are ready."""
    dist.barrier()
    return report.seconds(work) * 1e3


def measure(mib: int, num_rounds: int) -> Iterator[tuple[tuple[Measurement, ...], Ratio]]:
    """For one size: the two sides of each operation, and their ratio. Three rounds warm up."""
    works = {key: partial(milliseconds, work) for key, work in variants(mib * MIB).items()}
    times = report.interleaved(works, num_rounds, warm_up=3)
    medians = report.medians(times)
    for operation in dict.fromkeys(operation for operation, _ in times):
        group = f"{operation}, {mib} MiB"
        both = {side: times[operation, side] for side in (OURS, TORCH)}
        ratio = medians[operation, TORCH] / medians[operation, OURS]
        yield measured(both, "ms", group), Ratio(f"{group}: torch / ours", ratio)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures several sizes; rank 0 reports."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args(argv)

    with launched() as (launch, _):
        found = [both for mib in arguments.mib for both in measure(mib, arguments.rounds)]
    if launch.rank == 0:
        result = Result(
            tuple(one for measurements, _ in found for one in measurements),
            tuple(ratio for _, ratio in found),
            settings=report.settings_of(arguments),
            facts={"ranks": launch.world_size},
        )
        report.hand_over(result, arguments.output)


if __name__ == "__main__":
    main()
