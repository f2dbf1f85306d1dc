"""Waits for other ranks, stated by the code that waits.

A rank that waits for others must not be blamed for a hang. While a thread sits in a collective, its
stack shows some call into C++, which looks like a computation. So the code that waits states it:
`with waiting_for_ranks("all-gather of 4096 elements")`. The watchdog calls `rank_wait`.

On the CPU a collective blocks: `issuing` (`issued_collectives.py`) makes the statement, and so do
the exchanges of `fsdp/collectives.py`. On an accelerator a collective returns at once, so
no statement is needed.

A thread that waits for another one is taken to wait for ranks only where it states it, as lanes do,
or where autograd runs the backward in separate threads.

Torch waits inside its own functions, too: a program's `dist.barrier()`, a DTensor that is
redistributed, DCP's planning. No code of this project runs there, so only these are recognised by
the module that their frames run in (`_wait_in_torch`).
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

# By thread, the innermost statement. Only the thread itself writes to its entry.
_stated: dict[int, str] = {}
_ANOTHER_THREAD = "another thread"

# A thread with a frame in one of these modules is inside a collective.
_COLLECTIVE_MODULES = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
)
# On an accelerator a backward runs in autograd's own threads, while its caller waits here.
_BACKWARD_MODULE = "torch.autograd.graph"


@contextmanager
def waiting_for_ranks(name: str) -> Iterator[None]:
    """States that this thread waits for other ranks until the block ends. Put no other work into
    the block: a rank that computes there would pass for one that waits.

    Args:
        name: of the collective; completes "waiting in the ...".
    """
    thread = threading.get_ident()
    outer = _stated.get(thread)
    _stated[thread] = name
    try:
        yield
    finally:
        if outer is None:
            del _stated[thread]
        else:
            _stated[thread] = outer


def waiting_for_thread() -> AbstractContextManager[None]:
    """States that this thread waits for another one of its process until the block ends."""
    return waiting_for_ranks(_ANOTHER_THREAD)


def rank_wait(thread: int) -> str | None:
    """The collective that a thread waits in, by itself or for another thread of this process; None
    if it waits for no other rank.
    """
    frames, stated = sys._current_frames(), _stated.copy()

    def collective(ident: int) -> str | None:
        name = stated.get(ident)
        return _wait_in_torch(frames.get(ident)) if name in (None, _ANOTHER_THREAD) else name

    own = collective(thread)
    if own is None and (stated.get(thread) == _ANOTHER_THREAD or _is_backward(frames.get(thread))):
        return next(filter(None, map(collective, frames)), None)
    return own


def _wait_in_torch(innermost: FrameType | None) -> str | None:
    for frame, _ in traceback.walk_stack(innermost):
        if _module_of(frame) in _COLLECTIVE_MODULES:
            return f"{frame.f_code.co_name} of torch.distributed"
    return None


def _is_backward(innermost: FrameType | None) -> bool:
    return innermost is not None and _module_of(innermost) == _BACKWARD_MODULE


def _module_of(frame: FrameType) -> object:
    return frame.f_globals.get("__name__")
