"""Work of a check that goes on beside other work of it.

A recording of few tokens is judged on one thread of numpy's (`one_thread`), which leaves the other cores to a second
judge, and to an engine that runs once more meanwhile. One of many takes all cores, and as much memory as there is:
there everything is done in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

#: Seconds between two looks at whether what is awaited is to end.
_TICK = 0.1


class _InTurn(Executor):
    """Does what it is given before it goes on."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """A result that is there."""
        done: Future[T] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@contextmanager
def lane(beside: bool, stop: Callable[[], None]) -> Iterator[Executor]:
    """Does one thing after the other: `beside` in a thread of its own, else where it is submitted. Where an error
    leaves it, `stop` is to end what is still under way."""
    if not beside:
        yield _InTurn()
        return
    executor = ThreadPoolExecutor(max_workers=1)
    try:
        yield executor
    except BaseException:
        stop()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def awaited(result: Future[T], tick: Callable[[], None]) -> T:
    """The result, or what its making has raised. `tick` is called meanwhile, now and then; what it raises ends the
    waiting."""
    while not result.done():
        tick()
        wait([result], timeout=_TICK)
    return result.result()
