"""GGUF files through transformers and gguf-py: names, permutations and dequantisation are others' work than the
engine's, so that a check of the engine is one.

Not by `from_pretrained`: that wants another library for it, passes over tensors that it has no name for, and fails
over special tokens whose ids the vocabulary lacks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import gguf
import torch
from gguf import GGUFReader
from transformers import AutoConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from lockstep.engine.checkpoint.gguf.split import read_split
from lockstep.engine.text import printable
from lockstep.workbench.references.request import ReferenceFailure

#: Divisors of the rotary frequencies, one a pair: llama.cpp has Llama 3's scaling as this tensor.
_ROPE_FREQS = "rope_freqs.weight"

_transformers: Any = load_gguf_checkpoint


class WholeReader(GGUFReader):
    """Of a split model all files as one: the first one's metadata, the tensors of all."""

    def __init__(self, path: str | Path, mode: Literal["r"] = "r") -> None:
        super().__init__(path, mode)
        for part in list(read_split(Path(path)))[1:]:
            self.tensors += GGUFReader(part).tensors


def _load(path: Path, **options: Any) -> Any:
    """transformers' `load_gguf_checkpoint`, which opens only the file that it is given, with the reader above."""
    package: Any = gguf
    package.GGUFReader = WholeReader
    try:
        return _transformers(str(path), **options)
    finally:
        package.GGUFReader = GGUFReader


def gguf_config(path: Path) -> Any:
    """The transformers config of the file's metadata, completed by what transformers passes over: the width of heads,
    RoPE scaling, biases. Without special tokens: no forward pass reads them."""
    told = _load(path)["config"]
    reader = WholeReader(path)
    arch = reader.fields["general.architecture"].contents()

    def value(key: str) -> Any:
        field = reader.fields.get(f"{arch}.{key}")
        return None if field is None else field.contents()

    names = {tensor.name for tensor in reader.tensors}
    told |= {"attention_bias": "blk.0.attn_q.bias" in names, "mlp_bias": "blk.0.ffn_down.bias" in names}
    if (head_dim := value("attention.key_length")) is not None:
        told["head_dim"] = head_dim
    if (kind := value("rope.scaling.type") or "none") != "none":
        if kind not in ("linear", "yarn"):
            raise ReferenceFailure(f"{path}: RoPE scaling {printable(kind)!r} is not mapped for transformers")
        told["rope_parameters"] = {
            "rope_type": kind,
            "rope_theta": value("rope.freq_base") or 10000.0,
            "factor": value("rope.scaling.factor"),
        }
        if (original := value("rope.scaling.original_context_length")) is not None:
            told["rope_parameters"]["original_max_position_embeddings"] = original
    return AutoConfig.for_model(**{key: one for key, one in told.items() if not key.endswith("_token_id")})


def fill_from_gguf(model: Any, path: Path) -> None:
    """Dequantise the file's tensors into a model made from its config. ReferenceFailure for a tensor without a place;
    RuntimeError (torch's) where one is missing or of another shape."""
    named = {tensor.name for tensor in WholeReader(path).tensors} - {_ROPE_FREQS}
    tensors = _load(path, return_tensors=True, model_to_load=model, torch_dtype=model.dtype)["tensors"]
    if len(tensors) < len(named):
        raise ReferenceFailure(
            f"{path}: transformers has a place for {len(tensors)} of its {len(named)} tensors, "
            f"{printable(', '.join(sorted(named)[:3]))}, …; a golden reference needs all of them"
        )
    if model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)


def scale_rotary(model: Any, path: Path) -> None:
    """Divide the rotary frequencies by those of the file, which transformers passes over."""
    rotary = model.model.rotary_emb
    for tensor in WholeReader(path).tensors:
        if tensor.name == _ROPE_FREQS:
            rotary.inv_freq /= torch.tensor(tensor.data, dtype=rotary.inv_freq.dtype)
