"""The screens are a light process: no torch, no transformers, and the home screen not even numpy."""

from __future__ import annotations

import subprocess
import sys

import pytest

_HEAVY = ("torch", "transformers", "pyarrow", "pandas")


def _loaded(statement: str, names: tuple[str, ...]) -> str:
    code = f"import sys; {statement}; print(*[name for name in {names!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    "module",
    [
        "workbench.tui.launch",
        "workbench.tui.screens.home",
        "workbench.tui.screens.workbench",
        "workbench.tui.drivers.live",
        "workbench.tui.drivers.replay",
        "workbench.tui.web",
    ],
)
def test_no_screen_loads_torch(module: str) -> None:
    assert _loaded(f"import {module}", _HEAVY) == ""


def test_the_first_paint_waits_for_nothing_but_textual() -> None:
    light = "import workbench.cli.main, workbench.tui.launch, workbench.tui.screens.home, workbench.tui.screens.opening"
    assert _loaded(light, (*_HEAVY, "numpy", "sqlite3", "tokenizers", "typer", "click")) == ""


def test_the_first_picture_of_a_session_waits_for_one_pane() -> None:
    """The others are imported once it stands; a debugger and its commands on a thread of their own."""
    opened = "import workbench.tui.screens.workbench, workbench.tui.reader, workbench.tui.drivers.replay"
    names = ("attention", "cache", "golden", "journal", "logits", "sentinels", "tensor", "weights")
    panes = tuple(f"workbench.tui.panes.{name}" for name in names)
    rest = (
        "workbench.tui.split.maps", "workbench.tui.screens.split", "workbench.tui.screens.toggles",
        "workbench.tui.drivers.recorded", "workbench.debugger.core.debugger", "engine.faults.catalogue",
        "engine.checkpoint.survey", "workbench.export.png", "resvg_py",
    )  # fmt: skip
    assert _loaded(opened, (*_HEAVY, *panes, *rest, "typer")) == ""
