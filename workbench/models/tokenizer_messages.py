"""What a process asks its tokenizer's process, and what that answers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.msgpack import Decoder

from lockstep.engine.errors import CheckpointError, ConfigError, EngineError

#: Seconds of the processor for each answer, and bytes for all of it. Of 262,000 tokens: a second and 400 MB to load, a
#: second for a megabyte of text.
SECONDS = 10
MEMORY = 2 << 30

#: The files of a directory that a tokenizer is read from.
TOKENIZER, CONFIG, TEMPLATE, VOCABULARY, MERGES = FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt",
)  # fmt: skip


class UnsupportedTokenizer(ConfigError):
    """A tokenizer that is no damage, but of a kind that is not known here. Token ids can be run without one."""


class EncodeRequest(msgspec.Struct, frozen=True, tag="encode"):
    """The ids of a text. `special`: with the tokens that the tokenizer puts around each text."""

    text: str
    special: bool


class DecodeRequest(msgspec.Struct, frozen=True, tag="decode"):
    """The text of ids, that of special ones where `special`."""

    ids: Sequence[int]
    special: bool


class PieceRequest(msgspec.Struct, frozen=True, tag="piece"):
    """The text of one token."""

    token: int


class TokenizerFound(msgspec.Struct, frozen=True, tag="found"):
    """The tokenizer stands: the special tokens by name, the chat template, the file or directory that it is from."""

    special: dict[str, str]
    template: str | None
    where: bytes  # a path may be any bytes


class TokenizerAbsent(msgspec.Struct, frozen=True, tag="absent"):
    """The checkpoint has none."""


class TokenizerRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Why there is no answer; `kind` is the class of the error."""

    kind: str
    message: str


class IdsAnswer(msgspec.Struct, frozen=True, tag="ids"):
    """Token ids."""

    ids: list[int]


class TextAnswer(msgspec.Struct, frozen=True, tag="text"):
    """A text; None for a token that is not known."""

    text: str | None


TokenizerRequest = EncodeRequest | DecodeRequest | PieceRequest
TokenizerAnswer = TokenizerFound | TokenizerAbsent | TokenizerRefused | IdsAnswer | TextAnswer
REQUESTS: Decoder[TokenizerRequest] = Decoder(TokenizerRequest)
ANSWERS: Decoder[TokenizerAnswer] = Decoder(TokenizerAnswer)
#: What loading may raise.
KINDS: dict[str, type[EngineError]] = {
    kind.__name__: kind for kind in (ConfigError, CheckpointError, UnsupportedTokenizer)
}
