"""Tokenizers that a stranger may put into a model to cost memory or time, or to bring a library down."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.engine.checkpoint.files import LARGEST_JSON

#: A tokenizer of single letters, into which each kind puts something.
_LETTERS = {letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz Ġ!?.,0123456789")}
_PLAIN: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": None, "post_processor": None, "decoder": None,
    "model": {"type": "BPE", "vocab": _LETTERS, "merges": [], "byte_fallback": False},
}  # fmt: skip


def _replace(times: int, by: str) -> dict[str, Any]:
    one = {"type": "Replace", "pattern": {"String": "a"}, "content": by}
    return {"type": "Sequence", "normalizers": [one] * times, "decoders": [one] * times}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _holding(**parts: object) -> Callable[[Path], object]:
    return lambda folder: (folder / "tokenizer.json").write_text(json.dumps(_PLAIN | parts))


def _written(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def _huge(folder: Path) -> None:
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(LARGEST_JSON + 1)


def _endless(folder: Path, name: str) -> None:
    """Something that can be read for ever; a tokenizer beside it where it is not one itself."""
    if name != "tokenizer.json":
        _holding()(folder)
    os.symlink("/dev/zero", folder / name)


def _pipe(folder: Path, name: str) -> None:
    if name != "tokenizer.json":
        _holding()(folder)
    os.mkfifo(folder / name)


#: Name -> what writes the tokenizer into a folder. Each either fails, or encodes and decodes within its bounds.
KINDS: dict[str, Callable[[Path], object]] = {
    "normalizers that double": _holding(normalizer=_replace(45, "aa")),
    "decoders that double": _holding(decoder=_replace(45, "aa")),
    "a normalizer that multiplies by a million": _holding(normalizer=_replace(3, "a" * 1_000_000)),
    "a regular expression that gives up": _holding(pre_tokenizer=_split("(a|aa)+b")),
    "a regular expression that takes for ever": _holding(pre_tokenizer=_split("(?:a|aa){1,22}b")),
    "a regular expression that is none": _holding(pre_tokenizer=_split("(((")),
    "a normalizer compiled by nobody": _holding(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "ABwQA////w==" + "A" * 400}
    ),
    "truncation to nothing": _holding(truncation={
        "direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9,
    }),
    "ids as large as can be": _holding(model={"type": "BPE", "vocab": {"a": 2**32 - 1, "b": 2**31}, "merges": []}),
    "merges of nothing": _holding(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "zz"]]}),
    "100,000 added tokens": _holding(added_tokens=[
        {"id": 100 + i, "content": f"a{i}", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": True, "special": False}
        for i in range(100_000)
    ]),
    "a nest of lists": _written("tokenizer.json", "[" * 200_000),
    "a nest of normalizers": _written(
        "tokenizer.json", '{"normalizer":' + '{"type":"Sequence","normalizers":[' * 100_000
    ),
    "a file beyond any": _huge,
    "no end of a file": lambda folder: _endless(folder, "tokenizer.json"),
    "a pipe": lambda folder: _pipe(folder, "tokenizer.json"),
    "a pipe for a template": lambda folder: _pipe(folder, "chat_template.jinja"),
    "no end of a template": lambda folder: _endless(folder, "chat_template.jinja"),
}  # fmt: skip
#: Those that take seconds until they are ended.
SLOW = (
    "a regular expression that takes for ever", "normalizers that double", "decoders that double",
    "a normalizer that multiplies by a million",
)  # fmt: skip


def use(folder: Path, length: int = 3_000) -> str:
    """Load the tokenizer of `folder`, encode a text of that length and decode it again; returns the error, if any."""
    from lockstep.engine.errors import CheckpointError, ConfigError, RequestError
    from lockstep.workbench.models.tokenizer import find_tokenizer, need_tokenizer

    try:
        tokenizer = need_tokenizer(find_tokenizer(folder), folder)
        tokenizer.decode([*tokenizer.encode("a" * length)[:length], 0])
    except (CheckpointError, ConfigError, RequestError) as error:
        return str(error)
    return ""
