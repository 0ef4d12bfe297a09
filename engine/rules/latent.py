"""The correct behaviour of latent attention (DeepSeek-V2, arXiv:2405.04434). T tokens, K cached rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.engine.parallel.comm import Comm


def normed_queries(x: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
    """The latents [T, q_rank] that queries are made of."""
    return norm(x)


def whole_latent(written: Tensor, comm: Comm) -> Tensor:
    """What a token's product gives, [T, kv_rank + rope]: every rank has made it whole."""
    return written


def normed_latent(written: Tensor, norm: Callable[[Tensor], Tensor], kv_rank: int) -> tuple[Tensor, Tensor]:
    """The latent [T, kv_rank], normed, and the part of the key that is rotated, as it is."""
    return norm(written[:, :kv_rank]), written[:, kv_rank:]


def with_shared_part(own: Tensor, shared: Tensor) -> Tensor:
    """Keys [K, heads, D]: each head's own channels [K, heads, plain], behind them those that all heads share
    [K, 1, rope]."""
    return torch.cat((own, shared.expand(-1, own.shape[1], -1)), -1)
