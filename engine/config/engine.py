"""How a model is to be run: `EngineConfig`, and whether it fits the model. Torch-free.

A combination that cannot work is refused here, with the numbers that would work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.engine.config.model import DTYPES, DType, ModelConfig
from lockstep.engine.errors import ConfigError

#: A month: what sockets and timers everywhere can take.
LONGEST_TIMEOUT = 31 * 86_400.0

#: No tensor parallelism above this is suggested: a hostile config.json may claim 2**31 heads.
MOST_RANKS = 1024

#: Sequences above which an engine lays its weights out for many tokens at a time; a few read them faster as they are.
FEW_SEQUENCES = 8


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to run: parallelism, device, dtype, cache. Checked against the model by `check_fit`."""

    tp: int = 1
    ep: int = 1  # groups of ranks among which the experts are divided; each expert is split within its group
    device: str = "cpu"
    dtype: DType = "float32"
    block_size: int = 0  # tokens; 0: 16, on a GPU 256, the least page that FlashAttention-2 reads
    num_blocks: int | None = None  # None: enough for max_sequences at the model's context, within memory
    max_sequences: int = FEW_SEQUENCES
    max_tokens: int | None = None  # context to provide for; None: the model's
    poison_cache: bool = False  # slots that nobody wrote hold NaN, so that what reads one is seen
    chunk_tokens: int | None = None  # prefill at most so many tokens a forward; None: whole
    load: Literal["direct", "rank0"] = "direct"
    weights: Literal["dequantised", "quantised"] = "dequantised"  # a GGUF file's: dense, or in its blocks
    batch_invariant: bool = False  # on the CPU: the same bits alone and in a batch, but slower
    timeout_seconds: float = 60.0  # without progress, until a rank counts as hung
    start_timeout_seconds: float = 300.0  # the same while ranks start and load
    threads: int | None = None  # of each rank on the CPU; None: `machine.default_threads`
    listen: str = ""  # HOST:PORT where ranks that torchrun started are awaited; "": they are started here

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise ConfigError(f"tp must be at least 1, not {self.tp}")
        if self.ep < 1 or self.tp % self.ep:
            good = [str(ep) for ep in range(1, min(self.tp, MOST_RANKS) + 1) if self.tp % ep == 0]
            raise ConfigError(f"ep={self.ep} does not divide tp={self.tp}: use {_either(good)}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.weights == "quantised" and self.load == "rank0":
            raise ConfigError("weights that are kept quantised are read by each rank itself: use load=direct")
        if self.block_size < 0:
            raise ConfigError(
                f"block_size must be at least 1, or 0 for the device's own, not {self.block_size}"
            )
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ConfigError(f"a chunk of a prompt has at least 1 token, not {self.chunk_tokens}")
        for name, seconds in (
            ("timeout", self.timeout_seconds),
            ("start timeout", self.start_timeout_seconds),
        ):
            if not 0 < seconds <= LONGEST_TIMEOUT:
                raise ConfigError(
                    f"the {name} must be above 0 and at most {LONGEST_TIMEOUT:g} seconds, not {seconds}"
                )
        if self.block_size == 0:
            object.__setattr__(self, "block_size", 256 if self.device.startswith("cuda") else 16)

    @property
    def for_many(self) -> bool:
        """Whether weights are laid out, and attention is computed, for steps of many sequences (`engine.layers`)."""
        return self.max_sequences > FEW_SEQUENCES


def check_fit(model: ModelConfig, engine: EngineConfig) -> None:
    """Refuse a tensor parallelism that cannot split this model, naming the ones that can.

    `tp` must divide the query heads, and divide the KV heads or be a multiple of them (which replicates them). The
    vocabulary and the MLP's width need not divide: the last ranks hold less of them. `ep` must divide the experts.
    """
    problem = _misfit(model, engine.tp)
    if problem is None:
        _check_experts(model, engine)
        return
    good = [str(tp) for tp in range(1, min(model.num_heads, MOST_RANKS) + 1) if _misfit(model, tp) is None]
    raise ConfigError(f"tp={engine.tp} {problem}: use {_either(good)}")


def _misfit(model: ModelConfig, tp: int) -> str | None:
    """Why `tp` ranks cannot share the model; None where they can."""
    if model.num_heads % tp:
        return f"does not divide {model.num_heads} attention heads"
    for count in sorted({model.num_kv_heads, *(one.num_kv_heads for one in model.shapes)}):
        if count % tp and tp % count:
            return f"neither divides nor is a multiple of {count} key/value heads"
    if model.short_conv is not None and model.hidden_size % tp:
        return f"does not divide the {model.hidden_size} channels of short convolutions"
    if (mamba := model.mamba) is not None:
        if mamba.heads % tp:
            return f"does not divide {mamba.heads} heads of Mamba-2"
        if mamba.groups % tp and tp % mamba.groups:
            return f"neither divides nor is a multiple of {mamba.groups} groups of B and C of Mamba-2"
    if (linear := model.linear) is not None:
        if linear.value_heads % tp:
            return f"does not divide {linear.value_heads} linear value heads"
        if linear.key_heads % tp and tp % linear.key_heads:
            return f"neither divides nor is a multiple of {linear.key_heads} linear key heads"
    return None


def _check_experts(model: ModelConfig, engine: EngineConfig) -> None:
    """Refuse groups of ranks among which the experts cannot be divided."""
    if engine.ep == 1:
        return
    if model.experts is None:
        raise ConfigError(f"ep={engine.ep} divides experts among ranks, {model.family} has none: use ep=1")
    if (count := model.experts.count) % engine.ep:
        good = [str(ep) for ep in range(1, engine.tp + 1) if engine.tp % ep == 0 and count % ep == 0]
        raise ConfigError(
            f"ep={engine.ep} does not divide {count} experts: with tp={engine.tp} use {_either(good)}"
        )


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
