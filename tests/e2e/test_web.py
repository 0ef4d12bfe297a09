"""`lockstep web`, fetched and connected to: served to this machine's own page only, and nothing is left after it."""

from __future__ import annotations

import asyncio
import json
import os
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


@asynccontextmanager
async def _served(directory: Path) -> AsyncIterator[tuple[subprocess.Popen[bytes], int]]:
    """A server on a free port, with directories of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "LOCKSTEP_STATE_DIR": str(directory),
        "XDG_CONFIG_HOME": str(directory),
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "workbench.cli", "web", "--port", str(port)],
        env={**os.environ, **settings}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process, port
    finally:
        process.kill()
        process.wait()


async def _page(http: aiohttp.ClientSession, url: str) -> str:
    """The page, as soon as somebody serves it."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                async with http.get(url) as answer:
                    assert answer.status == 200
                    assert "style-src 'self'" in answer.headers["Content-Security-Policy"], (
                        "nothing of the web's"
                    )
                    return await answer.text()
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.05)


async def _frame(socket_: aiohttp.ClientWebSocketResponse, wanted: bytes) -> None:
    """Read until the screens have drawn `wanted`."""
    seen = b""
    async with asyncio.timeout(PATIENCE):
        while wanted not in seen:
            seen += await socket_.receive_bytes()


async def _until_closed(socket_: aiohttp.ClientWebSocketResponse) -> None:
    async for _ in socket_:
        pass


def _children(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
async def test_the_screens_are_served_to_their_own_page_only(how: signal.Signals, tmp_path: Path) -> None:
    async with _served(tmp_path) as (server, port), aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{port}"
        page = await _page(http, url)
        assert f"ws://127.0.0.1:{port}/ws" in page
        listening = [c.laddr.ip for c in psutil.Process(server.pid).net_connections() if c.status == "LISTEN"]
        assert listening == ["127.0.0.1"]
        async with http.get(url, headers={"Host": "elsewhere.example"}) as answer:
            assert answer.status == 403
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await http.ws_connect(f"{url}/ws", origin="http://elsewhere.example")
        async with http.ws_connect(f"{url}/ws?width=100&height=30", origin=url) as screens:
            await _frame(screens, b"haiku")
            await screens.send_str(json.dumps(["stdin", "o/nowhere"]))
            await _frame(screens, b"there is no")
            running = _children(server)
            assert any("workbench.tui" in process.cmdline() for process in running)
            server.send_signal(how)
            processes = [psutil.Process(server.pid), *running]
            reading = asyncio.create_task(_until_closed(screens))  # as a browser does
            _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=20)
            assert alive == []
            await reading


async def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = subprocess.run(
            [sys.executable, "-P", "-m", "workbench.cli", "web", "--port", str(taken.getsockname()[1])],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
    assert done.returncode == 2
    assert "choose another with --port" in done.stderr
