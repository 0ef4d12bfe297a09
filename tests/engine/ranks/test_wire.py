"""Messages arrive as they were sent, or not at all."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from collections.abc import Iterator
from struct import pack

import numpy as np
import pytest
from msgspec.msgpack import encode

from lockstep.engine.ranks import wire
from lockstep.engine.ranks.messages import COMMANDS, AddSequence, Command, Ping, ReadTap, RunStep
from lockstep.engine.ranks.reports import TensorReport
from lockstep.engine.ranks.wire import Connection, Disconnected, MalformedMessage, WireArray
from lockstep.engine.taps.breaks import Break, PauseSpec


@pytest.fixture
def ends() -> Iterator[tuple[Connection[Command], Connection[Command]]]:
    a, b = (Connection(sock, COMMANDS) for sock in socket.socketpair())
    yield a, b
    a.close()
    b.close()


@pytest.mark.parametrize(
    "command",
    [
        Ping(),
        AddSequence(3, [1, 2]),
        RunStep({0: 5}, PauseSpec("place", 7, [Break(1, frozenset([2, 3]), ["<", ["name", "step"], 4], 1)])),
    ],
)
def test_a_command_arrives_as_it_was_sent(
    ends: tuple[Connection[Command], Connection[Command]], command: Command
) -> None:
    ends[0].send(command)
    assert ends[1].receive() == command


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.arange(6, dtype=np.float32).reshape(2, 3).T, "float32"),  # not contiguous
        (np.array([0x3F80, 0xC000], np.uint16), "bfloat16"),
        (np.zeros((0, 3), np.float16), "float16"),
        (np.array(2**63, np.uint64), "uint64"),
    ],
)
def test_arrays_keep_every_bit(array: np.ndarray, dtype: str) -> None:
    found = WireArray.of(array, dtype).array
    assert (found.shape, found.dtype) == (array.shape, array.dtype)
    assert (found == array).all()


def test_bfloat16_is_widened() -> None:
    assert WireArray.of(np.array([0x3F80, 0xC000], np.uint16), "bfloat16").numbers.tolist() == [1.0, -2.0]


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        encode([1]),
        encode({"type": "nonsense"}),
        encode({"type": "read", "place": "0"}),
        encode({"type": "lens", "top": 1, "rows": {"dtype": "float32", "shape": [2], "data": b"123"}}),
        encode({"type": "lens", "top": 1, "rows": {"dtype": "object", "shape": [1], "data": b"1234"}}),
        encode({"type": "lens", "top": 1, "rows": {"dtype": "float32", "shape": [-1, -1], "data": b"1234"}}),
        encode({"type": "lens", "top": 1, "rows": {"dtype": "float32", "shape": [1] * 33, "data": b"1234"}}),
        encode({"type": "lens", "top": 1, "rows": {"dtype": "float32", "shape": [0, 1 << 62], "data": b""}}),
        b"\x82\xa4type\xa4ping\xa1x" + b"\x91" * 10_000 + b"\xc0",  # nested
        b"\x83\xa4type\xa6rewind\xa4step\x00\xa7lengths\x81\x91\x01\x02",  # a list for a key
        b"\x83\xa4type\xa3add\xa3seq\x00\xa3ids\xdd\xff\xff\xff\xff",  # four billion ids
        encode(TensorReport(WireArray.of(np.zeros(1, np.float32), "float32"))),  # an answer is no command
    ],
)
def test_what_is_no_message_is_refused(
    ends: tuple[Connection[Command], Connection[Command]], body: bytes
) -> None:
    ends[0].socket.sendall(pack("<I", len(body)) + body)
    with pytest.raises(MalformedMessage):
        ends[1].receive()


def test_a_frame_is_bounded_on_both_sides(
    ends: tuple[Connection[Command], Connection[Command]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME", 64)
    with pytest.raises(ValueError, match="does not fit a frame"):
        ends[0].send(AddSequence(0, list(range(100))))
    ends[0].socket.sendall(pack("<I", 65))
    with pytest.raises(MalformedMessage, match="65 bytes where at most 64"):
        ends[1].receive()
    ends[0].send(ReadTap(0))
    with pytest.raises(MalformedMessage, match="at most 3"):
        Connection(ends[1].socket, COMMANDS, 3).receive()
    ends[0].close()
    with pytest.raises(Disconnected):
        ends[1].receive()


def test_a_length_is_only_a_claim(ends: tuple[Connection[Command], Connection[Command]]) -> None:
    """Memory grows with what arrives, not with what is announced."""
    ends[0].socket.sendall(pack("<I", 0xFFFFFFFF) + b"x" * 200_000)
    ends[0].close()
    tracemalloc.start()
    try:
        with pytest.raises(Disconnected, match="closed"):
            ends[1].receive()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_a_connection_allows_is_reported_before_it_is_read(
    ends: tuple[Connection[Command], Connection[Command]],
) -> None:
    ends[1].most = 3
    ends[0].send(ReadTap(0))
    with pytest.raises(MalformedMessage, match="at most 3"):
        ends[1].receive()


def test_a_long_message_arrives_whole(ends: tuple[Connection[Command], Connection[Command]]) -> None:
    """Longer than what is allocated at first, in pieces as the socket has them."""
    ids = list(range(300_000))
    sender = threading.Thread(target=ends[0].send, args=(AddSequence(0, ids),))
    sender.start()
    assert ends[1].receive() == AddSequence(0, ids)
    sender.join()
