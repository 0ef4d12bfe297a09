"""`lockstep tui`: what is asked for on the command line is what the host is told."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from engine.run.sampling import Sampling
from workbench.cli import tui
from workbench.debugger.host.options import Launch, parse_options
from workbench.tui import launch


def test_every_option_reaches_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(tui, "no_screens", lambda: "")
    monkeypatch.setattr(launch.routes, "running", lambda words, name: told.extend(words))
    monkeypatch.setattr(launch, "_run", lambda route: 0)
    words = [
        "m.gguf", "--prompt", "a b", "--ids", "1,2", "--chat", "--tp", "2", "--device", "cuda", "--dtype", "bfloat16",
        "--weights", "quantised", "--rule", "mask=additive", "--listen", "h:1", "--seed", "7", "--capture", "full",
        "--timeout", "9", "--start-timeout", "8",
    ]  # fmt: skip
    result = CliRunner().invoke(tui.app, words)
    assert result.exit_code == 0, result.output
    assert parse_options(["--socket", "s", *told]).launch == Launch(
        "m.gguf", ["a b"], ["1,2"], True, 2, "cuda", "bfloat16", ["mask=additive"], ["full"], Sampling(seed=7), 9.0,
        listen="h:1", start_timeout=8.0, catch=[], weights="quantised",
    )  # fmt: skip
