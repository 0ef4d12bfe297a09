"""Reading a session costs no more than its limits, whatever the file asks for."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.sessions import Session, SessionError, limits
from lockstep.sessions.format import codec
from lockstep.sessions.format.json_text import json_bytes, parse_json
from lockstep.sessions.keeping import keeping, reading
from lockstep.sessions.limits import LimitExceeded, ReadLimits, ReadMeter
from tests.sessions.hostile_files import KINDS
from tests.sessions.samples import create, record, write

MIB = 1 << 20

#: What the limits do not count: the interpreter, numpy, the builder of the files.
BASE_MIB = 200


def measured(
    directory: Path, memory: int, seconds: float, kinds: tuple[str, ...]
) -> dict[str, dict[str, object]]:
    """What reading each kind took in a process of its own: see `measured_reading`."""
    words = [
        sys.executable,
        "-m",
        "tests.sessions.measured_reading",
        str(directory),
        str(memory),
        str(seconds),
    ]
    done = subprocess.run([*words, *kinds], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {reported["kind"]: reported for reported in map(json.loads, done.stdout.splitlines())}


#: What takes long; all others run out of memory first, or are refused for what they are.
LONG = (
    "chained branches",
    "many events",
    "many verdicts",
    "many tensors",
    "many sequences",
    "unknown meta bomb",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """Every kind, read within a quarter of the default memory; what takes long in a hundredth of the time."""
    directory, others = tmp_path_factory.mktemp("hostile"), tuple(kind for kind in KINDS if kind not in LONG)
    return measured(directory, 128, 0.1, LONG) | measured(directory, 128, 5.0, others)


@pytest.mark.slow
def test_no_session_takes_more_memory_than_it_may(found: dict[str, dict[str, object]]) -> None:
    """One of 0.3 MB took 6 GB."""
    peaks = {kind: reported["peak_mib"] for kind, reported in found.items()}
    assert {kind: peak for kind, peak in peaks.items() if peak > 128 + BASE_MIB} == {}  # type: ignore[operator]
    assert set(peaks) == set(KINDS)


@pytest.mark.slow
def test_no_session_takes_more_memory_than_the_default(tmp_path: Path) -> None:
    peaks = {kind: reported["peak_mib"] for kind, reported in measured(tmp_path, 512, 10.0, KINDS).items()}
    assert {kind: peak for kind, peak in peaks.items() if peak > 512 + BASE_MIB} == {}  # type: ignore[operator]


#: What is reported of each kind; the others are read.
REFUSALS = {
    "tensor bomb": "no room for tensor 'embed' of step 0 of branch 0, rank 0: about 3,072 MiB; reading a session may",
    "partial bomb": "no room for tensor 'embed' of step 0 of branch 0, rank 0: about 768 MiB",
    "bfloat16 bomb": "no room for tensor 'embed' of step 0 of branch 0, rank 0: about 1,536 MiB",
    "tensor bombs": "no room for tensor 'embed' of step 0 of branch 0, rank 0: about 384 MiB",
    "ids bomb": "no room for the lists of step 0 of branch 0: about 512 MiB",
    "positions bomb": "no room for the lists",
    "blocks bomb": "no room for the lists",
    "top-k bomb": "no room for the lists",
    "lengths bomb": "no room for the lists",
    "chunk steps bomb": "a list of 8388608 integers, where at most 64 may be",
    "statistics bomb": "no room for 2048 taps on 1024 ranks",
    "chunk bomb": "no room for 2048 taps on 1024 ranks",
    "meta bomb": "no room for meta 'notes'",
    "unknown meta bomb": "raise `session_",  # memory or time: which runs out first is the processor's affair
    "journal bomb": "no room for the list of 1 events",
    "deep journal": "JSON nested more than 64 deep",
    "deep meta": "JSON nested more than 64 deep",
    "rules bomb": "no room for the list of 1 branches",
    "dropped bomb": "no room for step 0 of branch 0",
    "wide text": "no room for a row of events",
    "chained branches": "stopped, as reading this takes more than",
    "many events": "raise `",
    "many verdicts": "raise `",
    "many tensors": "raise `",
    "many sequences": "stopped, as reading this takes more than 0.1 s of processor time.",
    "no such shape": "claims more than",
    "empty and huge": "claims more than",
}


@pytest.mark.parametrize("kind", REFUSALS)
@pytest.mark.slow
def test_what_is_refused_is_reported(found: dict[str, dict[str, object]], kind: str) -> None:
    stated = found[kind]["printed"]
    assert isinstance(stated, list)
    assert [words for words in stated if REFUSALS[kind] in words], stated[:5]


def test_what_was_decoded_counts_while_it_lives() -> None:
    meter = ReadMeter("a.session", ReadLimits(100 * MIB))
    array = np.zeros(MIB, np.float32)
    part = array[5:].view(np.uint8)[3:]
    meter.keep_array(array)
    assert meter.used == 3 * 4 * MIB  # as its readers copy it
    del array
    assert meter.used == 12 * MIB  # a view of it lives
    del part
    assert meter.used == 0
    held = meter.charged([1, 2], 5)
    assert (list(held), meter.used) == ([1, 2], 5)
    del held
    assert meter.used == 0


def test_caches_are_emptied_before_anything_is_refused() -> None:
    meter = ReadMeter("a.session", ReadLimits(10 * MIB))

    class Kept:
        """One large value."""

        def __init__(self) -> None:
            self.values = [np.zeros(MIB, np.uint8)]
            meter.keep_array(self.values[0], 8 * MIB)

        def forget(self) -> None:
            """Let go."""
            self.values.clear()

    cache = Kept()
    meter.register(cache)
    meter.room(2 * MIB, "what fits beside it")
    assert cache.values
    meter.room(3 * MIB, "what does not")
    assert (cache.values, meter.used) == ([], 0)
    with pytest.raises(
        LimitExceeded,
        match=r"a.session: no room for this: about 11 MiB; .* 10 MiB of memory.*`session_memory`",
    ):
        meter.room(11 * MIB, "this")


def test_all_that_a_session_has_decoded_is_given_back(tmp_path: Path) -> None:
    with Session.open(write(tmp_path / "a.session", 70)) as session:
        for step in (0, 30, 69):
            held = (
                session.step(step),
                session.stats(step),
                session.rebuilt("embed", step=step),
                session.events(),
            )
            assert session.meter.used > 0
            del held
        session._kept.forget()  # where the tensors of these steps are
        kept = session.meter.used
        for step in range(70):
            session.step(step), session.stats(step), session.tensor("embed", step=step, rank=1)
        gc.collect()
        session._kept.forget()
        assert session.meter.used == kept
        session._arrays.forget()
        assert session.meter.used < kept


def test_time_is_that_of_one_view_and_one_thread(tmp_path: Path) -> None:
    """A query that would run for ever is stopped too; another thread's view goes on."""
    forever = "SELECT count(*) FROM steps a, steps b, steps c, steps d, steps e, steps f"
    with create(tmp_path / "a.session") as writer:
        for step in range(100):
            writer.step(0, record(step, arrays=False, tensors=False))
    with Session.open(tmp_path / "a.session", ReadLimits(seconds=0.05)) as session:
        with pytest.raises(LimitExceeded, match=r"more than 0\.05 s.*`session_seconds`"):
            session._archive.query(forever)
        session.step(0)
        with session.view():
            end = time.thread_time() + 0.06
            while time.thread_time() < end:
                pass
            other: list[object] = []
            thread = threading.Thread(target=lambda: other.append(session.step(0)))
            thread.start()
            thread.join()
            assert other
            with pytest.raises(LimitExceeded), session.view():
                session.step(0)
        session.step(0)


@pytest.mark.parametrize(
    "text", ["[" + "{}," * 99 + "{}]", '{"a":[1,2]}', '"' + "a" * 99 + '"', "[" + "1.5," * 99 + "1]"]
)
def test_json_is_estimated_from_above(text: str) -> None:
    def size(value: object) -> int:
        inner = (
            [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        )
        return sys.getsizeof(value) + sum(map(size, inner))

    assert size(parse_json(text, "here")) <= json_bytes(text) + 64


def test_json_as_deep_as_it_may_be() -> None:
    parse_json("[" * 64 + "]" * 64, "here")
    with pytest.raises(SessionError, match="64 deep"):
        parse_json("[" * 65 + "]" * 65, "here")


def test_a_small_limit_still_opens_and_reads_an_honest_session(tmp_path: Path) -> None:
    with (
        Session.open(write(tmp_path / "a.session", 200), ReadLimits(4 * MIB, 5.0)) as session,
        session.walk(),
    ):
        for step in session.steps():
            assert session.stats(step) is not None
            assert session.tensor("embed", step=step, rank=0) is not None


def test_what_computes_on_what_it_reads_is_charged_for_reading_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(limits.time, "thread_time", lambda: clock[0])
    decode = codec.decode

    def slowly(*arguments: Any) -> Any:
        clock[0] += 4
        return decode(*arguments)

    path = write(tmp_path / "a.session", 8)
    with Session.open(path, ReadLimits(seconds=10)) as session, keeping(session), session.view():
        with reading(session):
            clock[0] += 1000  # what is computed beside it
            session.tensor("embed", step=0, rank=0)
            clock[0] += 1000
            monkeypatch.setattr(codec, "decode", slowly)
            for step in range(1, 3):
                session.tensor("embed", step=step, rank=0)
            clock[0] += 1000
            session.tensor("embed", step=3, rank=0)  # begun before the time was over
            with pytest.raises(LimitExceeded, match="session_seconds"):
                session.tensor("embed", step=4, rank=0)
        session.meter.check_time()  # none of it is of the view around
