"""Parts of the end-to-end comparison: equal data and weights, comparisons of states and losses,
peak memory, missing peers.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks import end_to_end
from benchmarks.peers import environments, memory
from benchmarks.peers.gpt import Shape, batch_of, build_gpt
from benchmarks.peers.resume import differences
from benchmarks.peers.trainer import Training

ROOT = Path(__file__).parents[4]
SHAPE = Shape(layers=1, hidden=64, vocabulary=97, micro_batch=2, sequence=12)


def test_data_follows_from_step_rank_and_seed_alone_and_can_be_learned() -> None:
    tokens, labels = batch_of(SHAPE, 3, 1, 0)
    again, _ = batch_of(SHAPE, 3, 1, 0)
    assert torch.equal(tokens, again)
    others = [batch_of(SHAPE, *place)[0] for place in ((4, 1, 0), (3, 0, 0), (3, 1, 1))]
    assert not any(torch.equal(tokens, other) for other in others)

    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    assert ((labels - 5 * tokens - 7) % SHAPE.vocabulary < 4).all()


def test_weights_are_the_same_in_every_process_and_leave_random_states_alone() -> None:
    before = torch.get_rng_state()
    one, other = build_gpt(SHAPE, 5).state_dict(), build_gpt(SHAPE, 5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], other[name]) for name in one)
    different = build_gpt(SHAPE, 6).state_dict()
    assert not torch.equal(one["output.weight"], different["output.weight"])


def test_settings_survive_the_way_to_another_process() -> None:
    training = Training(SHAPE, lr=0.5)
    assert Training.from_plain(json.loads(json.dumps(training.to_plain()))) == training


def test_states_are_compared_by_weights_and_moments(tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "a.exp_avg": torch.zeros(3), "a.exp_avg_sq": torch.zeros(3)}
    one, other, third = (tmp_path / name for name in ("one", "other", "third"))
    torch.save(state, one)
    torch.save({**state, "a.exp_avg_sq": torch.tensor([0.0, -0.25, 0.0])}, other)
    torch.save({"a": torch.ones(3)}, third)

    assert differences(one, one).is_exact
    found = differences(one, other)
    assert (found.weights, found.moments, found.is_exact) == (0.0, 0.25, False)
    with pytest.raises(RuntimeError, match=r"Expected the same tensors.*a\.exp_avg"):
        differences(one, third)


def test_sides_whose_losses_part_are_not_compared() -> None:
    agreed = [9.0] * end_to_end.COMPARED_STEPS
    # From there on rounding may add up.
    end_to_end.check_losses({"ours": [*agreed, 5.0], "theirs": [*agreed, 6.0]})
    with pytest.raises(RuntimeError, match=r"in step 1: ours 9\.0000, theirs 9\.1000"):
        end_to_end.check_losses({"ours": agreed, "theirs": [9.0, 9.1, *agreed[2:]]})


def test_a_peak_is_of_what_was_needed_since_the_reset_with_children_and_without_libraries() -> None:
    """In a separate process: this one's children include the pools of ranks of other tests."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(check_peaks).result()


def check_peaks() -> None:
    size = 64 << 20
    memory.reset_peak()
    least = memory.peak_bytes()
    block = torch.ones(size, dtype=torch.uint8)
    del block
    assert size * 0.9 < memory.peak_bytes() - least < size * 1.5
    memory.reset_peak()
    assert memory.peak_bytes() - least < size * 0.5

    script = f"held = bytearray(b'1' * {size}); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert memory.peak_bytes() - least > size * 0.9
        child.communicate(b"\n")


def make_interpreter(root: Path, peer: str, script: str) -> None:
    python = root / ".venv-peers" / peer / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)


def test_a_peer_says_itself_why_it_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    rows = {row.side: row.why for row in environments.peers_that_cannot_run()}
    assert rows == {
        "torchao CPUOffloadOptimizer": ".venv-peers/torchao has not been made: make peers",
        "Megatron-LM HybridDeviceOptimizer": ".venv-peers/megatron-core has not been made: make "
        "peers",
    }

    # The last line of the interpreter's output for the probe.
    make_interpreter(
        tmp_path, "torchao", 'echo "line 1" >&2; echo "AssertionError: $2" >&2; exit 1'
    )
    make_interpreter(tmp_path, "megatron-core", "exit 0")
    rows = {row.side: row.why for row in environments.peers_that_cannot_run()}
    probe = environments.PROBES / "torchao.py"
    assert rows["torchao CPUOffloadOptimizer"].endswith(f"AssertionError: {probe}")
    assert rows["Megatron-LM HybridDeviceOptimizer"].startswith("it runs on this machine")


def test_a_side_without_its_environment_is_named_with_what_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    found, missing = end_to_end.sides(["fsdp2", "deepspeed_zero3"])
    assert list(found) == ["ours", "FSDP2 + CPUOffloadPolicy"]
    (row,) = missing
    assert row.side == "DeepSpeed ZeRO-3 offload"
    assert row.why == ".venv-peers/deepspeed has not been made: make peers"


@pytest.mark.wide
def test_ours_and_fsdp2_from_end_to_end(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    size = "--layers 1 --hidden 64 --vocabulary 128 --sequence 16 --rounds 2 --steps 2 --saves 1"
    command = [sys.executable, "-m", "benchmarks.end_to_end", *size.split()]
    command += ["--other-ranks", "1", "3", "--peers", "fsdp2", "--disk", str(tmp_path)]
    done = subprocess.run(
        [*command, "--output", str(output)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    result = json.loads(output.read_text())
    sides = result["facts"]["sides"]
    assert sides.keys() == {"ours", "FSDP2 + CPUOffloadPolicy"}
    for side in sides.values():
        assert side["initial_weights_differ_by"] == 0.0
        assert side["resume"]["is_exact"], side
        assert all(one["is_exact"] for one in side["resume"]["loads_on"].values()), side
        assert len(side["losses"]) == (end_to_end.WARM_UP + 2) * 2
    groups = {(one["group"], one["side"]) for one in result["measurements"]}
    assert len(groups) == len(result["measurements"]) == 14
    assert all(
        value > 0
        for one in result["measurements"]
        for value in one["values"]
        if one["group"] != "a save: training lost"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"], "no other file is left"
