"""Frames that only a holder of the shared secret can have sent, in the order in which they were sent (torch-free).

Each connection has keys of its own, one a direction, derived from the secret (HKDF-SHA256, RFC 5869) with a nonce of
either side's and with what the connection is for: a frame or a proof recorded on one connection is worth nothing on
another, nor sent back. A frame is authenticated together with its number, so that one altered, repeated, moved or
left out is noticed before anything of it is decoded. Nothing is encrypted.

HMAC rather than TLS with a pre-shared key, which Python offers from 3.13 on only.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

#: Bytes of a tag, a proof and a nonce.
TAG_BYTES = 32
_NUMBER = struct.Struct("<Q")


def derive(secret: bytes, nonces: bytes, purpose: bytes) -> bytes:
    """A key of 32 bytes: HKDF-SHA256 with the nonces as salt."""
    extracted = hmac.digest(nonces, secret, "sha256")
    return hmac.digest(extracted, purpose + b"\x01", "sha256")


class Seal:
    """One direction of a connection: numbers its frames and authenticates each."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def next_frame(self, header: bytes | bytearray) -> hmac.HMAC:
        """The next frame's authentication code: as it is, of its header; once updated with the body, of all of it."""
        code = hmac.new(self._key, _NUMBER.pack(self._number) + header, hashlib.sha256)
        self._number += 1
        return code


@dataclass(frozen=True, slots=True)
class Seals:
    """Both directions of a connection, as one side of it sees them."""

    incoming: Seal
    outgoing: Seal
