"""The parts of a Hugging Face config.json that take more than reading a key. Torch-free.

Each function follows what the family's own config class and model do in transformers 5
(`models/{qwen2,qwen3,llama,mistral}`), and raises ConfigError for what the engine would compute differently.
"""

from __future__ import annotations

from lockstep.engine.config.families import FamilyRules
from lockstep.engine.config.fields import Fields
from lockstep.engine.errors import ConfigError
from lockstep.engine.text import printable

FULL, SLIDING = "full_attention", "sliding_attention"

DEFAULT_WINDOW = 4096
#: Families whose models see everything in every layer.
WINDOWLESS = ("llama", "olmo2")


def refuse_unsupported(fields: Fields) -> None:
    """Features that would silently change the numbers."""
    if fields.word("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", "not a supported activation; supported is silu")
    if "quantization_config" in fields:
        raise fields.error(
            "quantization_config", "quantised weights are not supported; use the original ones"
        )
    if "per_layer_config" in fields:
        raise fields.error("per_layer_config", "layers of different sizes are not supported")


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
    elif rules.head_dim is not None:
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


def windows(fields: Fields, family: str, layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window in tokens, None where it sees everything."""
    types = _layer_types(fields, layers)
    if family in WINDOWLESS:
        if "sliding_window" in fields:
            raise fields.error("sliding_window", f"{family} has none")
        window = None
        types = types or [FULL] * layers
    elif family == "mistral":
        window = _window(fields)
        uniform = [SLIDING if window else FULL] * layers
        if types not in (None, uniform):
            raise ConfigError(
                f"{fields.where}: layer_types disagrees with sliding_window = {window}: "
                "all layers of mistral have the same window"
            )
        types = uniform
    else:
        window = _window(fields) if fields.flag("use_sliding_window", False) else None
        first = fields.size("max_window_layers", 28, least=0)
        types = types or [SLIDING if window and i >= first else FULL for i in range(layers)]
    if window is None and SLIDING in types:
        raise ConfigError(f"{fields.where}: layer_types names {SLIDING}, but no sliding window is in use")
    return tuple(window if kind == SLIDING else None for kind in types)


def _layer_types(fields: Fields, layers: int) -> list[str] | None:
    types = fields.words("layer_types")
    if types is None:
        return None
    if len(types) != layers:
        raise ConfigError(
            f"{fields.where}: layer_types has {len(types)} entries, num_hidden_layers is {layers}"
        )
    if other := sorted(set(types) - {FULL, SLIDING}):
        raise ConfigError(
            f"{fields.where}: layer_types names {printable(repr(other[0]))}; "
            f"supported are {FULL} and {SLIDING}"
        )
    return types


def _window(fields: Fields) -> int | None:
    """An explicit null switches the window off; an absent key means the config classes' default."""
    if "sliding_window" in fields.data and "sliding_window" not in fields:
        return None
    return fields.size("sliding_window", DEFAULT_WINDOW)
