"""Pictures of every pane, taken of the demo: `python docs/screenshots.py [DIRECTORY]` writes SVGs.

The demo runs on two ranks, faultless; then its q/k/v biases are switched off, the text breaks, and both are
held against the golden reference.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from textual.pilot import Pilot
from textual.worker import WorkerCancelled

from workbench.tui import routes, screenshots
from workbench.tui.app import LockstepApp
from workbench.tui.screens.home import HomeScreen
from workbench.tui.screens.workbench import WorkbenchScreen

SIZE = (140, 42)
#: Commands that make the session, in order.
STORY = (
    "next 24", "goto 0", "toggle load_bias false --stay", "next 24", "golden", "lens", "info weights",
    "capture layers.*.attn.k_cache",
)  # fmt: skip
#: Pictures: the keys that lead to each from the one before.
SHOTS = {
    "operations": ("1", "o"),
    "attention": ("2",),
    "attention-head": ("m",),
    "cache": ("3",),
    "weights": ("4", "u", "u"),
    "logits": ("5",),
    "lens": ("l",),
    "sentinels": ("6",),
    "golden": ("7",),
    "journal": ("8",),
    "toggles": ("1", "x"),
    "help": ("escape", "question_mark"),
}


async def settle(pilot: Pilot[int]) -> None:
    """Wait until nothing is left to do."""
    await pilot.pause(0.1)
    while any(worker.is_running for worker in pilot.app.workers):
        with suppress(WorkerCancelled):  # a newer question has replaced an older one
            await pilot.app.workers.wait_for_complete()
        await pilot.pause(0.1)


def save(app: LockstepApp, directory: Path, name: str) -> None:
    """Write one picture: cells as they are, no fonts fetched from anywhere."""
    picture = screenshots.taken(app.screen, app.screen.region, "").picture()
    (directory / f"{name}.svg").write_text(picture, encoding="utf-8")
    print(directory / f"{name}.svg")


async def home(directory: Path) -> None:
    """The home screen."""
    app = LockstepApp(lambda chosen: HomeScreen(examine=False))
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot)
        save(app, directory, "home")


async def workbench(directory: Path, session: Path) -> None:
    """The demo, broken and judged."""
    words = ["demo", "--tp", "2", "--capture", "layers.*.attn.probs", "--session", str(session)]
    app = LockstepApp(routes.running(words, "the demo, 2 ranks"))
    async with app.run_test(size=SIZE) as pilot:
        while not (isinstance(app.screen, WorkbenchScreen) and app.screen.present is not None):
            await pilot.pause(0.2)
        await settle(pilot)
        for line in STORY:
            assert isinstance(app.screen, WorkbenchScreen)
            await app.screen.runner.run(line)
            await settle(pilot)
        for name, keys in SHOTS.items():
            for key in keys:
                await pilot.press(key)
                await settle(pilot)
            save(app, directory, name)


def main() -> None:
    """All pictures."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "screens"
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as own:
        # Nothing of the user's own sessions or settings is to be seen in a picture.
        for variable in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "LOCKSTEP_DATA_DIR"):
            os.environ[variable] = own
        asyncio.run(home(directory))
        asyncio.run(workbench(directory, Path(own) / "demo.session"))


if __name__ == "__main__":
    main()
