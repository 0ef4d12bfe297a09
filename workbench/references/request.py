"""What a golden recording is asked to do, and how it fails (torch-free)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from engine.errors import EngineError
from engine.text import printable

DType = Literal["float64", "float32", "bfloat16", "float16"]
DTYPES: tuple[DType, ...] = get_args(DType)


class ReferenceFailure(EngineError):
    """A golden reference could not be recorded; `exit_code` is the design's (2 usage, 3 load, 4 timeout)."""

    def __init__(self, message: str, exit_code: int = 3) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class GoldenSequence:
    """One sequence of the batch. `forced[k]` is the token that step k emits and step k + 1 reads.

    None: the reference chooses greedily. Shorter than the steps asked for: the sequence leaves the
    batch when its ids run out, as one does that has ended.
    """

    prompt: tuple[int, ...]
    forced: tuple[int, ...] | None = None

    def runs(self, step: int) -> bool:
        """Whether the sequence still has a token to read at `step` (0 is the prefill)."""
        return self.forced is None or step <= len(self.forced)


@dataclass(frozen=True, slots=True)
class GoldenRequest:
    """A prefill of every sequence (step 0), then `steps` decode steps of one token each."""

    model_dir: str
    sequences: tuple[GoldenSequence, ...]
    steps: int
    dtype: DType = "float32"
    device: str = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ReferenceFailure(f"dtype {printable(self.dtype)!r} is not one of {', '.join(DTYPES)}", 2)
        if self.steps < 0 or self.threads < 1:
            raise ReferenceFailure(
                f"steps must be at least 0 and threads at least 1, not {self.steps} and {self.threads}", 2
            )
        if not self.sequences:
            raise ReferenceFailure("nothing to record: give at least one sequence of token ids", 2)
        for seq, sequence in enumerate(self.sequences):
            if not sequence.prompt:
                raise ReferenceFailure(f"sequence {seq} has an empty prompt: give at least one token id", 2)
            if min((*sequence.prompt, *(sequence.forced or ()))) < 0:
                raise ReferenceFailure(f"sequence {seq} holds a negative token id", 2)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dump`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> GoldenRequest:
        """The request that `to_json` wrote; anything else is a ReferenceFailure that says what is wrong."""
        try:
            sequences = tuple(
                GoldenSequence(_ids(item["prompt"]), None if item["forced"] is None else _ids(item["forced"]))
                for item in data["sequences"]
            )
            return cls(
                str(data["model_dir"]),
                sequences,
                int(data["steps"]),
                data["dtype"],
                str(data["device"]),
                int(data["threads"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ReferenceFailure(f"not a golden request: {type(error).__name__}: {error}", 2) from error


def _ids(values: Sequence[Any]) -> tuple[int, ...]:
    if not all(isinstance(value, int) for value in values):
        raise TypeError("token ids must be integers")
    return tuple(values)


def model_directory(path: str | Path) -> Path:
    """`path` as a Hugging Face checkpoint directory, or a ReferenceFailure that says what is missing."""
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise ReferenceFailure(
            f"{printable(directory, 300)}: no config.json there; give the directory of a Hugging Face checkpoint"
        )
    return directory
