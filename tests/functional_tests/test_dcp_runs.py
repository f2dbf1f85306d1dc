"""Runs that start from a checkpoint of an FSDP2 program, and resume from their checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.functional_tests.helpers.runs import losses, published, refusal, train
from tests.helpers.ranks import run_ranks
from tests.helpers.titan_llama import Sizes, own, trained_llama, windows_of

SIZES = Sizes()
TABLE = Path(__file__).parents[2] / "examples" / "torchtitan_llama3.yaml"
MODEL = (
    "--num-layers 2 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 24 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --vocab-size 30 --make-vocab-size-divisible-by 1"
).split()
LOADED = "loaded weights and moments from"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("titan") / "step-3"

    def save() -> None:
        batches = [own(windows_of(number, SIZES)) for number in range(3)]
        trained_llama(SIZES, batches).save(str(folder))

    run_ranks(2, save)
    return folder


def test_a_run_starts_from_the_directory_once_and_then_resumes_from_its_checkpoint(saved, tmp_path):
    begins = [*MODEL, "--load-dcp", saved, "--dcp-key-map", TABLE]
    whole, parts, runs = (tmp_path / name for name in ("whole.jsonl", "parts.jsonl", "runs"))
    assert f"{LOADED} {saved}" in train(*begins, "--metrics-jsonl", whole, world_size=2)

    again = [*begins, "--save", runs, "--save-interval", 2, "--metrics-jsonl", parts]
    assert LOADED in train(*again, "--exit-interval", 2, world_size=2)
    assert LOADED not in train(*again, world_size=2)
    assert published(runs) == ["iter_0000002", "iter_0000004"]
    assert losses(parts) == losses(whole)


def test_a_checkpoint_of_another_vocabulary_is_an_error_with_the_flags(saved):
    flags = [*MODEL, "--make-vocab-size-divisible-by", "8"]
    told = refusal(*flags, "--load-dcp", saved, "--dcp-key-map", TABLE)
    assert "vocabulary has 31 rows and this model's 32, which --vocab-size" in told
