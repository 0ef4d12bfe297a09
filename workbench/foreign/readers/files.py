"""Files of a stranger's dump: which may be opened, and how large they may be. Tensors in them: `arrays`."""

from __future__ import annotations

import json
import os
import re
from io import BufferedReader
from pathlib import Path

from lockstep.engine.plain_files import PlainFileError, open_plain
from lockstep.engine.text import printable
from lockstep.workbench.foreign.passes import ForeignDumpError

MAX_FILES = 1 << 20
MAX_JSON = 256 << 20
MAX_TENSORS = 32 << 30


def shown(path: Path) -> str:
    """A file's name, safe to print."""
    return printable(path.name, 160)


def children(folder: Path) -> list[Path]:
    """What lies in a folder, by name, links left out. ForeignDumpError for no folder, or too many files."""
    try:
        found = sorted(path for path in folder.iterdir() if not path.is_symlink())
    except OSError as error:
        raise ForeignDumpError(
            f"{printable(folder)}: {error.strerror or error}; name the folder of the dump"
        ) from error
    if len(found) > MAX_FILES:
        raise ForeignDumpError(f"{shown(folder)}: {len(found)} files; at most {MAX_FILES} are read")
    return found


def numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """The children whose whole name matches, by the number in the pattern's first group, in its order."""
    found = ((pattern.fullmatch(path.name), path) for path in children(folder))
    return dict(sorted((int(match[1]), path) for match, path in found if match is not None))


def within(folder: Path, name: object) -> Path:
    """The file that a dump names, which must lie in `folder` itself. ForeignDumpError for a path elsewhere."""
    text = name if isinstance(name, str) else ""
    text = text.removeprefix("./")
    if not text or text in (".", "..") or "\0" in text or Path(text).name != text or "\\" in text:
        raise ForeignDumpError(
            f"{printable(name)}: is no file of {shown(folder)}: a dump names files of its own folder alone"
        )
    return folder / text


def opened(path: Path, limit: int = MAX_TENSORS) -> BufferedReader:
    """A plain file, open. ForeignDumpError for a link, a pipe, a missing or an oversized one."""
    try:
        return open_plain(path, limit)
    except PlainFileError as error:
        raise ForeignDumpError(f"{shown(path.parent)}/{shown(path)}: {error}") from error


def plain_size(path: Path, limit: int = MAX_TENSORS) -> int:
    """Bytes of a plain file. ForeignDumpError for a link, a pipe, a missing or an oversized one."""
    with opened(path, limit) as file:
        return os.fstat(file.fileno()).st_size


def read_json(path: Path) -> dict[str, object]:
    """A JSON object. ForeignDumpError for anything else."""
    try:
        with opened(path, MAX_JSON) as file:
            found = json.loads(file.read(MAX_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise ForeignDumpError(
            f"{shown(path)}: is no JSON file, or was cut off: {printable(error)}"
        ) from error
    if not isinstance(found, dict):
        raise ForeignDumpError(f"{shown(path)}: holds no JSON object")
    return found
