"""Text to token ids and back, with a checkpoint's own tokenizer and chat template. Loads neither torch nor
transformers: `tokenizers` reads tokenizer.json, or is given what a GGUF file holds; the template runs in a process of
its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.checkpoint.files import LARGEST_JSON, gguf_file, read_json
from engine.checkpoint.header import is_lfs_pointer, lfs_error
from engine.errors import ConfigError, EngineError, RequestError
from engine.text import printable
from workbench.models.chat_template import render
from workbench.models.gguf_tokenizer import UnsupportedTokenizer, gguf_tokenizer

_FILE, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"

#: How Qwen2 cuts text into words, for checkpoints with vocab.json and merges.txt alone.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: Tokenizers count ids in 32 bits.
_IDS = 1 << 32
#: Tokens held back while they end inside a character, which has at most four bytes; more are broken bytes.
_LONGEST = 8


class Tokenizer:
    """A checkpoint's tokenizer. `config` is its tokenizer_config.json."""

    def __init__(
        self, backend: Backend, config: Mapping[str, Any], template: str | None, where: Path
    ) -> None:
        self.backend, self.config, self.template, self.where = backend, config, template, where
        backend.no_truncation()
        backend.no_padding()

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; special tokens in the text count as such, and a leading one (BOS) is added
        where the tokenizer does."""
        return list(self.backend.encode(text).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to where the answer begins. The template writes every special token
        itself, so none is added."""
        return list(self.backend.encode(self.render(messages), add_special_tokens=False).ids)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as the chat template writes it. RequestError where there is none or it refuses the
        conversation, CheckpointError where it fails."""
        if self.template is None:
            raise RequestError(f"{self.where} has no chat template: give the prompt without --chat")
        special = {key: text for key in _SPECIAL if (text := _content(self.config.get(key))) is not None}
        return render(self.template, messages, special, self.where)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of some ids; special tokens only where `special`. Ids beyond the vocabulary have none."""
        known = [one for one in ids if 0 <= one < _IDS]
        return str(self.backend.decode(known, skip_special_tokens=not special))

    def token(self, token: int) -> str | None:
        """The text of one token, special or not; None for an id that the tokenizer does not know."""
        known = 0 <= token < _IDS and self.backend.id_to_token(token) is not None
        return self.decode([token], special=True) if known else None


class TextStream:
    """Tokens in, text out as soon as it is final: a character split over tokens comes when it is complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # what was last let go: decoders look at what precedes
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes, often its own."""
        self._pending.append(token)
        text = self._text()
        incomplete = text.endswith("\ufffd") and len(self._pending) < _LONGEST
        return "" if incomplete else self._release(text)

    def finish(self) -> str:
        """What is left at the end; half a character is U+FFFD."""
        return self._release(self._text())

    def _text(self) -> str:
        return self._tokenizer.decode(self._context + self._pending)

    def _release(self, text: str) -> str:
        new = text[len(self._tokenizer.decode(self._context)) :]
        if new:
            self._context = self._pending
        else:
            self._context = self._context + self._pending
        self._pending = []
        return new


def find_tokenizer(checkpoint: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint: in its directory or GGUF file, or beside its file. None where there is none, or
    only one of a kind that is not known here.

    ConfigError for one that cannot be read.
    """
    file = gguf_file(checkpoint)
    if file is not None and (own := _gguf(file)[0]) is not None:
        return own
    directory = checkpoint if checkpoint.is_dir() else checkpoint.parent
    config_file = directory / _CONFIG
    config = read_json(config_file) if config_file.is_file() else {}
    if (directory / _FILE).is_file():
        backend = _from_file(directory / _FILE)
    elif (directory / "vocab.json").is_file() and str(config.get("tokenizer_class")).startswith("Qwen2"):
        backend = _qwen2(directory, config)
    else:
        return None
    return Tokenizer(backend, config, _template(directory, config), directory)


def need_tokenizer(tokenizer: Tokenizer | None, where: Path) -> Tokenizer:
    """`tokenizer`, or a RequestError that says why there is none and how to go on without."""
    if tokenizer is None:
        file = gguf_file(where)
        reason = ("" if file is None else _gguf(file)[1]) or f"{where} has no tokenizer"
        raise RequestError(f"{reason}: give token ids with --ids 1,2,3 instead of text")
    return tokenizer


def _gguf(file: Path) -> tuple[Tokenizer | None, str]:
    """The tokenizer in a GGUF file, or why there is none ("": the file has none)."""
    try:
        found = gguf_tokenizer(file)
    except UnsupportedTokenizer as error:
        return None, str(error)
    return (None, "") if found is None else (Tokenizer(*found, file), "")


def _from_file(path: Path) -> Backend:
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise ConfigError(f"{path}: larger than any tokenizer ({LARGEST_JSON} bytes)")
        raw = path.read_bytes()
        if is_lfs_pointer(raw):
            raise lfs_error(path)
        return Backend.from_str(raw.decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {printable(error)}") from error
    except EngineError:
        raise
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError(f"{path}: not a tokenizer: {printable(error)}") from error


def _qwen2(directory: Path, config: Mapping[str, Any]) -> Backend:
    """Qwen2's byte-level BPE, put together from vocab.json and merges.txt."""
    try:
        backend = Backend(models.BPE.from_file(str(directory / "vocab.json"), str(directory / "merges.txt")))
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
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def _content(token: object) -> str | None:
    """A special token as text, however the configuration writes it."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: its own file, or in the configuration (of several, the default)."""
    file = directory / _TEMPLATE
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, Mapping)}
        found = named.get("default", next(iter(named.values()), None))
    return found if isinstance(found, str) else None
