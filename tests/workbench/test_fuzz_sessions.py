"""Sessions that a stranger may send: any values that the writer takes, any bytes. Reader, verify, exports, replay and
every pane give a result or one of our errors."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lockstep.sessions import SessionError, TensorRecord, VerdictRecord
from lockstep.sessions.dtypes import STORED_AS
from lockstep.sessions.meta import SessionMeta
from lockstep.workbench.tui.app import LockstepApp
from lockstep.workbench.tui.reader import Reader
from lockstep.workbench.tui.settings import UserSettings
from tests.sessions.oddities import KINDS, ODDITIES
from tests.sessions.strangers import FLOATS, WORDS, Stranger, usual, write
from tests.workbench.harmless import stands
from tests.workbench.tui.conftest import replaying, settle
from tests.workbench.tui.test_strangers import walk

_INTEGER = st.sampled_from((0, 1, 2, 3, -1, 63, 64, 2**31, 10**18, -(2**63), 2**63 - 1)) | st.integers(-9, 99)
_FLOAT = st.sampled_from((*FLOATS, 0.0, 1.0)) | st.floats()
_TEXT = st.sampled_from(WORDS) | st.text(max_size=20)
_JSON = st.recursive(
    st.none() | st.booleans() | _INTEGER | _FLOAT | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)
_LIST = st.lists(_INTEGER, max_size=6).map(tuple)
_SEQUENCE = {
    "ids": _LIST, "positions": _LIST, "block_table": _LIST, "emitted": st.none() | _INTEGER, "topk_ids": _LIST,
    "topk_logits": st.lists(_FLOAT, max_size=6).map(tuple), "logsumexp": st.none() | _FLOAT,
    "entropy": st.none() | _FLOAT, "seq": _INTEGER, "forced": st.booleans(),
    "kv_lens": st.just(()) | st.integers(1, 3).flatmap(lambda n: st.tuples(*[st.tuples(*[_INTEGER] * n)] * 2)),
}  # fmt: skip


@st.composite
def strangers(draw: st.DrawFn) -> Stranger:
    """The usual session with a few things spoiled: oddities, and values drawn for fields."""
    made = usual()
    for oddity in draw(st.lists(st.sampled_from(sorted(ODDITIES)), max_size=3, unique=True)):
        ODDITIES[oddity](made)
    made.each_sequence(**draw(st.fixed_dictionaries({}, optional=_SEQUENCE)))
    pool = np.array(draw(st.lists(st.floats(width=32), min_size=1, max_size=5)), np.float32)
    if draw(st.booleans()):
        made.each_step(
            lambda step: replace(step, stats=step.stats if step.stats is None else _fill(step.stats, pool))
        )
    if draw(st.booleans()):
        dtype = draw(st.sampled_from(sorted(STORED_AS)))
        array = draw(
            hnp.arrays(STORED_AS[dtype], hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
        )
        odd = draw(st.sampled_from((None, 0, 1)))

        def other(one: TensorRecord) -> TensorRecord:
            return one if odd == one.rank else replace(one, array=array, dtype=dtype)

        made.each_tensor(other)
    events = st.tuples(st.integers(-1, 2), st.integers(-1, 4), st.sampled_from(KINDS), _TEXT, _JSON)
    made.events += [(b, s, k, _stored(t), data) for b, s, k, t, data in draw(st.lists(events, max_size=4))]
    words = st.sampled_from(("pass", "fail", "suspect", "absent", "[/]"))
    verdicts = st.builds(
        VerdictRecord,
        st.integers(-1, 2),
        st.integers(-1, 4),
        st.sampled_from(("embed", "logits", "x")),
        words,
        _JSON,
    )
    made.verdicts += draw(st.lists(verdicts, max_size=4))
    made.rows |= draw(st.dictionaries(st.sampled_from(SessionMeta.__struct_fields__), _JSON, max_size=2))
    return made


def _fill(stats: np.ndarray, pool: np.ndarray) -> np.ndarray:
    return np.resize(pool, stats.shape).astype(np.float32)


def _stored(text: str) -> str:
    """No column holds lone surrogates."""
    return text.encode("utf-8", "replace").decode()


def tried(made: Stranger, path: Path) -> Path:
    """The file; the example is dropped where the writer takes no such session."""
    try:
        return write(path, made)
    except (ValueError, OverflowError, TypeError):
        reject()


def by_value(examples: int) -> Any:
    """Decorates a test of one session, many times."""
    slowness = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture]
    return lambda test: settings(max_examples=examples, suppress_health_check=slowness)(
        given(strangers())(test)
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@by_value(25)  # `make soak ONLY=fuzz-values` tries as many as one likes
def test_many_values(made: Stranger) -> None:
    with tempfile.TemporaryDirectory() as directory:
        stands(tried(made, Path(directory, "stranger.session")))


@cache
def _whole() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        return write(Path(directory, "usual.session"), usual()).read_bytes()


#: Where to change a byte, as a share of those that are not 0 (most of a small database is empty), and to what.
_FLIPS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=30)


def _any_bytes(flips: list[tuple[float, int]], length: float) -> None:
    content = bytearray(_whole())
    meaningful = np.flatnonzero(np.frombuffer(content, np.uint8))
    for where, mask in flips:
        content[int(meaningful[int(where * len(meaningful))])] ^= mask
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "stranger.session")
        path.write_bytes(content[: max(1, int(length * len(content)))])
        stands(path)
        assert [file.name for file in Path(directory).iterdir()] == [path.name], "nothing is left beside it"


@settings(max_examples=15)
@given(_FLIPS, st.just(1.0) | st.floats(0, 1))
def test_any_bytes(flips: list[tuple[float, int]], length: float) -> None:
    _any_bytes(flips, length)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=75)
@given(_FLIPS, st.just(1.0) | st.floats(0, 1))
def test_many_bytes(flips: list[tuple[float, int]], length: float) -> None:
    _any_bytes(flips, length)


async def _on_screen(path: Path, size: tuple[int, int]) -> None:
    try:
        reader = Reader.open(path)
    except SessionError:
        return
    try:
        async with LockstepApp(replaying(reader), UserSettings()).run_test(size=size) as pilot:
            await settle(pilot)
            await walk(pilot)
    finally:
        reader.close()


def _any_panes(made: Stranger, size: tuple[int, int]) -> None:
    """LOCKSTEP_DEBUG has the screens raise what their outer net would catch."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patched:
        patched.setenv("LOCKSTEP_DEBUG", "1")
        patched.setenv("XDG_CONFIG_HOME", directory)
        patched.chdir(directory)
        path = tried(made, Path(directory, "stranger.session"))
        asyncio.run(asyncio.wait_for(_on_screen(path, size), 150))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@by_value(2)
def test_many_values_in_every_pane(made: Stranger) -> None:
    """A few seconds each: `make soak ONLY=fuzz-screens` tries as many as one likes."""
    for size in ((80, 24), (160, 50)):
        _any_panes(made, size)
