"""The moving picture of the README: the real screens, on the demo, as one SVG whose frames follow each other.

python docs/cast.py [FILE]      # default: docs/screens/cast.svg
"""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path

from textual.pilot import Pilot

from lockstep.workbench.tui import routes, screenshots
from lockstep.workbench.tui.app import LockstepApp
from lockstep.workbench.tui.screens.workbench import WorkbenchScreen

SIZE = (110, 30)
#: Seconds that each frame is shown.
SECONDS = 3.0
#: What is under each frame; the debugger's commands that lead to it, then the keys.
FRAMES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("The demo on two ranks writes a haiku. Every operation, on every rank.", ("next 14",), ("1",)),
    ("A bug that real engines had: the biases of q, k and v are not loaded. The text breaks.",
     ("goto 0", "toggle load_bias false"), ("1",)),
    ("g: every tensor against transformers. The first wrong operation, and why.", (), ("g",)),
    ("The first wrong tensor, head by channel.", ("origin",), ("1", "enter")),
    ("What a layer attends to.", (), ("2",)),
    ("Put right, on a branch of its own: it matches again.",
     ("toggle load_bias true --stay", "next 2", "golden"), ("7",)),
)  # fmt: skip

_shots = runpy.run_path(str(Path(__file__).with_name("screenshots.py")))
settle, opened = _shots["settle"], _shots["opened"]


async def frames(session: Path) -> list[str]:
    """The screens of the story, each as an SVG."""
    app = LockstepApp(routes.running(["demo", "--tp", "2", "--session", str(session)], "the demo, 2 ranks"))
    pictures = []
    async with app.run_test(size=SIZE) as pilot:
        bench = await opened(app, pilot)
        for text, lines, keys in FRAMES:
            await _go(bench, pilot, lines, keys)
            pictures.append(screenshots.taken(app.screen, app.screen.region, text).picture())
            while app.screen is not bench:
                await pilot.press("escape")
    return pictures


async def _go(
    bench: WorkbenchScreen, pilot: Pilot[int], lines: tuple[str, ...], keys: tuple[str, ...]
) -> None:
    for line in lines:
        await bench.runner.run(line)
        await settle(pilot)
    for key in keys:
        await pilot.press(key)
        await settle(pilot)


def moving(pictures: list[str], seconds: float) -> str:
    """The pictures over each other, one visible at a time, again and again; where nothing moves, the first."""
    whole, share = seconds * len(pictures), 100 / len(pictures)
    sizes = [tuple(map(float, re.findall(r'(?:width|height)="([\d.]+)"', one)[:2])) for one in pictures]
    width, height = (max(size[axis] for size in sizes) for axis in (0, 1))
    style = (
        f".frame {{ visibility: hidden; animation: shown {whole:g}s step-end infinite; }} .frame:first-of-type "
        "{ visibility: visible; } @keyframes shown { 0% { visibility: visible; } "
        f"{share:.4f}% {{ visibility: hidden; }} 100% {{ visibility: hidden; }} }}"
    )
    groups = [
        f'<g class="frame" style="animation-delay: {seconds * place:g}s">{one[one.index("<svg") :]}</g>'
        for place, one in enumerate(pictures)
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}">'
    return "\n".join([head, f"<style>{style}</style>", *groups, "</svg>", ""])


def main() -> None:
    """Take and write it."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "screens" / "cast.svg"
    with tempfile.TemporaryDirectory() as own:
        # Nothing of the user's own sessions or settings is to be seen in a picture.
        for variable in ("XDG_CONFIG_HOME", "LOCKSTEP_STATE_DIR", "LOCKSTEP_DATA_DIR"):
            os.environ[variable] = own
        pictures = asyncio.run(frames(Path(own) / "demo.session"))
    file.write_text(moving(pictures, SECONDS), encoding="utf-8")
    print(file, file.stat().st_size)


if __name__ == "__main__":
    main()
