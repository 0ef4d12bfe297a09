"""The parts of a Hugging Face config.json that take more than reading a key. Torch-free.

Each function follows what the family's own config class and model do in transformers 5
(`models/*/configuration_*.py`), and raises ConfigError for what the engine would compute differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.engine.config.families import Activation, FamilyRules
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.indexer import INDEXED
from lockstep.engine.config.linear_attention import LINEAR
from lockstep.engine.config.short_convolution import CONVOLUTION
from lockstep.engine.errors import ConfigError
from lockstep.engine.text import printable

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
    "xielu": "xielu",
}
#: Those that have no weights, which any family may have.
_OF_ALL = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu2")


def refuse_unsupported(fields: Fields) -> None:
    """Features that would silently change the numbers."""
    quantised = fields.object("quantization_config")
    if quantised is not None and not _is_read(quantised, fields):
        raise fields.error(
            "quantization_config", "quantised weights are not supported; use the original ones"
        )
    if "per_layer_config" in fields and fields.data.get("model_type") != "gemma4_text":
        raise fields.error("per_layer_config", "layers of different sizes are not supported")
    # Where only images see later tokens, text does not.
    if fields.data.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise fields.error("use_bidirectional_attention", "tokens that see later ones are not supported")


def _is_read(quantised: Fields, fields: Fields) -> bool:
    """Whether the loader dequantises: the experts of gpt-oss (`engine.checkpoint.mxfp4`)."""
    return quantised.data.get("quant_method") == "mxfp4" and fields.data.get("model_type") == "gpt_oss"


def activation(fields: Fields, rules: FamilyRules) -> Activation:
    """The MLP's, as `ModelConfig` calls it."""
    key, default = rules.activation
    found = fields.word(key, default)
    supported = [name for name in ACTIVATIONS if name in (default, *_OF_ALL)]
    if found not in supported:
        raise fields.error(key, f"not a supported activation; supported are {', '.join(supported)}")
    return ACTIVATIONS[found]


def kv_heads(fields: Fields, rules: FamilyRules, heads: int) -> int:
    """Key/value heads; null means as many as query heads."""
    if rules.own_kv_heads and "num_key_value_heads" not in fields.data:
        raise ConfigError(
            f"{fields.where}: num_key_value_heads is missing (expected a positive whole number)"
        )
    count = fields.size("num_key_value_heads", heads)
    if heads % count:
        raise fields.error("num_key_value_heads", f"does not divide num_attention_heads = {heads}")
    return count


def head_dim(fields: Fields, rules: FamilyRules, hidden: int, heads: int) -> int:
    """Features per head: explicit, or what the family assumes."""
    if "head_dim" in fields:
        size = fields.size("head_dim")
    elif rules.head_dim is not None and "head_dim" not in fields.data:  # null: what the width leaves to each
        size = rules.head_dim
    elif hidden % heads:
        raise fields.error(
            "hidden_size", f"num_attention_heads = {heads} does not divide it, and no head_dim is given"
        )
    else:
        size = hidden // heads
    if size % 2:
        raise ConfigError(f"{fields.where}: head_dim = {size} is odd; rotary embedding turns pairs")
    return size


def windows(fields: Fields, rules: FamilyRules, types: Sequence[str]) -> tuple[int | None, ...]:
    """Each layer's sliding window in tokens, None where it sees everything."""
    if rules.windows == "none" and "sliding_window" in fields:
        raise fields.error("sliding_window", f"{fields.word('model_type')} has none")
    window = window_of(fields, rules)
    named, kind = (CHUNKED, "chunk") if rules.windows == "chunked" else (SLIDING, "sliding window")
    if window is None and named in types:
        raise ConfigError(f"{fields.where}: layer_types names {named}, but no {kind} is in use")
    return tuple(window if one == named else None for one in types)


def layer_types(fields: Fields, rules: FamilyRules, layers: int) -> Sequence[str]:
    """Of each layer whether it sees everything or has a window."""
    types, window = _stated_types(fields, rules, layers), window_of(fields, rules)
    if rules.shaped:
        every = rules.full_every or 1
        stated = types or [FULL if (i + 1) % every == 0 else SLIDING for i in range(layers)]
        return [*stated[:-1], FULL]  # the last one whatever is stated
    if rules.windows in ("all", "all_switched"):
        uniform = [SLIDING if window else FULL] * layers
        if types not in (None, uniform):
            raise ConfigError(
                f"{fields.where}: layer_types disagrees with sliding_window = {window}: "
                f"all layers of {fields.word('model_type')} have the same window"
            )
        return uniform
    if types is not None:
        return types
    if rules.windows in ("switched", "late") and rules.unrotated_every is None:
        first = fields.size("max_window_layers", 28 if rules.windows == "switched" else 62, least=0)
        return [SLIDING if window and i >= first else FULL for i in range(layers)]
    if rules.windows == "typed":
        every = fields.size("sliding_window_pattern", rules.full_every or 1)
        return [FULL if (i + 1) % every == 0 else SLIDING for i in range(layers)]
    if rules.windows == "chunked" and window is not None:
        return [CHUNKED if rotated else FULL for rotated in rotated_layers(fields, rules, layers)]
    return [FULL] * layers


def rotated_layers(fields: Fields, rules: FamilyRules, layers: int) -> list[bool]:
    """Which layers rotate: `no_rope_layers` has, whatever its name suggests, 1 for those that do."""
    key, every = "no_rope_layers", rules.unrotated_every or 1
    stated = fields.data.get(key)
    if stated is None or stated == []:
        every = fields.size("no_rope_layer_interval", every)
        return [(i + 1) % every != 0 for i in range(layers)]
    if not isinstance(stated, list) or len(stated) < layers or not all(one in (0, 1) for one in stated):
        raise fields.error(key, f"expected {layers} numbers, 0 or 1")
    return [bool(one) for one in stated[:layers]]


def _stated_types(fields: Fields, rules: FamilyRules, layers: int) -> list[str] | None:
    types = fields.words("layer_types") if rules.layer_types is None else rules.layer_types(fields)
    if types is None:
        return None
    if "index_topk" in fields:
        types = [FULL if one == INDEXED else one for one in types]
    if len(types) != layers:
        raise ConfigError(
            f"{fields.where}: layer_types has {len(types)} entries, num_hidden_layers is {layers}"
        )
    others = {
        LINEAR: rules.linear or rules.layer_types is not None,
        CONVOLUTION: rules.short_conv,
        CHUNKED: rules.windows == "chunked",
    }
    supported = (FULL, next((kind for kind, there in others.items() if there), SLIDING))
    if other := sorted(set(types) - set(supported)):
        raise ConfigError(
            f"{fields.where}: layer_types names {printable(repr(other[0]))}; supported are {' and '.join(supported)}"
        )
    return types


def window_of(fields: Fields, rules: FamilyRules) -> int | None:
    """The window of those layers that have one. An explicit null switches it off; an absent key means the config
    classes' default."""
    off, key = rules.windows in ("switched", "all_switched"), rules.window_key
    off = off and not fields.flag("use_sliding_window", False)
    if off or rules.windows == "none" or (key not in fields and (key in fields.data or not rules.window)):
        return None
    return fields.size(key, rules.window or 1)
