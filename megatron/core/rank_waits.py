"""Functions of this project that wait for other ranks say so where they stand: `@waits_for_ranks`.

Where a collective blocks, as on the CPU, the watchdog tells a rank that waits from one that hangs
by the stack of its main thread. Most waits show as a frame of torch.distributed; some are a call
into C++ in a function of ours, which nothing in the stack tells from a computation. A mark on the
function itself moves with the code, where a list of files and names elsewhere would go stale
without a word.

On an accelerator a collective does not block, and the device itself is asked
(`issued_collectives.py`). The marks count there for what blocks all the same: connecting for the
first collective, say.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable[..., object])

_marked: set[CodeType] = set()


def waits_for_ranks(function: _Function) -> _Function:
    """Marks a function which, as a thread's innermost frame, waits for other ranks. It is not
    wrapped.

    Goes below other decorators: a frame shows the code of the function itself.
    """
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        raise TypeError(f"Expected a plain function to mark, got {function!r}.")

    _marked.add(code)
    return function


def is_marked(code: CodeType) -> bool:
    """Whether this is the code of a function that was marked."""
    return code in _marked
