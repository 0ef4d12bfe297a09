"""How large the cache is (torch-free)."""

from __future__ import annotations

from lockstep.engine.config import EngineConfig, ModelConfig

#: Context in tokens where EngineConfig.max_tokens is not set.
DEFAULT_CONTEXT = 2048
#: Bytes of the states of linear attention that a rank keeps of passes before the newest one.
KEPT_STATE_BYTES = 256 << 20


def context_length(model: ModelConfig, config: EngineConfig) -> int:
    """The longest that one sequence may grow, in tokens."""
    return min(config.max_tokens or DEFAULT_CONTEXT, model.context)


def pool_blocks(model: ModelConfig, config: EngineConfig) -> int:
    """Blocks in the pool: as configured, or enough for every sequence at full context."""
    if config.num_blocks is not None:
        return config.num_blocks
    return config.max_sequences * -(-context_length(model, config) // config.block_size)
