"""Ranks that were started before their engine: taken by the engine that they fit, and left behind by nobody."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from lockstep.engine.config import EngineConfig
from lockstep.engine.ranks import standby
from lockstep.engine.ranks.client import Client
from lockstep.engine.ranks.messages import Ping
from tests.running import still_running

PROGRAM = "lockstep.engine.ranks"
#: A host that is gone at once, and prints the rank that it had started.
GONE = f"""
import os
from lockstep.engine.ranks import standby
block = standby.standing_by({PROGRAM!r}, 1)
block.__enter__()
print(standby._standing[0].process.pid, flush=True)
os._exit(0)
"""


def _waiting() -> standby.Standby:
    (one,) = standby._standing
    return one


def _engine(tp: int = 1, threads: int = 1) -> Client:
    return Client(EngineConfig(tp=tp, threads=threads), program=PROGRAM)


def test_an_engine_of_one_rank_takes_the_one_that_stands_by() -> None:
    with standby.standing_by(PROGRAM, 1):
        pid = _waiting().process.pid
        with _engine() as client:
            assert client.pids == [pid]
            client.call(Ping())
        with _engine() as second:
            assert second.pids != [pid]
    assert not still_running([pid])


def test_what_it_does_not_fit_starts_its_own_and_it_ends_with_the_block() -> None:
    with standby.standing_by(PROGRAM, 1):
        pid = _waiting().process.pid
        with _engine(threads=2) as other:
            assert pid not in other.pids
    assert not still_running([pid])


def test_an_engine_of_several_takes_as_many_as_there_are_and_starts_the_others() -> None:
    with standby.standing_by(PROGRAM, 1, ranks=2):
        waiting = {one.process.pid for one in standby._standing}
        assert len(waiting) == 2
        with _engine(tp=3) as client:
            assert waiting < set(client.pids)
            client.call(Ping())
    assert not still_running(waiting)


def test_an_engine_whose_standing_rank_has_died_starts_another() -> None:
    with standby.standing_by(PROGRAM, 1):
        dead = _waiting().process
        dead.kill()
        dead.wait()
        with _engine() as client:
            assert client.pids != [dead.pid]
            client.call(Ping())


@pytest.mark.slow
def test_it_ends_when_its_host_is_gone_before_it_was_needed() -> None:
    host = subprocess.run([sys.executable, "-c", GONE], capture_output=True, text=True, check=True)
    pid = int(host.stdout)
    psutil.wait_procs(still_running([pid]), timeout=60)
    assert not still_running([pid])
