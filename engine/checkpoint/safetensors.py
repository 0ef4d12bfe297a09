"""A checkpoint of one or several safetensors files, read by slices. Loads torch when a tensor is read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from lockstep.engine.checkpoint.file_source import PIECE_BYTES, FileSource, hash_contents
from lockstep.engine.checkpoint.files import weight_files
from lockstep.engine.checkpoint.header import Header, read_header
from lockstep.engine.checkpoint.source import TensorInfo
from lockstep.engine.checkpoint.wrapped import own_name
from lockstep.engine.errors import CheckpointError
from lockstep.engine.parallel.shards import Span
from lockstep.engine.text import printable

if TYPE_CHECKING:
    import torch


class SafetensorsSource(FileSource):
    """The `Source` of a directory with `model.safetensors` or a sharded index, or of a single file.

    All headers are validated on opening. Each `read` maps its file, copies the slice piece by piece and unmaps
    it again, so that a rank's resident memory holds its shards, not the pages of all that it has read. Opening a
    file again costs 0.4 ms, a tenth of copying a piece.
    """

    def __init__(self, path: Path, config: bytes = b"", named: Callable[[str], str] = own_name) -> None:
        """`config` is the raw config.json: part of the digest. `named` gives a tensor its name here from that in the
        file."""
        files, located = weight_files(path) if path.is_dir() else ([path], None)
        self._config = config
        self._headers: dict[Path, Header] = {file: read_header(file) for file in files}
        infos: dict[str, TensorInfo] = {}
        for file, header in self._headers.items():
            for stored, entry in header.entries.items():
                home = file if located is None else located.get(stored)
                if home is None:
                    raise CheckpointError(f"{file}: holds {printable(stored)}, which the index does not name")
                if home != file:  # the index decides where a tensor that lies in two files is read
                    continue
                if (name := named(stored)) in infos:
                    both = f"{printable(infos[name].stored_as or name)} and {printable(stored)}"
                    raise CheckpointError(f"{file}: {both} are both {printable(name)}")
                other = "" if name == stored else stored
                infos[name] = TensorInfo(entry.shape, entry.dtype, file, stored_as=other)
        there = {info.stored_as or name for name, info in infos.items()}
        if located is not None and (absent := sorted(located.keys() - there)):
            first = absent[0]
            raise CheckpointError(
                f"{located[first]}: does not hold {printable(first)}, which the index places there"
                + (f" (nor {len(absent) - 1} others)" if len(absent) > 1 else "")
            )
        super().__init__(infos, files)

    def read(self, name: str, dim: int | None = None, span: Span | None = None) -> torch.Tensor:
        """The tensor, or `span` of dimension `dim`, as a contiguous CPU tensor of its own."""
        info = self.readable(name, dim, span)
        index = [slice(0, size) for size in info.shape]
        if dim is not None and span is not None:
            index[dim] = slice(span.start, span.stop)
        return self._read(name, info, index)

    def read_matrix(
        self, name: str, rows: Span, columns: Span | None = None, matrix: int | None = None
    ) -> torch.Tensor:
        """Some rows and columns (None: all) of a matrix, or of the one with the number `matrix` of a stack. Without it
        a tensor [rows, 1, columns] is taken for a matrix."""
        shape = self.info(name).shape
        columns = columns or Span(0, shape[-1])
        part = [rows, columns]
        if matrix is not None:
            part.insert(0, Span(matrix, matrix + 1))
        elif len(shape) == 3:
            part.insert(1, Span(0, 1))
        return self.read_part(name, part).reshape(rows.size, columns.size)

    def read_part(self, name: str, part: Sequence[Span]) -> torch.Tensor:
        """Of every dimension of a tensor a span."""
        info = self.info(name)
        for dim, span in enumerate(part):
            self.readable(name, dim, span)
        return self._read(name, info, [slice(span.start, span.stop) for span in part])

    def _read(self, name: str, info: TensorInfo, index: Sequence[slice]) -> torch.Tensor:
        try:
            tensor = _copy(name, info, index)
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
        for name, info in sorted((info.stored_as or name, info) for name, info in self._infos.items()):
            entry = self._headers[info.file].entries[name]
            hasher.update(f"\n{name}\0{entry.dtype}\0{entry.shape}\0".encode("utf-8", "surrogatepass"))
            with info.file.open("rb") as file:
                hash_contents(hasher, file, entry.start, entry.stop - entry.start)
        return hasher.hexdigest()


def _copy(name: str, info: TensorInfo, index: Sequence[slice]) -> torch.Tensor:
    """The slice in memory of its own, copied by whole rows, at most about PIECE_BYTES of the file mapped in. Of a stack
    of matrices by rows of each."""
    stored = info.stored_as or name
    if not info.numel or not info.shape:
        with safe_open(info.file, framework="pt") as file:
            whole: torch.Tensor = file.get_tensor(stored).clone()
        return whole[tuple(index)].clone() if index else whole
    along = 1 if len(index) > 2 else 0
    first, last = index[along].start, index[along].stop
    row_bytes = info.nbytes // info.shape[0] // (info.shape[1] if along else 1)
    rows = max(1, PIECE_BYTES // max(1, row_bytes))
    tensor: torch.Tensor | None = None
    for start in range(first, max(last, first + 1), rows):
        stop = min(start + rows, last)
        with safe_open(info.file, framework="pt") as file:
            view = file.get_slice(stored)[(*index[:along], slice(start, stop), *index[along + 1 :])]
            if tensor is None:
                tensor = view.new_empty([part.stop - part.start for part in index])
            tensor.narrow(along, start - first, stop - start).copy_(view)
            del view  # the mapping lives as long as a view of it
    assert tensor is not None, "a range with at least one step"
    return tensor
