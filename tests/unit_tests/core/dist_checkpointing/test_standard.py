"""PyTorch DCP reads the checkpoints of this project."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.state.param_groups import PARAM_GROUPS
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.helpers.models import (
    HFSDP,
    ITERATION,
    Setting,
    Trained,
    full_tensors,
    moments,
)

RUNS = {
    "one rank": (1, Setting(is_tied=False)),
    "fp8": (2, Setting("optim", compute_dtype=torch.bfloat16, optimizer=moments("fp8", "fp32"))),
    "three ranks alike": (3, Setting("no_shard", 1.0, is_fused=False, is_tied=False)),
    "hfsdp": (4, Setting(HFSDP, 0.5, optimizer=moments("bf16", "bf16"))),
}

# Runs where this project cannot be imported. Argument: pairs of a checkpoint and a file with its
# expected tensors. Output: for each pair, the keys that differ.
VANILLA = """
import json, sys, warnings

class Blocked:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "megatron":
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
try:
    import megatron.core
    raise SystemExit("megatron can be imported")
except ImportError:
    pass

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

warnings.simplefilter("ignore")
torch.set_num_threads(1)

def is_equal(one, other):
    if not isinstance(other, torch.Tensor):
        return one == other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))

def differing(got, expected):
    keys = sorted(got.keys() ^ expected.keys())
    return keys + [key for key in expected if key in got and not is_equal(got[key], expected[key])]

def flat(key):
    section, _, rest = key.partition(".")
    if section == "optimizer" and rest.startswith("state."):
        return ("optimizer", "state", *rest[len("state."):].rsplit(".", 1))
    return (section, *rest.split(".", 1)) if section == "rng" else (section, rest)

def dig(nested, path):
    for name in path:
        nested = nested[name]
    return nested

def count(nested):
    return sum(map(count, nested.values())) if isinstance(nested, dict) else 1

verdicts = []
for folder, file in json.loads(sys.argv[1]):
    expected = torch.load(file, weights_only=True)
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = dict.fromkeys(found)
    for key, value in found.items():
        if isinstance(value, TensorStorageMetadata):
            state[key] = torch.full(value.size, 77, dtype=value.properties.dtype)
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    # Some of the weights, as a program with a model requests them.
    weights = {
        key.removeprefix("model."): value
        for key, value in expected.items()
        if key.startswith("model.decoder")
    }
    some = {"model": {name: torch.full_like(value, 77) for name, value in weights.items()}}
    dcp.load(some, checkpoint_id=folder, no_dist=True)
    dcp_to_torch_save(folder, file + ".all")
    everything = torch.load(file + ".all", weights_only=True)
    verdicts.append({
        "dcp.load": differing(state, expected),
        "dcp.load of a part": differing(some["model"], weights),
        "dcp_to_torch_save": differing(
            {
                key: everything[key] if key in everything else dig(everything, flat(key))
                for key in expected
            },
            expected,
        ),
        "number of values": count(everything) - len(expected),
        "number of tensors": sum(isinstance(value, torch.Tensor) for value in state.values()),
    })
print(json.dumps(verdicts))
"""


def _ranks_own(rank: int) -> torch.Tensor:
    return torch.arange(5, dtype=torch.uint8) + rank


def _save(root: str, setting: Setting) -> None:
    """Publishes a checkpoint and stores its expected tensors."""
    trained = Trained(setting, seed=0)
    for number in range(ITERATION):
        trained.step(number)
    trained.save(root, private={"rng.torch": _ranks_own(trained.rank)})
    expected: dict[str, Any] = full_tensors(trained)
    expected |= {f"rng.{rank}.torch": _ranks_own(rank) for rank in range(trained.world_size)}
    expected[PARAM_GROUPS] = trained.contents().plain[PARAM_GROUPS]
    if trained.rank == 0:
        torch.save(expected, f"{root}/expected.pt")


def read_by_pytorch_alone(*places: tuple[Path, Path]) -> list[dict[str, Any]]:
    """The differences found by `VANILLA` in each pair of a checkpoint and a file."""
    argument = json.dumps([(str(folder), str(expected)) for folder, expected in places])
    result = subprocess.run(
        [sys.executable, "-I", "-c", VANILLA, argument], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directories of RUNS."""
    found = {}
    for name, (world_size, setting) in RUNS.items():
        found[name] = tmp_path_factory.mktemp("run")
        run_ranks(world_size, _save, str(found[name]), setting)
    return found


OTHER = "other.pt"  # expectations that are not met


@pytest.fixture(scope="module")
def verdicts(roots: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Returns PyTorch's differences by run; OTHER has wrong expectations."""
    places = {
        name: (root / checkpoint_name(ITERATION), root / "expected.pt")
        for name, root in roots.items()
    }
    folder, file = next(iter(places.values()))
    expected = torch.load(file, weights_only=True)
    name = "embedding.word_embeddings.weight"
    for key in ("model.decoder.layers.0.self_attention.key.weight", f"optimizer.state.{name}.step"):
        expected[key].view(torch.int32).reshape(-1)[-1] ^= 1
    del expected["rng.0.torch"]
    torch.save(expected, file.with_name(OTHER))
    places[OTHER] = (folder, file.with_name(OTHER))
    return dict(zip(places, read_by_pytorch_alone(*places.values()), strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_pytorch_alone_reads_every_tensor_bit_for_bit(verdicts, name):
    verdict = verdicts[name]
    assert verdict["dcp.load"] == []
    assert verdict["dcp.load of a part"] == []
    assert verdict["dcp_to_torch_save"] == []
    assert verdict["number of values"] == 0
    assert verdict["number of tensors"] > 60


def test_a_flipped_bit_is_a_difference(verdicts):
    verdict = verdicts[OTHER]
    assert len(verdict["dcp.load"]) == 3
    assert len(verdict["dcp.load of a part"]) == 1
    assert len(verdict["dcp_to_torch_save"]) == 2
