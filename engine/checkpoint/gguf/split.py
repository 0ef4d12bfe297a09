"""A model in several GGUF files, as llama.cpp's `gguf-split` names and numbers them. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

from engine.checkpoint.gguf.header import GgufHeader, read_gguf_header
from engine.errors import CheckpointError

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def read_split(path: Path) -> dict[Path, GgufHeader]:
    """The headers of a file, or of all the files that it is the first of, in order."""
    first = read_gguf_header(path)
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return {path: first}
    match = _SPLIT.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise CheckpointError(
            f"{path}: one of {count} files of a split model, but not named as such: "
            f"expected NAME-00001-of-{count:05}.gguf"
        )
    if int(match[2]) != 1:
        raise CheckpointError(
            f"{path}: file {int(match[2])} of {count}: open the first, {match[1]}-00001-of-{match[3]}.gguf"
        )
    headers = {path: first}
    for number in range(2, count + 1):
        part = path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf")
        if not part.exists():
            raise CheckpointError(f"{part}: missing, one of {count} files of a split model; download it")
        headers[part] = header = read_gguf_header(part)
        if header.metadata.get("split.count") != count or header.metadata.get("split.no") != number - 1:
            raise CheckpointError(f"{part}: is not file {number} of {count} by its metadata")
    return headers
