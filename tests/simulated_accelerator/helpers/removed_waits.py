"""Removes one of the project's waits, so that tests show whether the simulated accelerator detects
it.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from megatron.core.activation_offload import ActivationOffload, _Saving
from megatron.core.distributed.fsdp.context import FsdpContext
from megatron.core.distributed.fsdp.group_weights import Delivery
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.lanes import StreamLane
from megatron.core.optimizer.cpu_offloading.bucket import FsdpBucket
from megatron.core.optimizer.cpu_offloading.early_updates import EarlyUpdate, EarlyUpdates
from megatron.core.optimizer.cpu_offloading.host_side import HostSide
from megatron.core.optimizer.cpu_offloading.streamed_pass import StreamedPass
from megatron.core.optimizer.matrix_pass import MatrixPass


class Removal(NamedTuple):
    """A wait of a method: patterns that are in its source, and their replacements
    without it. `also`: another wait without which it matters.
    """

    owner: type
    method: str
    edits: dict[str, str]
    also: Removal | None = None


REMOVALS = {
    "of the computation for gathered weights": Removal(
        Delivery, "wait", {r"gathered\.wait\(\)": "pass"}
    ),
    "of the gather for the computation": Removal(
        FsdpParameterGroup, "_prepare_gather", {r"\[ready, \*awaited\]": "awaited"}
    ),
    "of the gather for the delivery": Removal(
        FsdpParameterGroup, "_prepare_gather", {r"\[ready, \*awaited\]": "[ready]"}
    ),
    "of the activations' way down for the layer": Removal(
        ActivationOffload, "send_down", {r"\[self\._device\.event\(\)\]": "[]"}
    ),
    "of the next layer but one for activations to be gone": Removal(
        _Saving, "leave", {r"self\._offload\.wait\(D2H, self\._down\)": "pass"}
    ),
    "of the activations' way up for the computation": Removal(
        ActivationOffload, "bring_up", {r"\[self\._device\.event\(\)\]": "[]"}
    ),
    "of the backward for activations": Removal(
        _Saving, "need", {r"self\._offload\.wait\(H2D, self\._up\)": "pass"}
    ),
    "of the reduction for the backward": Removal(
        FsdpParameterGroup,
        "reduce",
        {r"lane\.enqueue\(timed, \[self\._device\.event\(\)\]": "lane.enqueue(timed, []"},
    ),
    "of the gradients' memory for their reduction": Removal(
        FsdpContext, "_finish_oldest", {r"groups\[0\]\.wait_reduced\(event\)": "pass"}
    ),
    "of the gradients' way down for their reduction": Removal(
        FsdpBucket, "fetch_during_backward", {r", \[reduced\]\)": ", [])"}
    ),
    "of the host for the gradients": Removal(
        HostSide, "_begin", {r"after=\[fetched, \*free\]": "after=free"}
    ),
    "of the states' way up for their slot": Removal(
        StreamedPass, "_issue_chunk", {r"\[self\._free\[number\]\]": "[]"}
    ),
    "of the device's update for the states": Removal(
        StreamedPass, "_issue_chunk", {r"\[is_up, now\]": "[now]"}
    ),
    "of the device's update for the computation": Removal(
        StreamedPass, "_issue_chunk", {r"\[is_up, now\]": "[is_up]"}
    ),
    "of the states' way down for the device's update": Removal(
        StreamedPass, "_issue_chunk", {r"\[is_updated\]": "[]"}
    ),
    "of the host's update for the states' way down": Removal(
        HostSide, "_fetch", {r"\[\*reads, \*bucket\.updates\(\)\]": "reads"}
    ),
    "of the early update for the gradients": Removal(
        HostSide, "begin_early", {r"\[fetched, ": "["}
    ),
    "of the early update for readers of states": Removal(
        HostSide, "begin_early", {r", \*bucket\.reads": ""}
    ),
    "of the early update for the states' way down": Removal(
        HostSide, "begin_early", {r", \*bucket\.updates\(\)": ""}
    ),
    "of the early update's end for its start": Removal(
        EarlyUpdates, "queue", {r"\[is_started\]": "[]"}
    ),
    "of old values for the early update": Removal(
        EarlyUpdate, "restore", {r"self\.done\.synchronize\(\)": "pass"}
    ),
    # Gradients that have come down already wait for the computation all the same, and the weights
    # for them: without that, too, the wait matters.
    "of the weights' way up for the computation": Removal(
        HostSide,
        "_begin",
        {r"h2d\.enqueue\(send, after=\[now\]\)": "h2d.enqueue(send)"},
        Removal(
            HostSide,
            "_fetch",
            {r"\[now\] if bucket\.is_delivered else \[now, \*reads\]": "list(reads)"},
        ),
    ),
    "of matrices for the gradients": Removal(
        HostSide, "_begin_matrices", {r"\(each\.fetched, \*each\.free\)": "each.free"}
    ),
    "of matrices for readers of states": Removal(
        HostSide, "_begin_matrices", {r"\(each\.fetched, \*each\.free\)": "[each.fetched]"}
    ),
    "of rows' way down for their matrices": Removal(
        MatrixPass, "stages", {r"(bring_down, number - 2\)), after\)": r"\1)"}
    ),
    "of the host for rows": Removal(MatrixPass, "stages", {r"down\.synchronize\(\)": "pass"}),
    "of the step for exchanges": Removal(
        HostSide, "_begin_matrices", {r"ended\.synchronize\(\)": "pass"}
    ),
}


@contextmanager
def removed(name: str) -> Iterator[None]:
    """While open, the wait with this name is not there. AssertionError if it is no longer where it
    was.
    """
    removals = [each for each in (REMOVALS[name], REMOVALS[name].also) if each is not None]
    own = [vars(each.owner)[each.method] for each in removals]
    for each, function in zip(removals, own, strict=True):
        setattr(each.owner, each.method, _edited(function, each))
    try:
        yield
    finally:
        for each, function in zip(removals, own, strict=True):
            setattr(each.owner, each.method, function)


@contextmanager
def recorded_lanes() -> Iterator[dict[str, torch.Stream]]:
    """The streams behind the lanes that are made while this is open, by the lanes' names."""
    streams: dict[str, torch.Stream] = {}
    make = StreamLane.__init__

    def note(self: StreamLane, driver: Any, index: int, name: str, **options: Any) -> None:
        make(self, driver, index, name, **options)
        streams[name] = self._stream

    StreamLane.__init__ = note
    try:
        yield streams
    finally:
        StreamLane.__init__ = make


def _edited(function: Any, removal: Removal) -> Any:
    # As Python would write it: without line breaks inside of statements, and without comments.
    source = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(function))))
    for pattern, instead in removal.edits.items():
        source, count = re.subn(pattern, instead, source)
        assert count > 0, f"expected {pattern} in {function.__qualname__}, found none"
    code = compile(
        source,
        f"<{function.__qualname__} without a wait>",
        "exec",
        flags=__future__.annotations.compiler_flag,
        dont_inherit=True,
    )
    made: dict[str, Any] = {}
    exec(code, inspect.unwrap(function).__globals__, made)
    return made[function.__name__]
