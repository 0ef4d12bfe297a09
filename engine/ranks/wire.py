"""Length-prefixed messages over a socket: between host and ranks, and between host and UI (torch-free).

frame    u32 little-endian length | one msgpack message, validated on arrival against the receiver's type
sealed   length | its authentication code | message | code of both, 32 bytes each: over TCP (`engine.ranks.sealing`)
array    a `WireArray` field: dtype, shape, raw bytes; bfloat16 as its 16 bits

A length is only a claim: one beyond what the receiver expects of this sender is refused before anything is allocated,
and below that memory grows with the bytes that arrive.

`multiprocessing.connection` frames bytes as well, but is not used: its reads have no timeout, so a peer that stops
within a frame would stop its reader; its listener authenticates inside `accept` without a deadline, so one silent
stranger would keep the ranks out; its digest is HMAC-MD5 in Python 3.11; and `recv` unpickles. The handshake over
TCP (`engine.ranks.joining`) is mutual, as its own is.
"""

from __future__ import annotations

import hmac
import math
import socket
import struct
import time
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec
from msgspec.msgpack import Decoder, Encoder

from lockstep.engine.ranks.sealing import TAG_BYTES, Seals

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LENGTH = struct.Struct("<I")
#: Bytes of the largest frame. One frame holds one tensor at most.
MAX_FRAME = (1 << 32) - 1
#: Bytes that a frame may announce and get at once; a longer one gets as much again whenever they have come.
_FIRST_BYTES = 1 << 16
#: Dimensions that a tensor has at most (numpy 1.26 has no more).
_MOST_DIMENSIONS = 32
#: What msgspec raises on a frame that is no message: MemoryError and TypeError on what claims to be huge, or has a key
#: that cannot be one.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError, TypeError)

WireDType = Literal["float64", "float32", "float16", "bfloat16", "int64", "uint64"]
#: How each dtype is held in numpy, which has no bfloat16.
NUMPY_DTYPES = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int64": "<i8", "uint64": "<u8",
}  # fmt: skip

Message = TypeVar("Message")
_encode = Encoder().encode


class Disconnected(ConnectionError):
    """The other side is gone."""


class MalformedMessage(Disconnected):
    """The other side sent what is no message of the protocol: the connection is of no further use."""


class Connection(Generic[Message]):
    """One end of a socket: sends any Struct, receives what `decoder` accepts in frames of at most `most` bytes (None:
    MAX_FRAME). Not thread-safe: one owner.

    With `seals` every frame is authenticated. Nothing is sent or received after `deadline` (of `time.monotonic`).
    """

    def __init__(
        self,
        sock: socket.socket,
        decoder: Decoder[Message],
        most: int | None = None,
        *,
        seals: Seals | None = None,
        deadline: float | None = None,
    ) -> None:
        self.socket, self.decoder, self.most = sock, decoder, most
        self.seals, self.deadline = seals, deadline

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def send(self, message: object) -> None:
        """Send one message; Disconnected when nobody is there to take it."""
        data = _encode(message)
        if len(data) > MAX_FRAME:
            raise ValueError(f"a message of {len(data)} bytes does not fit a frame ({MAX_FRAME})")
        header = _LENGTH.pack(len(data))
        parts: tuple[bytes, ...] = (header, data)
        if self.seals is not None:
            code = self.seals.outgoing.next_frame(header)
            header += code.digest()
            code.update(data)
            parts = (header, data, code.digest())
        try:
            for part in parts:
                self._arm()
                self.socket.sendall(part)
        except OSError as error:
            raise Disconnected(f"the other side is gone: {error}") from error

    def receive(self) -> Message:
        """The next message; blocks.

        Disconnected at the end of the stream, MalformedMessage for a frame that is too long or does not validate.
        """
        header = self.exactly(_LENGTH.size)
        code = None if self.seals is None else self.seals.incoming.next_frame(header)
        self._authenticate(code)
        (length,) = _LENGTH.unpack(header)
        most = MAX_FRAME if self.most is None else min(self.most, MAX_FRAME)
        if length > most:
            raise MalformedMessage(f"a message of {length} bytes where at most {most} were expected")
        body = self.exactly(length)
        if code is not None:
            code.update(body)
            self._authenticate(code)
        try:
            return self.decoder.decode(body)
        except _UNREADABLE as error:
            raise MalformedMessage(f"not a message of this protocol: {error}") from error

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def exactly(self, count: int) -> bytearray:
        """The next so many bytes of the stream; Disconnected where it ends before."""
        buffer, got = bytearray(min(count, _FIRST_BYTES)), 0
        while got < count:
            if got == len(buffer):
                buffer.extend(bytes(min(got, count - got)))
            try:
                self._arm()
                with memoryview(buffer) as view:
                    received = self.socket.recv_into(view[got:])
            except OSError as error:
                raise Disconnected(f"the other side is gone: {error}") from error
            if received == 0:
                raise Disconnected("the other side closed the connection")
            got += received
        return buffer

    def _arm(self) -> None:
        """Let the socket wait no longer than to the deadline: one for all, however often a byte trickles in."""
        if self.deadline is not None:
            if (left := self.deadline - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            self.socket.settimeout(left)

    def _authenticate(self, code: hmac.HMAC | None) -> None:
        if code is not None and not hmac.compare_digest(code.digest(), self.exactly(TAG_BYTES)):
            raise MalformedMessage(
                "a message was altered, repeated, moved or left out on its way: something between host and rank "
                "tampers with the connection"
            )


class WireArray(msgspec.Struct, frozen=True):
    """A tensor as a field of a message."""

    dtype: WireDType
    shape: tuple[int, ...]
    data: memoryview  # on arrival, a view of the frame: decoding copies nothing

    def __post_init__(self) -> None:
        if len(self.shape) > _MOST_DIMENSIONS:
            raise ValueError(f"an array of {len(self.shape)} dimensions")
        # An empty array's other sizes are multiplied by numpy as well, and must not overflow there.
        if min(self.shape, default=0) < 0 or math.prod(filter(None, self.shape)) > MAX_FRAME:
            raise ValueError(f"an array of shape {self.shape}")
        expected = int(NUMPY_DTYPES[self.dtype][-1]) * math.prod(self.shape)
        if self.data.nbytes != expected:
            raise ValueError(f"an array of {expected} bytes comes with {self.data.nbytes}")

    @classmethod
    def of(cls, array: NDArray[Any], dtype: str) -> WireArray:
        """A numpy array of that dtype; bfloat16 as its 16 bits."""
        import numpy as np  # Imported here: a process that exchanges no tensors starts without

        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        return cls(dtype, tuple(array.shape), data)  # type: ignore[arg-type]  # a KeyError where it is none

    @property
    def array(self) -> NDArray[Any]:
        """The values as they were stored: bfloat16 as its 16 bits (uint16). Read-only where it came over the wire."""
        import numpy as np  # as above

        return np.frombuffer(self.data, dtype=NUMPY_DTYPES[self.dtype]).reshape(self.shape)

    @property
    def numbers(self) -> NDArray[Any]:
        """The values as numbers: bfloat16 widened to float32."""
        return widen(self.array, self.dtype)


def widen(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """`array` of an engine's dtype as numbers numpy can reckon with: bfloat16 bits become float32."""
    if dtype != "bfloat16":
        return array
    return (array.astype("uint32") << 16).view("float32")
