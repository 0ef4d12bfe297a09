"""The tokenizer that a GGUF file carries, rebuilt with `tokenizers`. Loads neither torch nor transformers.

Two models, as llama.cpp knows them: `llama`, SentencePiece's BPE whose pieces have scores, and `gpt2`, byte-level BPE
with merges, where `tokenizer.ggml.pre` names how text is cut into words. Special tokens in a text count as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from lockstep.engine.checkpoint.gguf.header import read_gguf_header
from lockstep.engine.checkpoint.gguf.metadata import MetadataArray
from lockstep.engine.checkpoint.gguf.vocabulary import TOKENS, token_id
from lockstep.engine.config.fields import Fields
from lockstep.engine.errors import ConfigError
from lockstep.engine.text import printable
from lockstep.workbench.models.tokenizer_messages import UnsupportedTokenizer

_PREFIX = "tokenizer.ggml."
#: llama.cpp's token types.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_WORD = "▁"
#: Characters of a piece. Every way to cut one is looked at, and real ones have a few dozen.
_LONGEST_PIECE = 256
#: Names of special tokens in tokenizer_config.json, and in GGUF.
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

_CONTRACTED = r"'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_CONTRACTED}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    """The cut that Llama 3 and Qwen2 share but for how many digits make a word."""
    return (
        rf"(?i:{_CONTRACTED})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclass(frozen=True, slots=True)
class WordCut:
    """How a kind of byte-level BPE cuts text: patterns applied one after the other, each match a word of its own."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges make of it
    adds_bos: bool = False
    composes: bool = False  # Unicode NFC before all else


_LLAMA3 = WordCut((_words(r"\p{N}{1,3}"),), ignore_merges=True, adds_bos=True)
CUTS: dict[str, WordCut] = {
    "default": WordCut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": WordCut((_GPT2,)),
    "smollm": WordCut((r"\p{N}", _GPT2)),
    "qwen2": WordCut((_words(r"\p{N}"),), composes=True),
    "deepseek-r1-qwen": WordCut((_words(r"\p{N}"),)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3),
    "tekken": WordCut(
        (
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        ignore_merges=True,
        adds_bos=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The metadata's arrays, checked: texts and types by id."""

    fields: Fields
    tokens: list[str]
    types: list[int]

    def ids(self, *, without: Sequence[int] = (_UNUSED,)) -> dict[str, int]:
        """Text -> id of the tokens that are not of these types; of equal texts the last."""
        return {
            text: index
            for index, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind not in without
        }


def gguf_tokenizer(file: Path) -> tuple[Tokenizer, dict[str, object], str | None] | None:
    """(tokenizer, what tokenizer_config.json would have of special tokens, chat template) of a GGUF file; None where it
    has none. ConfigError for one that is damaged, UnsupportedTokenizer for one of a kind that is not known."""
    metadata = read_gguf_header(file).metadata
    if TOKENS not in metadata:
        return None
    fields = Fields(metadata, str(file))
    model = fields.word(f"{_PREFIX}model")
    builders = {"llama": _sentence_piece, "gpt2": _byte_level}
    if model not in builders:
        raise _unsupported(fields, "model", builders)
    vocabulary = _vocabulary(fields)
    try:
        backend = builders[model](vocabulary)
        backend.add_tokens(list(_added(vocabulary)))
        _add_ends(backend, vocabulary, model)
    except ConfigError:
        raise
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError(f"{file}: its tokenizer cannot be built: {printable(error)}") from error
    special: dict[str, object] = {
        name: vocabulary.tokens[found]
        for name, kind in _SPECIAL.items()
        if (found := token_id(fields, kind)) is not None
    }
    return backend, special, fields.word("tokenizer.chat_template", "") or None


def _vocabulary(fields: Fields) -> Vocabulary:
    tokens = _array(fields, "tokens", "STRING").texts()
    if f"{_PREFIX}token_type" not in fields:
        return Vocabulary(fields, tokens, [1] * len(tokens))
    types = _array(fields, "token_type", "INT32", len(tokens)).numbers()
    return Vocabulary(fields, tokens, [int(kind) for kind in types])


def _array(fields: Fields, name: str, element: str, count: int | None = None) -> MetadataArray:
    """An array of that element type and length."""
    value = fields.data.get(f"{_PREFIX}{name}")
    where = f"{fields.where}: {_PREFIX}{name}"
    if value is None:
        raise ConfigError(f"{where} is missing (expected an array of {element})")
    if not isinstance(value, MetadataArray):
        raise ConfigError(f"{where} is not an array of {element}")
    if value.element != element:
        raise ConfigError(f"{where} at byte {value.at} is an array of {value.element}, expected {element}")
    if count is not None and value.count != count:
        raise ConfigError(f"{where} at byte {value.at} has {value.count} elements for {count} tokens")
    return value


def _sentence_piece(vocabulary: Vocabulary) -> Tokenizer:
    """Pieces merge in the order of their scores; a character that is no piece is spelt in bytes."""
    fields = vocabulary.fields
    scores = _array(fields, "scores", "FLOAT32", len(vocabulary.tokens)).numbers()
    unknown = token_id(fields, "unknown")
    backend = Tokenizer(
        models.BPE(
            vocabulary.ids(),
            _merges_by_score(vocabulary, scores),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaced = fields.flag(f"{_PREFIX}add_space_prefix", True)
    first: list[normalizers.Normalizer] = [normalizers.Prepend(_WORD)] if spaced else []
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _WORD)])
    last: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if spaced else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_WORD, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return backend


def _merges_by_score(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, the best piece first."""
    ids = vocabulary.ids(without=(_UNKNOWN, _CONTROL, _UNUSED, _BYTE))
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, index in ids.items():
        if len(piece) > _LONGEST_PIECE:
            raise ConfigError(
                f"{vocabulary.fields.where}: {TOKENS}: token {index} has {len(piece)} characters, a piece at most "
                f"{_LONGEST_PIECE}: damaged; download it again"
            )
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in ids and right in ids:
                found.append((-scores[index], index, at, (left, right)))
    return [pair for *_, pair in sorted(found)]


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    fields = vocabulary.fields
    cut = _cut(fields)
    merges = [_pair(merge) for merge in _array(fields, "merges", "STRING").texts()]
    backend = Tokenizer(models.BPE(vocabulary.ids(), merges, ignore_merges=cut.ignore_merges))
    if cut.composes:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cut.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _cut(fields: Fields) -> WordCut:
    name = fields.word(f"{_PREFIX}pre", "default")
    if name not in CUTS:
        raise _unsupported(fields, "pre", CUTS)
    return CUTS[name]


def _unsupported(fields: Fields, key: str, known: Iterable[str]) -> UnsupportedTokenizer:
    reason = fields.error(f"{_PREFIX}{key}", f"not supported; supported are {', '.join(known)}")
    return UnsupportedTokenizer(str(reason))


def _pair(merge: str) -> tuple[str, str]:
    """A merge is written `left right`; a space at its start is part of the left."""
    at = merge.find(" ", 1)
    return (merge[:at], merge[at + 1 :]) if at > 0 else (merge, "")


def _added(vocabulary: Vocabulary) -> Iterator[AddedToken]:
    """The tokens that are found in a text before it is cut: control tokens, and what users added."""
    for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and text:
            yield AddedToken(text, special=kind != _USER_DEFINED, normalized=False)


def _add_ends(backend: Tokenizer, vocabulary: Vocabulary, model: str) -> None:
    """BOS before and EOS after each text, where the file or else its kind of tokenizer wants them."""
    fields = vocabulary.fields
    by_default = model == "llama" or _cut(fields).adds_bos
    wanted: Mapping[str, bool] = {
        "bos": fields.flag(f"{_PREFIX}add_bos_token", by_default),
        "eos": fields.flag(f"{_PREFIX}add_eos_token", False),
    }
    ids = {kind: found for kind, on in wanted.items() if on and (found := token_id(fields, kind)) is not None}
    if not ids:
        return
    texts = {kind: vocabulary.tokens[found] for kind, found in ids.items()}
    single = [f"{texts['bos']}:0"] if "bos" in texts else []
    single += ["$A:0"] + ([f"{texts['eos']}:0"] if "eos" in texts else [])
    backend.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(texts[kind], found) for kind, found in ids.items()]
    )
