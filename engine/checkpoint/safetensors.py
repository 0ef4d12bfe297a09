"""A checkpoint of one or several safetensors files, read by slices. Loads torch when a tensor is read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from safetensors import SafetensorError, safe_open

from engine.checkpoint.files import weight_files
from engine.checkpoint.header import Header, read_header
from engine.checkpoint.source import TensorInfo
from engine.errors import CheckpointError
from engine.parallel.shards import Span
from engine.text import printable

if TYPE_CHECKING:
    import torch

#: How much of a file is mapped in at a time. Opening it again costs 0.4 ms, a tenth of copying so much.
PIECE_BYTES = 8 << 20
#: Tensors up to this size enter the digest whole (every bias and norm does), larger ones by sampled blocks.
WHOLE_BYTES = 1 << 20
SAMPLES = 16
SAMPLE_BYTES = 4096


class SafetensorsSource:
    """The `Source` of a directory with `model.safetensors` or a sharded index, or of a single file.

    All headers are validated on opening. Each `read` maps its file, copies the slice piece by piece and unmaps
    it again, so that a rank's resident memory holds its shards, not the pages of all that it has read.
    """

    def __init__(self, path: Path, config: bytes = b"") -> None:
        """`config` is the raw config.json: part of the digest."""
        files, located = weight_files(path) if path.is_dir() else ([path], None)
        self.bytes_read = 0
        self._config = config
        self._headers: dict[Path, Header] = {file: read_header(file) for file in files}
        self._stamps = {file: _stamp(file) for file in files}
        self._infos: dict[str, TensorInfo] = {}
        for file, header in self._headers.items():
            for name, entry in header.entries.items():
                home = file if located is None else located.get(name)
                if home is None:
                    raise CheckpointError(f"{file}: holds {printable(name)}, which the index does not name")
                if home == file:  # the index decides where a tensor that lies in two files is read
                    self._infos[name] = TensorInfo(entry.shape, entry.dtype, file)
        if located is not None and (absent := sorted(located.keys() - self._infos.keys())):
            first = absent[0]
            raise CheckpointError(
                f"{located[first]}: does not hold {printable(first)}, which the index places there"
                + (f" (nor {len(absent) - 1} others)" if len(absent) > 1 else "")
            )

    def names(self) -> set[str]:
        """The tensors it holds."""
        return set(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype and file of a tensor. CheckpointError for an unknown name."""
        try:
            return self._infos[name]
        except KeyError:
            raise CheckpointError(f"the checkpoint holds no tensor {printable(name)}") from None

    def read(self, name: str, dim: int | None = None, span: Span | None = None) -> torch.Tensor:
        """The tensor, or `span` of dimension `dim`, as a contiguous CPU tensor of its own."""
        info = self.info(name)
        _check_span(name, info, dim, span)
        if _stamp(info.file) != self._stamps[info.file]:
            # A mapped file that shrinks under the reader kills the process (SIGBUS): refuse while we can.
            raise CheckpointError(f"{info.file}: has changed since it was opened; open the checkpoint again")
        try:
            tensor = _copy(name, info, dim, span)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{info.file}: {printable(name)}: {printable(error)}") from error
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def digest(self) -> str:
        """BLAKE2b over config.json and, tensor by tensor in name order, name, dtype, shape and contents.

        Tensors up to 1 MiB (all biases and norms) count byte for byte; of larger ones 16 evenly spaced blocks
        of 4 KiB: a change that misses them all goes unseen. File names and the split into files do not count.
        """
        hasher = hashlib.blake2b(self._config, digest_size=16)
        for name in sorted(self._infos):
            info = self._infos[name]
            entry = self._headers[info.file].entries[name]
            hasher.update(f"\n{name}\0{entry.dtype}\0{entry.shape}\0".encode("utf-8", "surrogatepass"))
            with info.file.open("rb") as file:
                for offset, count in _sampled(entry.stop - entry.start):
                    file.seek(entry.start + offset)
                    hasher.update(file.read(count))
        return hasher.hexdigest()

    def close(self) -> None:
        """Nothing stays open between reads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _copy(name: str, info: TensorInfo, dim: int | None, span: Span | None) -> torch.Tensor:
    """The slice in memory of its own, copied by whole rows, at most about PIECE_BYTES of the file mapped in."""
    if not info.numel or not info.shape:
        with safe_open(info.file, framework="pt") as file:
            whole: torch.Tensor = file.get_tensor(name).clone()
        return whole if dim is None or span is None else whole.narrow(dim, span.start, span.size)
    index = [slice(0, size) for size in info.shape]
    if dim is not None and span is not None:
        index[dim] = slice(span.start, span.stop)
    first, last = index[0].start, index[0].stop
    rows = max(1, PIECE_BYTES * info.shape[0] // info.nbytes)
    tensor: torch.Tensor | None = None
    for start in range(first, max(last, first + 1), rows):
        stop = min(start + rows, last)
        with safe_open(info.file, framework="pt") as file:
            view = file.get_slice(name)[(slice(start, stop), *index[1:])]
            if tensor is None:
                tensor = view.new_empty([part.stop - part.start for part in index])
            tensor[start - first : stop - first].copy_(view)
            del view  # the mapping lives as long as a view of it
    assert tensor is not None, "a range with at least one step"
    return tensor


def _stamp(file: Path) -> tuple[int, int, int]:
    try:
        stat = file.stat()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _check_span(name: str, info: TensorInfo, dim: int | None, span: Span | None) -> None:
    if dim is None or span is None:
        return
    if not 0 <= dim < len(info.shape) or not 0 <= span.start <= span.stop <= info.shape[dim]:
        raise CheckpointError(
            f"{info.file}: {printable(name)} has shape {list(info.shape)}: no {span} in dimension {dim}"
        )


def _sampled(size: int) -> list[tuple[int, int]]:
    """(offset, count) of the blocks of a tensor of `size` bytes that enter the digest."""
    if size <= WHOLE_BYTES:
        return [(0, size)]
    return [(i * (size - SAMPLE_BYTES) // (SAMPLES - 1), SAMPLE_BYTES) for i in range(SAMPLES)]
