"""A headless Chromium to open pages in, driven by the DevTools protocol over its websocket."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.terminal import PATIENCE

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: no browser to open")


class PageLeft(Exception):
    """The page that was asked has been left for another one."""


class Page:
    """One tab. `asked` are the addresses that it has asked for, `complaints` what its console reported as wrong."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.asked: list[str] = []
        self.complaints: list[str] = []

    async def listen(self) -> None:
        """Take in what the browser sends."""
        async for message in self._socket:
            reported = json.loads(message.data)
            match reported.get("method"):
                case "Network.requestWillBeSent":
                    self.asked.append(reported["params"]["request"]["url"])
                case "Network.webSocketCreated":
                    self.asked.append(reported["params"]["url"])
                case "Log.entryAdded":
                    self.complaints.append(reported["params"]["entry"]["text"])
                case None:
                    self._answers.pop(reported["id"]).set_result(reported)

    async def call(self, method: str, **parameters: object) -> Any:
        """One command of the protocol; its result."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": parameters}))
        reported = await self._answers[number]
        if "navigated" in reported.get("error", {}).get("message", ""):
            raise PageLeft(reported["error"]["message"])
        assert "result" in reported, reported
        return reported["result"]

    async def open(self, address: str) -> None:
        """Load a page."""
        for domain in ("Network", "Log", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=address)

    async def value(self, expression: str) -> Any:
        """What JavaScript returns."""
        reported = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return reported["result"].get("value")

    async def _is_true(self, expression: str) -> bool:
        try:
            return bool(await self.value(expression))
        except PageLeft:  # asked while the next page was being loaded
            return False

    async def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        async with asyncio.timeout(PATIENCE):
            while not await self._is_true(expression):
                await asyncio.sleep(0.1)


@asynccontextmanager
async def browser(directory: Path) -> AsyncIterator[Page]:
    """A browser with one empty tab, its profile in `directory`."""
    assert CHROMIUM is not None
    process = subprocess.Popen(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
         "--disable-background-networking", "--remote-debugging-port=0", f"--user-data-dir={directory}", "about:blank"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(PATIENCE), aiohttp.ClientSession() as http:
            while not (reported := directory / "DevToolsActivePort").is_file() or not reported.read_text():
                await asyncio.sleep(0.05)
            port = reported.read_text().splitlines()[0]
            async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                address = next(
                    one["webSocketDebuggerUrl"] for one in await answer.json() if one["type"] == "page"
                )
            async with http.ws_connect(address, max_msg_size=0) as socket:
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                yield page
                listening.cancel()
    finally:
        process.kill()
        process.wait()
