"""Which files make up a Hugging Face checkpoint directory, and its JSON. Torch-free.

Only safetensors and GGUF files are opened. A pickle checkpoint (`pytorch_model.bin`, `.pt`, `.pth`) can run code
when loaded and is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from lockstep.engine.checkpoint.gguf.split import split_name
from lockstep.engine.checkpoint.header import is_lfs_pointer, lfs_error, regular_size
from lockstep.engine.errors import CheckpointError, ConfigError
from lockstep.engine.text import printable

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
LARGEST_JSON = 64 * 2**20


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file; ConfigError or CheckpointError names the file and what is wrong with it."""
    size = regular_size(path)
    if size > LARGEST_JSON:
        raise ConfigError(f"{path}: {size} bytes is more than any configuration ({LARGEST_JSON})")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if is_lfs_pointer(raw):
        raise lfs_error(path)
    try:
        data = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {printable(error)}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return data


def weight_files(directory: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """(files, map from tensor to file or None where one file holds all), as transformers chooses them."""
    if (directory / SINGLE).exists():
        return [directory / SINGLE], None
    if (directory / INDEX).exists():
        located = _read_index(directory / INDEX)
        return sorted(set(located.values())), located
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found, None
    if found:
        raise CheckpointError(
            f"{directory}: {len(found)} safetensors files ({_some(p.name for p in found)}) but no {INDEX}"
        )
    if pickles := sorted(p for p in directory.iterdir() if p.suffix in PICKLES and p.is_file()):
        raise pickle_error(pickles[0])
    raise CheckpointError(f"{directory}: no weights: expected {SINGLE}, {INDEX} or one .gguf file")


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one (of a split one the first) of a directory without
    safetensors; None where it means none. CheckpointError where a directory holds several."""
    if not path.is_dir():
        return path if path.suffix == ".gguf" else None
    if any(path.glob("*.safetensors")) or (path / INDEX).exists():
        return None
    found = sorted(p for p in path.glob("*.gguf") if not is_later_part(p.name))
    if len(found) > 1:
        raise CheckpointError(
            f"{path}: {len(found)} GGUF files ({_some(p.name for p in found)}): give the path of one"
        )
    return found[0] if found else None


def is_later_part(name: str) -> bool:
    """Whether it is the name of a file of a split GGUF model that is not its first."""
    named = split_name(name)
    return named is not None and named.number != 1


def pickle_error(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: a pickle checkpoint, which can run code when opened: refused; convert it to safetensors "
        "(transformers: `save_pretrained`) in a place that you trust"
    )


def _read_index(path: Path) -> dict[str, Path]:
    located = read_json(path).get("weight_map")
    if not isinstance(located, dict) or not located:
        raise CheckpointError(f"{path}: weight_map is missing or empty")
    for tensor, name in located.items():
        if not isinstance(name, str) or not _inside(name):
            raise CheckpointError(
                f"{path}: {printable(tensor)} is placed in {printable(repr(name))}: "
                "not the name of a safetensors file in this directory"
            )
    absent = sorted(name for name in set(located.values()) if not (path.parent / name).exists())
    if absent:
        raise CheckpointError(
            f"{path}: names files that are absent ({len(absent)}): {_some(absent)}; download them"
        )
    return {tensor: path.parent / name for tensor, name in located.items()}


def _inside(name: str) -> bool:
    # By name, not by resolving links: the Hugging Face cache itself links each file to a blob elsewhere.
    parts = PurePosixPath(name).parts
    plain = name.isprintable() and "\\" not in name and name.endswith(".safetensors")
    return plain and not name.startswith("/") and ".." not in parts


def _some(names: Iterable[str], most: int = 3) -> str:
    shown = [printable(name) for name in names]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")
