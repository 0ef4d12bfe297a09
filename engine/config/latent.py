"""Multi-head latent attention as a configuration describes it: keys and values of all heads are made from one latent of
each token, which is what is cached (DeepSeek-V2, arXiv:2405.04434, section 2.1). Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.engine.config.fields import Fields

#: Of the norms of latents, whatever the model's other norms have: as transformers builds them.
LATENT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Of each token a latent of `kv_rank` channels gives every head's key, its first `plain_dim` channels, and its
    value, `value_dim`; `rope_dim` channels of the key are rotated and shared by all heads. Queries are made through a
    latent of `q_rank` channels, None: straight from the stream. `bias`: of the products that make latents."""

    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None
    bias: bool = False
    eps: float = LATENT_EPS

    @property
    def head_dim(self) -> int:
        """Channels of a query, and of a key."""
        return self.plain_dim + self.rope_dim

    @property
    def expanded_dim(self) -> int:
        """Channels that a head makes of a latent: its key's, its value's behind them."""
        return self.plain_dim + self.value_dim

    @property
    def written_dim(self) -> int:
        """Channels that a token's product gives: its latent's, the shared part of its key behind them."""
        return self.kv_rank + self.rope_dim


def latent_of(
    fields: Fields, plain_dim: int = 128, value_dim: int = 128, q_rank: int = 1536, kv_rank: int = 512
) -> LatentConfig:
    """From a configuration; the numbers are what the family assumes."""
    rope = fields.size("qk_rope_head_dim", 64)
    if rope % 2:
        raise fields.error("qk_rope_head_dim", "odd; rotary embedding turns pairs")
    through = "q_lora_rank" not in fields.data or "q_lora_rank" in fields  # null: no latent of queries
    return LatentConfig(
        fields.size("kv_lora_rank", kv_rank),
        fields.size("qk_nope_head_dim", plain_dim),
        rope,
        fields.size("v_head_dim", value_dim),
        fields.size("q_lora_rank", q_rank) if through else None,
        fields.flag("attention_bias", False),
    )
