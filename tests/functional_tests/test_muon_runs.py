"""Runs with Muon: the log says what it updates, and they resume to the bit, on any ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.functional_tests.helpers.runs import logged, losses, train
from tests.helpers.hf_models import save_model
from tests.helpers.ranks import run_ranks

MUON = (
    "--optimizer muon --num-layers 2 --normalization RMSNorm --swiglu --ffn-hidden-size 24 "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --lr-decay-iters 4 "
    "--muon-extra-scale-factor 2"
).split()
OFFLOAD = (
    "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --overlap-optimizer-with-forward "
    "--optimizer-offload-fraction"
).split()
ENGINES = {
    "megatron_fsdp": [],
    "offloaded": [*OFFLOAD, "0.5"],
    "experts": (
        "--num-experts 4 --moe-ffn-hidden-size 6 --moe-aux-loss-coeff 0 "
        "--expert-model-parallel-size 2"
    ).split(),
    "torch_fsdp2": ["--use-torch-fsdp2"],
}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_resumes_bit_for_bit_and_on_another_number_of_ranks(engine: str, tmp_path: Path):
    flags = [*MUON, *ENGINES[engine], "--bf16"]
    alone = [*flags, *(["--expert-model-parallel-size", "1"] if engine == "experts" else [])]
    whole, parts, other = (tmp_path / f"{name}.jsonl" for name in ("whole", "parts", "other"))
    log = train(*flags, "--metrics-jsonl", whole, world_size=2)
    expected = losses(whole)
    assert len(set(expected.values())) == 4
    table = {line.split()[0]: line.split()[1] for line in log.splitlines() if " x " in line}
    assert table["decoder.layers.*.self_attention.linear_qkv.weight"] == "muon"
    assert table["embedding.word_embeddings.weight"] == "adam"

    checkpoints = tmp_path / "checkpoints"
    save = ["--save", checkpoints, "--save-interval", "2", "--metrics-jsonl", parts]
    train(*flags, *save, "--exit-interval", "2", world_size=2)
    train(*alone, "--load", checkpoints, "--metrics-jsonl", other)
    train(*flags, *save, world_size=2)
    assert losses(parts) == expected
    continued = losses(other)
    assert set(continued) == {3, 4}, "it continued from the checkpoint"
    assert continued == pytest.approx({n: expected[n] for n in continued}, rel=1e-3)


def test_each_flag_of_muon_changes_the_result(tmp_path: Path):
    seen = set()
    changes = (
        [],
        ["--muon-momentum", "0.5"],
        ["--no-muon-nesterov"],
        ["--muon-num-ns-steps", "2"],
        ["--muon-coefficient-type", "quintic"],
        ["--muon-coefficient-type", "polar_express"],
        ["--muon-scale-mode", "original"],
        ["--muon-scale-mode", "spectral"],
        ["--muon-extra-scale-factor", "3"],
        ["--muon-split-heads"],
        ["--adam-beta1", "0.5"],
        ["--adam-eps", "1e-3"],
        ["--optimizer", "adam", "--muon-extra-scale-factor", "1"],
    )
    for number, change in enumerate(changes):
        metrics = tmp_path / f"{number}.jsonl"
        train(*MUON, *change, "--metrics-jsonl", metrics)
        seen.add(tuple(losses(metrics).values()))
    assert len(seen) == len(changes)


@pytest.mark.parametrize("precision", ["--bf16", "--fp16 --initial-loss-scale 524288"])
def test_losses_are_bit_equal_at_every_offload_fraction(precision: str, tmp_path: Path):
    """With several microbatches, clipping, and in fp16 steps that are skipped."""
    flags = [*MUON, *precision.split(), "--micro-batch-size", "1", "--clip-grad", "0.1"]
    flags += ["--hysteresis", "1"] if "fp16" in precision else []
    seen = []
    for number, change in enumerate(([], *([*OFFLOAD, share] for share in ("0", "0.4", "1")))):
        metrics = tmp_path / f"{number}.jsonl"
        train(*flags, *change, "--metrics-jsonl", metrics, world_size=2)
        seen.append(losses(metrics))
    assert seen == [seen[0]] * 4
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    skipped = [r["skipped_iterations"] for r in records if r["kind"] == "train"][-1]
    assert 0 < skipped < 4 if "fp16" in precision else skipped == 0


@pytest.mark.parametrize("family", ["qwen3_5_text", "deepseek_v3", "gpt_oss"])
def test_a_hugging_face_model_is_fine_tuned_with_muon(family: str, tmp_path: Path):
    pytest.importorskip("transformers")
    folder = save_model(tmp_path / "model", family)
    flags = (
        f"--hf-model {folder} --seq-length 16 --mock-data --num-workers 0 --micro-batch-size 2 "
        "--global-batch-size 4 --train-iters 3 --eval-iters 0 --lr 1e-3 --lr-decay-style constant "
        "--bf16"
    ).split()
    found = {}
    for rule in ("muon", "adam"):
        metrics = tmp_path / f"{rule}.jsonl"
        run_ranks(2, logged, [*flags, "--optimizer", rule, "--metrics-jsonl", str(metrics)])
        found[rule] = [*losses(metrics).values()]
    metrics = tmp_path / "offloaded.jsonl"
    offload = ["--optimizer", "muon", *OFFLOAD, "0.5", "--metrics-jsonl", str(metrics)]
    run_ranks(2, logged, [*flags, *offload])
    assert [*losses(metrics).values()] == found["muon"]
    assert found["muon"][0] == found["adam"][0], "both start from the weights of the directory"
    assert found["muon"][1:] != found["adam"][1:]
    assert found["muon"][2] == pytest.approx(found["adam"][2], rel=0.05), "at AdamW's rate"
