"""`lockstep.attach`: a command's run as a value; the command's own streams are left alone."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import lockstep
from tests.workbench.cli.test_attach import ENGINE
from tests.workbench.library.safe_html import Shown


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    program = tmp_path_factory.mktemp("attached") / "engine.py"
    program.write_text(ENGINE.replace("lockstep.workbench.attach.inside", "_lockstep_attached"))
    return [sys.executable, str(program), "0", "1"]


@pytest.mark.slow
def test_a_run_of_a_command(engine: list[str], tmp_path: Path, capfd: Any) -> None:
    runs = lockstep.attach([*engine, "fails"], output=tmp_path / "run.session")
    assert (runs.session, runs.exit_code, runs.verdict) == (tmp_path / "run.session", 7, None)
    with lockstep.open(runs.session) as run:
        assert run.tokens().prompt == (5, 6, 7)
    reported = runs.to_json()
    assert (reported["command"], reported["code"], reported["session"]) == (
        [*engine, "fails"],
        7,
        str(runs.session),
    )
    assert "run.session" in repr(runs)
    assert "the command ended with exit code 7" in Shown(runs._repr_html_()).text
    assert capfd.readouterr() == ("text of the engine\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["run.session"]


def test_it_needs_the_main_thread(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool, pytest.raises(lockstep.UsageError, match="main thread"):
        pool.submit(lockstep.attach, ["true"], output=tmp_path / "run.session").result()


@pytest.mark.parametrize(
    ("more", "error", "printed"),
    [
        ({"engine": "tensorrt"}, lockstep.UsageError, "engine is one of auto, vllm"),
        ({"capture": "some"}, lockstep.UsageError, "capture is full or stats"),
        ({"keep_dump": Path(__file__).parent}, lockstep.UsageError, "name a new folder"),
        ({"model": "/nowhere"}, lockstep.EngineError, "nowhere"),
        ({}, lockstep.AttachError, "cannot start no-such-program"),
    ],
)
def test_what_cannot_be_done_is_a_documented_exception(
    more: dict[str, Any], error: type[Exception], printed: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=printed):
        lockstep.attach(["no-such-program"], output=tmp_path / "run.session", **more)
    assert list(tmp_path.iterdir()) == []
