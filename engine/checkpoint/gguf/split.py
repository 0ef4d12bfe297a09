"""A model in several GGUF files, as llama.cpp's `gguf-split` names and numbers them. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lockstep.engine.checkpoint.gguf.header import GgufHeader, read_gguf_header
from lockstep.engine.errors import CheckpointError

_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SplitName:
    """The name of one of `count` files of a model; the first has number 1."""

    stem: str
    number: int
    count: int

    def file(self, number: int) -> str:
        """The name of another of them."""
        return f"{self.stem}-{number:05}-of-{self.count:05}.gguf"


def split_name(name: str) -> SplitName | None:
    """A file name taken apart; None where it is not numbered so."""
    match = _NAME.fullmatch(name)
    return None if match is None else SplitName(match[1], int(match[2]), int(match[3]))


def read_split(path: Path) -> dict[Path, GgufHeader]:
    """The headers of a file, or of all the files that it is the first of, in order."""
    first = read_gguf_header(path)
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return {path: first}
    named = split_name(path.name)
    if named is None or named.count != count:
        raise CheckpointError(
            f"{path}: one of {count} files of a split model, but not named as such: "
            f"expected NAME-00001-of-{count:05}.gguf"
        )
    if named.number != 1:
        raise CheckpointError(f"{path}: file {named.number} of {count}: open the first, {named.file(1)}")
    headers = {path: first}
    for number in range(2, count + 1):
        part = path.with_name(named.file(number))
        if not part.exists():
            raise CheckpointError(f"{part}: missing, one of {count} files of a split model; download it")
        headers[part] = header = read_gguf_header(part)
        if header.metadata.get("split.count") != count or header.metadata.get("split.no") != number - 1:
            raise CheckpointError(f"{part}: is not file {number} of {count} by its metadata")
    return headers
