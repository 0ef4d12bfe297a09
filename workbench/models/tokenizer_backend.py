"""A checkpoint's tokenizer as `tokenizers` has it: read from tokenizer.json, put together from vocab.json and
merges.txt, or rebuilt from a GGUF file. Used by `tokenizer_program` alone: it runs what a stranger wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lockstep.engine.checkpoint.files import LARGEST_JSON, gguf_file, read_json
from lockstep.engine.checkpoint.header import is_lfs_pointer, lfs_error, regular_size
from lockstep.engine.errors import ConfigError, EngineError
from lockstep.engine.text import printable
from lockstep.workbench.models.gguf_tokenizer import gguf_tokenizer
from lockstep.workbench.models.tokenizer_messages import (
    CONFIG,
    MERGES,
    TEMPLATE,
    TOKENIZER,
    VOCABULARY,
    UnsupportedTokenizer,
)

#: How Qwen2 cuts text into words, for checkpoints with vocab.json and merges.txt alone.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class LoadedTokenizer(NamedTuple):
    """A tokenizer, the special tokens by the names that templates use, the chat template, and where it is from."""

    backend: Tokenizer
    special: dict[str, str]
    template: str | None
    where: Path


def load(checkpoint: Path) -> LoadedTokenizer | None:
    """The tokenizer of a checkpoint: in its directory or GGUF file, or beside its file. None where there is none.

    ConfigError and CheckpointError for one that cannot be read, UnsupportedTokenizer for one of a kind that is not
    known, which is looked for beside a GGUF file as well.
    """
    file = gguf_file(checkpoint)
    if file is None:
        return _of_directory(checkpoint if checkpoint.is_dir() else checkpoint.parent)
    try:
        own = gguf_tokenizer(file)
    except UnsupportedTokenizer:
        if beside := _of_directory(file.parent):
            return beside
        raise
    if own is None:
        return _of_directory(file.parent)
    backend, config, template = own
    return LoadedTokenizer(_plain(backend), _special(config), template, file)


def _of_directory(directory: Path) -> LoadedTokenizer | None:
    config_file = directory / CONFIG
    config = read_json(config_file) if config_file.is_file() else {}
    if (directory / TOKENIZER).is_file():
        backend = _from_file(directory / TOKENIZER)
    elif (directory / VOCABULARY).is_file() and str(config.get("tokenizer_class")).startswith("Qwen2"):
        backend = _qwen2(directory, config)
    else:
        return None
    return LoadedTokenizer(_plain(backend), _special(config), _template(directory, config), directory)


def _plain(backend: Tokenizer) -> Tokenizer:
    """Without what changes the length of a text."""
    backend.no_truncation()
    backend.no_padding()
    return backend


def _from_file(path: Path) -> Tokenizer:
    try:
        _check_size(path)
        raw = path.read_bytes()
        if is_lfs_pointer(raw):
            raise lfs_error(path)
        return Tokenizer.from_str(raw.decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {printable(error)}") from error
    except EngineError:
        raise
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError(f"{path}: not a tokenizer: {printable(error)}") from error


def _check_size(path: Path) -> None:
    if regular_size(path) > LARGEST_JSON:
        raise ConfigError(f"{path}: larger than any tokenizer ({LARGEST_JSON} bytes)")


def _qwen2(directory: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Qwen2's byte-level BPE, put together from vocab.json and merges.txt."""
    files = [directory / VOCABULARY, directory / MERGES]
    for file in files:
        _check_size(file)
    try:
        backend = Tokenizer(models.BPE.from_file(*map(str, files)))
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError(f"{directory}: vocab.json and merges.txt do not fit: {printable(error)}") from error
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    added = config.get("added_tokens_decoder")
    for token in _by_id(added) if isinstance(added, Mapping) else ():
        content = str(token.get("content", ""))
        backend.add_tokens([AddedToken(content, special=bool(token.get("special")), normalized=False)])
    return backend


def _by_id(added: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """The added tokens in the order of their ids, which is the order in which they must be added."""
    return [
        token
        for _, token in sorted(added.items(), key=lambda item: int(item[0]))
        if isinstance(token, Mapping)
    ]


#: Special tokens that templates may name.
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def _special(config: Mapping[str, Any]) -> dict[str, str]:
    return {key: text for key in _NAMES if (text := _content(config.get(key))) is not None}


def _content(token: object) -> str | None:
    """A special token as text, however the configuration writes it."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: its own file, or in the configuration (of several, the default)."""
    file = directory / TEMPLATE
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, Mapping)}
        found = named.get("default", next(iter(named.values()), None))
    return found if isinstance(found, str) else None
