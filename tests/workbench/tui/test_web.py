"""`lockstep web` answers its owner alone: token, cookie, names, places. Its screens are a program that only waits."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import AsyncIterator
from http.cookies import Morsel
from typing import Any

import psutil
import pytest

aiohttp = pytest.importorskip("aiohttp", reason="the extra `web` is not installed")
pytest.importorskip("textual_serve", reason="the extra `web` is not installed")

from aiohttp.test_utils import TestClient, TestServer  # noqa: E402 - an extra

from lockstep.workbench import error_log  # noqa: E402 - as above
from lockstep.workbench.tui import web  # noqa: E402 - as above
from lockstep.workbench.tui.web_server import OwnersServer  # noqa: E402 - needs the extra

#: Reports that it is ready, and ends with the first message, which is that it is to quit.
_SCREENS = "printf '__GANGLION__\\n'; head -c 1 > /dev/null"


@pytest.fixture
async def server() -> OwnersServer:
    made = OwnersServer(["demo"], visitors=2)
    made.command = _SCREENS
    return made


@pytest.fixture
async def client(server: OwnersServer) -> AsyncIterator[Any]:
    """A visitor who keeps cookies, as a browser does."""
    jar = aiohttp.CookieJar(unsafe=True)  # for addresses, too
    async with TestClient(TestServer(await server.application()), cookie_jar=jar) as made:
        yield made


async def _come_in(client: Any, server: OwnersServer) -> Morsel[str]:
    async with client.get("/", params={"token": server.token}) as answer:
        assert answer.status == 200
        assert f'url={server.path}"' in await answer.text()
        return answer.cookies["lockstep"]


async def test_no_route_answers_a_stranger(client: Any, server: OwnersServer) -> None:
    paths = {"/", "/nowhere", f"{server.path}nowhere"}
    for route in client.app.router.routes():
        path = route.resource.canonical
        paths.add(path if "{" in path or route.resource.name != "static" else f"{path}/js/textual.js")
    assert {f"{server.path}{one}" for one in ("", "ws", "download/{key}", "static/js/textual.js")} <= paths
    cookie = await _come_in(client, server)
    client.session.cookie_jar.clear()
    guesses = ({}, {"lockstep": server.token}, {"lockstep": "ü"}, {"lockstep": cookie.value[:-1]})
    for path in paths:
        for cookies in guesses:
            async with client.get(path, cookies=cookies) as answer:
                assert answer.status == 403, path
                assert "open the address that it printed" in await answer.text()
                assert answer.headers["X-Frame-Options"] == "DENY"
        async with client.get(path, params={"token": server.token[:-1]}) as answer:
            assert answer.status == 403, path
        if path != "/":
            async with client.get(path, params={"token": server.token}) as answer:
                assert answer.status == 403, "the token opens the entrance alone"


async def test_the_cookie_is_no_token_and_of_a_path_that_nobody_guesses(
    client: Any, server: OwnersServer
) -> None:
    cookie = await _come_in(client, server)
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "Strict", server.path)
    assert len(server.path) > 40
    assert len({cookie.value, server.token, server.path.strip("/")}) == 3
    other = OwnersServer([], 1)
    assert {other.token, other.path}.isdisjoint({server.token, server.path})


async def test_the_page_may_not_be_framed_and_asks_for_nothing_elsewhere(
    client: Any, server: OwnersServer
) -> None:
    await _come_in(client, server)
    for name in ("localhost", "127.0.0.1", "[::1]"):
        cookies = {"lockstep": next(iter(client.session.cookie_jar)).value}
        headers = {"Host": f"{name}:9000"}  # as ssh forwards it
        async with client.get(server.path, headers=headers, cookies=cookies) as answer:
            page = await answer.text()
            policy = answer.headers["Content-Security-Policy"]
            assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert "default-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert f"ws://{name}:9000{server.path}ws" in page
        asked = re.findall(r"(?:href=|src=|url\()\"(\w+:[^\"]*)", page)
        assert len(asked) >= 3
        assert all(address.startswith(f"http://{name}:9000{server.path}static/") for address in asked)


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "elsewhere.example"}, {"Host": "localhost.elsewhere.example:8000"}, {"Origin": "null"},
        {"Origin": "http://elsewhere.example"}, {"Origin": "http://127.0.0.1:1"},
    ],
)  # fmt: skip
async def test_no_page_from_elsewhere_drives_it(
    headers: dict[str, str], client: Any, server: OwnersServer
) -> None:
    cookie = await _come_in(client, server)
    for path in ("", "ws"):
        async with client.get(
            server.path + path, headers=headers, cookies={"lockstep": cookie.value}
        ) as answer:
            assert answer.status == 403


async def test_as_many_visitors_as_allowed(client: Any, server: OwnersServer) -> None:
    await _come_in(client, server)
    first = await client.ws_connect(f"{server.path}ws")
    second = await client.ws_connect(f"{server.path}ws")
    async with client.get(server.path) as answer:
        assert answer.status == 503
        assert "--visitors allows (2)" in await answer.text()
    with pytest.raises(aiohttp.WSServerHandshakeError, match="503"):
        await client.ws_connect(f"{server.path}ws")
    await first.close()
    async with asyncio.timeout(30):
        while (await client.get(server.path)).status != 200:
            await asyncio.sleep(0.02)
    third = await client.ws_connect(f"{server.path}ws")
    await asyncio.gather(second.close(), third.close())
    async with asyncio.timeout(30):
        while server.visits:
            await asyncio.sleep(0.02)


#: Reports how large its screen is, for `_sizes`, and ends as the other does.
_PRINTS_SIZE = "printf '%s %s %s\\n' $COLUMNS $ROWS $$ > size; " + _SCREENS


async def _sizes(tmp_path: Any) -> list[int]:
    async with asyncio.timeout(30):
        while not (tmp_path / "size").exists() or not (stated := (tmp_path / "size").read_text()):
            await asyncio.sleep(0.02)
    return [int(word) for word in stated.split()]


@pytest.mark.parametrize(
    ("asked", "given"),
    [("100000000", 1000), ("9" * 400, 1000), ("-5", 1), ("0", 1), ("none", 80), ("132", 132)],
)
async def test_no_screen_is_larger_than_any(
    asked: str, given: int, client: Any, server: OwnersServer, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server.command = _PRINTS_SIZE
    await _come_in(client, server)
    visit = await client.ws_connect(f"{server.path}ws", params={"width": asked, "height": asked})
    width, height, _ = await _sizes(tmp_path)
    assert width == given
    assert height == (min(given, 500) if asked != "none" else 24)
    await visit.close()


@pytest.mark.parametrize(
    "message",
    [
        "{", "[]", "{}", "7", '["resize", {"width": "x", "height": 2}]', '["resize", 3]', '["resize", {"width": null}]',
        '["stdin", 5]', '["stdin", "\\ud800"]', "[" * 100_000,
    ],
)  # fmt: skip
async def test_a_message_that_is_none_ends_the_visit_and_nothing_else(
    message: str, client: Any, server: OwnersServer, capfd: Any
) -> None:
    await _come_in(client, server)
    visit = await client.ws_connect(f"{server.path}ws")
    await visit.send_str(message)
    async with asyncio.timeout(30):
        async for _ in visit:  # as browsers do: who reads on answers that it is closed
            pass
        while server.visits:
            await asyncio.sleep(0.02)
    async with client.get(server.path) as answer:
        assert answer.status == 200
    assert capfd.readouterr() == ("", "")


async def test_a_process_that_hears_nothing_is_ended_with_its_socket(
    client: Any, server: OwnersServer, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lockstep.workbench.tui.web_server._GRACE", 0.2)
    server.command = "printf '%s %s %s\\n' $COLUMNS $ROWS $$ > size; printf '__GANGLION__\\n'; exec sleep 600"
    await _come_in(client, server)
    visit = await client.ws_connect(f"{server.path}ws")
    *_, process = await _sizes(tmp_path)
    await visit.close()
    async with asyncio.timeout(30):
        while psutil.pid_exists(process):
            await asyncio.sleep(0.02)


async def test_a_request_that_is_none_is_nothing_for_the_owners_terminal(
    client: Any, server: OwnersServer, capfd: Any
) -> None:
    for request in (
        b"GET / HTTP/1.1\r\nX: " + b"x" * 300_000 + b"\r\n\r\n",
        b"\x00\xff\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        with contextlib.suppress(ConnectionError):
            writer.write(request)
            await writer.drain()
            async with asyncio.timeout(30):
                answer = await reader.read(200)
            assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
        writer.close()
    await _come_in(client, server)
    assert capfd.readouterr() == ("", "")
    assert not error_log.log_file().exists()


def test_ctrl_c_ends_the_server_between_tasks_and_not_one_of_them() -> None:
    async def visit() -> str:
        signal.raise_signal(signal.SIGINT)
        return "whole"

    async def serving() -> None:
        web._end_between_tasks()
        visits.append(asyncio.create_task(visit()))
        await asyncio.sleep(60)

    visits: list[asyncio.Task[str]] = []
    loop = asyncio.new_event_loop()
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        server = loop.create_task(serving())
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(server)
        assert visits[0].result() == "whole"
        assert not server.done(), "it is ended by whoever serves, in its order"
        server.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(server)
    finally:
        loop.close()
        signal.signal(signal.SIGINT, usual)
