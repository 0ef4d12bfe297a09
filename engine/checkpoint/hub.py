"""Checkpoints of the Hugging Face hub, by id: in the local cache, or downloaded. Torch-free.

A repository of GGUF files holds a model in several quantisations: `owner/name:FILE.gguf`, or `owner/name:Q4_K_M`, names
one.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from pathlib import Path

from lockstep.engine.checkpoint.files import INDEX, SINGLE, is_later_part
from lockstep.engine.checkpoint.gguf.split import split_name
from lockstep.engine.errors import CheckpointError
from lockstep.engine.text import printable

HUB_ID = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>[\w.+-]+(?:/[\w.+-]+)*))?", re.ASCII
)

#: What a model cannot do without: weights as transformers names them (not the copies in other formats that many
#: repositories carry beside them) and their configuration.
ESSENTIAL = ["config.json", "model*.safetensors", INDEX]
#: What is downloaded of a repository. Never code, never pickles.
PATTERNS = [
    *ESSENTIAL,
    "generation_config.json",
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
]
#: Patterns that no file has: the snapshot counts as complete, whatever is in it.
_NO_FILE = ["/"]
#: File names that an error lists.
_LISTED = 40


def fetch(repository: str, file: str | None) -> Path:
    """The snapshot of a safetensors checkpoint, or the GGUF file that `file` (a name, or a quantisation) chooses:
    from the cache where that has it, otherwise downloaded. CheckpointError where there is none, or none is chosen."""
    if file is None and (found := _cached(repository, PATTERNS)) is not None:
        return found
    if (names := _cached_gguf(repository)) and (found := _in_cache(repository, names, file)) is not None:
        return found
    return _download(repository) if file is None else _download_gguf(repository, file)


def choose(names: Iterable[str], file: str | None, repository: str) -> str:
    """The GGUF file (of a split one the first) that is meant: the only one, or that of the name or the quantisation
    `file`. CheckpointError lists them where none or several are."""
    known = models(names)
    found = known if file is None else _meant(known, file)
    if len(found) == 1:
        return found[0]
    listed = printable(", ".join(known[:_LISTED]), 4000)
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    asked = "" if file is None else f", {'several' if found else 'none'} of them {printable(repr(file))}"
    raise CheckpointError(
        f"{repository} has {len(known)} GGUF files{asked}: give one as {repository}:FILE: {listed}{more}"
    )


def models(names: Iterable[str]) -> list[str]:
    """The GGUF files among the names of a repository, of a split model only the first."""
    return sorted(name for name in names if name.endswith(".gguf") and not is_later_part(name))


def _meant(known: Iterable[str], file: str) -> list[str]:
    """Those of that name, in whichever folder, or else of that quantisation."""
    tagged = re.compile(rf"(?:.*[-./])?{re.escape(file)}(?:[-./].*)?", re.IGNORECASE)
    exactly = [name for name in known if file in (name, name.rpartition("/")[2])]
    return exactly or [name for name in known if tagged.fullmatch(name.removesuffix(".gguf"))]


def _in_cache(repository: str, names: dict[str, Path], file: str | None) -> Path | None:
    """The file among those of the cache; None where another one is wanted, or a part of it is not there."""
    if file is not None and not _meant(models(names), file):
        return None
    name = choose(names, file, repository)
    return names[name] if all(part in names for part in _parts(name)) else None


def _parts(name: str) -> list[str]:
    """The names of all files of a model, by that of its first."""
    split = split_name(name)
    return [name] if split is None else [split.file(number) for number in range(1, split.count + 1)]


def _snapshot(repository: str, patterns: list[str], *, local: bool) -> Path:
    # Imported here: it takes a third of a second, and only hub ids need it.
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(repository, local_files_only=local, allow_patterns=patterns))


def _cached(repository: str, patterns: list[str]) -> Path | None:
    """The snapshot of the local cache, None where it lacks weights or files that are known to belong to it."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = _snapshot(repository, patterns, local=True)
    except (LocalEntryNotFoundError, ValueError):  # ValueError: not a valid repository name after all
        return None
    return path if _complete(path) else None


def _cached_gguf(repository: str) -> dict[str, Path]:
    """The GGUF files of the cached snapshot, by their names in the repository."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot = _snapshot(repository, _NO_FILE, local=True)
    except (LocalEntryNotFoundError, ValueError):
        return {}
    return {str(path.relative_to(snapshot)): path for path in sorted(snapshot.rglob("*.gguf"))}


def _download(repository: str) -> Path:
    """Fetch from the hub or, where that fails, make do with a cached snapshot that has at least the weights."""
    try:
        path = _snapshot(repository, PATTERNS, local=False)
    except (
        Exception
    ) as error:  # the library lets its HTTP client's errors through, and has changed the client
        if (cached := _cached(repository, ESSENTIAL)) is not None:
            return cached
        raise _unreachable(repository, error) from error
    return path if _complete(path) else _download_gguf(repository, None)


def _download_gguf(repository: str, file: str | None) -> Path:
    """Fetch one GGUF file, all of its parts, from the hub."""
    from huggingface_hub import HfApi

    try:
        names = HfApi().list_repo_files(repository)
    except Exception as error:  # as above
        if cached := _cached_gguf(repository):
            choose(cached, file, repository)  # reports what there is
        raise _without_weights(repository) if file is None else _unreachable(repository, error) from error
    if not any(name.endswith(".gguf") for name in names):
        raise _without_weights(repository)
    name = choose(names, file, repository)
    try:
        return _snapshot(repository, [glob.escape(part) for part in _parts(name)], local=False) / name
    except Exception as error:  # as above
        raise _unreachable(repository, error) from error


def _complete(directory: Path) -> bool:
    """Whether a cached snapshot has a configuration and weights (an interrupted download may lack them)."""
    return (directory / "config.json").is_file() and any((directory / n).is_file() for n in (SINGLE, INDEX))


def _unreachable(repository: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{repository}: not a local path, not in the Hugging Face cache, and it could not be downloaded "
        f"({type(error).__name__}): check the name and the network, or give the path of a local copy"
    )


def _without_weights(repository: str) -> CheckpointError:
    return CheckpointError(
        f"{repository}: has no config.json with {SINGLE} or {INDEX}, and no GGUF file, on the hub or (offline) in "
        "the cache"
    )
