"""What the tensors of a text model are called in the checkpoint of the model that it is a part of, and which are not
its own: as transformers 5 reads them, old names and new (`conversion_mapping.py`). Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from lockstep.engine.config import ModelConfig

_HEAD = re.compile(r"language_model\.(?=lm_head\.)", re.ASCII)
_DECODER = re.compile(r"(?:model\.language_model|language_model\.model|language_model)\.", re.ASCII)
#: Parts that are no text model, whatever reads them.
_OTHER_PARTS = re.compile(
    r"(?:model\.)?(?:(?:embed_)?(?:vision|audio)\w*|visual|multi_modal_projector|mm_projector|patch_merger)\.",
    re.ASCII,
)


def own_name(name: str) -> str:
    """The name itself."""
    return name


def text_name(name: str) -> str:
    """The name of a tensor of the file in the text model alone; of other parts as it is."""
    found, replaced = _HEAD.subn("", name, count=1) if _HEAD.match(name) else (name, 0)
    return found if replaced or not (prefix := _DECODER.match(name)) else f"model.{name[prefix.end() :]}"


def naming(model: ModelConfig) -> Callable[[str], str]:
    """From the names in the files to those of the model's parameters."""
    if model.family == "nemotron_h":
        return _without_backbone
    return text_name if model.wrapper else own_name


def _without_backbone(name: str) -> str:
    """The name of a tensor of Nemotron-H, as that of other families' is."""
    name = f"model.{name.removeprefix('backbone.')}" if name.startswith("backbone.") else name
    return "model.embed_tokens.weight" if name == "model.embeddings.weight" else name


def other_part(name: str) -> str:
    """The part that a tensor belongs to, of those that read images or lead from there to the text model; "" for what is
    of none."""
    match = _OTHER_PARTS.match(name)
    return "" if match is None else match[0].removesuffix(".")
