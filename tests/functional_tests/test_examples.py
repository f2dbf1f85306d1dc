"""The examples that are programs."""

from __future__ import annotations

import re
import subprocess

from megatron.training.checkpoint.hf_layout import WEIGHTS_FILE
from tests.functional_tests.helpers.runs import ROOT, TIMEOUT, TORCHRUN, environment


def test_a_hugging_face_model_trains_and_is_saved_in_both_formats(tmp_path):
    command = [
        *TORCHRUN,
        "examples/train_hugging_face.py",
        "--output",
        str(tmp_path),
        "--steps",
        "3",
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True), "it learns, and goes on from what it has loaded"
    assert (tmp_path / "weights" / WEIGHTS_FILE).exists()
    assert (tmp_path / "step" / "published.json").exists()
