"""numpy's products on one thread, while a recording is judged.

They have few rows and take as long as reading a weight, so that a second thread gains little. Where cores are not idle
it costs much: OpenBLAS's threads wait for each other in a loop that gives up the core. On two cores of a virtual
machine a product of 12 rows with [2432, 896] took 40 ms by two threads and 3.7 by one, a check at 0.5B shapes 94 s and
49.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from threadpoolctl import ThreadpoolController


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, or in a function that it decorates. What others have set is there again afterwards; libraries other than
    OpenBLAS, and torch, keep their threads."""
    with _openblas().limit(limits=1):
        yield


@cache
def _openblas() -> ThreadpoolController:
    return ThreadpoolController().select(internal_api="openblas")
