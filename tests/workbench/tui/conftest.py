"""Sessions made once, and a way to wait until the screen has nothing left to do."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import pytest
from textual import _wait, events
from textual.pilot import Pilot
from textual.worker import WorkerCancelled

from lockstep.workbench.tui.app import LockstepApp
from lockstep.workbench.tui.drivers.replay import ReplayDriver
from lockstep.workbench.tui.reader import Reader
from lockstep.workbench.tui.routes import Route
from lockstep.workbench.tui.screens.workbench import WorkbenchScreen
from lockstep.workbench.tui.settings import UserSettings
from tests.workbench.tui.synthetic import build

# How long a pilot sleeps at a time until the process is idle: `settle` waits for what is under way, not for a clock.
_wait.SLEEP_GRANULARITY, _wait.SLEEP_IDLE = 1 / 100, 1 / 400

Bench = Callable[..., AbstractAsyncContextManager[Pilot[int]]]


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The usual session: twelve tokens, NaN from step 6 on, a branch from step 1."""
    return build(tmp_path_factory.mktemp("sessions") / "haiku.session")


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's own settings."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("LOCKSTEP_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("LOCKSTEP_DEBUG", "1")  # the screens' outer net hides nothing from the tests


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """What the screens change in their process, which is theirs but for the tests, is put back."""
    interval = sys.getswitchinterval()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    sys.setswitchinterval(interval)
    for number, handler in handlers.items():
        signal.signal(number, handler)


async def settle(pilot: Pilot[int], rounds: int = 3) -> None:
    """Wait for messages and workers: `Pilot.pause` alone does not wait for the latter."""
    for _ in range(rounds):  # what a worker's answer sets going may start the next
        await pilot.pause()
        while any(worker.is_running for worker in pilot.app.workers):
            with suppress(WorkerCancelled):  # another has taken its place, and is waited for in its turn
                await pilot.app.workers.wait_for_complete()
            await pilot.pause()


async def press(pilot: Pilot[int], *keys: str) -> None:
    """Press keys, each when the one before has had its effect."""
    for key in keys:
        await pilot.press(key)
        await settle(pilot)


async def until(condition: Callable[[], bool], pilot: Pilot[int], seconds: float = 60) -> None:
    """Wait for what no worker of the screen brings about: its own ticks, an engine."""
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        await pilot.pause(0.05)
    raise AssertionError("\n".join(text_of(pilot)))


async def enter(pilot: Pilot[int], opener: str, text: str) -> None:
    """Open a line of text with a key, paste into it (typing takes a twentieth of a second a letter), and enter it."""
    await press(pilot, opener)
    pilot.app.post_message(events.Paste(text))
    await press(pilot, "enter")


def replaying(reader: Reader) -> Route:
    """The workbench on a session that is open already."""
    return lambda chosen: WorkbenchScreen(reader, ReplayDriver(reader.source.path), chosen)


@pytest.fixture
def bench(session: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """`async with bench(size=(80, 24), path=…, theme=…) as pilot`: the workbench on a session, with no golden reference
    but those beside it."""
    monkeypatch.setenv("LOCKSTEP_CACHE_DIR", str(tmp_path / "cache"))

    @asynccontextmanager
    async def opened(
        size: tuple[int, int] = (120, 40),
        path: Path | None = None,
        theme: str = "lockstep-dark",
    ) -> AsyncIterator[Pilot[int]]:
        reader = Reader.open(path or session)
        app = LockstepApp(replaying(reader), UserSettings(theme=theme))
        try:
            async with app.run_test(size=size) as pilot:
                await settle(pilot)
                yield pilot
        finally:
            reader.close()

    return opened


def text_of(pilot: Pilot[int]) -> list[str]:
    """What is on the screen, line by line, as plain text."""
    strips = pilot.app.screen._compositor.render_strips()
    return [strip.text.rstrip() for strip in strips]
