"""Checkpoints of models that read images and text: which text model is inside, and where config.json describes it, as
in transformers 5 (`models/*/configuration_*.py`). Torch-free.

Images are not read. A prompt of text has the same position on all axes of mRoPE (arXiv:2409.12191), whose rotation is
the plain one then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.engine.config.families import FAMILIES, Family
from lockstep.engine.config.fields import Fields

Assumed = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TextModel:
    """A text model that goes by a name of its own: the family that computes the same, and what its configuration class
    assumes of missing keys where that differs. `unread`: keys of the family that it passes over."""

    family: Family
    assumed: Assumed = field(default_factory=dict)
    unread: tuple[str, ...] = ()


#: `model_type` of a text model.
TEXT_MODELS: Mapping[str, TextModel] = {
    "kimi_k2": TextModel("deepseek_v3"),
    "ministral3": TextModel(
        "mistral",
        {
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5,
            "head_dim": 128,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "qwen2_vl_text": TextModel("qwen2", {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_window_layers": 80}),
    "qwen2_5_vl_text": TextModel("qwen2", {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_window_layers": 80}),
    "qwen3_vl_text": TextModel("qwen3", {"rope_theta": 5e5, "max_position_embeddings": 128_000}),
    "qwen3_vl_moe_text": TextModel(
        "qwen3_moe", {"rope_theta": 5e5, "max_position_embeddings": 128_000, "num_experts_per_tok": 4}
    ),
    "glm4v_text": TextModel(
        "glm4", {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-5}, unread=("attention_bias",)
    ),
    "glm4v_moe_text": TextModel(
        "glm4_moe", {"attention_bias": True, "max_position_embeddings": 65_536}, unread=("use_qk_norm",)
    ),
}


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model of which one part is a text model. `text`: the `model_type` of that where `text_config` does not state
    it; `tied`: whether its head is the embedding where neither states it; `flat`: it may be described by the keys of
    config.json itself; `assumed`: keys that published checkpoints leave to the configuration class."""

    text: str
    tied: bool = False
    flat: bool = False
    assumed: Assumed = field(default_factory=dict)


#: `model_type` of config.json.
WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper(
        "gemma3_text",
        tied=True,
        assumed={"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208},
    ),
    "gemma4": Wrapper("gemma4_text", tied=True),
    "qwen3_5": Wrapper("qwen3_5_text"),
    "qwen3_5_moe": Wrapper("qwen3_5_moe_text"),
    "mistral3": Wrapper("mistral", tied=True),
    "qwen2_vl": Wrapper("qwen2_vl_text", flat=True),
    "qwen2_5_vl": Wrapper("qwen2_5_vl_text", flat=True),
    "qwen3_vl": Wrapper("qwen3_vl_text"),
    "qwen3_vl_moe": Wrapper("qwen3_vl_moe_text"),
    "kimi_k25": Wrapper("deepseek_v3", tied=True),
    "glm4v": Wrapper("glm4v_text"),
    "glm4v_moe": Wrapper("glm4v_moe_text"),
    "glm46v": Wrapper("glm4v_text"),
    "llama4": Wrapper("llama4_text"),
}
#: Every `model_type` of config.json that can be run.
SUPPORTED = (*FAMILIES, *(name for name in TEXT_MODELS if not name.endswith("_text")), *WRAPPERS)

#: Keys that describe the checkpoint, wherever they stand; config.json's own go first.
_OF_BOTH = ("quantization_config", "dtype", "torch_dtype", "bos_token_id", "eos_token_id")
_TIED = "tie_word_embeddings"


def text_fields(fields: Fields) -> tuple[Fields, str]:
    """The configuration of the text model, as its family states it, and the `model_type` of the model that it is a part
    of, "" where it is the whole. One that is not supported stays as it is."""
    name = fields.word("model_type")
    wrapper = WRAPPERS.get(name)
    if wrapper is None:
        return _as_family(fields, {}), ""
    inner = fields.object("text_config")
    if inner is None:
        if not wrapper.flat:
            raise fields.error(
                "text_config", f"expected an object, where the text model of {name} is described"
            )
        inner = Fields(
            {key: value for key, value in fields.data.items() if key != "model_type"}, fields.where
        )
    reported = dict(inner.data) | {key: fields.data[key] for key in _OF_BOTH if key in fields}
    tied = next((one.flag(_TIED) for one in (fields, inner) if _TIED in one), wrapper.tied)
    reported |= {"model_type": inner.word("model_type", wrapper.text), _TIED: tied}
    return _as_family(Fields(reported, inner.where), wrapper.assumed), name


def _as_family(fields: Fields, assumed: Assumed) -> Fields:
    """The same under its family's name, with what is assumed of keys that are missing."""
    reported = dict(fields.data)
    if (text := TEXT_MODELS.get(fields.word("model_type"))) is not None:
        reported = {key: value for key, value in reported.items() if key not in text.unread}
        reported |= {**_plain_rotation(fields), "model_type": text.family}
        assumed = {**text.assumed, **assumed}
    return Fields({**assumed, **reported}, fields.where)


def _plain_rotation(fields: Fields) -> dict[str, object]:
    """Rotary parameters whose kind is `mrope`, as of the plain rotation."""
    found = dict[str, object]()
    for key in ("rope_scaling", "rope_parameters"):
        one = fields.object(key)
        if one is not None and one.word("rope_type", one.word("type", "")) == "mrope":
            found[key] = {**one.data, "rope_type": "default"}
    return found
