"""A model's sizes from its `config.json`, as far as reading a dump needs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lockstep.engine.config.wrappers import WRAPPERS
from lockstep.sessions.meta import HUGGING_FACE, ModelMeta
from lockstep.workbench.foreign.passes import ForeignDumpError
from lockstep.workbench.foreign.readers.files import read_json


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one of `ranks` ranks holds: features of q, features of k (or v), and how many ranks share each KV head.
    None where the dump has no config."""

    q: int
    kv: int
    replicas: int

    @classmethod
    def of(cls, model: ModelMeta, ranks: int) -> Sizes | None:
        if model.num_heads is None or (model.head_dim or model.hidden_size) is None:
            return None
        head_dim = model.head_dim or (model.hidden_size or 0) // model.num_heads
        kv_heads = model.num_kv_heads or model.num_heads
        return cls(
            model.num_heads // ranks * head_dim,
            max(1, kv_heads // ranks) * head_dim,
            max(1, ranks // kv_heads),
        )


def read_model(folder: Path, model: Path | None) -> ModelMeta:
    """The model that a dump is of: from the `config.json` of `model` (a directory, or that file) or of the dump itself.

    ForeignDumpError for a config that cannot be read; nothing but a name is known without one.
    """
    if model is None:
        beside = folder / "config.json"
        return from_config(read_json(beside)) if beside.is_file() else ModelMeta()
    file = model / "config.json" if model.is_dir() else model
    if file.name != "config.json":
        return ModelMeta(name=model.name)
    return msgspec.structs.replace(from_config(read_json(file)), name=file.parent.name)


def from_config(config: Mapping[str, object]) -> ModelMeta:
    """The fields of a Hugging Face config that have a place in `ModelMeta`."""
    text = config.get("text_config")
    fields = text if isinstance(text, dict) else config
    if (wrapper := WRAPPERS.get(str(config.get("model_type")))) is not None:
        fields = {**wrapper.assumed, **fields}
    found = {ours: fields[theirs] for theirs, ours in HUGGING_FACE.items() if fields.get(theirs) is not None}
    if isinstance(family := fields.get("model_type"), str):
        found["family"] = family
    try:
        return msgspec.convert(found, ModelMeta)
    except msgspec.ValidationError as error:
        raise ForeignDumpError(f"config.json: {error}") from error
