"""What the loader asks of a checkpoint, whatever its format: names, shapes, slices. Torch-free to import."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from lockstep.engine.parallel.shards import Span

if TYPE_CHECKING:
    import torch

#: Bits per element of every dtype a source may name (torch's names). Only floating ones are loadable.
DTYPE_BITS: dict[str, int] = {
    "bool": 8,
    "uint8": 8,
    "int8": 8,
    "uint16": 16,
    "int16": 16,
    "uint32": 32,
    "int32": 32,
    "uint64": 64,
    "int64": 64,
    "float16": 16,
    "bfloat16": 16,
    "float32": 32,
    "float64": 64,
    "complex64": 64,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2fnuz": 8,
    "float8_e8m0fnu": 8,
    "float6_e2m3": 6,
    "float6_e3m2": 6,
    "float4_e2m1": 4,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as the file describes it; `dtype` by torch's name (`bfloat16`), `file` where it lies.

    Of a GGUF file `encoding` is the type (`Q4_K`), `encoded_bytes` its size, and `dtype` what `read` returns:
    the type's own name where it cannot be read. `stored_as` is its name in a safetensors file, where that is another.
    """

    shape: tuple[int, ...]
    dtype: str
    file: Path
    encoding: str = ""
    encoded_bytes: int = 0
    stored_as: str = ""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.encoded_bytes or self.numel * DTYPE_BITS[self.dtype] // 8


class Source(Protocol):
    """A checkpoint opened for reading by slices. Names are Hugging Face names, shapes are global.

    Opening validates all headers, so that a damaged file is refused before any tensor is read.
    """

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data that `read` has returned so far (not headers, not `digest`)."""
        ...

    def names(self) -> set[str]:
        """The tensors it holds."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype and file of a tensor. CheckpointError for an unknown name."""
        ...

    def read(self, name: str, dim: int | None = None, span: Span | None = None) -> torch.Tensor:
        """The tensor, or only `span` of its dimension `dim`: contiguous, on the CPU, owned by the caller.

        Bytes outside the slice are not read, and nothing of the file stays mapped afterwards.
        CheckpointError where the span does not lie inside the tensor or the file has changed.
        """
        ...

    def digest(self) -> str:
        """An identity of the checkpoint's contents (hex); the same wherever the same files lie."""
        ...

    def close(self) -> None:
        """Release the files."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
