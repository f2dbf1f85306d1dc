"""Messages between the ranks of one start, through the store of their process group.

Every request has a timeout. The store may be open to a network (docs/security.md), so a record that
is too long, is not JSON or has fields of other types counts as missing. The first such record is
logged as a warning.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from torch.distributed.distributed_c10d import Store

from megatron.core.json_reading import parse_json
from megatron.core.log import printable

_T = TypeVar("_T")
# None ends the thread.
_Requests: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], Callable[[Store], Any]] | None]"

_STORE_SECONDS = 3.0  # for one request
_MOST_BYTES = 2**20  # of a record


class StoreLostError(RuntimeError):
    """The store has failed or timed out."""


class RankStore:
    """Records and counters that the ranks of one start share.

    Requests run in a daemon thread, because one may block forever, and the thread of an executor
    would then keep the interpreter from exiting. After a timeout, no further request is sent until
    the pending one has finished. Then the store is usable again: PyTorch's store looks up the host
    name of each client, and serves no other client while a name server is slow.

    Args:
        store: the process group's store.
        warn: called once, for the first record that is ignored.
    """

    def __init__(self, store: Store, warn: Callable[[str], object]) -> None:
        self._warn = warn
        self._has_warned = False
        self._has_failed = False
        self._overdue: Future[Any] | None = None
        self._requests: _Requests = queue.SimpleQueue()
        threading.Thread(
            target=_serve, args=(self._requests, store), name="watchdog store", daemon=True
        ).start()

    @property
    def is_lost(self) -> bool:
        """Whether a request has failed, or is still pending after its timeout."""
        if (overdue := self._overdue) is not None and overdue.done():
            self._has_failed = self._has_failed or overdue.exception() is not None
            self._overdue = None
        return self._has_failed or self._overdue is not None

    def call(self, work: Callable[[Store], _T]) -> _T:
        """Returns `work(store)`.

        Raises:
            StoreLostError: if it fails, as every later call then does, or if it times out, as every
                call then does until it has finished.
        """
        if self.is_lost:
            raise StoreLostError("Expected a store that responds, got one that was lost before.")

        response: Future[_T] = Future()
        self._requests.put((response, work))
        try:
            return response.result(_STORE_SECONDS)
        except Exception as error:
            self._overdue = response
            got = f", got {error}" if response.done() else f" within {_STORE_SECONDS} s, got none"
            raise StoreLostError(f"Expected a response of the store{got}.") from error

    def add(self, key: str, number: int) -> int:
        """Adds to a counter and returns the sum. StoreLostError."""
        return self.call(lambda store: store.add(key, number))

    def put(self, key: str, content: Mapping[str, Any]) -> None:
        """Stores a record. StoreLostError."""
        text = json.dumps(content, allow_nan=False)
        self.call(lambda store: store.set(key, text))

    def put_first(self, key: str, content: Mapping[str, Any]) -> None:
        """Stores a record unless another rank was faster. StoreLostError."""
        text = json.dumps(content, allow_nan=False)
        self.call(lambda store: store.compare_set(key, "", text))

    def read(self, key: str, parse: Callable[[dict[str, Any]], _T]) -> _T | None:
        """Returns the parsed record; None for a missing record, and one that `parse` rejects by
        ValueError, KeyError or TypeError. StoreLostError.
        """
        return self._parsed(key, self._raw(key), parse)

    def read_all(
        self, keys: Mapping[int, str], parse: Callable[[dict[str, Any]], _T]
    ) -> dict[int, _T] | None:
        """Returns the records that `parse` accepts, by rank; None until all are stored.
        StoreLostError.
        """
        names = list(keys.values())
        if not self.call(lambda store: store.check(names)):
            return None

        values = self.call(lambda store: store.multi_get(names))
        records = {
            rank: self._parsed(key, raw, parse)
            for (rank, key), raw in zip(keys.items(), values, strict=True)
        }
        return {rank: record for rank, record in records.items() if record is not None}

    def close(self) -> None:
        """Ends the thread after the pending requests."""
        self._requests.put(None)

    def _raw(self, key: str) -> bytes | None:
        is_there = self.call(lambda store: store.check([key]))
        return self.call(lambda store: store.get(key)) if is_there else None

    def _parsed(
        self, key: str, raw: bytes | None, parse: Callable[[dict[str, Any]], _T]
    ) -> _T | None:
        if not raw:
            return None

        try:
            if len(raw) > _MOST_BYTES:
                raise ValueError(f"it has {len(raw)} bytes")
            return parse(parse_json(raw))
        except (ValueError, KeyError, TypeError) as error:
            # Once, since there may be many such records.
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"{key} in the launcher's store is ignored: {printable(str(error))}")
            return None


def _serve(requests: _Requests, store: Store) -> None:
    while (request := requests.get()) is not None:
        response, work = request
        try:
            response.set_result(work(store))
        except BaseException as error:
            response.set_exception(error)
