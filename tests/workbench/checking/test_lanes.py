"""What a lane is given is done in turn: in a thread of its own, or where it is submitted."""

from __future__ import annotations

import threading

import pytest

from lockstep.workbench.checking.lanes import awaited, lane


def nothing() -> None:
    pass


@pytest.mark.parametrize("beside", [False, True])
def test_one_after_the_other(beside: bool) -> None:
    done: list[int] = []
    with lane(beside, nothing) as at:
        results = [at.submit(done.append, number) for number in range(5)]
        for one in results:
            assert awaited(one, nothing) is None
    assert done == list(range(5))


@pytest.mark.parametrize("beside", [False, True])
def test_only_beside_is_another_thread(beside: bool) -> None:
    with lane(beside, nothing) as at:
        assert (awaited(at.submit(threading.get_ident), nothing) != threading.get_ident()) is beside


@pytest.mark.parametrize("beside", [False, True])
def test_errors_come_where_it_is_submitted_or_awaited(beside: bool) -> None:
    with lane(beside, nothing) as at, pytest.raises(ZeroDivisionError):
        awaited(at.submit(divmod, 1, 0), nothing)


def test_who_waits_may_give_up_which_ends_what_goes_on() -> None:
    stop, ended = threading.Event(), threading.Event()

    def work() -> None:
        stop.wait()
        ended.set()

    with pytest.raises(InterruptedError), lane(True, stop.set) as at:
        awaited(at.submit(work), _interrupted)
    assert ended.is_set(), "left before what goes on had ended"


def test_nothing_is_stopped_that_nobody_gave_up() -> None:
    stopped: list[bool] = []
    with lane(True, lambda: stopped.append(True)) as at:
        at.submit(nothing)
    assert not stopped


def _interrupted() -> None:
    raise InterruptedError
