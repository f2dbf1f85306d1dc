"""Token files against megatron-core itself, in its own environment
(`MEGATRON_PEER_PYTHON`).
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

pytestmark = pytest.mark.peer

ROOT = Path(__file__).parents[4]
SCRIPT = Path(__file__).parent / "helpers" / "peer_indexed_dataset.py"


def _peer(action: str, prefix: Path, path: Path) -> None:
    python = os.environ.get(
        "MEGATRON_PEER_PYTHON", str(ROOT / ".venv-peers" / "megatron-core" / "bin" / "python")
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    command = [python, str(SCRIPT), action, str(prefix), str(path)]
    ran = subprocess.run(
        command, cwd=path.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def _spec(dtype: str) -> dict[str, Any]:
    random = np.random.default_rng(7)
    documents = []
    for _ in range(300):
        lengths = random.integers(0, 40, size=random.integers(1, 4))
        documents.append([random.integers(0, 65500, size=length).tolist() for length in lengths])
    return {"dtype": dtype, "documents": documents}


def _write_ours(prefix: Path, spec: dict[str, Any]) -> None:
    with IndexedDatasetBuilder(prefix, spec["dtype"]) as builder:
        for sequences in spec["documents"]:
            builder.add_document(
                list(itertools.chain(*sequences)), [len(sequence) for sequence in sequences]
            )


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_files_of_megatron_core_are_read_and_rewritten_byte_for_byte(
    tmp_path: Path, dtype: str
) -> None:
    spec = _spec(dtype)
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    _peer("write", tmp_path / "theirs", tmp_path / "spec.json")
    dataset = IndexedDataset(tmp_path / "theirs")
    assert dataset.dtype == dtype
    assert [dataset.get(index).tolist() for index in range(len(dataset))] == list(
        itertools.chain(*spec["documents"])
    )
    _write_ours(tmp_path / "ours", spec)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (
            tmp_path / f"theirs{suffix}"
        ).read_bytes()


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_megatron_core_reads_our_files(tmp_path: Path, dtype: str) -> None:
    spec = _spec(dtype)
    _write_ours(tmp_path / "ours", spec)
    _peer("read", tmp_path / "ours", tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text()) == spec
