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


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "module",
    [
        "lockstep.workbench.tui.launch",
        "lockstep.workbench.tui.screens.home",
        "lockstep.workbench.tui.screens.workbench",
        "lockstep.workbench.tui.drivers.live",
        "lockstep.workbench.tui.drivers.replay",
        "lockstep.workbench.tui.web",
    ],
)
def test_no_screen_loads_torch(module: str) -> None:
    assert _loaded(f"import {module}", _HEAVY) == ""


def test_the_first_paint_waits_for_nothing_but_textual() -> None:
    light = (
        "import lockstep.workbench.cli.main\nfrom lockstep.workbench.tui import launch\n"
        "from lockstep.workbench.tui.screens import home, opening"
    )
    assert _loaded(light, (*_HEAVY, "numpy", "sqlite3", "tokenizers", "typer", "click")) == ""


def test_the_first_picture_of_a_session_waits_for_one_pane() -> None:
    """The others are imported once it stands; a debugger and its commands on a thread of their own."""
    opened = (
        "from lockstep.workbench.tui import reader\nfrom lockstep.workbench.tui.drivers import replay\n"
        "from lockstep.workbench.tui.screens import workbench"
    )
    names = ("attention", "cache", "experts", "golden", "journal", "logits", "sentinels", "tensor", "weights")
    panes = tuple(f"lockstep.workbench.tui.panes.{name}" for name in names)
    rest = (
        "lockstep.workbench.tui.split.maps", "lockstep.workbench.tui.screens.split",
        "lockstep.workbench.tui.screens.toggles", "lockstep.workbench.tui.drivers.recorded",
        "lockstep.workbench.debugger.core.debugger", "lockstep.engine.faults.catalogue",
        "lockstep.engine.checkpoint.survey", "lockstep.workbench.export.png", "resvg_py",
    )  # fmt: skip
    assert _loaded(opened, (*_HEAVY, *panes, *rest, "typer")) == ""
