"""Messages among the ranks of one start, through the store of their process group.

Every request is bounded in time. Records are signed (`job_secret.py`), since the store may be open
to a network. A record that was not made by this start, or has other types, counts as missing and is
one warning. Counters are not signed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from torch.distributed.distributed_c10d import Store

from megatron.core.log import printable
from megatron.training.health.job_secret import Signer

_T = TypeVar("_T")
# The end of the thread that serves is None.
_Requests: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], Callable[[Store], Any]] | None]"

_STORE_SECONDS = 3.0  # for one request


class StoreLostError(RuntimeError):
    """The store has failed, or owes an answer for too long."""


class BoundedStore:
    """A store that is waited for only so long. A request that blocks for ever blocks a thread of
    its own, which unlike an executor's does not keep the interpreter from ending.

    While an answer is overdue, nothing else is asked. If it comes after all, the store is back:
    torch's looks up the name of whoever connects, and may wait seconds for a name server, during
    which it serves nobody.
    """

    def __init__(self, store: Store) -> None:
        self._has_failed = False
        self._overdue: Future[Any] | None = None
        self._requests: _Requests = queue.SimpleQueue()
        threading.Thread(
            target=_serve, args=(self._requests, store), name="watchdog store", daemon=True
        ).start()

    @property
    def is_lost(self) -> bool:
        """Whether it has failed, or an answer is overdue."""
        if (overdue := self._overdue) is not None and overdue.done():
            self._has_failed = self._has_failed or overdue.exception() is not None
            self._overdue = None
        return self._has_failed or self._overdue is not None

    def call(self, work: Callable[[Store], _T]) -> _T:
        """Returns `work(store)`.

        Raises:
            StoreLostError: it fails, and ever after; it takes too long, and until it has ended.
        """
        if self.is_lost:
            raise StoreLostError("Expected a store that answers, got one that was lost before.")

        answer: Future[_T] = Future()
        self._requests.put((answer, work))
        try:
            return answer.result(_STORE_SECONDS)
        except Exception as error:
            self._overdue = answer
            got = f", got {error}" if answer.done() else f" within {_STORE_SECONDS} s, got none"
            raise StoreLostError(f"Expected an answer of the store{got}.") from error

    def add(self, key: str, number: int) -> int:
        """Adds to a counter, and returns what it has become. StoreLostError."""
        return self.call(lambda store: store.add(key, number))

    def close(self) -> None:
        """Ends the thread once it has served what is under way."""
        self._requests.put(None)


def _serve(requests: _Requests, store: Store) -> None:
    while (request := requests.get()) is not None:
        answer, work = request
        try:
            answer.set_result(work(store))
        except BaseException as error:
            answer.set_exception(error)


class SignedStore(BoundedStore):
    """Records that only the ranks of this start can have made, written by the one with this rank.

    `warn` is told, once, of a record that is ignored.
    """

    def __init__(
        self, store: Store, signer: Signer, rank: int, warn: Callable[[str], object]
    ) -> None:
        super().__init__(store)
        self._signer = signer
        self._rank = rank
        self._warn = warn
        self._has_warned = False

    def put(self, key: str, content: Mapping[str, Any]) -> None:
        """Stores a record of this rank. StoreLostError."""
        text = self._signer.sign(key, self._rank, content)
        self.call(lambda store: store.set(key, text))

    def put_first(
        self, key: str, content: Mapping[str, Any], parse: Callable[[dict[str, Any]], object]
    ) -> None:
        """Stores a record unless there is one that can be trusted. StoreLostError."""
        text = self._signer.sign(key, self._rank, content)
        present = self._raw(key) or b""
        if self._opened(key, present, None, parse) is None:
            # Another rank may be faster: what it stores stays.
            self.call(lambda store: store.compare_set(key, present, text))  # type: ignore[arg-type]

    def read(self, key: str, rank: int | None, parse: Callable[[dict[str, Any]], _T]) -> _T | None:
        """The record that a rank (None: any) has made; None if there is none that can be trusted.

        `parse` raises ValueError, KeyError or TypeError for content that it does not expect.
        StoreLostError if the store does not answer.
        """
        return self._opened(key, self._raw(key), rank, parse)

    def read_all(
        self, keys: Mapping[int, str], parse: Callable[[dict[str, Any]], _T]
    ) -> dict[int, _T] | None:
        """The records that can be trusted, by rank; None until all are there. StoreLostError."""
        names = list(keys.values())
        if not self.call(lambda store: store.check(names)):
            return None

        values = self.call(lambda store: store.multi_get(names))
        records = {
            rank: self._opened(key, raw, rank, parse)
            for (rank, key), raw in zip(keys.items(), values, strict=True)
        }
        return {rank: record for rank, record in records.items() if record is not None}

    def _raw(self, key: str) -> bytes | None:
        is_there = self.call(lambda store: store.check([key]))
        return self.call(lambda store: store.get(key)) if is_there else None

    def _opened(
        self, key: str, raw: bytes | None, rank: int | None, parse: Callable[[dict[str, Any]], _T]
    ) -> _T | None:
        if not raw:
            return None
        try:
            return parse(self._signer.open(key, raw, rank))
        except (ValueError, KeyError, TypeError) as error:
            # Once: whoever writes one may write many.
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"{key} in the launcher's store is ignored: {printable(str(error))}")
            return None
