"""One pass of a dump by `lockstep_tap.py`: its line in passes.jsonl, and the tensors in its file. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, overload

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from lockstep.engine.checkpoint.header import TensorEntry, header_of
from lockstep.engine.errors import CheckpointError
from lockstep.engine.text import printable
from lockstep.sessions.dtypes import STORED_AS
from lockstep.sessions.errors import LayoutError
from lockstep.sessions.layouts import parse
from lockstep.sessions.meta import Count
from lockstep.sessions.records import STATISTICS
from lockstep.workbench.foreign.accesses import CacheAccesses
from lockstep.workbench.foreign.passes import ForeignDumpError, ForeignTensor
from lockstep.workbench.foreign.readers.files import opened, within

Text = Annotated[str, Meta(max_length=1000)]
Whole = Annotated[int, Meta(ge=-(2**31), lt=2**31)]  # padding may have ids and positions below zero


class TapeTap(Struct, kw_only=True):
    """One tap of a pass."""

    name: Annotated[str, Meta(min_length=1, max_length=500)]
    key: Annotated[str, Meta(max_length=500)]
    layout: Annotated[str, Meta(max_length=100)] = ""
    dtype: Text = ""
    rows: list[Count] | None = None


class TapeLine(Struct, kw_only=True):
    """One line of passes.jsonl."""

    index: Count = msgspec.field(name="pass")
    ids: list[Whole]
    positions: list[Whole]
    places: list[Whole] | None = None
    requests: list[Text] | None = None
    greedy: list[Text] | None = None
    file: str
    taps: list[TapeTap]
    skipped: Count = 0
    raised: str = ""
    cache: CacheAccesses | None = None


class PassTensors(Sequence[ForeignTensor]):
    """The tensors of a pass, each read when it is taken."""

    def __init__(self, home: Path, where: str, line: TapeLine, full: bool) -> None:
        self._path, self._taps, self._full = within(home, line.file), line.taps, full
        try:
            with opened(self._path) as file:
                self._entries = header_of(self._path, os.fstat(file.fileno()).st_size, file).entries
        except CheckpointError as error:
            raise ForeignDumpError(
                printable(error, 1000).replace("download it again", "record it again")
            ) from error
        for tap in line.taps:
            self._check(where, tap, len(line.ids))

    def __len__(self) -> int:
        return len(self._taps)

    @overload
    def __getitem__(self, index: int) -> ForeignTensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ForeignTensor]: ...
    def __getitem__(self, index: int | slice) -> ForeignTensor | Sequence[ForeignTensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        with opened(self._path) as file:
            return self._tensor(self._taps[index], file)

    def __iter__(self) -> Iterator[ForeignTensor]:
        """All of them, the file opened once: there may be tens of thousands."""
        with opened(self._path) as file:
            for tap in self._taps:
                yield self._tensor(tap, file)

    def _tensor(self, tap: TapeTap, file: BufferedReader) -> ForeignTensor:
        rows = None if tap.rows is None else tuple(tap.rows)
        if tap.key in self._entries:
            entry = self._entries[tap.key]
            return ForeignTensor(tap.name, tap.layout, entry.dtype, array=self._read(entry, file), rows=rows)
        statistics, hashes = (
            self._read(self._entries[f"{tap.key}.{one}"], file) for one in ("stats", "hash")
        )
        return ForeignTensor(
            tap.name, tap.layout, tap.dtype, rows=rows, statistics=statistics, hashes=hashes.view(np.uint64)
        )

    def _read(self, entry: TensorEntry, file: BufferedReader) -> NDArray[Any]:
        found = np.empty(entry.shape, STORED_AS[entry.dtype])
        try:
            file.seek(entry.start)
            count = file.readinto(found.reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise ForeignDumpError(f"{self._path}: cannot be read: {error.strerror or error}") from error
        if count != found.nbytes:
            raise ForeignDumpError(f"{self._path}: truncated while it was being read")
        return found

    def _check(self, where: str, tap: TapeTap, tokens: int) -> None:
        def wrong(what: str) -> ForeignDumpError:
            return ForeignDumpError(f"{where}: {printable(tap.name)}: {what}: damaged; record it again")

        try:
            if tap.layout:
                parse(tap.layout)
        except LayoutError as error:
            raise wrong(printable(error, 200)) from error
        whole = self._full or tap.key in self._entries  # of statistics some taps may be tensors all the same
        keys = [tap.key] if whole else [f"{tap.key}.stats", f"{tap.key}.hash"]
        if absent := [key for key in keys if key not in self._entries]:
            raise wrong(f"{self._path.name} holds no {printable(absent[0])!r}")
        first = self._entries[keys[0]]
        if first.dtype not in STORED_AS or not first.shape:
            raise wrong(f"{first.dtype} {first.shape} is no tensor of rows")
        rows = first.shape[0]
        if not whole:
            found = [(self._entries[key].dtype, self._entries[key].shape) for key in keys]
            if found != [("float32", (rows, len(STATISTICS))), ("int64", (rows,))]:
                raise wrong(f"statistics of {found}")
        if tap.rows is not None and (len(tap.rows) != rows or max(tap.rows, default=0) >= tokens):
            raise wrong(f"{len(tap.rows)} row numbers for {rows} rows of {tokens} tokens")
