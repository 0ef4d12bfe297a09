"""A stranger's session in a replay: what it states of itself may be anything, and stays data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.engine.errors import EngineError
from lockstep.sessions import SessionError
from lockstep.workbench.debugger.commands.script import script_of
from lockstep.workbench.debugger.errors import DebuggerError
from lockstep.workbench.debugger.host.replay import engine_config, open_replay, recorded_sequences
from tests.sessions.oddities import ODDITIES, some_of_each
from tests.sessions.samples import put_meta, tamper
from tests.sessions.strangers import usual, write
from tests.workbench.debugger.host.test_replay import RECORDED
from tests.workbench.harmless import stands

pytestmark = pytest.mark.sampled_file(2)

EVIL = "\x1b]0;owned\x07\x9b2J../../etc/passwd'; DROP TABLE steps; --\u202e\n$(touch pwned)"
JUNK: tuple[Any, ...] = (
    None,
    5,
    -1e300,
    "x",
    EVIL,
    [],
    [[1], {}],
    {},
    {"0": 5},
    {EVIL: EVIL},
    {"0": {EVIL: [EVIL]}},
    True,
)
#: One of each kind; all of them take long.
FEW = (5, EVIL, [[1], {}], {"0": 5}, {"0": {EVIL: [EVIL]}})
junk = pytest.mark.parametrize(
    "values", [FEW, pytest.param(JUNK, marks=pytest.mark.slow)], ids=["few", "all"]
)
COMMANDS = (
    "where", "next", "where", "topk", "frame", "info ranks", "info kv", "info blocks", "info toggles", "info taps",
    "info weights", "info checkpoints", "attn 0 0", "print text", "print tokens", "print rule.mask", "golden",
    "diagnose", "check", "origin", "expect golden == match", "expect cause == none", "catch golden", "catch eos",
    "continue", "reverse-continue", "branches", "branch 1", "diff 0 1", "export script", "export journal",
    "print layers.0.attn.q_proj", "toggle load_bias true", "goto 5", "reverse-step", "display where", "stepi",
    "split", "split golden", "extend 1", "sequence 1",
)  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copyfile(RECORDED / "load_bias-false.session", tmp_path / "a.session"))


def harmless(path: Path) -> None:
    """Every command answers with clean text or refuses with one of our errors; the file stays as it is."""
    before = path.read_bytes()
    try:
        debugger = open_replay(path)
    except (SessionError, EngineError, DebuggerError):
        return
    with debugger:
        for line in COMMANDS:
            try:
                result = debugger.execute(line)
                stated = result.to_text()
                json.dumps(result.to_json())
            except (SessionError, EngineError, DebuggerError) as error:
                stated = str(error)
            assert not [c for c in stated if ord(c) < 32 and c != "\n"], (line, stated)
            assert "\x9b" not in stated
            assert "\u202e" not in stated
        script_of(debugger)
        for ask in (engine_config, recorded_sequences):
            try:
                ask(debugger.session)
            except (SessionError, EngineError):
                continue
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("line", ["export html a\0b.html", "source a\0b", "diff a\0b 0", "record a\0b"])
def test_names_of_files_that_no_file_can_have(path: Path, line: str) -> None:
    with open_replay(path) as debugger, pytest.raises(DebuggerError):
        debugger.execute(line)


@pytest.mark.sampled(12)
@junk
@pytest.mark.parametrize(
    "key",
    [
        "model",
        "model_path",
        "model_name",
        "config",
        "rules",
        "sequences",
        "capture",
        "token_texts",
        "weights",
        "dtype",
    ],
)
def test_whatever_the_meta_holds(path: Path, key: str, values: Sequence[object]) -> None:
    for value in values:
        put_meta(path, **{key: value})
        harmless(path)


@pytest.mark.sampled(6)
@junk
@pytest.mark.parametrize(
    "kind", ["fork", pytest.param("golden", marks=pytest.mark.slow), "command", "stop", "note", "lens"]
)
def test_whatever_an_event_holds(path: Path, kind: str, values: Sequence[object]) -> None:
    for value in (*values, {"patches": 5}, {"patches": [EVIL]}, {"sampling": {"x": 1}}, {"at": EVIL}, {"sampling": 7},
                  {"verdict": "diverged", "steps": EVIL, "words": EVIL, "causes": [{"text": EVIL, "residual": EVIL}]},
                  {"verdict": "diverged", "causes": 5}, {"amended": EVIL}):  # fmt: skip
        tamper(
            path,
            "UPDATE events SET data = ?, text = ? WHERE kind = ?",
            arguments=(json.dumps(value), EVIL, kind),
        )
        tamper(
            path,
            "INSERT INTO events VALUES (NULL, 1, 0, ?, ?, ?, 0)",
            arguments=(kind, EVIL, json.dumps(value)),
        )
        harmless(path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET branch = 77 WHERE kind = 'fork'",
        "UPDATE events SET step = -5",
        "UPDATE branches SET name = ?1, rules = json_object(?1, ?1)",
        "UPDATE taps SET name = ?1 WHERE id = 0",
        "UPDATE taps SET name = 'layers.' || id",
        "UPDATE verdicts SET tap = ?1 || step || tap",
        "UPDATE verdicts SET verdict = ?1",
        "UPDATE steps SET phase = ?1, dropped = json_array(?1)",
        "DELETE FROM sequences",
        "DELETE FROM recent",
        "DELETE FROM tensors",
        "UPDATE sequences SET emitted = 9000000000000000000",
        "UPDATE tensors SET slice = ?1",
    ],
)
def test_whatever_the_rows_hold(path: Path, statement: str) -> None:
    tamper(path, statement, arguments=(EVIL,) if "?" in statement else ())
    harmless(path)


@pytest.mark.parametrize(
    "oddities",
    [
        ("nothing_in_sequences", "shape_6"),
        ("no_sequences", "numbers_1"),
        ("sequence_ids_0", "shape_8"),
        ("name_10",),
    ],
    ids=" ".join,
)
def test_whatever_the_values_are(tmp_path: Path, oddities: Sequence[str]) -> None:
    """No positions, nothing fed, infinite counts, attention of no dimensions, line breaks in names."""
    made = usual()
    for oddity in oddities:
        ODDITIES[oddity](made)
    stands(write(tmp_path / "stranger.session", made))


@pytest.mark.slow
@pytest.mark.parametrize("oddity", some_of_each(2))
def test_whatever_any_value_is(tmp_path: Path, oddity: str) -> None:
    """`make soak` tries all of them."""
    made = usual()
    ODDITIES[oddity](made)
    stands(write(tmp_path / "stranger.session", made))
