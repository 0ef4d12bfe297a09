"""Values that may be asked for again: those used last are kept, up to so many bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class RecentlyUsed(Generic[V]):
    """Keeps the newest value, and of the others those used last whose bytes together are `limit` at most. Safe to use
    from several threads."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Of what is kept."""
        return self._nbytes

    def get(self, key: Hashable) -> V | None:
        """The value, which is then the one used last; None where it is not kept."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: Hashable, value: V, nbytes: int) -> None:
        """Keep a value that takes `nbytes`."""
        with self._lock:
            self._drop(key)
            self._kept[key] = value, nbytes
            self._nbytes += nbytes
            while self._nbytes > self.limit and len(self._kept) > 1:
                self._drop(next(iter(self._kept)))

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            self._kept.clear()
            self._nbytes = 0

    def _drop(self, key: Hashable) -> None:
        _, nbytes = self._kept.pop(key, (None, 0))
        self._nbytes -= nbytes
