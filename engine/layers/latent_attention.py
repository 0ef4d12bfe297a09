"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Every rank makes the latent and the rotated part of the key of each token whole, and caches these. In each pass it makes
its own heads' keys and values of all cached rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.latent import LatentConfig
from lockstep.engine.kv.pool import KVPool
from lockstep.engine.layers.attention import Attention
from lockstep.engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from lockstep.engine.layers.norm import Norm
from lockstep.engine.layers.weight import KeptTensor, Store
from lockstep.engine.layers.wiring import TapCallback, Wiring
from lockstep.engine.parallel import shards

#: The products by their taps, without `attn.`.
_PRODUCTS = ("q_a_proj", "q_proj", "q_b_proj", "kv_a_proj", "kv_b_proj")


class LatentAttention(Attention):
    """One layer's attention over this rank's heads. `modules`: tap -> the checkpoint's module, whole."""

    def __init__(
        self,
        layer: int,
        model: ModelConfig,
        latent: LatentConfig,
        modules: Mapping[str, str],
        o_proj: RowParallelLinear,
        store: Store,
    ) -> None:
        self._take(layer, model, o_proj, 0)
        self.latent, comm = latent, o_proj.comm
        products = {tap: name for tap in _PRODUCTS if (name := modules.get(f"attn.{tap}")) is not None}
        read = {"q_b_proj": latent.q_rank or 0, "kv_b_proj": latent.kv_rank}
        widths = {
            "q_a_proj": shards.Span(0, latent.q_rank or 0),
            "kv_a_proj": shards.Span(0, latent.written_dim),
            "kv_b_proj": shards.span_of("expanded_heads", model, comm.size, comm.rank),
        }
        heads = shards.span_of("heads", model, comm.size, comm.rank)
        self.products = {
            tap: MergedColumnParallelLinear(
                [name], [widths.get(tap, heads)], read.get(tap, model.hidden_size),
                latent.bias and tap.endswith("_a_proj"), store,
            )
            for tap, name in products.items()
        }  # fmt: skip
        sizes = {"q_a_norm": latent.q_rank, "kv_a_norm": latent.kv_rank}
        self.norms = {
            tap: Norm(modules[f"attn.{tap}"], size, model, store, eps=latent.eps)
            for tap, size in sizes.items()
            if size is not None
        }

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's share."""
        params = self.o_proj.parameters()
        for product in self.products.values():
            params |= product.parameters()
        for norm in self.norms.values():
            params |= norm.parameters()
        return params

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""
        super().bind(wiring)
        self.unpaged = "keys and values are made from latents"

    def _bind_projections(self, wiring: Wiring) -> None:
        for tap, norm in self.norms.items():
            norm.bind(wiring, f"attn.{tap}")
        self.taps = {tap: wiring.tap(f"attn.{tap}") for tap in self.products}
        self.tap_rope_key = wiring.tap("attn.rope_key")
        self.cached_taps = [wiring.tap(f"attn.{tap}") for tap in ("latent_cache", "rope_cache")]
        self.tap_keys, self.tap_values = wiring.tap("attn.keys"), wiring.tap("attn.values")

    def _product(self, tap: str, x: Tensor) -> Tensor:
        (out,) = self.products[tap](x)
        if callback := self.taps[tap]:
            callback(out)
        return out

    def _written(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Queries [T, heads, D], and what is cached: latents [T, 1, kv_rank], the keys' rotated parts [T, 1, rope]."""
        query: Tensor | None = None
        if "q_a_norm" in self.norms:
            norm = self.norms["q_a_norm"]
            query = self.rules.query_latent(self._product("q_a_proj", x), norm.normalised)
            if norm.tap:
                norm.tap(query)
            q = self._product("q_b_proj", query)
        else:
            q = self._product("q_proj", x)
        q = self.rotate(q.unflatten(-1, (-1, self.head_dim)), *rope)
        if self.tap_q_rope:
            self.tap_q_rope(q)
        written = self.rules.written_latent(self._product("kv_a_proj", x), self.o_proj.comm)
        norm = self.norms["kv_a_norm"]
        latent, key = self.rules.split_latent(written, norm.normalised, self.latent.kv_rank)
        if norm.tap:
            norm.tap(latent)
        key = self.rotate(key.unsqueeze(1), *rope)
        if self.tap_rope_key:
            self.tap_rope_key(key)
        key = self._with_index(key, x, query, rope)
        return q, (self.rules.cache_heads(latent.unsqueeze(1), 1), self.rules.cache_heads(key, 1))

    def _with_index(
        self, key: Tensor, x: Tensor, query: Tensor | None, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        """What is cached beside latents [T, 1, …] of tokens [T, hidden] whose queries come from the latents `query`."""
        return key

    def _read(self, index: int, rows: Tensor, pool: KVPool) -> tuple[Tensor, Tensor]:
        """One sequence's keys [K, heads, D] and values [K, heads, value_dim]."""
        cached = self._without_index(pool.read(self.cache, rows))
        for tap, x in zip(self.cached_taps, cached, strict=True):
            if tap:
                tap(x, index)
        latent, rope_key = cached
        (expanded,) = self.products["kv_b_proj"](latent.flatten(1))
        self._seen(self.taps["kv_b_proj"], expanded, index)
        heads = expanded.unflatten(-1, (self.heads, -1))
        keys = self.rules.latent_keys(heads[..., : self.latent.plain_dim], rope_key)
        values = heads[..., self.latent.plain_dim :].contiguous()
        self._seen(self.tap_keys, keys, index)
        self._seen(self.tap_values, values, index)
        return keys, values

    def _without_index(self, cached: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Of what is cached [K, 1, …] the latents and the rotated parts of keys."""
        return cached

    @staticmethod
    def _seen(tap: TapCallback | None, x: Tensor, index: int) -> None:
        if tap:
            tap(x, index)
