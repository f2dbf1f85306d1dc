"""A job on two hosts with separate addresses and a shared directory of checkpoints, as Slurm and
torchrun start it on a cluster. One host disappears and returns; the results are bit-equal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.functional_tests.helpers.hosts import Host, NoNamespacesError, two_hosts
from tests.functional_tests.helpers.recovery_scenes import (
    MODEL,
    NO_DROPOUT,
    OFFLOADED,
    TIMEOUT,
    Job,
    children,
    kill_process,
    run_undisturbed,
    started,
    until,
)
from tests.functional_tests.helpers.runner import assert_same_tensors, read_checkpoint

FLAGS = [
    *(*MODEL, *OFFLOADED, *NO_DROPOUT),
    *("--global-batch-size", "8", "--train-iters", "12", "--save-interval", "2", "--async-save"),
]
# A node that comes late can join: see docs/training.md.
LATE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(two_hosts(tmp_path))
        except NoNamespacesError as error:
            pytest.skip(f"this machine does not allow network namespaces: {error}")
        yield found


def launcher(host: Host) -> list[str]:
    """Returns the command of `examples/slurm` for a host, with a shorter keep-alive."""
    return host.command(
        *(sys.executable, "-m", "megatron_hybrid", "launch"),
        *("--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "10"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29500", "--rdzv-id", "gpt-1"),
        *("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=3"),
    )


def test_hosts_have_separate_names_addresses_and_ports(hosts):
    for host, other in (hosts, hosts[::-1]):
        assert host.run("hostname").strip() == host.name
        assert f"{host.name}\n" in host.run("getent", "hosts", host.name)
        ask = f"import socket; socket.create_connection(({other.name!r}, 29500), timeout=60)"
        with pytest.raises(NoNamespacesError, match="refused"):
            host.run(sys.executable, "-c", ask)


@pytest.mark.wide
def test_a_job_of_two_hosts_resumes_after_a_lost_host_returns(hosts, tmp_path):
    undisturbed, job = Job(tmp_path / "undisturbed"), Job(tmp_path / "job")
    run_undisturbed(undisturbed, *FLAGS, num_ranks=4)

    first, second = hosts
    # A pause long enough to disconnect a host.
    pause = "slow:rank=any,step=6,seconds=20,times=1"
    flags = [*FLAGS, "--hang-timeout-seconds", "60", "--inject", pause]
    with started(job, launcher(first), *flags, log="log_1.txt", **LATE) as stays:
        with started(job, launcher(second), *flags, log="log_2.txt", **LATE) as goes:
            until(lambda: max(dict(job.losses()), default=0) >= 5, "five iterations on two hosts")
            # Simulates a power failure: connections are not closed.
            second.set_link(is_up=False)
            for pid in [goes.pid, *children(goes.pid)]:
                kill_process(pid)
        until(lambda: job.events("exit"), "the ranks of the other host to end")
        second.set_link(is_up=True)
        with started(job, launcher(second), *flags, log="log_3.txt", **LATE) as returns:
            assert stays.wait(TIMEOUT) == 0, job.log
            assert returns.wait(TIMEOUT) == 0, job.log

    assert "node2" in job.events("exit")[0]["reason"], "it names the host that was lost"
    resumes = job.events("resume")
    assert [event["world_size"] for event in resumes] == [4] * len(resumes)
    assert resumes[-1]["iteration"] >= 2, "it resumed from a checkpoint of both hosts"
    assert job.events("exit")[-1]["name"] == "FINISHED"
    assert dict(job.losses()) == dict(undisturbed.losses())
    assert_same_tensors(read_checkpoint(job.saved), read_checkpoint(undisturbed.saved))
