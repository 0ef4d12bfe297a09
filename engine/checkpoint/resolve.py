"""From what a user typed to an open checkpoint: a directory, a file, or a Hugging Face hub id. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

from engine.checkpoint.files import INDEX, PICKLES, SINGLE, gguf_file, pickle_error, read_json
from engine.checkpoint.gguf.source import open_gguf
from engine.checkpoint.safetensors import SafetensorsSource
from engine.checkpoint.source import Source
from engine.checkpoint.ties import settle
from engine.config import ModelConfig
from engine.errors import CheckpointError, ConfigError
from engine.text import printable

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)

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


def open_checkpoint(path: Path) -> tuple[ModelConfig, Source]:
    """Open a checkpoint directory, a GGUF file, or one safetensors file beside its config.json.

    Headers are validated, tensors not yet read: `load.verify` holds them against the configuration.
    ConfigError for the configuration, CheckpointError for the weights.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    if gguf := gguf_file(path):
        return open_gguf(gguf)
    if not path.is_dir():
        _refuse_format(path)
    directory = path if path.is_dir() else path.parent
    config_file = directory / "config.json"
    if not config_file.exists():
        raise ConfigError(f"{directory}: no config.json: not a Hugging Face checkpoint")
    config = read_json(config_file)
    generation_file = directory / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else None
    model = ModelConfig.from_hf(config, generation, str(config_file))
    source = SafetensorsSource(path, config_file.read_bytes())
    return settle(model, source), source


def resolve(model: str) -> Path:
    """The path that `model` means: itself where it exists, otherwise a hub id, from the cache or downloaded.

    CheckpointError where it is neither, or cannot be fetched.
    """
    path = Path(model).expanduser()
    if model and path.exists():  # Path("") would be the working directory
        return path
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"{printable(repr(model))}: no such file or directory, and not a hub id (owner/name)"
        )
    return _cached(model, PATTERNS) or _download(model)


def _cached(model: str, patterns: list[str]) -> Path | None:
    """The snapshot of the local cache, None where it lacks weights or files that are known to belong to it."""
    # Imported here and below: it takes a third of a second, and only hub ids need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(model, local_files_only=True, allow_patterns=patterns))
    except (LocalEntryNotFoundError, ValueError):  # ValueError: not a valid repository name after all
        return None
    return path if _complete(path) else None


def _download(model: str) -> Path:
    """Fetch from the hub or, where that fails, make do with a cached snapshot that has at least the weights."""
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(model, allow_patterns=PATTERNS))
    except (
        Exception
    ) as error:  # the library lets its HTTP client's errors through, and has changed the client
        if (cached := _cached(model, ESSENTIAL)) is not None:
            return cached
        raise CheckpointError(
            f"{model}: not a local path, not in the Hugging Face cache, and it could not be downloaded "
            f"({type(error).__name__}): check the name and the network, or give the path of a local copy"
        ) from error
    if not _complete(path):  # offline, the library is content with whatever the cache holds
        raise CheckpointError(
            f"{model}: has no config.json with {SINGLE} or {INDEX}, on the hub or (offline) in the cache"
        )
    return path


def _complete(directory: Path) -> bool:
    """Whether a cached snapshot has a configuration and weights (an interrupted download may lack them)."""
    return (directory / "config.json").is_file() and any((directory / n).is_file() for n in (SINGLE, INDEX))


def _refuse_format(path: Path) -> None:
    if path.suffix in PICKLES:
        raise pickle_error(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: neither a directory nor a .safetensors or .gguf file")
