"""What a checkpoint's tensors show beyond its config.json: whether the head is the embedding, what stays unread.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from lockstep.engine.checkpoint.header import TensorEntry, read_header
from lockstep.engine.checkpoint.source import Source
from lockstep.engine.checkpoint.wrapped import other_part
from lockstep.engine.config import Family, ModelConfig
from lockstep.engine.errors import CheckpointError
from lockstep.engine.graph import LAYER
from lockstep.engine.parallel.shards import layer_of_parameter
from lockstep.engine.text import printable

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PIECE = 1 << 22


def settle(model: ModelConfig, source: Source) -> ModelConfig:
    """`model` as transformers 5 loads it from these safetensors: with `notes`, and untied where the head that the
    files hold is not the embedding (`PreTrainedModel.tie_weights`)."""
    names = source.names()
    notes = _unread_frequencies(names) + _unread_layers(names, model) + _unread_parts(names, model)
    borrowed = (name for name in names if is_borrowed(name, model))
    notes += _ignored(borrowed, "the layer reads the keys and values of another one") + _too_far(model)
    tied = model.tie_embeddings
    if tied and {EMBEDDING, HEAD} <= names:
        tied = _same_bytes(*_place(source, EMBEDDING), *_place(source, HEAD))
        notes += (
            f"ignored {HEAD}: it is a copy of the embedding, to which config.json ties the head"
            if tied
            else f"{HEAD} is not the embedding, though config.json {_tied_by(model)}: the head uses {HEAD}, as in "
            "transformers; correct config.json",
        )
    return replace(model, tie_embeddings=tied, notes=notes)


def _tied_by(model: ModelConfig) -> str:
    """Of a model that reads images some classes assume it."""
    return "does not have tie_word_embeddings: false" if model.wrapper else "has tie_word_embeddings: true"


def is_unread(name: str, model: ModelConfig) -> bool:
    """Whether no engine has to load the tensor."""
    other = bool(model.wrapper) and bool(other_part(name))
    return is_frequencies(name) or predicts_further(name, model) or is_borrowed(name, model) or other


def is_frequencies(name: str) -> bool:
    """Whether the tensor is a layer's rotary frequencies, which old versions of transformers saved."""
    return name.endswith("rotary_emb.inv_freq")


#: Families whose checkpoints hold such layers.
PREDICTING: tuple[Family, ...] = (
    "glm4_moe", "deepseek_v3", "glm4_moe_lite", "qwen3_5_text", "qwen3_5_moe_text", "exaone_moe",
    "deepseek_v32", "glm_moe_dsa",
)  # fmt: skip


def predicts_further(name: str, model: ModelConfig) -> bool:
    """Whether the tensor is of the layers behind the others that predict further tokens (arXiv:2404.19737), which
    GLM-4.5's, DeepSeek-V3's, Qwen3.5's, K-EXAONE's and Nemotron-3's checkpoints hold and transformers leaves unread."""
    if name.startswith("mtp.") and (model.linear is not None or model.family in ("exaone_moe", "nemotron_h")):
        return True
    layer = layer_of_parameter(name)
    return model.family in PREDICTING and layer is not None and layer >= model.num_layers


#: Modules that a layer has for keys and values of its own.
_OF_OWN_KV = frozenset(one.module for one in LAYER.values() if one.module and "shared_kv" in one.unless)


def is_borrowed(name: str, model: ModelConfig) -> bool:
    """Whether the tensor would make keys and values in a layer that reads another one's, as in published checkpoints of
    Gemma-4; transformers leaves it unread."""
    layer = layer_of_parameter(name)
    if layer is None or layer >= len(model.shapes) or model.shapes[layer].kv_from is None:
        return False
    return name.removeprefix(f"model.layers.{layer}.").rpartition(".")[0] in _OF_OWN_KV


def _unread_layers(names: set[str], model: ModelConfig) -> tuple[str, ...]:
    found = (name for name in names if predicts_further(name, model))
    return _ignored(found, "a layer that predicts further tokens, behind the model's")


def _unread_frequencies(names: set[str]) -> tuple[str, ...]:
    return _ignored(filter(is_frequencies, names), "rotary frequencies are computed from the configuration")


def _unread_parts(names: set[str], model: ModelConfig) -> tuple[str, ...]:
    """What there is beside the text model; and that of such a model it alone is run, whatever the files hold."""
    if not model.wrapper:
        return ()
    reported = f"of {model.wrapper} the text model alone is run, images are not read"
    return _ignored(filter(other_part, names), reported) or (reported,)


def _too_far(model: ModelConfig) -> tuple[str, ...]:
    """Where a sequence ends before the context that was trained."""
    if model.context >= model.max_position:
        return ()
    reported = f"sequences end at {model.context} tokens of {model.max_position}"
    return (
        f"{reported}: beyond, queries are scaled by their position (llama_4_scaling_beta), which is not run",
    )


def _ignored(names: Iterable[str], why: str) -> tuple[str, ...]:
    """A note that names the first of them."""
    found = sorted(names)
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (f"ignored {printable(found[0])}{more}: {why}",) if found else ()


def _place(source: Source, name: str) -> tuple[Path, int, TensorEntry]:
    """File, when it was changed, and where in it the tensor lies."""
    info = source.info(name)
    return info.file, info.file.stat().st_mtime_ns, read_header(info.file).entries[info.stored_as or name]


@lru_cache(maxsize=16)  # a checkpoint is opened again for each thing that is shown of it
def _same_bytes(
    a: Path, a_changed: int, in_a: TensorEntry, b: Path, b_changed: int, in_b: TensorEntry
) -> bool:
    """Whether two tensors are stored alike. Where they differ in -0 or NaN alone, two that are used apart compute the
    same as one that is shared."""
    if (in_a.dtype, in_a.shape) != (in_b.dtype, in_b.shape):
        return False
    left = in_a.stop - in_a.start
    try:
        with a.open("rb") as one, b.open("rb") as other:
            one.seek(in_a.start)
            other.seek(in_b.start)
            while left > 0:
                piece = one.read(min(left, _PIECE))
                if not piece or piece != other.read(len(piece)):
                    return False
                left -= len(piece)
    except OSError as error:
        raise CheckpointError(f"{a}: cannot be read: {error.strerror or error}") from error
    return True
