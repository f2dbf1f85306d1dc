from __future__ import annotations

import errno
import mmap
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from megatron.core.dist_checkpointing import store as store_module
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.manifest import MARKER_FILE, METADATA_FILE
from megatron.core.dist_checkpointing.store import (
    SIGN_FILE,
    TRACKER_FILE,
    LocalStore,
    RemoteStore,
    Store,
    latest_iteration,
    open_store,
    track,
)
from megatron.core.files import UnusableFileError, published

FINAL = "iter_0000010"
PAGE = 4096


@pytest.fixture
def local(tmp_path) -> LocalStore:
    found = open_store(tmp_path / "run")
    assert isinstance(found, LocalStore)
    return found


@pytest.fixture
def remote() -> Iterator[RemoteStore]:
    found = open_store("memory://tests/run")
    assert isinstance(found, RemoteStore)
    yield found
    # The memory of fsspec is the process's.
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


@pytest.fixture(params=["local", "remote"])
def store(request) -> Store:
    return request.getfixturevalue(request.param)


def aligned(content: bytes) -> memoryview:
    """The bytes, beginning on a page."""
    memory = mmap.mmap(-1, max(len(content), 1))
    memory[: len(content)] = content
    return memoryview(memory)[: len(content)]


def save(
    store: Store,
    final: str = FINAL,
    token: str = "token",
    content: bytes = b"data",
    *,
    with_marker: bool = True,
) -> str:
    """A draft with everything that a checkpoint needs. Returns its name."""
    draft = store.draft_name(final, token)
    store.make_folder(draft)
    sink = store.open_data(f"{draft}/__0_0.distcp")
    sink.write([aligned(content)])
    sink.close()
    for name in (METADATA_FILE, MARKER_FILE)[: 1 + with_marker]:
        store.write(f"{draft}/{name}", content)
    return draft


def holds_checkpoint(store: Store, final: str, content: bytes = b"data") -> bool:
    files = ("__0_0.distcp", METADATA_FILE, MARKER_FILE)
    return all(
        store.exists(f"{final}/{name}") and store.read(f"{final}/{name}") == content
        for name in files
    )


def after(num_calls: int, real: Callable, error: Exception) -> Callable:
    """`real`, which raises `error` instead from call `num_calls` on."""
    calls = []

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) > num_calls:
            raise error
        return real(*args, **kwargs)

    return call


# Every store.


def test_a_small_file_is_read_as_it_was_written_last(store):
    assert store.folders() == store.sweep() == []
    store.make_folder(FINAL)
    path = f"{FINAL}/{MARKER_FILE}"
    assert not store.exists(path)
    for content in (b"first", b"the second"):
        store.write(path, content)
        store.make_folder(FINAL)
        assert store.read(path) == content
        assert store.size(path) == len(content)
        assert store.exists(path)
    assert store.folders() == [FINAL]


def test_a_file_of_more_bytes_than_wanted_is_not_read(store):
    store.make_folder(FINAL)
    store.write(f"{FINAL}/file", b"content")
    assert store.read(f"{FINAL}/file", 7) == b"content"
    with pytest.raises(UnusableFileError):
        store.read(f"{FINAL}/file", 6)


def test_the_files_of_a_directory_are_listed_without_other_files(store):
    store.make_folder(FINAL)
    store.make_folder(f"{FINAL}/folder")
    for name in ("b", "a", "deleted", "folder/c"):
        store.write(f"{FINAL}/{name}", b"content")
    for _ in range(2):
        store.delete(f"{FINAL}/deleted")
    assert [name for name in store.files(FINAL) if name != SIGN_FILE] == ["a", "b"]


def test_a_file_that_is_missing_is_a_file_not_found(store):
    store.make_folder(FINAL)
    path, memory = f"{FINAL}/missing", memoryview(bytearray(1))
    for use in (store.size, store.read, lambda path: store.read_into(path, 0, [memory])):
        with pytest.raises(FileNotFoundError):
            use(path)


@pytest.mark.parametrize("request_bytes", [100, 1 << 22])
def test_buffers_are_filled_in_order_and_passed_on_one_by_one(store, monkeypatch, request_bytes):
    monkeypatch.setattr(store_module, "_REQUEST_BYTES", request_bytes)
    content = os.urandom(1000)
    store.make_folder(FINAL)
    store.write(f"{FINAL}/file", content)
    memory, seen = memoryview(bytearray(64)), []
    # The same memory each time: it may be reused once it has been passed on.
    sizes = [64, 7, 0, 64, 33]
    store.read_into(
        f"{FINAL}/file",
        8,
        (memory[:size] for size in sizes),
        lambda buffer: seen.append(bytes(buffer)),
    )
    assert [len(each) for each in seen if each] == [64, 7, 64, 33]
    assert b"".join(seen) == content[8 : 8 + sum(sizes)]


def test_reading_ends_with_the_first_wrong_buffer(store):
    store.make_folder(FINAL)
    store.write(f"{FINAL}/file", bytes(range(100)))
    memory = memoryview(bytearray(40))

    def refuse(buffer: memoryview) -> None:
        raise CheckpointDamagedError(f"the first byte is {buffer[0]}")

    with pytest.raises(CheckpointDamagedError, match="the first byte is 10"):
        store.read_into(f"{FINAL}/file", 10, [memory[:20], memory[20:]], refuse)
    if store.is_rename_atomic:
        assert bytes(memory[20:]) == bytes(20)


@pytest.mark.parametrize(("offset", "got"), [(0, 100), (90, 10), (500, 0)])
def test_a_file_that_ends_too_early_is_damage_that_names_it(store, offset, got):
    store.make_folder(FINAL)
    store.write(f"{FINAL}/file", bytes(100))
    with pytest.raises(
        CheckpointDamagedError, match=rf"Expected 101 bytes at byte {offset} of .*/file, got {got}"
    ):
        store.read_into(f"{FINAL}/file", offset, [memoryview(bytearray(101))])


@pytest.mark.parametrize("sizes", [[], [1], [2 * PAGE, PAGE, PAGE + 17]])
def test_a_data_file_holds_what_was_written_in_order(store, sizes):
    parts = [os.urandom(size) for size in sizes]
    store.make_folder(FINAL)
    sink = store.open_data(f"{FINAL}/__0_0.distcp")
    for part in parts:
        sink.write([aligned(part)])
    sink.close()
    if store.is_rename_atomic:
        with pytest.raises(FileExistsError):
            store.open_data(f"{FINAL}/__0_0.distcp")
    assert store.read(f"{FINAL}/__0_0.distcp") == b"".join(parts)


def test_an_aborted_data_file_is_gone_and_aborting_it_again_does_no_harm(store):
    draft = store.draft_name(FINAL, "token")
    store.make_folder(draft)
    sink = store.open_data(f"{draft}/__0_0.distcp")
    sink.write([aligned(bytes(PAGE))])
    sink.abort()
    assert not store.exists(f"{draft}/__0_0.distcp")
    assert store.sweep() == [draft]
    sink.abort()
    assert store.folders() == []


def test_a_published_checkpoint_has_its_final_name_and_no_sweep_deletes_it(store):
    draft = save(store)
    store.publish(draft, FINAL)
    assert holds_checkpoint(store, FINAL)
    assert store.sweep() == []
    assert holds_checkpoint(store, FINAL)
    assert store.folders() == [FINAL]


def test_an_abandoned_draft_is_swept_and_cannot_be_published_then(store):
    draft = save(store, with_marker=False)
    assert store.sweep() == [draft]
    assert store.folders() == []
    with pytest.raises(FileNotFoundError, match=FINAL):
        store.publish(draft, FINAL)
    assert store.folders() == []


def test_a_removed_checkpoint_is_gone_and_others_stay(store):
    for final in (FINAL, "iter_0000020"):
        store.publish(save(store, final), final)
    store.remove(FINAL)
    assert store.folders() == ["iter_0000020"]
    assert holds_checkpoint(store, "iter_0000020")
    with pytest.raises(FileNotFoundError):
        store.remove(FINAL)


def test_a_sweep_leaves_directories_that_are_no_checkpoints(store):
    for name in ("tensorboard", "old.saving", "iter_best", "iter_10_backup"):
        store.make_folder(name)
        store.write(f"{name}/file", b"content")
    assert store.sweep() == []
    assert store.folders() == ["iter_10_backup", "iter_best", "old.saving", "tensorboard"]


def test_the_newest_checkpoint_is_found_while_a_newer_one_is_published(store, monkeypatch):
    list_published = store_module.published_iterations

    def list_before_another_is_published(store: Store) -> list[int]:
        found = list_published(store)
        if found == [10]:
            store.publish(save(store, "iter_0000020"), "iter_0000020")
            track(store, 20)
        return found

    store.publish(save(store), FINAL)
    track(store, 10)
    monkeypatch.setattr(store_module, "published_iterations", list_before_another_is_published)
    assert latest_iteration(store) == 20


# A directory of the file system.


def test_a_tracker_of_a_gibibyte_is_an_error_before_it_is_read(local, tmp_path):
    save(local)
    with (tmp_path / "run" / TRACKER_FILE).open("wb") as tracker:
        tracker.truncate(1 << 30)
    with pytest.raises(CheckpointError, match=TRACKER_FILE) as caught:
        latest_iteration(local)
    assert isinstance(caught.value.__cause__, UnusableFileError)


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_path_and_a_file_url_are_the_same_local_directory(tmp_path, prefix):
    found = open_store(f"{prefix}{tmp_path}/run")
    assert isinstance(found, LocalStore)
    assert found.root == f"{tmp_path}/run"
    assert found.is_rename_atomic


def test_a_file_that_is_still_being_written_is_not_listed(local):
    local.make_folder(FINAL)
    local.write(f"{FINAL}/whole", b"content")
    with published(Path(local.root) / FINAL / "half") as stream:
        stream.write(b"content")
        assert len(list((Path(local.root) / FINAL).iterdir())) == 2
        assert local.files(FINAL) == ["whole"]
    assert local.files(FINAL) == ["half", "whole"]


def test_the_error_for_an_unwritable_small_file_has_its_name_and_no_directory_is_left(local):
    with pytest.raises(FileNotFoundError, match=f"'{local.root}/{FINAL}/file'"):
        local.write(f"{FINAL}/file", b"content")
    assert local.folders() == []


def test_a_checkpoint_whose_name_cannot_be_synced_is_published_but_not_durable(local, monkeypatch):
    first, second = save(local), save(local, final="iter_0000020")
    assert local.publish(first, FINAL) is True

    def sync(folder: Path) -> None:
        if folder == Path(local.root):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(store_module, "sync_folder", sync)
    assert local.publish(second, "iter_0000020") is False
    assert holds_checkpoint(local, "iter_0000020")


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT], ids=["I/O error", "repeated request"])
def test_a_rename_that_was_carried_out_although_it_raised_has_published(local, monkeypatch, code):
    draft, rename = save(local), Path.rename

    def raise_afterwards(path: Path, target: Path) -> None:
        rename(path, target)
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "rename", raise_afterwards)
    assert local.publish(draft, FINAL) is True
    assert holds_checkpoint(local, FINAL)


def test_a_rename_that_raised_while_another_run_published_has_not(local, monkeypatch):
    mine, theirs, rename = (
        save(local, token="mine"),
        save(local, token="theirs", content=b"theirs"),
        Path.rename,
    )

    def be_outrun(path: Path, target: Path) -> None:
        rename(Path(local.root) / theirs, target)
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(Path, "rename", be_outrun)
    with pytest.raises(OSError, match="Input/output error"):
        local.publish(mine, FINAL)
    assert holds_checkpoint(local, FINAL, b"theirs")


def test_a_publish_that_another_run_precedes_is_rejected(local, monkeypatch):
    first, second = (
        save(local, token=token, content=token.encode()) for token in ("first", "second")
    )

    def outrun(folder: Path) -> None:
        monkeypatch.undo()
        assert folder.name == second
        local.publish(first, FINAL)

    monkeypatch.setattr(store_module, "sync_folder", outrun)
    for _ in range(2):  # between check and rename, and before the check
        with pytest.raises(FileExistsError, match=FINAL):
            local.publish(second, FINAL)
    assert holds_checkpoint(local, FINAL, b"first")
    assert holds_checkpoint(local, second, b"second")
    assert local.sweep() == [second]


def test_a_directory_that_another_process_deletes_too_is_gone_in_the_end(local, monkeypatch):
    draft = save(local)
    real = shutil.rmtree

    def be_outrun(folder: Path) -> None:
        monkeypatch.setattr(shutil, "rmtree", real)
        (folder / MARKER_FILE).unlink()
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", MARKER_FILE)

    monkeypatch.setattr(shutil, "rmtree", be_outrun)
    assert local.sweep() == [draft]
    assert local.folders() == []


def test_a_draft_that_cannot_be_deleted_does_not_keep_the_others(local, monkeypatch):
    for final in (FINAL, "iter_0000020"):
        save(local, final)
    real = shutil.rmtree

    def refuse_the_first(folder: Path) -> None:
        if folder.name.startswith(FINAL):
            raise OSError(errno.EBUSY, "busy")
        real(folder)

    monkeypatch.setattr(shutil, "rmtree", refuse_the_first)
    assert local.sweep() == ["iter_0000020.token.saving"]
    (left,) = local.folders()
    assert left.endswith(".deleting")


def test_a_link_to_a_checkpoint_is_removed_without_the_checkpoint(local, tmp_path):
    save(open_store(tmp_path / "elsewhere"))
    target = tmp_path / "elsewhere" / f"{FINAL}.token.saving"
    local.make_folder("iter_0000020")
    (Path(local.root) / FINAL).symlink_to(target)
    assert local.folders() == [FINAL, "iter_0000020"]
    local.remove(FINAL)
    assert local.folders() == ["iter_0000020"]
    assert len(list(target.iterdir())) == 3


# Direct I/O.


@pytest.fixture
def sink(local):
    local.make_folder(FINAL)
    opened = local.open_data(f"{FINAL}/__0_0.distcp")
    yield opened
    opened.abort()


def test_a_file_that_the_system_cuts_short_is_an_error_that_names_it(local, sink):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE + 100, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: .*/__0_0.distcp") as failure:
            sink.write([aligned(bytes(4 * PAGE))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failure.value.errno == errno.EFBIG
    assert local.size(f"{FINAL}/__0_0.distcp") == 2 * PAGE + 100
    sink.abort()
    assert not local.exists(f"{FINAL}/__0_0.distcp")


# A remote store.


def test_the_marker_alone_publishes_a_remote_checkpoint(remote):
    assert not remote.is_rename_atomic
    assert remote.draft_name(FINAL, "token") == FINAL
    draft = save(remote, with_marker=False)
    with pytest.raises(FileNotFoundError, match=f"memory://tests/run/{FINAL}"):
        remote.publish(draft, FINAL)
    remote.write(f"{draft}/{MARKER_FILE}", b"data")
    remote.publish(draft, FINAL)
    assert holds_checkpoint(remote, FINAL)


def test_a_remote_directory_that_another_program_made_is_not_swept(remote):
    remote._files.pipe_file(f"{remote._path}/{FINAL}/{METADATA_FILE}", b"theirs")
    assert remote.sweep() == []
    assert remote.read(f"{FINAL}/{METADATA_FILE}") == b"theirs"


def test_a_remote_publish_that_a_sweep_came_before_fails(remote, monkeypatch):
    draft = save(remote, with_marker=False)
    with monkeypatch.context() as patch:
        # The sweep gets no further than one file.
        patch.setattr(
            type(remote._files), "rm", after(1, type(remote._files).rm, KeyboardInterrupt())
        )
        with pytest.raises(KeyboardInterrupt):
            remote.sweep()
    remote.write(f"{draft}/{MARKER_FILE}", b"data")
    with pytest.raises(FileNotFoundError, match="swept"):
        remote.publish(draft, FINAL)


@pytest.mark.parametrize("num_deleted", range(1, 4))
def test_an_interrupted_remote_removal_leaves_no_marker_and_the_next_sweep_deletes_the_rest(
    remote, monkeypatch, num_deleted
):
    remote.publish(save(remote), FINAL)
    with monkeypatch.context() as patch:
        patch.setattr(
            type(remote._files),
            "rm",
            after(num_deleted, type(remote._files).rm, KeyboardInterrupt()),
        )
        with pytest.raises(KeyboardInterrupt):
            remote.remove(FINAL)
    left = set(remote._list(remote._at(FINAL)))
    assert len(left) == 4 - num_deleted
    assert MARKER_FILE not in left
    assert SIGN_FILE in left
    assert (METADATA_FILE in left) == (num_deleted < 2)
    assert remote.sweep() == [FINAL]
    assert remote.folders() == []
