"""The examples that are programs, and the commands of the page on fine-tuning."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from megatron.training.checkpoint.hf_layout import WEIGHTS_FILE
from tests.functional_tests.helpers.runs import ROOT, TIMEOUT, execute
from tests.helpers.doc_commands import bash_blocks


def test_a_hugging_face_model_trains_and_is_saved_in_both_formats(tmp_path):
    arguments = ["--output", str(tmp_path), "--steps", "3"]
    command = [sys.executable, "examples/train_hugging_face.py", *arguments]
    done = execute(command, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True), "the loss falls, also after the resume"
    assert (tmp_path / "weights" / WEIGHTS_FILE).exists()
    assert (tmp_path / "step" / "published.json").exists()


@pytest.mark.wide
def test_the_proxy_goes_from_its_pictures_to_its_accuracy_in_one_command(tmp_path):
    command = [sys.executable, "examples/qwen3_5_vl_proxy/run.py"]
    command += ["--data", str(tmp_path / "data"), "--runs", str(tmp_path / "runs")]
    command += "--pictures 200 --iterations 32 --questions 4".split()
    done = execute(command, 2 * TIMEOUT)
    assert done.returncode == 0, done.stderr
    for iteration in (10, 12):
        assert f"resumed at iteration {iteration}: the losses are those" in done.stdout
    assert len(re.findall(r"accuracy, .*: \d+\.\d % of 4", done.stdout)) == 3


@pytest.mark.wide
def test_the_commands_for_fine_tuning_run_as_they_stand(tmp_path):
    pytest.importorskip("transformers")
    for name in ("docs", "megatron", "megatron_hybrid", "pretrain_gpt.py", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    # `python` and `torchrun` come from the tests' environment.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    blocks = bash_blocks(ROOT / "docs" / "fine-tuning.md")
    assert len(blocks) == 8
    bash = ["bash", "-euo", "pipefail", "-c", "\n".join(blocks)]
    done = execute(bash, 2 * TIMEOUT, tmp_path, PYTHONPATH=str(tmp_path), PATH=path)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"lm loss: (\d+\.\d+E[+-]\d+)", done.stdout)]
    assert len(losses) == 6, "two of each training that logs, and its validation"
    assert losses[1] < losses[0] < 8, "random weights with 1000 tokens start at 6.9"
    assert losses[4] < losses[3] < losses[1], "conversations start with a trained loss"
    for name in ("tiny", "chats"):
        assert (tmp_path / "exports" / name / WEIGHTS_FILE).exists()
    assert "--- prompt: 'A checkpoint'" in done.stdout
