"""Runs whose samples hold documents that do not see each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.functional_tests.helpers.document_runs import APART, OFFLOADED, train, write_text


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text")


def test_documents_that_do_not_see_each_other_train_alike_on_any_number_of_ranks(
    prefix: str, tmp_path: Path
) -> None:
    expected = train(prefix, tmp_path / "one", *APART, world_size=1)
    assert len(set(expected.values())) == 4
    assert train(prefix, tmp_path / "two", *APART) == pytest.approx(expected, rel=1e-6)
    fsdp2 = train(prefix, tmp_path / "fsdp2", *APART, "--use-torch-fsdp2")
    assert fsdp2 == pytest.approx(expected, rel=1e-6)


def test_each_flag_matters(prefix: str, tmp_path: Path) -> None:
    flags = [[], *([flag] for flag in APART), APART[:2]]
    found = [
        tuple(train(prefix, tmp_path / str(number), *some, world_size=1).values())
        for number, some in enumerate(flags)
    ]
    # Rotations know differences of positions alone, and a document has the same either way.
    assert found[1] == pytest.approx(found[4], rel=1e-5)
    assert len(set(found[:4])) == 4


def test_a_token_has_the_same_weight_at_any_microbatch_size(prefix: str, tmp_path: Path) -> None:
    masked = ["--eod-mask-loss"]
    expected = train(prefix, tmp_path / "whole", *masked, "--micro-batch-size", 8, world_size=1)
    per_token = [*masked, "--micro-batch-size", 1, "--calculate-per-token-loss"]
    assert train(prefix, tmp_path / "rows", *per_token) == pytest.approx(expected, rel=1e-5)
    default = train(prefix, tmp_path / "default", *masked, "--micro-batch-size", 1)
    assert default != pytest.approx(expected, rel=1e-5)
    # Where all tokens are learned, not a bit changes.
    plain = [train(prefix, tmp_path / f"plain_{len(more)}", *more) for more in ([], per_token[3:])]
    assert plain[0] == plain[1]


def test_offloaded_and_resumed_runs_have_the_bits_of_an_undisturbed_one(
    prefix: str, tmp_path: Path
) -> None:
    expected = train(prefix, tmp_path / "device", *APART)
    saving = ["--save", tmp_path / "run", "--save-interval", 2]
    assert train(prefix, tmp_path / "host", *APART, *OFFLOADED, *saving) == expected
    load = ["--load", tmp_path / "run" / "iter_0000002"]
    resumed = train(prefix, tmp_path / "resumed", *APART, *OFFLOADED, *load)
    assert resumed == {n: expected[n] for n in (3, 4)}
