"""Messages between host and ranks: length-prefixed msgpack over a socket (torch-free).

frame   u32 little-endian length | msgpack map
tensor  {"dtype": "float32", "shape": [..], "data": bytes}   bfloat16 as its 16 bits
"""

from __future__ import annotations

import socket
import struct
import traceback
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineError

_LENGTH = struct.Struct("<I")
MAX_FRAME = (1 << 32) - 1

#: How each engine dtype is held in numpy, which has no bfloat16.
NUMPY_DTYPES = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int64": "<i8"}


class Disconnected(ConnectionError):
    """The other side is gone."""


class Connection:
    """One end of a socket that carries messages. Not thread-safe: one owner."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; Disconnected when nobody is there to take it."""
        data = msgpack.packb(message, use_bin_type=True)
        if len(data) > MAX_FRAME:
            raise ValueError(f"a message of {len(data)} bytes does not fit a frame ({MAX_FRAME})")
        try:
            self.socket.sendall(_LENGTH.pack(len(data)))
            self.socket.sendall(data)
        except OSError as error:
            raise Disconnected(f"the other side is gone: {error}") from error

    def receive(self, most: int = MAX_FRAME) -> dict[str, Any]:
        """The next message, of at most so many bytes; blocks. Disconnected at the end of the stream."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > most:
            raise Disconnected(f"a message of {length} bytes where at most {most} were expected")
        message = msgpack.unpackb(self._exactly(length), raw=False, strict_map_key=False)
        if not isinstance(message, dict):
            raise Disconnected(f"not a message: {type(message).__name__}")
        return message

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _exactly(self, count: int) -> bytearray:
        buffer = bytearray(count)
        view, got = memoryview(buffer), 0
        while got < count:
            try:
                received = self.socket.recv_into(view[got:])
            except OSError as error:
                raise Disconnected(f"the other side is gone: {error}") from error
            if received == 0:
                raise Disconnected("the other side closed the connection")
            got += received
        return buffer


def failure(error: Exception) -> dict[str, Any]:
    """The answer to a command that raised; `expected` when the message alone tells the user enough."""
    return {
        "ok": False, "kind": type(error).__name__, "expected": isinstance(error, EngineError),
        "message": str(error), "traceback": "".join(traceback.format_exception(error)),
    }  # fmt: skip


def pack_array(array: NDArray[Any], dtype: str) -> dict[str, Any]:
    """A numpy array as a message field."""
    return {"dtype": dtype, "shape": list(array.shape), "data": array.tobytes()}


def unpack_array(packed: dict[str, Any]) -> tuple[NDArray[Any], str]:
    """The array and its engine dtype; bfloat16 comes as its 16 bits (uint16)."""
    dtype = str(packed["dtype"])
    array = np.frombuffer(packed["data"], dtype=NUMPY_DTYPES[dtype]).reshape(packed["shape"])
    return array, dtype


def widen(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """What the array means as numbers numpy can reckon with: bfloat16 bits become float32."""
    if dtype != "bfloat16":
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)
