"""Two hosts on one machine: network namespaces with separate names, addresses and a link.

A host has its own interfaces, ports, host name and shared memory; both see the same files, as on a
shared file system. Its processes resolve `node1` and `node2` as on a cluster. No rights
are needed where the system allows user namespaces.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen

# The host's processes inherit these mounts.
_BECOME = """
set -e
hostname {name}
mount --bind {names} /etc/hosts
mount -t tmpfs none /dev/shm
ip link set lo up
echo ready
exec sleep infinity
"""


class NoNamespacesError(Exception):
    """The system does not allow what hosts are made of."""


@dataclass(frozen=True)
class Host:
    """A host.

    Attributes:
        name: its host name.
        pid: of a process on it.
    """

    name: str
    pid: int

    def command(self, *command: str) -> list[str]:
        """A command that runs on the host, in the same process."""
        spaces = ("--user", "--net", "--uts", "--mount", "--preserve-credentials")
        here = f"--wd={Path.cwd()}"
        return ["nsenter", f"--target={self.pid}", *spaces, here, *command]

    def run(self, *command: str) -> str:
        """The output of a short command on the host. NoNamespacesError if it fails."""
        return _output(self.command(*command))

    def set_link(self, *, is_up: bool) -> None:
        """Plugs the host's cable in, or pulls it: packets are then lost without a response."""
        self.run("ip", "link", "set", "eth0", "up" if is_up else "down")


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """`node1` (10.77.0.1) and `node2` (10.77.0.2), with a cable between them.

    Raises:
        NoNamespacesError: with the reason.
    """
    names = folder / "hosts"
    names.write_text("127.0.0.1 localhost\n10.77.0.1 node1\n10.77.0.2 node2\n")
    own = ["unshare", "--net", "--uts", "--mount"]
    processes: list[Popen[str]] = []
    try:
        # The second host is made inside the first one's user namespace, which may link both.
        first = _host("node1", [*own, "--user", "--map-root-user"], names, processes)
        inside = ["nsenter", f"--target={first.pid}", "--user", "--preserve-credentials"]
        second = _host("node2", [*inside, *own], names, processes)
        link = ["eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second.pid)]
        first.run("ip", "link", "add", *link)
        for number, host in enumerate((first, second), start=1):
            host.run("ip", "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
            host.set_link(is_up=True)
        yield first, second
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _host(name: str, spaces: list[str], names: Path, processes: list[Popen[str]]) -> Host:
    script = _BECOME.format(name=name, names=names)
    try:
        process = Popen([*spaces, "bash", "-c", script], stdout=PIPE, stderr=PIPE, text=True)
    except FileNotFoundError as error:
        raise NoNamespacesError(f"{error.filename}: {error.strerror}") from error
    processes.append(process)
    assert process.stdout is not None, "it is a pipe"
    assert process.stderr is not None, "it is a pipe"
    if process.stdout.readline() != "ready\n":
        raise NoNamespacesError(process.stderr.read().strip())
    return Host(name, process.pid)


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoNamespacesError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
