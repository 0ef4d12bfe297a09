"""What sources of every file format share: infos, files that have not changed, the digest. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, Self

from lockstep.engine.checkpoint.source import TensorInfo
from lockstep.engine.errors import CheckpointError
from lockstep.engine.parallel.shards import Span
from lockstep.engine.text import printable

#: How much of a file is mapped in at a time, so that memory holds what was copied, not the pages it came from.
PIECE_BYTES = 8 << 20
#: Tensors up to this size enter the digest whole (every bias and norm does), larger ones by sampled blocks.
WHOLE_BYTES = 1 << 20
SAMPLES = 16
SAMPLE_BYTES = 4096


class Hasher(Protocol):
    """What of `hashlib`'s objects is used."""

    def update(self, data: bytes, /) -> None: ...


class FileSource:
    """Tensors in files whose headers were read. The base of a `Source`: `read` and `digest` are the format's."""

    def __init__(self, infos: Mapping[str, TensorInfo], files: Iterable[Path]) -> None:
        self.bytes_read = 0
        self._infos = dict(infos)
        self._stamps = {file: _stamp(file) for file in files}

    def names(self) -> set[str]:
        """The tensors it holds."""
        return set(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype and file of a tensor. CheckpointError for an unknown name."""
        try:
            return self._infos[name]
        except KeyError:
            raise CheckpointError(f"the checkpoint holds no tensor {printable(name)}") from None

    def readable(self, name: str, dim: int | None, span: Span | None) -> TensorInfo:
        """The info of a tensor of which that slice can be read now; CheckpointError otherwise."""
        info = self.info(name)
        if dim is not None and span is not None:
            inside = 0 <= dim < len(info.shape) and 0 <= span.start <= span.stop <= info.shape[dim]
            if not inside:
                raise CheckpointError(
                    f"{info.file}: {printable(name)} has shape {list(info.shape)}: no {span} in dimension {dim}"
                )
        if _stamp(info.file) != self._stamps[info.file]:
            # A mapped file that shrinks under the reader kills the process (SIGBUS): refuse while we can.
            raise CheckpointError(f"{info.file}: has changed since it was opened; open the checkpoint again")
        return info

    def close(self) -> None:
        """Nothing stays open between reads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def hash_contents(hasher: Hasher, file: BinaryIO, start: int, size: int) -> None:
    """The bytes of a tensor at `start`: up to 1 MiB all of them, of more 16 evenly spaced blocks of 4 KiB."""
    for offset, count in _sampled(size):
        file.seek(start + offset)
        hasher.update(file.read(count))


def _sampled(size: int) -> list[tuple[int, int]]:
    """(offset, count) of the blocks of a tensor of `size` bytes that enter the digest."""
    if size <= WHOLE_BYTES:
        return [(0, size)]
    return [(i * (size - SAMPLE_BYTES) // (SAMPLES - 1), SAMPLE_BYTES) for i in range(SAMPLES)]


def _stamp(file: Path) -> tuple[int, int, int]:
    try:
        stat = file.stat()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
