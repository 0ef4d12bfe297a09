"""What a peer is asked, and what it answers: JSON lines on a socket (torch-free)."""

from __future__ import annotations

import msgspec


class PeerSpec(msgspec.Struct, frozen=True):
    """What a peer loads. `library` is "transformers" or "llama.cpp"."""

    library: str
    model: str
    dtype: str
    threads: int
    context: int
    socket: int
    device: str = "cpu"


class Workload(msgspec.Struct, frozen=True):
    """`batch` equal prompts of `prompt` tokens, then `steps` tokens of each."""

    batch: int
    prompt: int
    steps: int


class Timing(msgspec.Struct, frozen=True):
    """Seconds of the prefill, and of each decode step; `bytes` is the peak of the memory where it was computed, above
    what was held before."""

    prefill: float
    decode: tuple[float, ...]
    bytes: int = 0


class PeerReady(msgspec.Struct, frozen=True, tag="ready"):
    """It has loaded, in so many seconds, and holds so many bytes; its imports are not counted in the seconds."""

    seconds: float
    bytes: int


class PeerTiming(msgspec.Struct, frozen=True, tag="timing"):
    """It has run."""

    timing: Timing


class PeerFailure(msgspec.Struct, frozen=True, tag="failure"):
    """It cannot; why, in a line."""

    why: str


PeerAnswer = PeerReady | PeerTiming | PeerFailure
ANSWERS = msgspec.json.Decoder(PeerAnswer)
WORKLOADS = msgspec.json.Decoder(Workload)


def prompt_ids(tokens: int, vocab_size: int, shift: int = 0) -> list[int]:
    """Ids that any model has, the same for all contenders."""
    return [(7 * i + shift) % min(vocab_size, 10_000) for i in range(tokens)]
