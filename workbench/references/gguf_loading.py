"""GGUF files through transformers and gguf-py: names, permutations and dequantisation are others' work than the
engine's, so that a check of the engine is one.

Not by `from_pretrained`: that knows half of the architectures, wants another library, passes over tensors that it has
no name for, and fails over special tokens whose ids the vocabulary lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
from gguf import GGUFReader
from transformers import AutoConfig
from transformers.modeling_gguf_pytorch_utils import (
    Gemma2TensorProcessor,
    LlamaTensorProcessor,
    TensorProcessor,
)

from lockstep.engine.checkpoint.gguf.split import read_split
from lockstep.engine.text import printable
from lockstep.workbench.references import gguf_experts, gguf_further, gguf_linear, gguf_mamba
from lockstep.workbench.references.doubles import rotary_of
from lockstep.workbench.references.gguf_experts import ConfigFields
from lockstep.workbench.references.request import ReferenceFailure

#: Divisors of the rotary frequencies, one a pair: llama.cpp has Llama 3's scaling as this tensor; and LongRoPE's.
_ROPE_FREQS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"

#: transformers' names of what most architectures have -> keys behind the architecture's name.
_KEYS: Mapping[str, str] = {
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "head_dim": "attention.key_length",
}


class WholeReader(GGUFReader):
    """Of a split model all files as one: the first one's metadata, the tensors of all."""

    def __init__(self, path: str | Path, mode: Literal["r"] = "r") -> None:
        super().__init__(path, mode)
        for part in list(read_split(Path(path)))[1:]:
            self.tensors += GGUFReader(part).tensors

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return str(self.fields["general.architecture"].contents())

    def value(self, key: str) -> Any:
        """Of a key behind the architecture's name; None where there is none."""
        found = self.fields.get(f"{self.architecture}.{key}")
        return None if found is None else found.contents()

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return any(tensor.name == name for tensor in self.tensors)

    def named(self, name: str) -> Any:
        """The data of a tensor; None where there is none."""
        return next((tensor.data for tensor in self.tensors if tensor.name == name), None)


def _llama(file: WholeReader) -> ConfigFields:
    if file.value("expert_count"):
        return {"model_type": "mixtral"}
    window = file.value("attention.sliding_window") or 0
    if 0 < window < file.value("context_length"):
        return {"model_type": "mistral", "sliding_window": window}
    return {}


def _gemma(file: WholeReader, largest: int) -> ConfigFields:
    """The largest model's scores are scaled by hidden / heads, those of the others by a head's width."""
    width = file.value("attention.key_length")
    if file.value("block_count") == largest:
        width = file.value("embedding_length") // file.value("attention.head_count")
    return {
        "query_pre_attn_scalar": width,
        "final_logit_softcapping": file.value("final_logit_softcapping"),
        "sliding_window": file.value("attention.sliding_window"),
    }


def _gemma2(file: WholeReader) -> ConfigFields:
    """What the first files of it lack has the model's own values, as in llama.cpp."""
    own = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "attention.sliding_window": 4096}
    found = {key: value if (stated := file.value(key)) is None else stated for key, value in own.items()}
    return {
        **_gemma(file, 46),
        **{key.removeprefix("attention."): value for key, value in found.items()},
        "layer_types": _layer_types(file, 2),
    }


def _gemma3(file: WholeReader) -> ConfigFields:
    local = file.value("rope.freq_base_swa") or 10_000.0
    return {
        **_gemma(file, 62),
        "layer_types": _layer_types(file, 6),
        "rope_parameters": _by_type(file, local),
    }


def _olmo2(file: WholeReader) -> ConfigFields:
    window = file.value("attention.sliding_window")
    if not window:
        return {}
    rope = {"rope_parameters": _by_type(file, file.value("rope.freq_base"))}
    return {"model_type": "olmo3", "sliding_window": window, "layer_types": _layer_types(file, 4), **rope}


def _phi3(file: WholeReader) -> ConfigFields:
    width = file.value("embedding_length") // file.value("attention.head_count")
    rope: ConfigFields = {
        "rope_type": "default",
        "rope_theta": file.value("rope.freq_base"),
        "partial_rotary_factor": (file.value("rope.dimension_count") or width) / width,
    }
    if (long := file.named(_LONG)) is not None:
        rope |= {
            "rope_type": "longrope",
            "long_factor": long.tolist(),
            "short_factor": file.named(_SHORT).tolist(),
        }
        rope["attention_factor"] = file.value("rope.scaling.attn_factor")
    original = file.value("rope.scaling.original_context_length")
    window = file.value("attention.sliding_window") or None
    return {"rope_parameters": rope, "original_max_position_embeddings": original, "sliding_window": window}


def _glm4(file: WholeReader) -> ConfigFields:
    width = file.value("attention.key_length") or file.value("embedding_length") // file.value(
        "attention.head_count"
    )
    share = (file.value("rope.dimension_count") or width) / width
    return {"rope_parameters": {**_rope(file), "partial_rotary_factor": share}}


def _starcoder2(file: WholeReader) -> ConfigFields:
    return {"use_bias": "blk.0.attn_q.bias" in {one.name for one in file.tensors}}


def _exaone4(file: WholeReader) -> ConfigFields:
    window = file.value("attention.sliding_window") or None
    types = _layer_types(file, 4) if window else ["full_attention"] * file.value("block_count")
    return {"sliding_window": window, "layer_types": types}


def _cohere(file: WholeReader) -> ConfigFields:
    reported = {"logit_scale": file.value("logit_scale"), **_layer_norm(file)}
    if file.architecture == "command-r":
        return reported
    window = file.value("attention.sliding_window")
    return {**reported, "sliding_window": window, "layer_types": _layer_types(file, 4)}


def _layer_norm(file: WholeReader) -> ConfigFields:
    """The epsilon under the names that families have for it."""
    eps = file.value("attention.layer_norm_epsilon")
    return {"layer_norm_eps": eps, "norm_eps": eps}


def _stablelm(file: WholeReader) -> ConfigFields:
    names = {one.name for one in file.tensors}
    biased, parallel = "blk.0.attn_q.bias" in names, "blk.0.ffn_norm.weight" not in names
    return {**_glm4(file), **_layer_norm(file), "use_qkv_bias": biased, "use_parallel_residual": parallel}


def _lfm2(file: WholeReader) -> ConfigFields:
    """Layers without key/value heads have a convolution. llama.cpp renormalises the weights of experts always, and
    scales them never."""
    heads = file.value("attention.head_count_kv")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if one else "conv" for one in heads],
        "conv_L_cache": file.value("shortconv.l_cache"),
        "norm_eps": file.value("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
        "num_dense_layers": file.value("leading_dense_block_count") or 0,
        "use_expert_bias": any(one.name.endswith("exp_probs_b.bias") for one in file.tensors),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def _linear_attention(file: WholeReader) -> ConfigFields:
    return gguf_linear.linear_attention(file, _rope(file))


def _seed_oss(file: WholeReader) -> ConfigFields:
    return {"attention_out_bias": "blk.0.attn_output.bias" in {one.name for one in file.tensors}}


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How files of an architecture become a transformers model. `own`: what of its config `_KEYS` do not state."""

    model_type: str
    own: Callable[[WholeReader], ConfigFields] = field(default=lambda file: {})
    processor: type[TensorProcessor] = TensorProcessor


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture("llama", _llama, LlamaTensorProcessor),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "gemma2": _Architecture("gemma2", _gemma2, Gemma2TensorProcessor),
    "gemma3": _Architecture("gemma3_text", _gemma3, Gemma2TensorProcessor),
    "gemma4": _Architecture(
        "gemma4_text", lambda file: gguf_further.gemma4(file, {"layer_types": _layer_types(file, 6)})
    ),
    "olmo2": _Architecture("olmo2", _olmo2),
    "phi3": _Architecture("phi3", _phi3),
    "granite": _Architecture("granite", gguf_mamba.granite, LlamaTensorProcessor),
    "granitemoe": _Architecture("granitemoe", gguf_mamba.granite, LlamaTensorProcessor),
    "granitehybrid": _Architecture("granitemoehybrid", gguf_mamba.granite_hybrid, LlamaTensorProcessor),
    "falcon-h1": _Architecture("falcon_h1", gguf_mamba.falcon_h1),
    "nemotron_h": _Architecture("nemotron_h", gguf_mamba.nemotron_h, LlamaTensorProcessor),
    "nemotron_h_moe": _Architecture("nemotron_h", gguf_mamba.nemotron_h, LlamaTensorProcessor),
    "smollm3": _Architecture("smollm3", processor=LlamaTensorProcessor),
    "glm4": _Architecture("glm4", _glm4),
    "starcoder2": _Architecture("starcoder2", _starcoder2),
    "gemma": _Architecture("gemma", processor=Gemma2TensorProcessor),
    "seed_oss": _Architecture("seed_oss", _seed_oss),
    "exaone4": _Architecture("exaone4", _exaone4),
    "ernie4_5": _Architecture("ernie4_5", _starcoder2),
    "arcee": _Architecture("arcee", processor=LlamaTensorProcessor),
    "nemotron": _Architecture(
        "nemotron", lambda file: {**_glm4(file), **_layer_norm(file)}, Gemma2TensorProcessor
    ),
    "stablelm": _Architecture("stablelm", _stablelm),
    "command-r": _Architecture("cohere", _cohere),
    "cohere2": _Architecture("cohere2", _cohere),
    "olmo": _Architecture(
        "olmo", lambda file: {"clip_qkv": file.value("attention.clamp_kqv") or None}, LlamaTensorProcessor
    ),
    "lfm2": _Architecture("lfm2", _lfm2),
    "lfm2moe": _Architecture("lfm2_moe", _lfm2),
    "phi2": _Architecture("phi", lambda file: {**_glm4(file), **_layer_norm(file)}),
    "qwen3moe": _Architecture("qwen3_moe", gguf_experts.qwen3_moe),
    "qwen2moe": _Architecture("qwen2_moe", gguf_experts.qwen2_moe),
    "olmoe": _Architecture("olmoe", lambda file: {"norm_topk_prob": False}),
    "glm4moe": _Architecture("glm4_moe", lambda file: gguf_experts.partly_rotated(file, _rope(file))),
    "minimax-m2": _Architecture("minimax_m2", lambda file: gguf_experts.partly_rotated(file, _rope(file))),
    "gpt-oss": _Architecture("gpt_oss", lambda file: gguf_experts.gpt_oss(file, _rope(file))),
    "deepseek2": _Architecture("deepseek_v2", lambda file: gguf_further.deepseek2(file, _rope(file))),
    "llama4": _Architecture("llama4_text", gguf_further.llama4),
    "phimoe": _Architecture("phimoe", lambda file: gguf_further.phimoe(file, _phi3(file))),
    "mistral4": _Architecture("mistral4", lambda file: gguf_further.mistral4(file, _rope(file))),
    "hunyuan-moe": _Architecture("hunyuan_v1_moe", gguf_further.hunyuan_moe),
    "ernie4_5-moe": _Architecture("ernie4_5_moe", gguf_further.ernie4_5_moe),
    "exaone-moe": _Architecture("exaone_moe", lambda file: gguf_further.exaone_moe(file, _exaone4(file))),
    "apertus": _Architecture("apertus"),
    "hunyuan-dense": _Architecture("hunyuan_v1_dense"),
    "jais2": _Architecture("jais2", _layer_norm),
    "mistral3": _Architecture(
        "ministral3", lambda file: gguf_further.mistral3(file, _rope(file)), LlamaTensorProcessor
    ),
    "qwen3next": _Architecture("qwen3_next", _linear_attention),
    "qwen35": _Architecture("qwen3_5_text", _linear_attention),
    "qwen35moe": _Architecture("qwen3_5_moe_text", _linear_attention),
}


def gguf_config(path: Path) -> Any:
    """The transformers config of the file's metadata. Without special tokens: no forward pass reads them."""
    file = WholeReader(path)
    architecture = _architecture(file, path)
    names = {tensor.name for tensor in file.tensors}
    found = {key: file.value(theirs) for key, theirs in _KEYS.items() if file.value(theirs) is not None}
    reported: ConfigFields = {
        "model_type": architecture.model_type,
        **found,
        "vocab_size": int(file.named("token_embd.weight").shape[0]),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_down.bias" in names,
        "rope_parameters": _rope(file),
        **gguf_experts.expert_fields(file),
        **architecture.own(file),
    }
    reported["num_hidden_layers"] -= file.value("nextn_predict_layers") or 0
    return AutoConfig.for_model(**reported, bos_token_id=None, eos_token_id=None, pad_token_id=None)


def _architecture(file: WholeReader, path: Path) -> _Architecture:
    if file.architecture not in _ARCHITECTURES:
        raise ReferenceFailure(
            f"{path}: architecture {printable(file.architecture)!r} is not mapped for transformers"
        )
    return _ARCHITECTURES[file.architecture]


def _rope(file: WholeReader) -> ConfigFields:
    """Of all layers that have no rotation of their own."""
    found = {"rope_type": "default", "rope_theta": file.value("rope.freq_base") or 10_000.0}
    if (kind := file.value("rope.scaling.type") or "none") == "none":
        return found
    if kind not in ("linear", "yarn"):
        raise ReferenceFailure(f"RoPE scaling {printable(kind)!r} is not mapped for transformers")
    found |= {"rope_type": kind, "factor": file.value("rope.scaling.factor")}
    if (original := file.value("rope.scaling.original_context_length")) is not None:
        found["original_max_position_embeddings"] = original
    return found


def _by_type(file: WholeReader, local: float) -> ConfigFields:
    """Layers with a window rotate by `local`, unscaled."""
    sliding = {"rope_type": "default", "rope_theta": local}
    return {"full_attention": _rope(file), "sliding_attention": sliding}


def _layer_types(file: WholeReader, period: int) -> list[str]:
    """The last of every `period` layers sees everything, unless the file states which have a window."""
    layers = range(file.value("block_count"))
    stated = file.value("attention.sliding_window_pattern")
    sliding = stated if isinstance(stated, list) else [(i + 1) % (stated or period) != 0 for i in layers]
    return ["sliding_attention" if one else "full_attention" for one in sliding]


def fill_from_gguf(model: Any, path: Path) -> None:
    """Dequantise the file's tensors into a model made from its config. ReferenceFailure for a tensor without a place;
    RuntimeError (torch's) where one is missing or of another shape."""
    file = WholeReader(path)
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    theirs = {
        names.get_name(gguf_experts.stored_name(ours), (".weight", ".bias")): ours
        for ours in model.state_dict()
    }
    processor: Any = _architecture(file, path).processor(config=model.config.to_dict())
    behind = tuple(f"blk.{i}." for i in range(model.config.num_hidden_layers, file.value("block_count")))
    behind += _borrowed(model.config)
    found = dict[str, torch.Tensor]()
    for tensor in file.tensors:
        if tensor.name in (_ROPE_FREQS, _LONG, _SHORT) or tensor.name.startswith(behind or ("\0",)):
            continue
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        values = processor.process(weights=values, name=tensor.name).weights
        found[tensor.name] = torch.from_numpy(np.array(values)).to(model.dtype)
    if model.config.model_type in gguf_mamba.FAMILIES:
        gguf_mamba.restore_mamba(found, model.config)
    elif "linear_attention" in (getattr(model.config, "layer_types", None) or ()):
        gguf_linear.restore_linear(found, model.config)
    for name in [name for name in found if name.endswith(".shortconv.conv.weight")]:
        found[name] = found[name].unsqueeze(1)
    gguf_experts.stack_experts(found, model.config.model_type)
    found |= gguf_further.xielu_numbers(file.fields, model.config.num_hidden_layers)
    tensors, homeless, there = {}, [], set(model.state_dict())
    for name in found:
        ours = name if name in there else theirs.get(name)
        if ours is None:
            homeless.append(name)
        else:
            tensors[ours] = gguf_experts.one_row(found, name)
    if homeless:
        raise ReferenceFailure(
            f"{path}: transformers has no place for {len(homeless)} of its {len(file.tensors)} tensors, "
            f"{printable(', '.join(sorted(homeless)[:3]))}; a golden reference needs all of them"
        )
    if model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = next(
            tensors[name]
            for name in ("model.embed_tokens.weight", "model.embeddings.weight")
            if name in tensors
        )
    model.load_state_dict(tensors)


def _borrowed(config: Any) -> tuple[str, ...]:
    """What layers that read the keys and values of others have no place for."""
    first = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    shared = range(first, config.num_hidden_layers)
    return tuple(f"blk.{i}.attn_{one}" for i in shared for one in ("k.", "v.", "k_norm."))


def scale_rotary(model: Any, path: Path) -> None:
    """Divide the rotary frequencies by those of the file, which transformers passes over; of Gemma-4 its config has
    them."""
    if model.config.model_type == "gemma4_text":
        return
    if (name := rotary_of(model)) is None:
        return
    rotary = getattr(model.model, name)
    for tensor in WholeReader(path).tensors:
        if tensor.name == _ROPE_FREQS:
            rotary.inv_freq /= torch.tensor(tensor.data, dtype=rotary.inv_freq.dtype)
