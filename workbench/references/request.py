"""What a golden recording is asked to do, what the recorder reports while it works, and how it fails (torch-free).

Requests are a JSON file, the recorder's messages are JSON lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec
from msgspec import Struct

from lockstep.engine.checkpoint.files import gguf_file
from lockstep.engine.errors import EngineError
from lockstep.engine.text import printable

DType = Literal["float64", "float32", "bfloat16", "float16"]
DTYPES: tuple[DType, ...] = get_args(DType)
#: The libraries that references are recorded with.
ReferenceName = Literal["transformers", "llama.cpp"]
REFERENCES: tuple[ReferenceName, ...] = get_args(ReferenceName)


class ReferenceFailure(EngineError):
    """A golden reference could not be recorded; `exit_code` is the design's (2 usage, 3 load, 4 timeout)."""

    def __init__(self, message: str, exit_code: int = 3) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class GoldenSequence(Struct, frozen=True):
    """One sequence of the batch. `forced[k]` is the token that it emits after its prompt and k tokens more, and then
    reads.

    None: the reference chooses greedily. Shorter than the steps asked for: the sequence leaves the
    batch when its ids run out, as one does that has ended.
    """

    prompt: tuple[int, ...]
    forced: tuple[int, ...] | None = None

    def runs(self, emitted: int) -> bool:
        """Whether the sequence still has a token to read when it has emitted so many (0: its prompt)."""
        return self.forced is None or emitted <= len(self.forced)


def prefill_passes(prompts: Iterable[Sequence[int]], chunk: int | None) -> int:
    """Passes until every prompt was read, `chunk` tokens of each at a time (None: all)."""
    return max(-(-len(prompt) // (chunk or len(prompt) or 1)) for prompt in prompts)


class GoldenRequest(Struct, frozen=True):
    """A prefill of every sequence (step 0), then `steps` passes more: decode steps of one token each, and before them
    the rest of prompts that are read in chunks of `chunk` tokens.

    `model` is a checkpoint directory or a GGUF file. `dequantised` is for llama.cpp alone: its weights are first
    dequantised to float32, by llama.cpp itself. Without it, it multiplies the blocks as they are stored, with
    activations rounded to 8 or 16 bits for that.
    """

    model: str
    sequences: tuple[GoldenSequence, ...]
    steps: int
    dtype: DType = "float32"
    device: str = "cpu"
    threads: int = 1
    reference: ReferenceName = "transformers"
    dequantised: bool = True
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 0 or self.threads < 1:
            raise ReferenceFailure(
                f"steps must be at least 0 and threads at least 1, not {self.steps} and {self.threads}", 2
            )
        if self.chunk is not None and self.chunk < 1:
            raise ReferenceFailure(f"a chunk has at least 1 token, not {self.chunk}", 2)
        if not self.sequences:
            raise ReferenceFailure("nothing to record: give at least one sequence of token ids", 2)
        for seq, sequence in enumerate(self.sequences):
            if not sequence.prompt:
                raise ReferenceFailure(f"sequence {seq} has an empty prompt: give at least one token id", 2)
            if min((*sequence.prompt, *(sequence.forced or ()))) < 0:
                raise ReferenceFailure(f"sequence {seq} holds a negative token id", 2)


#: The kind of the event of a recording that holds a `OnePass`.
ONE_PASS = "one pass"


class OnePass(Struct, frozen=True):
    """How far the logits of a sequence's decode steps are, at most, from those of one pass over the same tokens."""

    seq: int
    apart: Mapping[int, float | None]  # by step; None: not a finite number


class RecordingJob(Struct, frozen=True):
    """A request with the checkpoint's digest and the file to record to."""

    request: GoldenRequest
    checkpoint: str
    output: str


class RecorderProgress(Struct, frozen=True, tag="progress"):
    """`done` of `total` forward passes are over."""

    done: int
    total: int


class RecorderFailure(Struct, frozen=True, tag="error"):
    """Why the recorder ends; `exit_code` is its own."""

    message: str
    exit_code: int


def decode_jobs(text: bytes) -> list[RecordingJob]:
    """The jobs of a request file; ReferenceFailure states what is wrong with them."""
    try:
        return msgspec.json.decode(text, type=list[RecordingJob])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ReferenceFailure(f"not a golden request: {printable(error, 300)}", 2) from error


def model_path(path: str | Path) -> Path:
    """`path` as a Hugging Face checkpoint directory or a GGUF file; ReferenceFailure states what is missing."""
    model = Path(path)
    if (file := gguf_file(model)) is not None:
        return file
    directory = model.parent if model.is_file() else model
    if not (directory / "config.json").is_file():
        raise ReferenceFailure(
            f"{printable(directory, 300)}: no config.json there; give the directory of a Hugging Face checkpoint, or "
            "a GGUF file"
        )
    return directory
