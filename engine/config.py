"""What a model is (`ModelConfig`) and how it is to be run (`EngineConfig`). Torch-free.

Sources: Hugging Face `config.json` and `generation_config.json`; DESIGN's rule that a combination
which cannot work is refused here, with the numbers that would work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from engine import config_hf
from engine.errors import ConfigError
from engine.fields import Fields
from engine.rope import RopeScaling, rope_from_hf

Family = Literal["qwen2", "qwen3", "llama", "mistral"]
DType = Literal["float32", "bfloat16", "float16"]
FAMILIES: tuple[Family, ...] = get_args(Family)
DTYPES: tuple[DType, ...] = get_args(DType)
MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder, whatever its family: sizes, and flags for what the families do differently.

    `windows[i]` is layer i's sliding window in tokens (itself included), None where it sees all.
    """

    family: Family
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    windows: tuple[int | None, ...] = ()
    dtype: DType = "float32"
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        where: str = "config.json",
    ) -> ModelConfig:
        """Read a Hugging Face `config.json` and `generation_config.json` as transformers 5 would.

        `where` names the file in errors. ConfigError for anything that the engine would compute differently.
        """
        fields = Fields(config, where)
        family = _family(fields)
        config_hf.refuse_unsupported(fields)
        heads = fields.size("num_attention_heads")
        hidden = fields.size("hidden_size")
        layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
        max_position = fields.size("max_position_embeddings", config_hf.MAX_POSITION[family])
        theta, scaling = rope_from_hf(fields, max_position)
        # Qwen2 always has q/k/v biases and never an o bias; Mistral has none: neither reads `attention_bias`.
        attention_bias = family in ("llama", "qwen3") and fields.flag("attention_bias", False)
        extra = Fields({} if generation is None else generation, "generation_config.json")
        bos = extra.ids("bos_token_id") or fields.ids("bos_token_id")
        return cls(
            family=family,
            hidden_size=hidden,
            intermediate_size=fields.size("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=config_hf.kv_heads(fields, family, heads),
            head_dim=config_hf.head_dim(fields, family, hidden, heads),
            vocab_size=fields.size("vocab_size"),
            max_position=max_position,
            rms_eps=fields.number("rms_norm_eps", 1e-6, above=0.0),
            rope_theta=theta,
            rope_scaling=scaling,
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=family == "llama" and fields.flag("mlp_bias", False),
            qk_norm=family == "qwen3",
            tie_embeddings=fields.flag("tie_word_embeddings", False),
            windows=config_hf.windows(fields, family, layers),
            dtype=_dtype(fields),
            bos_id=bos[0] if bos else None,
            eos_ids=extra.ids("eos_token_id") or fields.ids("eos_token_id"),
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to run: parallelism, device, dtype, cache. Checked against the model by `check_fit`."""

    tp: int = 1
    device: str = "cpu"
    dtype: DType = "float32"
    block_size: int = 0  # tokens; 0: 16, on a GPU 256, the least page that FlashAttention-2 reads
    num_blocks: int | None = None  # None: enough for max_sequences at the model's context, within memory
    max_sequences: int = 8
    max_tokens: int | None = None  # context to provide for; None: the model's
    chunk_tokens: int | None = None  # prefill at most so many tokens a forward; None: whole
    load: Literal["direct", "rank0"] = "direct"
    timeout_seconds: float = 60.0
    threads: int | None = None  # of each rank on the CPU; None: the cores shared evenly
    listen: str = ""  # HOST:PORT where ranks that torchrun started are awaited; "": they are started here

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise ConfigError(f"tp must be at least 1, not {self.tp}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.block_size < 0:
            raise ConfigError(
                f"block_size must be at least 1, or 0 for the device's own, not {self.block_size}"
            )
        if self.block_size == 0:
            object.__setattr__(self, "block_size", 256 if self.device.startswith("cuda") else 16)


def check_fit(model: ModelConfig, engine: EngineConfig) -> None:
    """Refuse a tensor parallelism that cannot split this model, naming the ones that can.

    `tp` must divide the query heads and the MLP's width, and divide the KV heads or be a multiple of them
    (which replicates them). The vocabulary is padded and need not divide.
    """
    problem = _misfit(model, engine.tp)
    if problem is None:
        return
    good = [str(tp) for tp in range(1, model.num_heads + 1) if _misfit(model, tp) is None]
    raise ConfigError(f"tp={engine.tp} {problem}: use {_either(good)}")


def _misfit(model: ModelConfig, tp: int) -> str | None:
    """Why `tp` ranks cannot share the model; None where they can."""
    if model.num_heads % tp:
        return f"does not divide {model.num_heads} attention heads"
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        return f"neither divides nor is a multiple of {model.num_kv_heads} key/value heads"
    if model.intermediate_size % tp:
        return f"does not divide the intermediate size {model.intermediate_size}"
    return None


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _family(fields: Fields) -> Family:
    name = fields.word("model_type")
    if name not in FAMILIES:
        raise fields.error("model_type", f"not a supported architecture; supported are {', '.join(FAMILIES)}")
    return name


def _dtype(fields: Fields) -> DType:
    key = "dtype" if "dtype" in fields else "torch_dtype"
    name = fields.word(key, "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise fields.error(key, f"not a supported dtype; supported are {', '.join(DTYPES)}")
    return name
