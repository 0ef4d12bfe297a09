"""Sparse attention by an indexer as a configuration describes it: of each layer a small scorer of keys chooses which of
them a query attends to (DeepSeek-V3.2, arXiv:2512.02556). Torch-free, as transformers 5 (`models/deepseek_v32`,
`models/glm_moe_dsa`).
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.engine.config.fields import Fields
from lockstep.engine.config.latent import LatentConfig

#: Of the norm of index keys, whatever the model's other norms have.
INDEX_EPS = 1e-6
#: What transformers calls layers whose attention is sparse.
INDEXED = "indexed_attention"
_FULL, _SHARED = "full", "shared"


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """A query attends to the `top_k` keys of the highest score among those that it sees, to all where there are fewer.
    Scores are summed over `heads` of `dim` channels, of which the first are rotated as attention's are, or, where they
    are `neighbours`, in pairs (2i, 2i + 1). `sources`: of each layer that whose choice it takes, mostly its own;
    `source` of one layer: another one's, None: its own."""

    heads: int
    dim: int
    top_k: int
    neighbours: bool
    sources: tuple[int, ...]
    source: int | None = None


def indexer_of(
    fields: Fields, latent: LatentConfig, heads: int, *, neighbours: bool, shared: bool
) -> IndexerConfig:
    """From a configuration; `heads` is what the family assumes, `shared`: layers may take another one's choice."""
    if latent.q_rank is None:
        raise fields.error("q_lora_rank", "an indexer without a latent of queries is not supported")
    dim = fields.size("index_head_dim", 128)
    if dim < latent.rope_dim:
        raise fields.error("index_head_dim", f"fewer channels than are rotated ({latent.rope_dim})")
    layers = fields.size("num_hidden_layers")
    return IndexerConfig(
        fields.size("index_n_heads", heads),
        dim,
        fields.size("index_topk", 2048),
        neighbours,
        _sources(fields, layers) if shared else tuple(range(layers)),
    )


def _sources(fields: Fields, layers: int) -> tuple[int, ...]:
    """Of each layer that whose choice it takes: the last one before it, or itself, that has an indexer."""
    key, types = _types(fields, layers)
    if len(types) != layers or set(types) - {_FULL, _SHARED}:
        raise fields.error(key, f"expected {layers} words, {_FULL} or {_SHARED}")
    if types[0] != _FULL:
        raise fields.error(key, "the first layer has no earlier one whose choice it could take")
    sources: list[int] = []
    for layer, kind in enumerate(types):
        sources.append(layer if kind == _FULL else sources[-1])
    return tuple(sources)


def _types(fields: Fields, layers: int) -> tuple[str, tuple[str, ...]]:
    """Of each layer whether it has an indexer, and the key that states it: a list, a pattern, or every so many-th."""
    if (stated := fields.words("indexer_types")) is not None:
        return "indexer_types", tuple(stated)
    pattern = fields.data.get("index_topk_pattern")
    if isinstance(pattern, str):
        words = {"F": _FULL, "S": _SHARED}
        return "index_topk_pattern", tuple(words.get(one, one) for one in pattern)
    if (listed := fields.words("index_topk_pattern")) is not None:
        return "index_topk_pattern", tuple(listed)
    every = max(1, fields.size("index_topk_freq", 1, least=0))
    offset = fields.size("index_skip_topk_offset", 2, least=0)
    types = (_SHARED if max(i - offset + 1, 0) % every else _FULL for i in range(layers))
    return "index_topk_freq", tuple(types)
