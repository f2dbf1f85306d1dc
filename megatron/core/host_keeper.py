"""The keeper: a process per machine that owns ranks' memory, so that it survives the ranks.

It creates memfds, hands them over a Unix socket, and maps none. It belongs to one launcher, the
process that starts and restarts the ranks, and ends with it, however that ends. Its socket has an
abstract name made of the launcher's identity: two jobs never share a keeper, and a job that has
ended leaves no keeper. Files belong to a rank and a number of ranks: a job that continues with
another number of ranks has new files, and uses the earlier ones until it drops them.

This file is also the keeper's program. It does not import the project, and starts in
milliseconds.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import mmap
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 16  # of a request or a response
_PATIENCE_SECONDS = 60.0  # for a keeper to start, and for a killed rank to end
_POLL_SECONDS = 0.02
_CREDENTIALS = struct.Struct("3i")  # pid, user, group


class KeeperError(RuntimeError):
    """The keeper does not respond, or rejects a request."""


class Keeper:
    """A rank's connection to the keeper of its machine.

    All methods raise KeeperError if the keeper does not respond.

    Attributes:
        files: the sizes in bytes of the rank's files, by name.
        died_at: when the rank's last process died, in seconds since 1970; 0: there was none.
        earlier: the ranks that have files on this machine, but that it has no longer: the job has
            another number of ranks now, or they are on another machine. By that number and their
            rank. They have ended, and get no new files.
    """

    def __init__(
        self, launcher: int, rank: int, world_size: int, local_ranks: range | None = None
    ) -> None:
        """
        Args:
            launcher: process id of the launcher.
            rank: among all ranks of the job. Each has separate files.
            world_size: the number of all ranks.
            local_ranks: the ranks of this machine; None: all.
        """
        self.files: dict[str, int] = {}
        self.died_at = 0.0
        self.earlier: dict[int, dict[int, Keeper]] = {}
        self._address = b""
        self._launcher = launcher
        self._rank = rank
        self._world_size = world_size
        self._local_ranks = range(world_size) if local_ranks is None else local_ranks
        self._alive: socket.socket | None = None  # the keeper closes its end when it dies

    def connect(self, *, starts: bool) -> None:
        """Connects, and waits until earlier processes of this rank, and all ranks that the machine
        has no longer, have ended.

        Args:
            starts: whether to start a keeper if the machine has none; by one rank of a machine.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        _raise_descriptor_limit()
        try:
            self._address = _address(self._launcher)
            while not self._reach():
                if starts:
                    starts = False
                    _start(self._launcher)
                _pause(deadline, "it did not start")
        except OSError as error:
            raise KeeperError(f"The keeper cannot be used: {error}.") from error
        local = [self._local_ranks.start, self._local_ranks.stop]
        while (owner := (found := self._request("claim", local=local)[0])["owner"]) is not None:
            _pause(deadline, f"process {owner}, which had memory of this job, runs on")
        self.files, self.died_at = found["files"], found["died_at"]
        for world_size, rank, files, died_at in found["earlier"]:
            other = Keeper(self._launcher, rank, world_size)
            other._address, other.files, other.died_at = self._address, files, died_at
            self.earlier.setdefault(world_size, {})[rank] = other

    def open(self, name: str, nbytes: int) -> int:
        """A new descriptor of the file of this name, which is created on the first request, and is
        zero then. KeeperError for another size.
        """
        response, descriptors = self._request("open", name=name, nbytes=nbytes)
        if len(descriptors) != 1:
            raise KeeperError(f"The keeper has no memory for {name}: {response['error']}.")
        self.files[name] = nbytes
        return descriptors[0]

    def forget(self) -> None:
        """Drops this rank's files. Their memory is freed once no process maps them."""
        self._request("forget")
        self.files = {}

    def forget_earlier(self, but: int = 0) -> None:
        """Drops the files of the `earlier` ranks, unless there were `but` ranks."""
        for world_size in self.earlier.keys() - {but}:
            for rank in self.earlier.pop(world_size).values():
                rank.forget()

    @property
    def is_alive(self) -> bool:
        """Whether the keeper runs."""
        if self._alive is None:
            return False
        try:
            return self._alive.recv(1) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Closes the connection; the files stay."""
        if self._alive is not None:
            self._alive.close()
            self._alive = None

    def _reach(self) -> bool:
        """Connects, if there is a keeper."""
        try:
            self._alive = self._opened()
        except ConnectionRefusedError:
            return False
        self._alive.setblocking(False)
        return True

    def _request(self, what: str, **fields: object) -> tuple[dict[str, Any], list[int]]:
        request = {"what": what, "place": [self._world_size, self._rank], **fields}
        try:
            with self._opened() as connection:
                connection.sendall(json.dumps(request).encode())
                connection.shutdown(socket.SHUT_WR)
                return _received(connection)
        except (OSError, ValueError) as error:
            raise KeeperError(f"The keeper does not respond: {error}.") from error

    def _opened(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_PATIENCE_SECONDS)
            connection.connect(self._address)
            # Any user may take an abstract name.
            if _peer(connection)[1] != os.getuid():
                raise KeeperError("Another user's process has the name of this job's keeper.")
        except BaseException:
            connection.close()
            raise
        return connection


class KeptMemory:
    """A rank's memory with its keeper, as slabs and records map it.

    Attributes:
        is_restored: whether an earlier process of this rank wrote the contents, which must not be
            initialized.
        files: what `map_files` has mapped, by name.
    """

    def __init__(self, keeper: Keeper) -> None:
        self.is_restored = False
        self.files: dict[str, mmap.mmap] = {}
        self._keeper = keeper
        self._numbers: Counter[str] = Counter()
        self._ranges: dict[str, range] = {}  # addresses of the mapping of each file

    def map(self, purpose: str, nbytes: int) -> mmap.mmap:
        """Maps a file, zero at first. Files of one purpose are mapped in the same order each time.

        Args:
            nbytes: more than 0.

        Raises:
            KeeperError: for a file of another size.
        """
        name = f"{purpose} {self._numbers[purpose]}"
        self._numbers[purpose] += 1
        mapping = self._map(name, nbytes)
        self._ranges[name] = _addresses(mapping)
        return mapping

    def place_of(self, address: int) -> tuple[int, int] | None:
        """The file with this address, as its number in the order of names, and the byte there; None
        if it is elsewhere.
        """
        for number, name in enumerate(sorted(self._ranges)):
            addresses = self._ranges[name]
            if address in addresses:
                return number, address - addresses.start
        return None

    def map_files(self, sizes: dict[str, int]) -> None:
        """Maps all files of an earlier process. KeeperError unless they have these sizes."""
        if self._keeper.files != sizes:
            raise KeeperError(f"The kept memory is {self._keeper.files} instead of {sizes}.")
        self.is_restored = True
        self.files = {name: self._map(name, sizes[name]) for name in sorted(sizes)}
        for name, mapping in self.files.items():
            # Mappings of `map` outlive these, whose addresses may be used again.
            self._ranges.setdefault(name, _addresses(mapping))

    def _map(self, name: str, nbytes: int) -> mmap.mmap:
        descriptor = self._keeper.open(name, nbytes)
        try:
            # The keeper has the size that it was created with.
            found = os.fstat(descriptor).st_size
            if found != nbytes:
                raise KeeperError(f"The kept memory {name} has {found} bytes instead of {nbytes}.")
            return mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
        except OSError as error:
            raise KeeperError(f"The kept memory {name} cannot be mapped: {error}.") from error
        finally:
            os.close(descriptor)


def _addresses(mapping: mmap.mmap) -> range:
    begin = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    return range(begin, begin + len(mapping))


class Records:
    """Numbered records in kept memory, the last two of each kind. A process that is killed while
    it writes one leaves the other.
    """

    _HEADER = struct.Struct("@qqq")  # number, bytes, checksum
    _SLOT_BYTES = 1 << 26  # untouched pages take no memory

    def __init__(self, memory: KeptMemory, kinds: tuple[str, ...]) -> None:
        self._kinds = kinds
        self._memory = memory.map("records", 2 * len(kinds) * self._SLOT_BYTES)

    def write(self, kind: str, number: int, content: bytes) -> None:
        """Writes a record over the one with the number before the last.

        Args:
            number: more than 0.

        Raises:
            ValueError: for more than 64 MiB.
        """
        begin = self._begin(kind, number)
        start = begin + self._HEADER.size
        if len(content) > self._SLOT_BYTES - self._HEADER.size:
            raise ValueError(f"A record of {len(content)} bytes is too large to be kept.")
        # Invalid until all is written.
        self._HEADER.pack_into(self._memory, begin, 0, 0, 0)
        self._memory[start : start + len(content)] = content
        self._HEADER.pack_into(
            self._memory, begin, number, len(content), _checksum(number, content)
        )

    def clear(self, kind: str) -> None:
        """Drops the records of a kind."""
        for parity in (0, 1):
            self._HEADER.pack_into(self._memory, self._begin(kind, parity), 0, 0, 0)

    def read(self, kind: str) -> dict[int, bytes]:
        """The intact records of a kind, by number."""
        found = {}
        for parity in (0, 1):
            begin = self._begin(kind, parity)
            number, nbytes, checksum = self._HEADER.unpack_from(self._memory, begin)
            if number > 0 and 0 <= nbytes <= self._SLOT_BYTES - self._HEADER.size:
                start = begin + self._HEADER.size
                content = self._memory[start : start + nbytes]
                if checksum == _checksum(number, content):
                    found[number] = content
        return found

    def _begin(self, kind: str, number: int) -> int:
        return (2 * self._kinds.index(kind) + number % 2) * self._SLOT_BYTES


def _checksum(number: int, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(str(number).encode()))


def _received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A response, and the descriptors that came with it."""
    room = socket.CMSG_SPACE(array.array("i").itemsize)
    content, descriptors = b"", array.array("i")
    while True:
        part, ancillary, *_ = connection.recvmsg(_MOST_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data)
        content += part
        if not part:
            return json.loads(content), list(descriptors)


def _pause(deadline: float, reason: str) -> None:
    if time.monotonic() > deadline:
        raise KeeperError(f"The keeper cannot be used: {reason}.")
    time.sleep(_POLL_SECONDS)


def _address(launcher: int) -> bytes:
    """An abstract name that no other launcher has: process ids are used again."""
    started = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[19]
    namespace = os.fsencode(Path("/proc/self/ns/pid").readlink())
    return b"\0megatron keeper %s %d %s" % (namespace, launcher, started.encode())


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, group = _CREDENTIALS.unpack(raw)
    return pid, user, group


def _raise_descriptor_limit() -> None:
    """Each file takes a descriptor, also of a process that has it mapped, and the usual limit of
    1024 is less than ranks of many modules need.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))


def _start(launcher: int) -> None:
    """Starts a keeper in a separate session: a launcher ends the sessions of its ranks."""
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(launcher)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


# The keeper's program


class _Rank:
    """The keeper's data of a rank."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[int, int]] = {}  # descriptor and size
        self.owner: int | None = None  # process id of the process that has the files
        self.died_at = 0.0

    @property
    def sizes(self) -> dict[str, int]:
        return {name: size for name, (_, size) in self.files.items()}

    def forget(self) -> None:
        for descriptor, _ in self.files.values():
            os.close(descriptor)
        self.files.clear()


class _Server:
    """Serves one request per connection, until the launcher ends."""

    def __init__(self, launcher: int) -> None:
        self._launcher = os.pidfd_open(launcher)
        self._ranks: dict[tuple[int, int], _Rank] = {}  # by world size and rank
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_address(launcher))
        self._listener.listen(256)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._launcher, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._launcher:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Rank):
                    self._end_of(key.fd, key.data)
                else:
                    self._read(key.data)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_PATIENCE_SECONDS)
        pid, user, _ = _peer(connection)
        if user != os.getuid():
            connection.close()
            return
        asking = _Asking(connection, pid)
        self._selector.register(connection, selectors.EVENT_READ, asking)

    def _end_of(self, pidfd: int, rank: _Rank) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        rank.owner, rank.died_at = None, time.time()

    def _read(self, asking: _Asking) -> None:
        """Reads a part of a request, and responds once it is complete. An idle connection is a rank
        that watches for the keeper's death.
        """
        part = b""
        with contextlib.suppress(OSError):
            part = asking.connection.recv(_MOST_BYTES)
        asking.content += part
        if part and len(asking.content) <= _MOST_BYTES:
            return
        self._selector.unregister(asking.connection)
        with asking.connection as connection, contextlib.suppress(OSError, ValueError, KeyError):
            if asking.content:
                response, descriptors = self._response(json.loads(asking.content), asking.pid)
                rights = array.array("i", descriptors)
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
                content = json.dumps(response).encode()
                connection.sendall(content[connection.sendmsg([content], ancillary) :])

    def _response(self, request: dict[str, Any], pid: int) -> tuple[dict[str, Any], list[int]]:
        world_size, number = request["place"]
        rank = self._ranks.setdefault((world_size, number), _Rank())
        match request["what"]:
            case "claim":
                local = range(*request["local"])
                others = {
                    at: own
                    for at, own in self._ranks.items()
                    if at[0] != world_size or at[1] not in local
                }
                owners = [own.owner for own in others.values() if own.owner is not None]
                return {
                    "owner": owners[0] if owners else self._claim(rank, pid),
                    "files": rank.sizes,
                    "died_at": rank.died_at,
                    "earlier": [
                        (*at, own.sizes, own.died_at) for at, own in others.items() if own.files
                    ],
                }, []
            case "forget":
                rank.forget()
                return {}, []
            case "open" if rank.owner == pid or (not rank.owner and request["name"] in rank.files):
                return self._open(rank, str(request["name"]), int(request["nbytes"]))
        return {"error": "the rank has not claimed its files"}, []

    def _claim(self, rank: _Rank, pid: int) -> int | None:
        """Makes a process the owner of a rank's files; returns the owner of before if it runs."""
        if rank.owner not in (None, pid):
            return rank.owner
        if rank.owner is None:
            self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, rank)
            rank.owner = pid
        return None

    def _open(self, rank: _Rank, name: str, nbytes: int) -> tuple[dict[str, Any], list[int]]:
        if name not in rank.files:
            try:
                rank.files[name] = (_created(name, nbytes), nbytes)
            except OSError as error:
                return {"error": str(error)}, []
        descriptor, size = rank.files[name]
        if size != nbytes:
            return {"error": f"it has {size} bytes, not {nbytes}"}, []
        return {}, [descriptor]


def _created(name: str, nbytes: int) -> int:
    descriptor = os.memfd_create(f"rank memory: {name}"[:200], os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class _Asking:
    """A connection, and the part of its request that has arrived."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid
        self.content = b""


def main() -> None:
    """Serves the launcher with this process id until that ends."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    # A launcher that has ended, or has a keeper already, needs none.
    with contextlib.suppress(OSError):
        _Server(int(sys.argv[1])).serve()


if __name__ == "__main__":
    main()
