"""Keys of config.json that nobody reads, though they mean something: what an engine passes over may be such a one."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.engine.checkpoint.files import read_json
from lockstep.engine.config import ModelConfig
from lockstep.engine.config.fields import noting_keys
from lockstep.engine.errors import CheckpointError, ConfigError
from lockstep.engine.text import printable

#: What states nothing of what is computed from tokens to logits: files, training, choosing tokens, labels.
_OTHER_MATTERS = re.compile(
    r"_.*|architectures|auto_map|.*version|.*dtype|use_cache|quantization_config|(.*_)?token_ids?|.*(dropout|pdrop)(_p)?"
    r"|.*initializer_.*|init_.*|.*_init|.*loss.*|output_.*|return_dict.*|.*label.*|task_.*|problem_type|tokenizer_.*"
    r"|pretraining_tp|seq_aux|ep_size|num_nextn_predict_layers|temperature|top_[kp]|do_sample|max_length|.*_penalty"
    r"|vision_.*|image_.*|video_.*|audio_.*|text_config|num_mtp.*|mtp_.*|unsloth_.*|finetuning_task|pruned_heads",
    re.ASCII,
)
#: Keys that mean nothing: key and values of another, with which that is so.
_SWITCHED: tuple[tuple[str, tuple[object, ...], tuple[str, ...]], ...] = (
    ("use_sliding_window", (False,), ("sliding_window", "max_window_layers")),
    ("sliding_window", (None,), ("max_window_layers",)),
    ("topk_method", ("greedy",), ("n_group", "topk_group")),
)
#: What follows from other keys of a model with latents.
_OF_LATENTS = ("head_dim", "num_key_value_heads", "qk_head_dim")
_SHOWN = 60


def unread_keys(config: Mapping[str, object]) -> dict[str, object]:
    """By its place the value of each key that our engine's reading passes over and that is another than its family's
    configuration has by itself. ConfigError of a family that it does not run."""
    with noting_keys() as asked:
        ModelConfig.from_hf(config)
    return keys_beside(config, {key for _, key in asked})


def keys_beside(config: Mapping[str, object], read: Collection[str]) -> dict[str, object]:
    """The same of any engine that reads the keys `read` and no others."""
    found = {}
    for place, part in _objects(config):
        usual = _defaults(part)
        off = {key for switch, at, keys in _SWITCHED if switch in part and part[switch] in at for key in keys}
        off |= set(_OF_LATENTS if part.get("kv_lora_rank") else ())
        for key, value in part.items():
            matters = key not in read and key not in off and not _OTHER_MATTERS.fullmatch(key)
            if matters and value not in (None, usual.get(key), False, [], {}):
                found[place + key] = value
    return found


def _objects(config: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """What describes the text model: the whole, or the part for it."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        yield "text_config.", inner
    else:
        yield "", config


def _defaults(config: Mapping[str, object]) -> dict[str, object]:
    """What transformers' class of a `model_type` has by itself; nothing where there is none."""
    transformers: Any = importlib.import_module("transformers")
    try:
        return dict(transformers.AutoConfig.for_model(config.get("model_type")).to_dict())
    except Exception:  # of a class that asks for arguments, or is not known
        return {}


def unread_words(checkpoint: Path, engine: str = "", reads: Collection[str] = ()) -> tuple[str, ...]:
    """A sentence on them, where there are any: on those of our engine, and of another whose code is known to read no
    other names than `reads`."""
    path = (checkpoint if checkpoint.is_dir() else checkpoint.parent) / "config.json"
    try:
        config = read_json(path) if path.is_file() else {}
    except (ConfigError, CheckpointError):  # which the checkpoint's own reader reports
        return ()
    lines = []
    if found := keys_beside(config, reads) if reads else {}:
        lines.append(
            f"no code of {printable(engine, 80)} reads, and not what the family has by itself: {_listed(found)}"
        )
    try:
        found = unread_keys(config) if config else {}
    except (ConfigError, CheckpointError):
        found = {}
    if found:
        own = "not read by Lockstep's own engine, and not what the family has by itself"
        lines.append(f"{own}: {_listed(found)}")
    return tuple(f"config.json: {line}" for line in lines)


def _listed(keys: Mapping[str, object]) -> str:
    return ", ".join(
        f"{printable(key, 80)} = {printable(repr(value), _SHOWN)}" for key, value in keys.items()
    )
