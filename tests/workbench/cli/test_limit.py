"""`--limit-seconds` is what commands may take, `--timeout` the patience with a rank; exit code 4 comes with a line."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.workbench.cli import run as run_command
from lockstep.workbench.cli.console import Console
from lockstep.workbench.cli.main import run
from lockstep.workbench.cli.root import load
from lockstep.workbench.debugger.answers import Position
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.errors import Interrupted
from lockstep.workbench.debugger.host.options import Launch


@pytest.mark.timeout(300)
def test_commands_that_take_too_long_end_with_a_line_and_4(tmp_path: Any, capsys: Any) -> None:
    words = ["run", "demo", "--ids", "1,2,3", "--save", str(tmp_path / "x.session"), "--limit-seconds", "0.5"]
    assert run([*words, "--batch", "--temperature", "1", "--ex", "until 100000", "--ex", "next"]) == 4
    (stated,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert stated.startswith(
        "lockstep: error: --ex 1: the commands have had their 0.5 s (--limit-seconds); stopped at "
    )
    assert "give them more" in stated


@pytest.mark.parametrize("as_json", [False, True])
def test_a_command_that_is_broken_off_ends_as_one_that_stops(as_json: bool, capsys: Any) -> None:
    """Such as `golden`, which raises when it is interrupted."""
    stopping: list[bool] = []

    def execute(line: str) -> None:
        while not stopping:
            time.sleep(0.01)
        raise Interrupted("golden was interrupted")

    debugger = SimpleNamespace(
        settings=SimpleNamespace(in_script=False), position=Position(0, 7), execute=execute,
        interrupt=lambda ahead: stopping.append(ahead),
    )  # fmt: skip
    console = Console(cast(Debugger, debugger), as_json=as_json)
    with console.interruptible(0.1, batch=True):
        assert console.run([("x.lds:3", "golden")]) == 4
    reported = capsys.readouterr()
    assert (
        "x.lds:3: the commands have had their 0.1 s (--limit-seconds); stopped at step 7 of branch 0"
        in reported.err
    )
    assert [json.loads(line)["exit_code"] for line in reported.out.splitlines()] == [4] * as_json


def test_timeout_is_the_patience_with_a_rank_wherever_it_is_an_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    helps = {
        name: option.help
        for name in ("run", "generate", "check", "diagnose", "tui")
        for option in load(name).params
        if "--timeout" in option.opts
    }
    assert len(helps) == 5
    assert len(set(helps.values())) == 1
    assert "--timeout" not in [word for option in load("replay").params for word in option.opts]
    launched: list[Launch] = []

    def stop(launch: Launch) -> None:
        launched.append(launch)
        raise KeyboardInterrupt

    monkeypatch.setattr(run_command, "target_of", stop)
    assert run(["run", "demo", "--ex", "next", "--timeout", "7", "--limit-seconds", "900"]) == 130
    assert launched[0].timeout == 7
