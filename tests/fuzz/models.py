"""Random models of all families: every size, rotation, window and bias that a config.json may state, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from lockstep.engine.config import EngineConfig, ModelConfig, check_fit
from lockstep.engine.errors import ConfigError
from tests.checkpoints import CLASSES

DTYPES = ("float32", "float32", "bfloat16", "float16")
DEGREES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A family and what its config.json holds."""

    family: str
    fields: dict[str, Any]

    @property
    def config(self) -> Any:
        """As transformers reads it."""
        return CLASSES[self.family][0](**self.fields)


#: Families whose config.json has one rotation, and the same weights by the same names.
ALIKE = ("llama", "mistral", "qwen2", "qwen3")


def random_model(chance: random.Random) -> RandomModel:
    """Two or three small layers."""
    family = chance.choice(ALIKE)
    kv_heads, group = chance.choice((1, 2, 3, 4)), chance.choice((1, 2, 3, 4))
    head_dim, layers = chance.choice((4, 8, 16, 32)), chance.choice((2, 3))
    hidden = kv_heads * group * head_dim
    fields: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": chance.randint(5, 150),
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "vocab_size": chance.randint(17, 300),
        "max_position_embeddings": 256,
        "rms_norm_eps": chance.choice((1e-6, 1e-5, 1e-3)),
        "tie_word_embeddings": chance.random() < 0.5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "rope_parameters": _rotation(chance, head_dim),
    }
    if family in ("qwen3", "mistral") or chance.random() < 0.3:
        fields["head_dim"] = head_dim
        if family != "qwen2" and chance.random() < 0.5:  # a head's width is not the hidden size's share
            fields["hidden_size"] = kv_heads * group * chance.choice((2, 6, 10))
    if family == "mistral":
        fields["sliding_window"] = chance.choice((None, 4, 9, 16))
    if family in ("qwen2", "qwen3") and chance.random() < 0.4:
        fields |= {"use_sliding_window": True, "sliding_window": chance.choice((4, 9, 16)),
                   "max_window_layers": chance.randint(0, layers)}  # fmt: skip
    if family in ("llama", "qwen3"):
        fields["attention_bias"] = chance.random() < 0.5
    if family == "llama":
        fields["mlp_bias"] = chance.random() < 0.5
    return RandomModel(family, fields)


def _rotation(chance: random.Random, head_dim: int) -> dict[str, Any]:
    kind = chance.choice(("default", "default", "linear", "dynamic", "llama3", "yarn", "longrope"))
    fields: dict[str, Any] = {"rope_type": kind, "rope_theta": chance.choice((1e4, 5e5, 1e6))}
    if kind != "default":
        fields["factor"] = chance.choice((2.0, 4.0, 8.0))
    if kind in ("llama3", "yarn", "longrope"):
        fields["original_max_position_embeddings"] = chance.choice((16, 32, 64))
    if kind == "llama3":
        fields |= {"low_freq_factor": 1.0, "high_freq_factor": chance.choice((2.0, 4.0))}
    if kind == "longrope":
        fields |= {
            name: [round(chance.uniform(1, 8), 2) for _ in range(head_dim // 2)]
            for name in ("short_factor", "long_factor")
        }
    return fields


def random_degree(chance: random.Random, model: ModelConfig) -> int:
    """A tensor parallelism that the model can be split by."""
    return chance.choice([tp for tp in DEGREES if _fits(model, tp)])


def _fits(model: ModelConfig, tp: int) -> bool:
    try:
        check_fit(model, EngineConfig(tp=tp))
    except ConfigError:
        return False
    return True


def random_prompts(chance: random.Random, vocabulary: int) -> list[list[int]]:
    """Up to three, from a single token to more than windows and a cache's block hold; the highest id among them."""
    lengths = [chance.choice((1, 2, 5, 9, 15, 16, 17, 33, 40)) for _ in range(chance.choice((1, 1, 2, 3)))]
    prompts = [[chance.randrange(vocabulary) for _ in range(length)] for length in lengths]
    prompts[0][-1] = vocabulary - 1
    return prompts
