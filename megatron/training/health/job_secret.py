"""The secret that the ranks of a job share, and the records that they sign with it.

torchrun's store listens on all interfaces and authenticates nobody. What the ranks tell each other
through it, who starts with whom and why a run is to end, is therefore signed: a record that was not
made with the job's secret, or was made for another key, rank or start, is ignored.

[Note: where the secret comes from]

    MEGATRON_JOB_SECRET       the secret itself; torchrun passes the environment on to its ranks
    MEGATRON_JOB_SECRET_FILE  a file with it, which nobody but its owner may read
    neither, one machine      a file in a folder of the user's own under tempfile.gettempdir()
    neither, several          none: records are not signed, which is one warning

Several machines cannot share a secret that the job makes up, since the store is all they have in
common. Guessing that they share a file system would keep jobs from starting where they do not.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.files import open_regular, sync_stream, temporary_path
from megatron.core.options import ConfigError
from megatron.training.health.jsonl import parse_object

SECRET_VARIABLE = "MEGATRON_JOB_SECRET"
FILE_VARIABLE = "MEGATRON_JOB_SECRET_FILE"

_LEAST_BYTES, _MOST_BYTES = 16, 4096  # of a secret
_MOST_RECORD_BYTES = 2**20  # the welcome of 20,000 ranks
_MAC_LENGTH = 2 * hashlib.sha256().digest_size


class BadRecordError(ValueError):
    """A record that no rank of this start can have made for this key."""


class Signer:
    """Signs the records of one start of a job, and tells them from others.

    Args:
        secret: that the ranks share. If it is empty, anybody can make records of the right form.
        scope: the start's name. Records of another start are refused.
    """

    def __init__(self, secret: bytes = b"", scope: str = "") -> None:
        self._secret = secret
        self._scope = scope

    def sign(self, key: str, rank: int, content: Mapping[str, Any]) -> str:
        """A record to store under `key`: a signature, this rank, and the content as JSON."""
        text = json.dumps(content, allow_nan=False)
        return f"{self._mac(key, rank, text)} {rank} {text}"

    def open(self, key: str, record: bytes, rank: int | None = None) -> dict[str, Any]:
        """The content of a record that was found under `key`.

        Args:
            rank: that must have made it; None: any.

        Raises:
            BadRecordError: if it was not signed with the secret, for this key, by this rank, in
                this start.
        """
        if len(record) > _MOST_RECORD_BYTES:
            most = f"at most {_MOST_RECORD_BYTES} bytes"
            raise BadRecordError(f"Expected a record of {most}, got {len(record)}.")

        try:
            mac, maker, text = record.decode().split(" ", 2)
            is_known = len(maker) < 10 and maker.isdecimal() and len(mac) == _MAC_LENGTH
        except ValueError:  # not UTF-8 either
            is_known = False

        # The content is parsed only once it is known to be from a rank.
        if not is_known or not self._is_signed(mac, key, int(maker), text):
            raise BadRecordError(
                f"Expected a record signed with this job's secret ({SECRET_VARIABLE}), got another."
            )

        content = parse_object(text.encode())
        if content is None or rank not in (None, int(maker)):
            raise BadRecordError(
                f"Expected a JSON object of rank {rank}, got another of rank {maker}."
            )
        return content

    def _is_signed(self, mac: str, key: str, maker: int, text: str) -> bool:
        return hmac.compare_digest(mac.encode(), self._mac(key, maker, text).encode())

    def _mac(self, key: str, rank: int, text: str) -> str:
        # As a JSON list, in which no part can pass for another's beginning or end.
        message = json.dumps([self._scope, key, rank, text])
        return hmac.new(self._secret, message.encode(), hashlib.sha256).hexdigest()


def job_secret(*, is_one_machine: bool) -> bytes | None:
    """This job's secret, or None if there is none. See [Note: where the secret comes from].

    Args:
        is_one_machine: whether all ranks of the job run on this machine.

    Raises:
        ConfigError: for a secret that is too short, or that others can read or have made.
        OSError: if there is no room for a secret of this machine's own.
    """
    value, file = os.environ.get(SECRET_VARIABLE), os.environ.get(FILE_VARIABLE)

    if value is not None:
        return _checked(os.fsencode(value), SECRET_VARIABLE)
    if file is not None:
        try:
            return _checked(_read_private(Path(file)), FILE_VARIABLE)
        except OSError as error:
            expected = "expected a file that can be read"
            raise ConfigError(f"{FILE_VARIABLE}: {expected}, got {error}.") from None
    return _secret_of_this_machine() if is_one_machine else None


def _secret_of_this_machine() -> bytes:
    """The secret that this user's jobs on this machine share, made by the first to need it."""
    folder = Path(tempfile.gettempdir()) / f"megatron-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # Anybody can make a folder of this name among the temporary files, or a link.
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or _is_open_to_others(status):
        raise ConfigError(
            f"Expected {folder} to be a folder that nobody but user {os.geteuid()} owns or may "
            f"enter, got mode {stat.filemode(status.st_mode)} of user {status.st_uid}. Remove it, "
            f"or set {SECRET_VARIABLE}."
        )

    path = folder / "job_secret"
    if not path.exists():
        _make_secret(path)
    return _checked(_read_private(path), str(path))


def _make_secret(path: Path) -> None:
    """Makes the file, whole from the start, unless another rank was faster."""
    temporary = temporary_path(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(secrets.token_hex(32).encode())
            # An empty file after a crash would refuse every later job.
            sync_stream(stream)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_private(path: Path) -> bytes:
    """A file's content without white space around it. ConfigError if it is open to others."""
    with open_regular(path, "a file with a job's secret") as stream:
        status = os.fstat(stream.fileno())
        if _is_open_to_others(status):
            raise ConfigError(
                f"Expected {path} to be readable by its owner alone, user {os.geteuid()}, got mode "
                f"{stat.filemode(status.st_mode)} of user {status.st_uid}: chmod 600."
            )
        return stream.read(_MOST_BYTES + 1).strip()


def _is_open_to_others(status: os.stat_result) -> bool:
    return status.st_uid != os.geteuid() or bool(status.st_mode & 0o077)


def _checked(secret: bytes, where: str) -> bytes:
    """ConfigError, without the secret, for one that can be guessed, or is none."""
    if not _LEAST_BYTES <= len(secret) <= _MOST_BYTES:
        raise ConfigError(
            f"{where}: expected a secret of {_LEAST_BYTES} to {_MOST_BYTES} bytes, got one of "
            f"{len(secret)}. `openssl rand -hex 32` makes one; a file that this project made may "
            "be removed."
        )
    return secret
