"""Which keys are attended to: an indexer's scores and its choice."""

from __future__ import annotations

import torch

from lockstep.engine.rules import indexer
from lockstep.engine.rules.rope import in_first_channels, rotate_half_split
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt


@bug(
    "indexer",
    accepted=("key_choice",),
    words="choice|chos|newest|last|key|window|recent|top",
    taps=("attn.index_chosen",),
    step=1,
    model="deepseek-v32",
    ep=1,
)
def decode_takes_the_newest_keys_for_the_best(p: Spoilt) -> None:
    """mlx-lm#1443: older keys are gone beyond index_topk."""

    def newest(scores, top_k):
        order = torch.arange(scores.shape[-1], dtype=scores.dtype).expand_as(scores)
        return indexer.best_keys(order.masked_fill(scores == -torch.inf, -torch.inf), top_k)

    p.rules(key_choice=p.later(indexer.best_keys, newest))


@bug(
    "indexer",
    accepted=("rope",),
    words="rope|rotar|pair|neighbour|interleav|half|adjacent|turn|angle",
    taps=("attn.index_k_rope",),
    model="deepseek-v32",
    dtype="bfloat16",
    ep=1,
)
def index_keys_are_turned_by_the_pairs_of_the_other_convention(p: Spoilt) -> None:
    """The indexer's own convention is not that of the attention around it."""
    neighbours = not p.model.indexer.neighbours
    rotate = in_first_channels(rotate_half_split, neighbours=neighbours)
    p.rules(index_keys=lambda k, _, cos, sin: rotate(k, cos, sin))


@bug(
    "indexer",
    accepted=("cache", "input", "index_scores"),
    words="cache|row|late|shift|before|stale|position|key",
    taps=("attn.index_k_cache",),
    layers=(2,),
    step=1,
    model="deepseek-v32",
    tp=2,
    ep=1,
)
def index_keys_of_the_last_layer_are_cached_one_late(p: Spoilt) -> None:
    def spoil(decoder):
        attention = decoder.layers[2].attention
        right = attention._without_index

        def late(cached):
            found = right(cached)
            if p.decode:
                attention.index_keys = attention.index_keys.roll(1, 0)
            return found

        attention._without_index = late

    p.loaded(spoil)


@bug(
    "indexer",
    accepted=("index_scores", "activation"),
    words="relu|positive|negative|scores|weight|clamp",
    taps=("attn.index_scores",),
    layers=(0, 2),
    model="glm-moe-dsa",
    ep=1,
)
def index_scores_keep_what_is_negative(p: Spoilt) -> None:
    def whole(q, k, weights, config):
        products = q.float() @ k.float().T * config.dim**-0.5
        return (weights.float().unsqueeze(1) @ products).squeeze(1) * config.heads**-0.5

    p.rules(index_scores=whole)


@bug(
    "indexer",
    accepted=("index_scores", "softmax", "scale"),
    words="softmax|weight|scores|normal|scale|head",
    taps=("attn.index_scores",),
    layers=(2,),
    model="deepseek-v32",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def weights_of_the_index_heads_go_through_a_softmax(p: Spoilt) -> None:
    def shares(q, k, weights, config):
        return indexer.scores(q, k, weights.float().softmax(-1), config)

    p.rules((2,), index_scores=shares)


@bug(
    "indexer",
    accepted=("index_scores", "mask", "key_choice"),
    words="own|itself|newest|key|mask|sight|one|before|causal",
    taps=("attn.index_scores", "attn.index_chosen"),
    layers=(0, 2),
    model="glm-moe-dsa",
    tp=2,
    ep=1,
)
def query_may_not_choose_its_own_key(p: Spoilt) -> None:
    """Strictly below the diagonal; the first query alone sees itself."""

    def below(q_positions, rows, kv_positions):
        distance = q_positions[rows, None] - kv_positions[None, :]
        return (distance > 0) | ((distance == 0) & (kv_positions == 0))

    p.rules(index_sight=below)


@bug(
    "indexer",
    accepted=("mask", "scores", "key_choice", "shared_choice", "sharding"),
    words="rank|chos|choice|key|shift|one|other|mask|row",
    taps=("attn.scores", "attn.probs"),
    ranks=(1,),
    model="deepseek-v32",
    tp=2,
    ep=2,
)
def second_rank_counts_the_chosen_rows_from_one(p: Spoilt) -> None:
    if p.rank == 1:
        p.rules(chosen_keys=lambda ids, keys: indexer.chosen_alone((ids - 1).clamp(min=0), keys))


@bug(
    "indexer",
    accepted=("mask", "scores", "shared_choice", "key_choice"),
    words="all|key|mask|chos|choice|layer|dense|every",
    taps=("attn.scores", "attn.probs"),
    layers=(1,),
    model="glm-moe-dsa",
    dtype="bfloat16",
    ep=1,
)
def layer_that_shares_a_choice_attends_to_all_keys(p: Spoilt) -> None:
    """It has no indexer, and so its attention is taken for a dense one."""
    p.rules((1,), chosen_keys=lambda ids, keys: torch.ones(len(ids), keys, dtype=torch.bool))
