"""Multi-head latent attention, and indexers that choose its keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.engine.batch import SequenceSpan
from lockstep.engine.config import ModelConfig
from lockstep.engine.config.indexer import IndexerConfig
from lockstep.engine.layers.latent_attention import LatentAttention
from lockstep.engine.layers.sparse_attention import SparseAttention
from lockstep.engine.layers.step_inputs import StepInputs
from lockstep.engine.model import Decoder
from lockstep.engine.rules import indexer
from lockstep.engine.rules.norm import layer_norm
from lockstep.engine.rules.rope import rotate_half_split
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

INDEX_SCORES = ("attn.index_scores",)


# -- latents -------------------------------------------------------------------------------------------------


@bug(
    "expansion",
    accepted=("linear", "weight", "sharding", "heads"),
    words="head|row|weight|shift|order|value|slice",
    taps=("attn.kv_b_proj",),
    ranks=(1,),
    model="deepseek-v3",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def rows_of_the_values_lie_one_head_further_on_the_second_rank(p: Spoilt) -> None:
    """W_UV is cut out of kv_b_proj once more for the absorbed product, with an offset that counts the first head."""

    def spoil(decoder: Decoder) -> None:
        for layer in decoder.layers:
            attention = layer.attention
            assert isinstance(attention, LatentAttention)
            (weight,) = attention.products["kv_b_proj"].weight.parts().values()
            values = weight.unflatten(0, (attention.heads, -1))[:, attention.latent.plain_dim :]
            values.copy_(values.roll(1, 0).clone())

    if p.rank == 1:
        p.loaded(spoil)


@bug(
    "rotation",
    accepted=("rope", "positions"),
    words="rotat|rope|turn|position|angle",
    taps=("attn.q_rope",),
    step=1,
    model="glm4-moe-lite",
    ep=1,
)
def fused_kernel_of_decode_turns_the_shared_key_alone(p: Spoilt) -> None:
    """Rotation is fused with the write into the cache, and the step that turned queries was taken out with it."""

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate_half_split(x, cos, sin) if x.shape[1] == 1 else x

    p.rules(rope=p.later(rotate_half_split, turn))


@bug(
    "scale",
    accepted=("scores", "scale"),
    words="scal|factor|mscale|yarn|times|multipl|width|channel|divid",
    taps=("attn.scores",),
    model="deepseek-v2-lite",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def scale_has_neither_what_yarn_adds_nor_the_rotated_channels(p: Spoilt) -> None:
    """Two at once: a backend makes the scale itself, from qk_nope_head_dim (yarn's part: tpu-inference #521)."""

    def scale(model: ModelConfig) -> float:
        assert model.latent is not None
        return float(model.latent.plain_dim**-0.5)

    p.rules(scale=scale)


@bug(
    "temperature",
    accepted=("query_scaling", "scale", "times"),
    words="factor|scal|position|quer|temperature|multipl|number|times",
    taps=("attn.q_scaled",),
    ranks=(1,),
    model="mistral4",
    tp=2,
    ep=1,
)
def second_rank_does_not_scale_its_queries_by_their_position(p: Spoilt) -> None:
    """llama_4_scaling_beta is read from a configuration that the worker has not been sent."""
    if p.rank == 1:
        p.rules(query_factor=lambda positions, scaling: torch.ones(len(positions)))


# -- indexers ------------------------------------------------------------------------------------------------


class _Stale(SparseAttention):
    """In a decode step the choice of the step before."""

    earlier: dict[int, Tensor]

    def _chosen(self, index: int, span: SequenceSpan, inputs: StepInputs, tiling: Any) -> Tensor | None:
        held = self.earlier.get(index)
        self.earlier[index] = inputs.chosen[index][-1:].clone()
        if held is not None:
            inputs.chosen[index] = held
        return super()._chosen(index, span, inputs, tiling)


@bug(
    "shared choice",
    accepted=("shared_choice", "key_choice", "cache"),
    words="stale|before|step|earlier|old|previous|last",
    taps=("attn.shared_chosen",),
    layers=(1,),
    step=1,
    model="glm-moe-dsa",
    tp=2,
    ep=1,
)
def layer_that_shares_a_choice_takes_that_of_the_step_before(p: Spoilt) -> None:
    """Index buffers of two steps take turns, and the layer without an indexer was captured with the other one."""

    def spoil(decoder: Decoder) -> None:
        attention = decoder.layers[1].attention
        attention.__class__ = _Stale
        attention.earlier = {}

    p.loaded(spoil)


@bug(
    "index cache",
    accepted=("index_scores", "scale", "cache"),
    words="scal|quanti|divid|factor|magnitude|length|times",
    taps=INDEX_SCORES,
    step=1,
    model="deepseek-v32",
    tp=2,
    ep=1,
)
def index_keys_of_decode_are_read_without_their_scales(p: Spoilt) -> None:
    """Codes and scales of a page lie behind each other; the paged kernel of logits reads the codes alone."""

    def score(q: Tensor, k: Tensor, weights: Tensor, config: IndexerConfig) -> Tensor:
        return indexer.scores(q, k / k.abs().amax(-1, keepdim=True), weights, config)

    p.rules(index_scores=p.later(indexer.scores, score))


@bug(
    "index scores",
    accepted=("index_scores",),
    words="relu|negativ|weigh|posit|clamp|clip",
    taps=INDEX_SCORES,
    layers=(2,),
    model="glm-moe-dsa",
    ep=1,
)
def last_indexer_adds_its_heads_without_relu_and_without_weights(p: Spoilt) -> None:
    """Two at once: the fallback for shapes that the kernel does not know is a plain product."""

    def score(q: Tensor, k: Tensor, weights: Tensor, config: IndexerConfig) -> Tensor:
        return (q.float() @ k.float().T).sum(1) * config.dim**-0.5 * config.heads**-0.5

    p.rules((2,), index_scores=score)


@bug(
    "key choice",
    accepted=("key_choice",),
    words=r"few|half|number|four|missing|only|top|less|\b4\b",
    taps=("attn.index_chosen",),
    model="deepseek-v32",
    dtype="bfloat16",
    ep=1,
)
def indexer_gives_half_of_the_keys_that_it_may_choose(p: Spoilt) -> None:
    """The radix selection has room for as many keys as one block of threads, and the rest of the table stays -1."""

    def choose(scores: Tensor, top_k: int) -> Tensor:
        few = indexer.best_keys(scores, top_k // 2)
        return torch.nn.functional.pad(few, (top_k - top_k // 2, 0), value=-1)

    p.rules(key_choice=choose)


@bug(
    "index norm",
    accepted=("norm", "bias", "weight"),
    words="bias|norm|shift|add",
    taps=("attn.index_k_norm",),
    ranks=(1,),
    model="deepseek-v32",
    tp=2,
    ep=2,
)
def second_rank_norms_its_index_keys_without_the_bias(p: Spoilt) -> None:
    """k_norm of the indexer is the only norm with a bias, which is sent to further ranks with the weights of linear
    layers alone."""
    if p.rank == 1:
        p.rules(index_norm=lambda bias, x, weight, eps, form: layer_norm(None, x, weight, eps, form))
