"""Runs whose activations wait in host memory, and runs whose layers are compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.functional_tests.helpers.document_runs import APART, OFFLOADED, train, write_text

# Small tensors move, too, and not all of them find room.
ACTIVATIONS = (
    "--activation-offload --activation-offload-gib 1e-4 --activation-offload-min-kib 0.25 "
    "--num-layers 5"
).split()
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01".split()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([*APART, "--recompute-granularity", "full", "--bf16"], marks=pytest.mark.wide),
        [*APART, *EXPERTS, "--expert-model-parallel-size", "2"],
    ],
    ids=["recomputed", "divided experts"],
)
def test_offloaded_activations_change_no_bit_and_runs_resume(
    prefix: str, tmp_path: Path, flags: list[str]
) -> None:
    expected = train(prefix, tmp_path / "device", *flags, *OFFLOADED, "--num-layers", 5)
    flags = [*flags, *OFFLOADED, *ACTIVATIONS]
    saving = ["--save", tmp_path / "run", "--save-interval", 2, "--timing-log-level", 1]
    assert train(prefix, tmp_path / "host", *flags, *saving) == expected
    resumed = train(
        prefix, tmp_path / "resumed", *flags, "--load", tmp_path / "run" / "iter_0000002"
    )
    assert resumed == {n: expected[n] for n in (3, 4)}

    records = [json.loads(line) for line in (tmp_path / "host/metrics.jsonl").open()]
    timed = [record for record in records if record["kind"] == "activation_timing"]
    assert sum(record["num_steps"] for record in timed) == 4
    assert all(record["d2h_ms"] > 0 < record["h2d_ms"] for record in timed)


def test_offloaded_activations_under_fsdp2_change_no_bit(prefix: str, tmp_path: Path) -> None:
    flags = [*APART, "--use-torch-fsdp2", "--num-layers", 5]
    expected = train(prefix, tmp_path / "device", *flags)
    assert train(prefix, tmp_path / "host", *flags, *ACTIVATIONS) == expected


@pytest.mark.wide
def test_a_compiled_run_has_the_losses_and_the_checkpoints_of_another(
    prefix: str, tmp_path: Path
) -> None:
    flags = [*APART, *OFFLOADED]
    saving = ["--save-interval", 2]
    expected = train(prefix, tmp_path / "plain", *flags, *saving, "--save", tmp_path / "a")
    compiled = [*flags, "--compile-layers"]
    found = train(prefix, tmp_path / "compiled", *compiled, *saving, "--save", tmp_path / "b")
    assert found == pytest.approx(expected, rel=1e-5)

    rest = {n: expected[n] for n in (3, 4)}
    for run, words in (("a", compiled), ("b", flags)):
        load = ["--load", tmp_path / run / "iter_0000002"]
        found = train(prefix, tmp_path / f"from {run}", *words, *load)
        assert found == pytest.approx(rest, rel=1e-5)


def test_host_memory_that_is_not_there_is_missed_before_there_are_weights(
    prefix: str, tmp_path: Path
) -> None:
    flags = ["--activation-offload", "--activation-offload-gib", "1e6"]
    with pytest.raises(Exception, match=r"activations 976\.56 TiB .*MemAvailable"):
        train(prefix, tmp_path / "run", *flags, world_size=1)
