"""Runs of `pretrain_gpt.py` whose experts are divided over ranks, and resumed otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.functional_tests.helpers.runs import losses, pretrain, published

MIXTURE = [
    *"--num-experts 4 --ffn-hidden-size 8 --moe-aux-loss-coeff 0.01 --swiglu".split(),
    *"--disable-bias-linear --attention-dropout 0 --hidden-dropout 0".split(),
    *"--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --micro-batch-size 1".split(),
]


def _run(folder: Path, name: str, expert_size: int, world_size: int, *flags: object) -> str:
    """A run that logs to `name`; answers rank 0's log."""
    runs = pretrain(
        *MIXTURE,
        *("--expert-model-parallel-size", expert_size, "--metrics-jsonl", folder / name),
        *flags,
        world_size=world_size,
    )
    assert [run.error for run in runs] == [""] * world_size
    return runs[0].log


def test_a_run_with_divided_experts_resumes_with_experts_divided_otherwise(tmp_path: Path) -> None:
    log = _run(tmp_path, "whole", 2, 2)
    assert "Megatron-FSDP (optim_grads_params, experts divided by 2) on 2 ranks" in log
    assert "decoder.layers.0.mlp.experts" in log, "a group of its own in the offload plan"
    expected = losses(tmp_path / "whole")
    assert len(expected) == 4

    save = tmp_path / "checkpoints"
    _run(tmp_path, "begun", 2, 2, "--save", save, "--exit-interval", 2)
    assert losses(tmp_path / "begun") == {k: expected[k] for k in (1, 2)}
    # Of two ranks, and of one.
    for world_size in (2, 1):
        name = f"resumed on {world_size}"
        _run(tmp_path, name, 1, world_size, "--load", save)
        resumed = losses(tmp_path / name)
        assert resumed == pytest.approx({k: expected[k] for k in (3, 4)}, rel=0, abs=1e-6)
    assert published(save)
