"""Checkpoints of version 1 of the format, made as that version wrote them, and upgraded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.manifest import digest
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.store import LocalStore
from megatron_hybrid.checkpoint.command import main
from tests.helpers.checkpoints import row_cuts, whole, write_checkpoint

NAME = "iter_0000010"
TENSORS = {
    "model.weight": (torch.arange(7 * 30.0).view(7, 30), row_cuts((7, 30), 3, 4)),
    "model.big": (torch.randn(300, 500), row_cuts((300, 500), 100, 200)),
    "optimizer.state.weight.step": (torch.tensor(5.0), whole(torch.tensor(5.0), rank=1)),
}
PLAIN = {"optimizer.param_groups": [{"lr": 0.5, "params": ["weight", "big"]}]}
FIELDS = "key dtype offsets sizes blob_offset blob_nbytes data_offset data_nbytes digests".split()


def to_json(value: object, **options: bool) -> str:
    return json.dumps(value, separators=(",", ":"), **options)


def make_version_1(folder: Path) -> None:
    """Replaces the index, manifests and marker of a checkpoint by those of version 1."""
    checkpoint = PublishedCheckpoint.open(LocalStore(folder.parent), folder.name)
    index, marker = checkpoint.index, checkpoint.marker
    places = dcp.FileSystemReader(folder).read_metadata().storage_data
    files = {
        name: [entry.nbytes, entry.digest]
        for name, entry in marker.files.items()
        if name != "index.json" and not name.startswith("manifest")
    }
    for rank in range(marker.world_size):
        lines = []
        manifest = checkpoint.manifest(rank)
        for (tensor, chunk), digests in zip(
            index.chunks_by_rank[rank], manifest.digests, strict=True
        ):
            is_plain = tensor.key in index.plain
            offsets, sizes = ((), ()) if is_plain else chunk.box
            place = next(
                info
                for where, info in places.items()
                if where.fqn == tensor.key and tuple(where.offset or ()) == offsets
            )
            dtype = "" if is_plain else str(tensor.dtype).removeprefix("torch.")
            nbytes = tensor.chunk_nbytes(chunk)
            blob = (place.offset, place.length)
            lines.append([tensor.key, dtype, offsets, sizes, *blob, chunk.offset, nbytes, digests])
        name = f"manifest_{rank}.json"
        head = {"format_version": 1, "save_id": index.save_id, "rank": rank}
        size = marker.files[f"__{rank}_0.distcp"].nbytes
        head |= {"file": f"__{rank}_0.distcp", "nbytes": size, "chunk_fields": FIELDS}
        content = to_json({**head, "chunks": lines}).encode()
        (folder / name).write_bytes(content)
        files[name] = [len(content), digest(content)]
    (folder / "index.json").unlink()
    members = {"format_version": 1, "save_id": index.save_id, "iteration": marker.iteration}
    members |= {"world_size": marker.world_size, "files": files}
    own = digest(to_json(members, sort_keys=True).encode())
    (folder / "published.json").write_text(to_json({**members, "digest": own}))


@pytest.fixture
def old(tmp_path: Path) -> Path:
    folder = tmp_path / "old" / NAME
    write_checkpoint(folder, TENSORS, PLAIN, world_size=2)
    make_version_1(folder)
    return folder


def test_a_load_refuses_version_1_and_names_the_tool(old: Path):
    tool = "`python -m megatron_hybrid checkpoint upgrade OLD NEW`"
    wanted = rf"version 2 in .*published.json, got 1. {tool}"
    with pytest.raises(CheckpointError, match=wanted) as caught:
        PublishedCheckpoint.open(LocalStore(old.parent), NAME)
    assert type(caught.value) is CheckpointError  # not damage: no older one is to be tried


def test_an_upgraded_checkpoint_has_the_same_content_without_a_copy_of_the_data(
    old: Path, tmp_path: Path
):
    before = {file.name: file.read_bytes() for file in old.iterdir()}
    new = tmp_path / "new" / NAME
    assert main(["upgrade", str(old), str(new)]) == 0
    assert main(["verify", str(new)]) == 0
    checkpoint = PublishedCheckpoint.open(LocalStore(new.parent), NAME)
    for key, (tensor, _) in TENSORS.items():
        out = torch.empty_like(tensor)
        checkpoint.read(key, (0,) * tensor.dim(), out)
        assert torch.equal(out, tensor)
    assert checkpoint.read_plain("optimizer.param_groups") == PLAIN["optimizer.param_groups"]
    for rank in range(2):
        assert (old / f"__{rank}_0.distcp").samefile(new / f"__{rank}_0.distcp")
    assert {file.name: file.read_bytes() for file in old.iterdir()} == before
    tracker = tmp_path / "new" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text().strip() == "10"


def test_a_folder_of_checkpoints_is_upgraded_as_a_whole(old: Path, tmp_path: Path):
    write_checkpoint(old.parent / "iter_0000020", TENSORS, PLAIN, world_size=2, save_id="b")
    make_version_1(old.parent / "iter_0000020")
    assert main(["upgrade", str(old.parent), str(tmp_path / "new")]) == 0
    for name in (NAME, "iter_0000020"):
        assert main(["verify", str(tmp_path / "new" / name)]) == 0


@pytest.mark.parametrize("file", ["published.json", "manifest_1.json", ".metadata"])
def test_a_damaged_one_is_named_and_nothing_is_left_of_the_new_one(
    old: Path, tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
):
    content = bytearray((old / file).read_bytes())
    content[len(content) // 2] ^= 1
    (old / file).write_bytes(content)
    assert main(["upgrade", str(old), str(tmp_path / "new" / NAME)]) == 2
    assert file in capsys.readouterr().err
    assert not (tmp_path / "new" / NAME).exists()
    assert not list((tmp_path / "new").glob("*.saving"))


def test_a_checkpoint_of_the_present_version_is_refused(tmp_path: Path):
    write_checkpoint(tmp_path / "now" / NAME, TENSORS, PLAIN, world_size=2)
    assert main(["upgrade", str(tmp_path / "now"), str(tmp_path / "new")]) == 2


def test_a_published_one_is_never_overwritten(old: Path, tmp_path: Path):
    new = tmp_path / "new"
    assert main(["upgrade", str(old.parent), str(new)]) == 0
    marker = (new / NAME / "published.json").read_bytes()
    assert main(["upgrade", str(old.parent), str(new)]) == 2
    assert (new / NAME / "published.json").read_bytes() == marker
