"""`lockstep web` as it is started: its owner sees the screens, nobody else anything, and nothing is left after it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tests.e2e.terminal import PATIENCE, ROOT

aiohttp = pytest.importorskip("aiohttp", reason="the extra `web` is not installed")
pytest.importorskip("textual_serve", reason="the extra `web` is not installed")

from yarl import URL  # noqa: E402 - comes with aiohttp

from tests.e2e.browser import browser, needs_chromium  # noqa: E402 - needs aiohttp


@asynccontextmanager
async def _served(directory: Path) -> AsyncIterator[tuple[subprocess.Popen[str], URL]]:
    """A server on a free port, with directories of its own, and the address that it prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"XDG_STATE_HOME": str(directory), "XDG_CONFIG_HOME": str(directory), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "lockstep.workbench.cli", "web", "--port", str(port)],
        env={**os.environ, **settings}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        # A suite that a shell started in the background ignores SIGINT, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield process, URL((await asyncio.to_thread(process.stdout.readline)).strip())
    finally:
        process.kill()
        process.communicate()


async def _come_in(http: aiohttp.ClientSession, address: URL) -> URL:
    """Open the printed address, as soon as it is served; where the screens are, the cookie kept."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                async with http.get(address) as answer:
                    return address.with_path(next(iter(answer.cookies.values()))["path"]).with_query(None)
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.05)


async def _frame(socket_: aiohttp.ClientWebSocketResponse, wanted: bytes) -> None:
    """Read until the screens have drawn `wanted`, in whatever styles."""
    seen = b""
    async with asyncio.timeout(PATIENCE):
        while wanted not in re.sub(rb"\x1b\[[0-9;]*m", b"", seen):
            seen += await socket_.receive_bytes()


async def _until_closed(socket_: aiohttp.ClientWebSocketResponse) -> None:
    async for _ in socket_:
        pass


def _children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
async def test_the_screens_are_served_to_their_owner_and_end_with_the_server(
    how: signal.Signals, tmp_path: Path
) -> None:
    async with (
        _served(tmp_path) as (server, address),
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http,
    ):
        token = address.query["token"]
        screens_at = await _come_in(http, address)
        listening = {c.laddr for c in psutil.Process(server.pid).net_connections() if c.status == "LISTEN"}
        assert {place.ip for place in listening} <= {"127.0.0.1", "::1"}
        async with aiohttp.ClientSession() as stranger, stranger.get(screens_at) as answer:
            assert answer.status == 403
        origin = str(address.origin())
        async with http.ws_connect(f"{screens_at}ws?width=100&height=30", origin=origin) as screens:
            await _frame(screens, b"haiku")
            await screens.send_str(json.dumps(["stdin", "o/nowhere"]))
            await _frame(screens, b"there is no")
            running = _children(server)
            assert any("lockstep.workbench.tui" in process.cmdline() for process in running)
            for process in (psutil.Process(server.pid), *running):  # what `ps` shows, and what is inherited
                assert token not in " ".join([*process.cmdline(), *process.environ().values()])
            server.send_signal(how)
            processes = [psutil.Process(server.pid), *running]
            reading = asyncio.create_task(_until_closed(screens))  # as a browser does
            _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=20)
            assert alive == []
            await reading


@pytest.mark.browser
@needs_chromium
async def test_a_browser_shows_the_screens_under_both_names(tmp_path: Path) -> None:
    async with _served(tmp_path) as (_, address), browser(tmp_path / "profile") as page:
        for name in ("localhost", "127.0.0.1"):
            page.asked.clear()
            await page.open(str(address.with_host(name)))
            shown = "document.body?.classList.contains('-first-byte')"
            await page.until(f"location.hostname == '{name}' && {shown}")
            assert await page.value("[document.cookie, document.referrer, location.search].join('')") == ""
            asked = [URL(one) for one in page.asked]
            assert {(one.host, one.port) for one in asked} == {(name, address.port)}, "nothing of elsewhere"
            assert {one.scheme for one in asked} == {"http", "ws"}
            assert [one.path for one in asked if "token" in one.query] == ["/"]
        assert not [stated for stated in page.complaints if "Content Security Policy" in stated]


async def test_a_port_that_is_taken_is_reported(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = subprocess.run(
            [sys.executable, "-P", "-m", "lockstep.workbench.cli", "web", "--port", str(taken.getsockname()[1])],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
    assert done.returncode == 2
    assert "choose another with --port" in done.stderr
