"""Products of few tokens with a large matrix, in float32 on a CPU, which take about as long as reading the matrix.

Libraries share a product out in equal parts and wait for the slowest thread, a hundred times a token; here the threads
take small chunks of it from a board, and those that help stay awake between products. Each element is one sum over the
columns, made in the same order whatever the number of rows, tokens, chunks and threads. The kernels are loaded with the
first token after a prompt: importing numba takes half a second, which the first token need not wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from threading import Event, Lock, Thread

import numpy as np
import torch
from torch import Tensor

from lockstep.engine.compiled import kernels
from lockstep.engine.text import first_line

#: Up to so many tokens are multiplied here, as many as an engine for few sequences decodes at once.
FEW = 8
#: Rows of its cache up to which a pass is bound by reading matrices: of more, attention needs torch's threads. And of
#: all sequences, times the threads that it could have: eight of 1,000 rows are worth it on two.
LONGEST, ALL_ROWS = 2048, 1 << 14
#: Elements of a decoder's feed-forward matrices that are worth loading the kernels.
WORTH = 1 << 26
#: Bytes of the matrix that a thread takes at a time, about.
CHUNK = 1 << 17
#: How often a thread that helps looks for the next product before it sleeps: for some milliseconds.
PATIENCE = 1 << 17
_KERNELS = "lockstep.engine.rows.product_kernels"


@contextmanager
def reading() -> Iterator[None]:
    """Within the block products of few tokens are made here, on as many threads as torch has. Torch's own, which stay
    awake for a while after each operation and would take the cores from those here, get nothing to do meanwhile."""
    if refusal() is not None:
        yield
        return
    threads = torch.get_num_threads()
    token = _CREW.set(_crew(threads))
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _CREW.reset(token)


def is_short(rows: Sequence[int]) -> bool:
    """Whether attention over so many rows of each sequence takes little beside the matrices, on one thread."""
    total = sum(rows)
    return max(rows) <= LONGEST and (total <= LONGEST or total * torch.get_num_threads() <= ALL_ROWS)


def is_reading() -> bool:
    """Whether a pass is made within such a block."""
    return _CREW.get() is not None


def product(x: Tensor, matrix: Tensor) -> Tensor | None:
    """[T, columns], [rows, columns] -> [T, rows], all of float32; None where it is not for these kernels, which read by
    address: torch reports what does not fit."""
    crew = _CREW.get()
    if crew is None or not x.dim() == matrix.dim() == 2 or not matrix.is_contiguous():
        return None
    tokens, columns = x.shape
    if not 0 < tokens <= FEW or columns != matrix.shape[1]:
        return None
    if not x.dtype == matrix.dtype == torch.float32:
        return None
    return crew.product(x.contiguous(), matrix)


class _Crew:
    """The thread that wants a product, and those that help."""

    def __init__(self, helpers: int) -> None:
        self._kernels = kernels(_KERNELS)
        self._board = np.zeros(self._kernels.SIZE, np.int64)
        self._one_at_a_time = Lock()
        self._wanted = [Event() for _ in range(helpers)]
        for wanted in self._wanted:
            Thread(target=self._help, args=(wanted,), name="lockstep-product", daemon=True).start()

    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """One that sleeps is woken, and not waited for: it takes part as soon as it is there."""
        (tokens, columns), rows = x.shape, matrix.shape[0]
        out = torch.empty((tokens, rows))
        chunks = max(1, min(rows, matrix.nbytes // CHUNK))
        with self._one_at_a_time:
            for wanted in self._wanted:
                if not wanted.is_set():
                    wanted.set()
            self._kernels.multiply(
                self._board, x.data_ptr(), matrix.data_ptr(), out.data_ptr(), tokens, rows, columns, chunks
            )
        return out

    def _help(self, wanted: Event) -> None:
        while True:
            wanted.wait()
            self._kernels.serve(self._board, PATIENCE)
            wanted.clear()


_CREW: ContextVar[_Crew | None] = ContextVar("crew", default=None)


@cache
def _crew(threads: int) -> _Crew:
    return _Crew(threads - 1)


@cache
def refusal() -> str | None:
    """Why the kernels cannot be used; None where they have passed their test: as float64 has it."""
    random = torch.Generator().manual_seed(0)
    x, matrix = torch.randn(3, 500, generator=random), torch.randn(301, 500, generator=random)
    try:
        found = _crew(torch.get_num_threads()).product(x, matrix)
    except Exception as error:  # whatever importing or compiling throws
        return first_line("no products of few rows here", error)
    apart = (found.double() - x.double() @ matrix.double().T).abs().max()
    return None if apart < 1e-3 else "no products of few rows here: the kernel is wrong on this CPU"
