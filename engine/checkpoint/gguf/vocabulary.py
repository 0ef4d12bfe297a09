"""The tokenizer's part of GGUF metadata as far as the model needs it: special tokens. Torch-free."""

from __future__ import annotations

from lockstep.engine.checkpoint.gguf.metadata import MetadataArray
from lockstep.engine.config.fields import Fields

TOKENS = "tokenizer.ggml.tokens"
#: What llama.cpp assumes of a SentencePiece vocabulary that does not state them.
SENTENCE_PIECE = {"unknown": 0, "bos": 1, "eos": 2}
#: What an absent id is written as.
NO_TOKEN = (1 << 32) - 1
#: Texts that end an answer for llama.cpp (`special_eog_ids`) whatever the metadata states, as far as the supported
#: families have them.
ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "<EOT>")


def token_id(fields: Fields, kind: str) -> int | None:
    """The id of a special token (bos, eos, eot, unknown, …); None where the file names none."""
    key = f"tokenizer.ggml.{kind}_token_id"
    assumed = (
        SENTENCE_PIECE.get(kind, NO_TOKEN) if fields.data.get("tokenizer.ggml.model") == "llama" else NO_TOKEN
    )
    found = fields.size(key, assumed, least=0, most=NO_TOKEN)
    tokens = fields.data.get(TOKENS)
    if found == NO_TOKEN:
        return None
    if isinstance(tokens, MetadataArray) and found >= tokens.count:
        raise fields.error(key, f"the vocabulary has {tokens.count} tokens")
    return found


def end_ids(fields: Fields) -> tuple[int, ...]:
    """The tokens that end an answer: eos, eot and eom as the file names them, then those known by their text."""
    named = [found for kind in ("eos", "eot", "eom") if (found := token_id(fields, kind)) is not None]
    tokens = fields.data.get(TOKENS)
    if isinstance(tokens, MetadataArray) and tokens.element == "STRING":
        named += sorted(tokens.find(ENDS).values())
    return tuple(dict.fromkeys(named))
