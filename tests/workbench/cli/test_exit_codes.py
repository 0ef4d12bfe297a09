"""Exit code 1 is a verdict: whatever is raised, wherever, ends as one line and another code."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from lockstep.engine.errors import LibraryPanic, panics_as_errors
from lockstep.workbench import error_log
from lockstep.workbench.cli import main, root
from lockstep.workbench.cli.subcommands import COMMANDS
from lockstep.workbench.exit_codes import Exit

pytestmark = pytest.mark.sampled_file(2)

ROOT = Path(__file__).resolve().parents[3]


class PanicException(BaseException):
    """As pyo3 derives its own."""


def _recurse() -> None:
    _recurse()


def _thrown(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


#: What a command's code may raise -> (how, the exit codes that it may end with).
RAISED: dict[str, tuple[Callable[[], None], Exit]] = {
    "panic": (_thrown(PanicException("called `Option::unwrap()`\x1b[31m")), Exit.DEFECT),
    "defect": (_thrown(KeyError("boom")), Exit.DEFECT),
    "memory": (_thrown(MemoryError()), Exit.CANNOT_LOAD),
    "recursion": (_recurse, Exit.DEFECT),
    "dependency": (_thrown(ModuleNotFoundError("No module named 'torch'", name="torch")), Exit.CANNOT_LOAD),
    "own module": (_thrown(ImportError("cannot import name", name="lockstep.engine.run")), Exit.DEFECT),
    "syntax": (_thrown(SyntaxError("invalid syntax")), Exit.DEFECT),
    "system": (_thrown(OSError(28, "No space left on device")), Exit.CANNOT_LOAD),
    "asked to exit": (_thrown(SystemExit(1)), Exit.DEFECT),
    "asked to exit in words": (_thrown(SystemExit("no way")), Exit.DEFECT),
    "a bare 1": (_thrown(typer.Exit(1)), Exit.DEFECT),
    "abort": (_thrown(typer.Abort()), Exit.INTERRUPTED),
    "interrupt": (_thrown(KeyboardInterrupt()), Exit.INTERRUPTED),
    "generator": (_thrown(GeneratorExit()), Exit.DEFECT),
    "group": (_thrown(BaseExceptionGroup("", [PanicException()])), Exit.DEFECT),
}


def _actions(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, action in getattr(command, "commands", {}).items():
        yield from _actions(action, (*words, name))
    if not getattr(command, "commands", {}):
        yield words, command


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("kind", RAISED)
def test_whatever_a_command_raises_is_one_line_and_no_verdict(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    act, code = RAISED[kind]
    command = root.load(name)
    for words, action in _actions(command):
        action.params, action.callback = [], act
        monkeypatch.setattr(root, "load", lambda _: command)
        assert main.run([name, *words]) == code
        stated = capsys.readouterr().err
        assert (stated.count("\n"), stated[:10]) == (1, "lockstep: ")
        assert "\x1b" not in stated


@pytest.mark.parametrize("kind", sorted(RAISED))
def test_the_screens_end_in_no_verdict(kind: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    act, code = RAISED[kind]
    if kind in ("a bare 1", "abort"):
        pytest.skip("of Typer's, which screens are opened without")
    monkeypatch.setattr(main, "straight", lambda _: act())
    monkeypatch.setattr(sys, "argv", ["lockstep"])
    monkeypatch.setattr(main.ending, "on_signals", lambda: None)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # `main` puts another in its place
    assert main.main() == code
    assert capsys.readouterr().err.count("\n") == 1


def test_a_verdict_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    command = root.load("diff")
    command.params, command.callback = [], _thrown(typer.Exit(Exit.DIVERGED))
    monkeypatch.setattr(root, "load", lambda _: command)
    assert main.run(["diff"]) == 1


@pytest.mark.parametrize("kind", RAISED)
def test_the_outermost_net_of_any_process(kind: str, capsys: Any) -> None:
    act, _ = RAISED[kind]

    def program() -> int:
        act()
        return 0

    if kind == "interrupt":
        with pytest.raises(KeyboardInterrupt):  # Python then ends as by SIGINT
            error_log.guarded(program, "x")
        return
    assert error_log.guarded(program, "x") in (Exit.DEFECT, Exit.CANNOT_LOAD)
    stated = capsys.readouterr().err
    assert (stated.count("\n"), stated[:9]) == (1, "x: error:")


def test_the_outermost_net_holds_where_the_log_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(error_log, "record", _thrown(ImportError("numpy")))
    assert error_log.guarded(_thrown(KeyError("boom"))) == Exit.DEFECT  # type: ignore[arg-type]
    assert "could not be kept" in capsys.readouterr().err


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lacking", ["typer", "numpy", "platformdirs", "msgspec"])
@pytest.mark.parametrize("words", [["faults"], ["sessions", "show", "none.session"]], ids=" ".join)
def test_an_installation_without_a_library_is_one_line(
    lacking: str, words: list[str], tmp_path: Path
) -> None:
    broken = tmp_path / lacking
    broken.mkdir()
    (broken / "__init__.py").write_text(
        "raise ModuleNotFoundError(f'No module named {__name__!r}', name=__name__)"
    )
    done = _lockstep(words, tmp_path)
    assert done.returncode in (Exit.OK, Exit.CANNOT_LOAD)  # not every command needs every library
    if done.returncode:
        (line,) = done.stderr.splitlines()
        assert lacking in line
        assert "install lockstep again" in line or "no such file" in line.lower()


@pytest.mark.parametrize("program", ["lockstep.workbench.cli", "lockstep.workbench.cli.host"])
def test_no_program_of_ours_ends_with_python_s_own_code(program: str, tmp_path: Path) -> None:
    """A library that panics while it is imported, before any net within could stand."""
    (tmp_path / "msgspec").mkdir()
    (tmp_path / "msgspec" / "__init__.py").write_text(
        "class PanicException(BaseException): pass\nraise PanicException('oh')"
    )
    done = _lockstep(["--socket", "x"] if program.endswith("host") else ["no.session"], tmp_path, program)
    assert done.returncode in (Exit.DEFECT, Exit.USAGE, Exit.CANNOT_LOAD), done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "PanicException" in done.stderr or program == "lockstep.workbench.cli"


def _lockstep(
    words: list[str], first: Path, program: str = "lockstep.workbench.cli"
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", program, *words]
    environment = {
        "PYTHONPATH": f"{first}:{ROOT}",
        "PATH": "/usr/bin:/bin",
        "LOCKSTEP_STATE_DIR": str(first / "state"),
    }
    return subprocess.run(
        command, cwd=first, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300
    )  # fmt: skip


def test_a_thread_that_fails_is_one_line(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", main._thread_failed)
    thread = threading.Thread(target=_thrown(PanicException("oh")))
    thread.start()
    thread.join()
    stated = capsys.readouterr().err
    assert stated.startswith("lockstep: error: PanicException: oh (a defect of lockstep")
    assert stated.count("\n") == 1


def test_a_panic_is_an_error_within_and_asking_to_end_is_not() -> None:
    with pytest.raises(LibraryPanic, match="PanicException: oh"), panics_as_errors():
        raise PanicException("oh")
    for passes in (KeyboardInterrupt, SystemExit, GeneratorExit, ValueError):
        with pytest.raises(passes), panics_as_errors():
            raise passes
