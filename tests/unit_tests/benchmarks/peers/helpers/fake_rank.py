"""A rank without a model, which does as it is told, misbehaviour included. Run as a module."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from typing import Any

from benchmarks.peers.protocol import Channel


def main() -> None:
    """Answers until told to stop."""
    parser = argparse.ArgumentParser()
    for name in ("--side", "--training", "--store"):
        parser.add_argument(name)
    parser.add_argument("--channel", type=int, nargs=2)
    arguments = parser.parse_args()
    channel = Channel(*arguments.channel)
    if arguments.side == "never_built":
        channel.send({"error": "ImportError: no such peer"})
        sys.exit(1)
    channel.send({"answer": {}})
    while (message := channel.receive())["command"] != "stop":
        _do(channel, message)


def _do(channel: Channel, message: dict[str, Any]) -> None:
    rank = int(os.environ["RANK"])
    command, on_rank = message["command"], message.get("on_rank", rank)
    if command == "hang" or rank != on_rank:
        signal.pause()
    elif command == "die":
        print("the last words", flush=True)
        os._exit(7)
    elif command == "fail":
        channel.send({"error": "ValueError: Expected more, got less."})
    elif command == "start_child":
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        channel.send({"answer": {"child": child.pid}})
    else:
        print('{"answer": "printed"}', flush=True)
        channel.send({"answer": {"rank": rank, "pid": os.getpid(), "said": message["say"]}})


if __name__ == "__main__":
    main()
