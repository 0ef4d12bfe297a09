"""Latent attention to the keys that an indexer chooses (DeepSeek-V3.2, arXiv:2512.02556).

Every rank has the whole indexer, and so chooses the same keys. An index key is cached behind the rotated part of its
token's key.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.engine.batch import SequenceSpan
from lockstep.engine.config import ModelConfig
from lockstep.engine.config.indexer import IndexerConfig
from lockstep.engine.config.latent import LatentConfig
from lockstep.engine.layers.latent_attention import LatentAttention
from lockstep.engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from lockstep.engine.layers.norm import LayerNorm
from lockstep.engine.layers.step_inputs import StepInputs
from lockstep.engine.layers.tiles import Tiling
from lockstep.engine.layers.weight import KeptTensor, Store
from lockstep.engine.layers.wiring import Wiring
from lockstep.engine.parallel import shards
from lockstep.engine.rules.rope import in_first_channels

#: Products of queries with keys, of all heads, that are made at a time.
_CELLS = 1 << 22
_PRODUCTS = ("index_q_proj", "index_k_proj", "index_weights")
_TAPS = (*_PRODUCTS, "index_q_rope", "index_k_rope", "index_k_cache", "index_scores", "index_chosen")


class Indexer:
    """One layer's: scores of all keys that queries see, and the best of them."""

    def __init__(
        self,
        model: ModelConfig,
        latent: LatentConfig,
        indexer: IndexerConfig,
        modules: Mapping[str, str],
        store: Store,
    ) -> None:
        self.config = indexer
        read = {"index_q_proj": latent.q_rank or 0}
        self.products = {
            tap: MergedColumnParallelLinear(
                [modules[f"attn.{tap}"]],
                [shards.Span(0, width)],
                read.get(tap, model.hidden_size),
                False,
                store,
            )
            for tap, width in zip(
                _PRODUCTS, (indexer.heads * indexer.dim, indexer.dim, indexer.heads), strict=True
            )
        }
        self.norm = LayerNorm(modules["attn.index_k_norm"], indexer.dim, model.as_indexer(), store)

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> the tensor, whole."""
        found: dict[str, Tensor | KeptTensor] = {**self.norm.parameters()}
        for product in self.products.values():
            found |= product.parameters()
        return found

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""
        self.rules = wiring.rules
        self.norm.bind(wiring, "attn.index_k_norm", wiring.rules.index_norm)
        self.rotate = in_first_channels(wiring.rules.rope, neighbours=self.config.neighbours)
        self.taps = {tap: wiring.tap(f"attn.{tap}") for tap in _TAPS}

    def _seen(self, tap: str, x: Tensor, sequence: int | None = None) -> Tensor:
        if callback := self.taps[tap]:
            callback(x, sequence)
        return x

    def _product(self, tap: str, x: Tensor) -> Tensor:
        (out,) = self.products[tap](x)
        return self._seen(tap, out)

    def written(self, x: Tensor, query: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """The index keys [T, 1, D] of tokens [T, hidden]; what their queries have is kept for `chosen`."""
        q = self._product("index_q_proj", query).unflatten(-1, (-1, self.config.dim))
        k = self.norm(self._product("index_k_proj", x)).unsqueeze(1)
        self.q = self._seen("index_q_rope", self.rotate(q, *rope))
        k = self._seen("index_k_rope", self.rules.index_keys(k, self.rotate, *rope))
        self.weights = self._product("index_weights", x)
        return k

    def chosen(self, index: int, span: SequenceSpan, keys: Tensor, inputs: StepInputs) -> Tensor:
        """The rows [T, S] that each query of one sequence attends to, of index keys [K, 1, D]."""
        self._seen("index_k_cache", keys, index)
        q, weights = (x[span.start : span.stop] for x in (self.q, self.weights))
        whole = self.taps["index_scores"] is not None
        size = max(1, _CELLS // (self.config.heads * len(keys)))
        parts = []
        for start in range(0, len(q), size):
            rows = slice(start, min(start + size, len(q)))
            sight = inputs.sight(index, rows, len(keys))
            found = self.rules.index_scores(q[rows], keys.squeeze(1), weights[rows], self.config)
            found = found.masked_fill_(~sight, -torch.inf)
            parts.append(found if whole else self.rules.key_choice(found, self.config.top_k))
        ids = torch.cat(parts)
        if whole:
            ids = self.rules.key_choice(
                self._seen("index_scores", ids.unsqueeze(0), index)[0], self.config.top_k
            )
        return self._seen("index_chosen", ids, index)


class SparseAttention(LatentAttention):
    """One layer's attention over this rank's heads. `indexer` is None where it takes an earlier layer's choice."""

    def __init__(
        self,
        layer: int,
        model: ModelConfig,
        latent: LatentConfig,
        modules: Mapping[str, str],
        o_proj: RowParallelLinear,
        store: Store,
    ) -> None:
        super().__init__(layer, model, latent, modules, o_proj, store)
        config = model.of_layer(layer).indexer
        assert config is not None, "a model whose attention is sparse"
        self.indexer = None if config.source is not None else Indexer(model, latent, config, modules, store)

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's share."""
        return super().parameters() | ({} if self.indexer is None else self.indexer.parameters())

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""
        super().bind(wiring)
        self.tap_shared = wiring.tap("attn.shared_chosen")
        if self.indexer is not None:
            self.indexer.bind(wiring)

    def _with_index(
        self, key: Tensor, x: Tensor, query: Tensor | None, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        if self.indexer is None:
            return key
        assert query is not None, "the configuration requires it"
        return torch.cat((key, self.indexer.written(x, query, rope)), -1)

    def _without_index(self, cached: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        latent, key = cached
        if self.indexer is None:
            return latent, key
        self.index_keys = key[..., self.latent.rope_dim :].contiguous()
        return latent, key[..., : self.latent.rope_dim].contiguous()

    def _chosen(self, index: int, span: SequenceSpan, inputs: StepInputs, tiling: Tiling) -> Tensor | None:
        if self.indexer is not None:
            inputs.chosen[index] = self.indexer.chosen(index, span, self.index_keys, inputs)
        elif self.tap_shared:
            inputs.chosen[index] = inputs.chosen[index].clone()  # a patch is of this layer and those after it
            self.tap_shared(inputs.chosen[index], index)
        return self.rules.chosen_keys(inputs.chosen[index], tiling.keys)
