"""The program itself: help, version, bare `lockstep`, closed pipes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.sessions import Session
from lockstep.workbench import error_log
from lockstep.workbench.cli.main import COMPLETION, complete, run
from lockstep.workbench.cli.root import load
from lockstep.workbench.cli.subcommands import COMMANDS
from lockstep.workbench.debugger.failures import explain

pytestmark = pytest.mark.sampled_file(2)

ROOT = Path(__file__).resolve().parents[3]


def test_help_lists_every_command(capsys: Any) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, (_, line) in COMMANDS.items():
        assert name in shown
        assert line[:30] in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_loads_under_its_name(name: str, capsys: Any) -> None:
    assert load(name).name == name
    assert run([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"lockstep {name}" in shown
    assert "--install-completion" not in shown


def test_paragraphs_of_help_flow_to_the_width_of_the_terminal(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 60)
    assert run(["check", "--help"]) == 0
    shown = capsys.readouterr().out.split("Exit code 0:")[1].split("╭")[0]
    lines = [line.rstrip() for line in shown.splitlines() if line.strip()]
    following = zip(lines, [line.split()[0] for line in lines[1:]], strict=False)
    assert len(lines) > 4
    # A column stays free at each side, and `line` begins with that of the left.
    assert all(len(f"{line} {word}") > 59 for line, word in list(following)[1:]), "no line is broken early"


def _actions(command: Any) -> Iterator[Any]:
    """A command, or those of which it is a group, and the group where it does something by itself."""
    if not hasattr(command, "commands") or command.invoke_without_command:
        yield command
    for action in getattr(command, "commands", {}).values():
        yield from _actions(action)


def test_json_is_understood_wherever_data_is_printed() -> None:
    silent = {"tui", "web", "mcp", "rank"}  # screens, and what talks to an agent or a host
    lacking = {
        f"{name} {action.name}"
        for name in COMMANDS.keys() - silent
        for action in _actions(load(name))
        if "--json" not in [word for option in action.params for word in option.opts]
    }
    assert lacking == set()
    page = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    assert "all but `tui`, `web`, `mcp` and `rank`" in page


def test_a_flag_has_no_type_in_the_help(capsys: Any) -> None:
    for words in ([], *([name] for name in COMMANDS), ["sessions", "show"]):
        assert run([*words, "--help"]) == 0
        shown = capsys.readouterr().out
        assert "bool" not in shown
        assert "seed S" not in shown


def test_completion_is_installed_and_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    assert run(["--install-completion"]) == 0
    assert "bash completion installed" in capsys.readouterr().out
    (script,) = [path for path in tmp_path.rglob("*") if path.suffix == ".sh"]
    assert f"{COMPLETION}=complete_bash" in script.read_text(encoding="utf-8")
    assert script.name in (tmp_path / ".bashrc").read_text(encoding="utf-8")
    for typed, offered in (
        ("lockstep ses", "sessions"), ("lockstep sessions pa", "pack"), ("lockstep check --dt", "--dtype")
    ):  # fmt: skip
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
        assert complete("complete_bash") == 0
        assert offered in capsys.readouterr().out.split()
    assert "lockstep --install-completion" in (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")


def test_version(capsys: Any) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lockstep ")


def test_a_typing_error_is_answered_with_a_suggestion(capsys: Any) -> None:
    assert run(["genrate"]) == 2
    assert "'generate'" in capsys.readouterr().err


def test_without_a_terminal_there_are_no_screens(capfd: Any) -> None:
    assert run([]) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "not a terminal" in shown.err
    assert "generate" in shown.err


def test_a_closed_pipe_is_no_error() -> None:
    code = (
        "import sys; from lockstep.workbench.cli.main import main\n"
        "sys.argv = ['lockstep', '--help']; sys.exit(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    stated = process.stderr.read()
    assert process.wait(30) == 141
    assert stated == ""


def test_a_defect_is_not_taken_for_a_divergence() -> None:
    code, message = explain(KeyError("\x1b[31mboom"))
    assert code == 70
    assert "\x1b" not in message
    assert f"its traceback is in {error_log.log_file()}" in message
    assert "boom" in error_log.log_file().read_text(encoding="utf-8")


RECORDED = ROOT / "sessions" / "recorded" / "load_bias-false.session"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "words",
    [["faults"], ["faults", "--json"], ["inspect", "demo"], ["sessions", "show", str(RECORDED)],
     ["diff", str(RECORDED), str(RECORDED)], ["generate", "demo", "--max-tokens", "1"], ["--version"]],
    ids=" ".join,
)  # fmt: skip
def test_closed_stdout_is_a_usage_error(words: list[str]) -> None:
    command = [sys.executable, "-m", "lockstep.workbench.cli", *words]
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *command], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "lockstep: error: stdout is closed: redirect it to /dev/null where its output is not wanted"
    ]


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["--seed", "9" * 20], "the seed must be from"),
        (["--seed", "-" + "9" * 20], "the seed must be from"),
        (["--top-k", "9" * 20], "top-k must be from 0"),
        (["--timeout", "inf"], "the timeout must be above 0 and at most"),
        (["--tp", "9" * 20], "does not divide"),
        (["--ids", "9" * 20], "token id"),
        (["--prompt", "caf\udce9"], "the prompt is not UTF-8 (character 4)"),
    ],
)
def test_what_no_engine_can_take_is_a_usage_error(words: list[str], printed: str, capsys: Any) -> None:
    prompt = [] if {"--prompt", "--ids"} & set(words) else ["--prompt", "a"]
    assert run(["generate", "demo", *prompt, *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert printed in error


@pytest.mark.parametrize(
    "words", [["replay", str(RECORDED), "--batch", "--ex", "help"], ["faults"]], ids=" ".join
)
def test_a_reader_that_leaves_early_is_shown_nothing(words: list[str]) -> None:
    """`lockstep … | true`: the program ends as `yes | true` does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep.workbench.cli", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, stated = process.communicate(timeout=120)
    assert (process.returncode, stated) == (141, b"")


def test_an_unexpected_exception_is_one_line_and_a_log(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """With LOCKSTEP_DEBUG the traceback comes before the line."""

    def fails(*_: object, **__: object) -> None:
        raise KeyError("\x1b[31mred \u202e")

    monkeypatch.setattr(Session, "open", fails)
    for debugging in (False, True):
        monkeypatch.setenv("LOCKSTEP_DEBUG", "1" if debugging else "")
        assert run(["sessions", "show", "x.session"]) == 70
        reported = capsys.readouterr().err
        assert ("Traceback" in reported) == debugging
        assert (reported.count("\n") == 1) != debugging
        assert f"is in {error_log.log_file()}" in reported
        assert "\x1b" not in reported
        assert "\u202e" not in reported


def test_a_command_line_is_no_way_to_the_terminal(capsys: Any) -> None:
    assert run(["\x1b]0;owned\x07"]) == 2
    assert run(["sessions", "show", "\x1b]0;owned\x07\u202e"]) == 3
    assert "\x1b" not in (reported := capsys.readouterr().err)
    assert "\u202e" not in reported
