"""One rank in every configuration: undisturbed, with device pauses, with blocking kernels."""

from __future__ import annotations

import traceback
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tools.gpu_check.accelerator import Accelerator, open_accelerator
from tools.gpu_check.findings import Findings
from tools.gpu_check.ranks import join
from tools.gpu_check.training import (
    CONFIGURATIONS,
    NUM_FIRST_STEPS,
    SIMULATED_SIZES,
    TWO_RANKS_SIZES,
    Configuration,
    Sizes,
    Trained,
    train,
)

_SEED = 11


def plain(findings: Findings) -> None:
    """Undisturbed. The first configuration runs twice: kernels may not be deterministic."""
    accelerator = _start(findings)
    twice = [train(accelerator, CONFIGURATIONS["zero3"], sizes_of(findings)).bits for _ in range(2)]
    findings.expect("the same run twice gives the same bits", twice[1], twice[0])
    train_all(findings, accelerator)


def delayed(findings: Findings) -> None:
    """With random pauses of the device before the work of every lane."""
    accelerator = _start(findings)
    train_all(findings, accelerator, pauses=True)


def blocking(findings: Findings) -> None:
    """With CUDA_LAUNCH_BLOCKING=1, which is in this process's environment."""
    accelerator = _start(findings)
    with accelerator.blocking_launches():
        train_all(findings, accelerator, checks_time=False)


def train_all(
    findings: Findings,
    accelerator: Accelerator,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    pauses: bool = False,
    checks_time: bool = True,
    names: list[str] | None = None,
) -> dict[str, list[str]]:
    """Every configuration for so many ranks, in turn; a failure does not stop the others."""
    found: dict[str, Trained] = {}
    for name in names or CONFIGURATIONS:
        configuration = CONFIGURATIONS[name]
        if configuration.least_ranks > num_ranks:
            continue
        context: AbstractContextManager[Any] = (
            accelerator.pauses(_SEED) if pauses else nullcontext()
        )
        try:
            found[name] = train(
                accelerator,
                configuration,
                sizes_of(findings, num_ranks),
                rank=rank,
                num_ranks=num_ranks,
                pauses=context,
            )
        except Exception as error:
            findings.error(f"{name}: {traceback.format_exc()}")
            if num_ranks > 1 or "CUDA error" in str(error):
                raise  # the other ranks, or this GPU's context, are lost
            continue
        if checks_time:
            check_steps(findings, name, configuration, found[name])
    bits = {name: trained.bits for name, trained in found.items()}
    check_families(findings, bits, num_ranks)
    findings.figure("configurations", len(bits), is_telling=True)
    if rank == 0:
        findings.share(findings.stage, bits)
    return bits


def check_steps(
    findings: Findings, name: str, configuration: Configuration, trained: Trained
) -> None:
    """Synchronisations and new memory of the steps after the first three."""
    late = trained.steps[NUM_FIRST_STEPS:]
    syncs = [list(step.syncs) for step in late]
    segments = [step.new_segments for step in late]
    findings.figure(f"{name}: synchronisations", [len(places) for places in syncs])
    findings.figure(f"{name}: new segments", segments)
    if configuration.num_syncs is not None:
        wrong = next((places for places in syncs if len(places) != configuration.num_syncs), None)
        findings.expect(
            f"{name}: where the main thread waits, if not {configuration.num_syncs} time a step",
            wrong,
            None,
        )
    if configuration.reuses_memory:
        findings.expect(
            f"{name}: new segments after step {NUM_FIRST_STEPS}", segments, [0] * len(segments)
        )
    finite = all(float.fromhex(step.loss) < 10 for step in trained.steps)
    findings.expect(f"{name}: losses are finite and below 10", finite, True)
    findings.expect(f"{name}: losses change", trained.steps[0].loss != trained.steps[-1].loss, True)


def check_families(findings: Findings, bits: dict[str, list[str]], num_ranks: int = 1) -> None:
    """Configurations of one family give each other's losses and norms, to the bit.

    Where several ranks share the states, the gradient norm is added up shard by shard: only those
    whose shards lie alike have the same bits, and the others nearly the same losses.
    """
    families: dict[str, list[str]] = defaultdict(list)
    for name in bits:
        if CONFIGURATIONS[name].family:
            families[CONFIGURATIONS[name].family].append(name)
    for family, names in families.items():
        first, exact = (
            names[0],
            [name for name in names if num_ranks == 1 or _lies_alike(name, names[0])],
        )
        differ = {name: _first_difference(bits[first][:-1], bits[name][:-1]) for name in exact}
        wrong = {name: text for name, text in differ.items() if text}
        findings.expect(
            f"family {family}, {len(exact)} of the same shards: what differs from {first}",
            wrong,
            {},
        )
        apart = {name: round(_apart(bits[first][:-1], bits[name][:-1]), 5) for name in names}
        findings.expect_at_most(
            f"family {family} of {len(names)}: most that losses are apart",
            max(apart.values()),
            0.01,
        )


def sizes_of(findings: Findings, num_ranks: int = 1) -> Sizes:
    if findings.simulate:
        return SIMULATED_SIZES
    return Sizes() if num_ranks == 1 else TWO_RANKS_SIZES


def _start(findings: Findings) -> Accelerator:
    accelerator = open_accelerator(findings)
    join(findings, accelerator, rank=0, num_ranks=1)
    return accelerator


def _first_difference(expected: list[str], got: list[str]) -> str:
    """The first step in which two runs differ; nothing if there is none."""
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        if one != other:
            return f"step {number}: {_readable(one)} and {_readable(other)}"
    return ""


def _lies_alike(name: str, other: str) -> bool:
    """Whether two configurations cut states into the same shards."""
    cuts = []
    for parallel in (CONFIGURATIONS[name].parallel, CONFIGURATIONS[other].parallel):
        instances = parallel.num_distributed_optimizer_instances
        cuts.append(
            (
                parallel.data_parallel_sharding_strategy,
                instances,
                parallel.outer_dp_sharding_strategy,
            )
        )
    return cuts[0] == cuts[1]


def _apart(one: list[str], other: list[str]) -> float:
    """The largest difference between two runs' losses."""
    pairs = zip(one, other, strict=True)
    return max(abs(float.fromhex(a.split()[0]) - float.fromhex(b.split()[0])) for a, b in pairs)


def _readable(step: str) -> str:
    return " ".join(f"{float.fromhex(value):.9g}" for value in step.split())
