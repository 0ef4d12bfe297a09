"""Pictures of the screens, taken of the demo.

    python docs/screenshots.py [DIRECTORY]      # one of each pane, as SVG, into docs/screens
    python docs/screenshots.py --all DIRECTORY  # every pane at three sizes, dark and light, as PNG, to be looked at

The demo runs on two ranks, faultless; then its q/k/v biases are switched off, the text breaks, and the broken branch is
held against the golden reference. `--all` replays what was recorded of that.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from contextlib import suppress
from itertools import product
from pathlib import Path

from textual.pilot import Pilot
from textual.worker import WorkerCancelled

from lockstep.workbench.export.png import rasterised
from lockstep.workbench.tui import routes, screenshots
from lockstep.workbench.tui.app import LockstepApp
from lockstep.workbench.tui.screens.home import HomeScreen
from lockstep.workbench.tui.screens.workbench import WorkbenchScreen
from lockstep.workbench.tui.settings import UserSettings

SIZE = (140, 42)
SIZES = ((80, 24), (120, 40), (200, 60))
THEMES = ("lockstep-dark", "lockstep-light")
#: Commands that make the session, in order.
STORY = ("next 24", "goto 0", "toggle load_bias false", "golden", "lens", "info weights")
#: Pictures: the keys that lead to each from the one before.
SHOTS = {
    "operations": ("1", "o"),
    "tensor": ("enter", "u"),
    "attention": ("2",),
    "attention-head": ("m",),
    "cache": ("3",),
    "weights": ("4", "u", "u"),
    "logits": ("5",),
    "candidate": ("enter",),
    "lens": ("escape", "l"),
    "sentinels": ("6",),
    "golden": ("7",),
    "journal": ("8",),
    "toggles": ("1", "x"),
    "help": ("escape", "question_mark"),
    "palette": ("escape", "ctrl+p"),
    "split": ("escape", "vertical_line"),
    "split-attention": ("2", "down"),
    "split-logits": ("3",),
}
#: A batch of so many prompts, run for a few tokens, and its pictures.
PROMPTS = ("The rain", "Once upon a time", "Write a haiku")
BATCH = {"batch": ("right_parenthesis",), "batch-attention": ("2",), "batch-cache": ("3",)}


async def settle(pilot: Pilot[int]) -> None:
    """Wait until nothing is left to do."""
    await pilot.pause(0.1)
    while any(worker.is_running for worker in pilot.app.workers):
        with suppress(WorkerCancelled):  # a newer question has replaced an older one
            await pilot.app.workers.wait_for_complete()
        await pilot.pause(0.1)


def save(app: LockstepApp, file: Path) -> None:
    """Write one picture in the format of its ending: cells as they are, no fonts fetched from anywhere."""
    picture = screenshots.taken(app.screen, app.screen.region, "").picture()
    file.write_bytes(rasterised(picture) if file.suffix == ".png" else picture.encode())
    print(file)


async def home(file: Path, size: tuple[int, int] = SIZE, theme: str = THEMES[0]) -> None:
    """The home screen."""
    app = LockstepApp(lambda chosen: HomeScreen(examine=False), UserSettings(theme=theme))
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        save(app, file)


async def opened(app: LockstepApp, pilot: Pilot[int]) -> WorkbenchScreen:
    """The workbench, once it shows a step."""
    while not (isinstance(app.screen, WorkbenchScreen) and app.screen.present is not None):
        await pilot.pause(0.2)
    await settle(pilot)
    return app.screen


async def shoot(
    app: LockstepApp, pilot: Pilot[int], shots: dict[str, tuple[str, ...]], directory: Path, ending: str
) -> None:
    """Go from picture to picture; each is saved as its name and the ending."""
    for name, keys in shots.items():
        for key in keys:
            await pilot.press(key)
            await settle(pilot)
        save(app, directory / f"{name}{ending}")


async def record(session: Path, directory: Path | None) -> None:
    """The demo, broken and judged; its pictures into `directory`."""
    words = ["demo", "--tp", "2", "--capture", "full", "--session", str(session)]
    app = LockstepApp(routes.running(words, "the demo, 2 ranks"))
    async with app.run_test(size=SIZE) as pilot:
        bench = await opened(app, pilot)
        for line in STORY:
            await bench.runner.run(line)
            await settle(pilot)
        if directory is not None:
            await shoot(app, pilot, SHOTS, directory, ".svg")


async def record_batch(session: Path) -> None:
    """Several prompts at once."""
    words = ["demo", "--tp", "2", "--session", str(session)]
    app = LockstepApp(routes.running([*words, *(w for p in PROMPTS for w in ("--prompt", p))], "a batch"))
    async with app.run_test(size=SIZE) as pilot:
        bench = await opened(app, pilot)
        await bench.runner.run("next 6")
        await settle(pilot)


async def replay(session: Path, batch: Path, directory: Path, size: tuple[int, int], theme: str) -> None:
    """Every pane at a size, in a theme."""
    ending = f"-{size[0]}x{size[1]}-{theme.removeprefix('lockstep-')}.png"
    await home(directory / f"home{ending}", size, theme)
    app = LockstepApp(routes.session(session), UserSettings(theme=theme))
    async with app.run_test(size=size) as pilot:
        bench = await opened(app, pilot)
        for line in ("branch load_bias=false", "goto 2"):  # the first difference, which was judged
            await bench.runner.run(line)
            await settle(pilot)
        await shoot(app, pilot, SHOTS, directory, ending)
    app = LockstepApp(routes.session(batch), UserSettings(theme=theme))
    async with app.run_test(size=size) as pilot:
        await opened(app, pilot)
        await shoot(app, pilot, BATCH, directory, ending)


def main() -> None:
    """All pictures of either kind."""
    every = sys.argv[1:2] == ["--all"]
    where = sys.argv[2 if every else 1 :]
    if len(where) > 1 or (every and not where):
        raise SystemExit(__doc__)
    directory = Path(where[0]) if where else Path(__file__).parent / "screens"
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as own:
        # Nothing of the user's own sessions or settings is to be seen in a picture.
        for variable in ("XDG_CONFIG_HOME", "LOCKSTEP_STATE_DIR", "LOCKSTEP_DATA_DIR"):
            os.environ[variable] = own
        session = Path(own) / "demo.session"
        if not every:
            asyncio.run(home(directory / "home.svg"))
        asyncio.run(record(session, None if every else directory))
        if every:
            batch = session.with_name("batch.session")
            asyncio.run(record_batch(batch))
            for size, theme in product(SIZES, THEMES):
                asyncio.run(replay(session, batch, directory, size, theme))


if __name__ == "__main__":
    main()
