"""Where a job's secret comes from, and what is signed with it."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.options import ConfigError
from megatron.training.health.job_secret import (
    FILE_VARIABLE,
    SECRET_VARIABLE,
    BadRecordError,
    Signer,
    job_secret,
)

SECRET = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    """Nothing of the user's own is read or made."""
    for name in (SECRET_VARIABLE, FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def own_folder(tmp_path: Path) -> Path:
    return tmp_path / f"megatron-{os.geteuid()}"


def test_ranks_of_one_machine_share_a_secret_that_nobody_else_can_read(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: job_secret(is_one_machine=True), range(32)))
    assert len(found) == 1
    assert len(next(iter(found))) == 64
    (path,) = own_folder(tmp_path).iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_ranks_of_several_machines_have_none_unless_they_are_given_one(monkeypatch, tmp_path):
    assert job_secret(is_one_machine=False) is None
    assert not own_folder(tmp_path).exists()
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    assert job_secret(is_one_machine=False) == job_secret(is_one_machine=True) == SECRET


def test_a_file_may_hold_the_secret_if_its_owner_alone_may_read_it(monkeypatch, tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o640)
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    with pytest.raises(ConfigError, match=r"readable by its owner alone, .*-rw-r-----.*chmod 600"):
        job_secret(is_one_machine=False)
    path.chmod(0o600)
    assert job_secret(is_one_machine=False) == SECRET


@pytest.mark.parametrize("make", [lambda _: None, os.mkfifo, Path.mkdir])
def test_a_file_that_cannot_be_read_is_named(monkeypatch, tmp_path, make):
    path = tmp_path / "secret"
    make(path)
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    with pytest.raises(
        ConfigError, match=rf"{FILE_VARIABLE}: expected a file that can be read, got .*{path}"
    ):
        job_secret(is_one_machine=True)


@pytest.mark.parametrize("secret", ["", "short", "x" * 5000])
def test_a_secret_that_can_be_guessed_or_has_no_end_is_refused_without_being_shown(
    monkeypatch, secret
):
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    with pytest.raises(
        ConfigError, match="expected a secret of 16 to 4096 bytes, got one of "
    ) as raised:
        job_secret(is_one_machine=True)
    assert not secret or secret not in str(raised.value)


@pytest.mark.parametrize("make", ["open", "link", "file"])
def test_a_folder_that_another_user_may_have_made_is_refused(tmp_path, make):
    folder = own_folder(tmp_path)
    if make == "open":
        folder.mkdir()
        folder.chmod(0o755)
    elif make == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "theirs")
    else:
        folder.write_text("")
    with pytest.raises((ConfigError, FileExistsError), match=str(folder)):
        job_secret(is_one_machine=True)


KEYS = st.sampled_from(["1/record/1", "1/record/2", "2/record/1", "left/1"])
PARTS = st.tuples(
    st.sampled_from(["a start", "another"]),
    KEYS,
    st.integers(0, 3),
    st.sampled_from(["x", 'x", "y']),
)


@given(PARTS, PARTS)
def test_a_record_is_good_for_its_start_key_rank_and_content_alone(made, found):
    (scope, key, rank, value), (other_scope, other_key, other_rank, other_value) = made, found
    record = Signer(SECRET, scope).sign(key, rank, {"value": value})
    assert Signer(SECRET, scope).open(key, record.encode(), rank) == {"value": value}
    if made != found:
        mac = record.partition(" ")[0]
        text = f"{mac} {other_rank} {json.dumps({'value': other_value})}"
        with pytest.raises(BadRecordError):
            Signer(SECRET, other_scope).open(other_key, text.encode(), other_rank)


def test_a_record_of_another_secret_or_none_is_refused():
    for secret in (b"", SECRET[:-1], SECRET + b"x"):
        record = Signer(secret, "a").sign("key", 0, {})
        with pytest.raises(
            BadRecordError, match=rf"signed with this job's secret \({SECRET_VARIABLE}\)"
        ):
            Signer(SECRET, "a").open("key", record.encode())


@given(
    st.binary(max_size=200)
    | st.text(max_size=100).map(lambda text: ("0" * 64 + " 1 " + text).encode())
)
def test_whatever_is_found_is_a_record_or_refused(record):
    with pytest.raises(BadRecordError):
        Signer(SECRET, "a").open("key", record)


def test_a_record_without_end_or_of_a_rank_without_end_is_refused():
    for record in (b"x" * (2**20 + 1), b"0" * 64 + b" " + b"9" * 5000 + b" {}"):
        with pytest.raises(BadRecordError):
            Signer(SECRET, "a").open("key", record)
