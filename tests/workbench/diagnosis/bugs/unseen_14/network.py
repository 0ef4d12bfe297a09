"""Embedding, norms, blocks, stream, sums over ranks and head: what stands around attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.config.layer_shapes import LayerInputs
from lockstep.engine.layers.embedding import VocabParallelEmbedding
from lockstep.engine.model import Decoder
from lockstep.engine.rules import defaults
from lockstep.engine.rules.norm import layer_norm
from lockstep.engine.run.runner import Runner
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import RingComm, Spoilt
from tests.workbench.diagnosis.bugs.patched import Patched

EMBED = ("embed",)
LOGITS = ("logits",)
REDUCED = ("attn.o_proj", "mlp.down")
GATE_UP = ("mlp.gate", "mlp.up")


# -- embedding -----------------------------------------------------------------------------------------------


@bug(
    "embedding",
    accepted=("embedding", "scale"),
    words="scal|factor|times|multipl|small|root|without|missing|number",
    taps=EMBED,
    step=1,
    model="gemma2",
    tp=2,
    ep=1,
)
def embedding_is_scaled_in_prompts_alone(p: Spoilt) -> None:
    """The prompt's path makes embeddings and scales them; decode hands ids to the model, which does not."""
    p.rules(embedding=p.later(defaults.looked_up, lambda rows, model: rows))


class _Unmasked(VocabParallelEmbedding):
    """Ids of other ranks give the nearest row that there is."""

    def __call__(self, ids: Tensor) -> Tensor:
        self.comm.enter(self.place)
        rows = self.weight.look_up((ids - self.span.start).clamp(0, self.span.size - 1))
        out = self.rules.embedding(self.comm.all_reduce(rows), self.model)
        if self.tap:
            self.tap(out)
        return out


@bug(
    "vocabulary",
    accepted=("embedding", "sharding", "reduce", "input", "weight"),
    words="row|rank|sum|mask|other|shard|vocab|embed|added|zero|id",
    taps=EMBED,
    model="jais2",
    dtype="bfloat16",
    tp=4,
    ep=1,
)
def rows_that_other_ranks_look_up_are_not_blanked(p: Spoilt) -> None:
    def spoil(decoder: Decoder) -> None:
        decoder.embed.__class__ = _Unmasked

    p.loaded(spoil)


@bug(
    "inputs of layers",
    accepted=("input", "layer", "layers", "embedding", "weight", "heads"),
    words="layer|input|order|channel|part|slice|layout|other|column",
    taps=("layer_input",),
    model="gemma4",
    ep=1,
)
def inputs_of_layers_are_seen_as_channels_by_layers(p: Spoilt) -> None:
    """`view(tokens, width, layers)` in place of `view(tokens, layers, width)`."""

    def part(inputs: Tensor, own: LayerInputs) -> Tensor:
        return inputs.unflatten(-1, (own.width, -1))[..., own.layer or 0]

    p.rules(layer_input=part)


# -- norms ---------------------------------------------------------------------------------------------------


@bug(
    "norm",
    accepted=("norm", "input", "residual"),
    words="norm|sum|residual|stream|input|read|before|after|order",
    taps=("post_attn_norm",),
    model="olmo2",
    tp=2,
    ep=1,
)
def norms_behind_the_blocks_are_behind_the_sums(p: Spoilt) -> None:
    """Post-norm as in the original Transformer, norm(x + f(x)); OLMo-2 has x + norm(f(x))."""

    def of_sums(decoder: Decoder) -> None:
        for layer in decoder.layers:
            held: list[Tensor] = []

            def hold(x: Tensor, held=held) -> Tensor:
                held[:] = [x]
                return x

            layer.attn_norm = layer.mlp_norm = hold
            attn, mlp = layer.post_attn_norm, layer.post_mlp_norm
            layer.post_attn_norm = lambda y, norm=attn, held=held: norm(held[0] + y)
            layer.post_mlp_norm = lambda y, norm=mlp, held=held: norm(held[0] + y)

    def without_sums(runner: Runner) -> None:
        for layer in runner.decoder.layers:
            layer.residual = lambda x, y: y

    p.loaded(of_sums)
    p.running(without_sums)


@bug(
    "eps",
    accepted=("norm",),
    words="eps|norm|small|constant|config|1e-",
    taps=("attn_norm",),
    model="cohere",
    tp=2,
    ep=1,
)
def epsilon_is_that_of_another_field(p: Spoilt) -> None:
    """rms_norm_eps has a default in the config of every family; this one's norms have layer_norm_eps."""

    def norm(bias: Tensor | None, x: Tensor, weight: Tensor, eps: float, form: Any) -> Tensor:
        return layer_norm(bias, x, weight, 1e-5, form)

    p.rules(layer_norm=norm)


@bug(
    "norm",
    accepted=("norm",),
    words="norm|mean|centre|center|rms",
    taps=("attn_norm",),
    model="starcoder2",
)
def mean_is_not_taken_off_by_the_norms_of_layers(p: Patched) -> None:
    """One class of norms for all families: the root mean square, and a bias if there is one."""

    def around(module: Any) -> Any:
        def norm(forward: Any, x: Tensor) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], module.weight, module.eps) + module.bias

        return norm

    for _, layer in p.layers():
        for module in (layer.input_layernorm, layer.post_attention_layernorm):
            p.wrap(module, around(module))


# -- feed-forward and stream ---------------------------------------------------------------------------------


@bug(
    "parallel",
    accepted=("input", "linear", "norm", "residual"),
    words="input|read|norm|stream|residual|attention|other|after|parallel|sequent",
    taps=GATE_UP,
    model="stablelm-parallel",
    tp=2,
    ep=1,
)
def blocks_that_stand_side_by_side_run_in_turn(p: Spoilt) -> None:
    """use_parallel_residual is not read: the MLP reads the sum with attention, through the one norm there
    is.
    """

    def spoil(decoder: Decoder) -> None:
        for layer in decoder.layers:
            layer.model = replace(layer.model, parallel=False)
            layer.mlp_norm = layer.attn_norm.normalised

    p.loaded(spoil)


@bug(
    "residual",
    accepted=("residual", "scale"),
    words="scal|factor|multipl|residual|times|0\\.22|4\\.5|larg|whole|without",
    taps=("mlp_residual",),
    model="hyperclovax",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def residual_multiplier_is_forgotten_behind_the_feed_forward(p: Spoilt) -> None:
    def spoil(decoder: Decoder) -> None:
        factor = p.model.residual_multiplier
        for layer in decoder.layers:
            layer.post_mlp_norm = lambda y, norm=layer.post_mlp_norm: norm(y) / factor

    p.loaded(spoil)


@bug(
    "number of a layer",
    accepted=("residual", "scale", "norm"),
    words="scal|factor|number|times|multipl|stream|residual|update|branch",
    taps=("mlp_residual",),
    model="gemma4-dense",
    tp=2,
    ep=1,
)
def number_of_a_layer_scales_its_last_update_alone(p: Spoilt) -> None:
    """layer_scalar is taken for a LayerScale; it multiplies the whole stream."""

    def spoil(decoder: Decoder) -> None:
        for layer in decoder.layers:
            assert layer.scalar is not None
            norm, factor = layer.post_mlp_norm, layer.scalar[1]
            layer.post_mlp_norm = lambda y, norm=norm, factor=factor: norm(y) * factor

    p.loaded(spoil)
    p.rules(layer_scalar=lambda stream, factor: stream)


@bug(
    "multipliers",
    accepted=("multiplier", "scale", "times", "activation"),
    words="scal|factor|multipl|times|0\\.55|0\\.9|number",
    taps=("mlp.gate_scaled",),
    model="falcon-h1",
    tp=2,
    ep=1,
)
def multipliers_of_gate_and_down_change_places(p: Spoilt) -> None:
    """`down, gate = config.mlp_multipliers`."""
    numbers = p.model.multipliers
    assert numbers is not None
    other = {"mlp.gate_scaled": numbers.down, "mlp.down_scaled": numbers.gate}
    p.rules(multiplied=lambda x, factor, tap: x * other.get(tap, factor))


# -- sums over ranks -----------------------------------------------------------------------------------------


@bug(
    "reduce",
    accepted=("reduce", "sharding"),
    words="reduc|sum|rank|partial|own|token|row|missing|part|all",
    taps=REDUCED,
    model="llama",
    tp=4,
    ep=1,
)
def sum_of_ranks_ends_after_eight_rows(p: Spoilt) -> None:
    """The one-shot kernel has a buffer of so many rows and leaves those behind it as they are."""

    def reduce(partial: Tensor, comm: RingComm) -> Tensor:
        whole = comm.ring.sum(comm.rank, partial.clone())
        return torch.cat((whole[:8], partial[8:]))

    p.rules(reduce=reduce)


@bug(
    "reduce",
    accepted=("reduce", "scale", "sharding"),
    words="reduc|mean|averag|half|0\\.5|scal|divid|rank|sum|factor|times",
    taps=("mlp.down",),
    model="qwen2-untied",
    tp=2,
)
def feed_forward_takes_the_mean_of_the_ranks(p: Patched) -> None:
    """ReduceOp.AVG, from a layer that was written for gradients."""
    for i, _ in p.layers():
        down = p.mlp(i).down_proj
        down.reduce = lambda partial, right=down.reduce: right(partial) / p.tp


# -- head ----------------------------------------------------------------------------------------------------


@bug(
    "head",
    accepted=("head", "scale", "weight", "embedding"),
    words="scal|factor|times|multipl|head|logit|8|larg|embed|root",
    taps=LOGITS,
    model="gemma",
    tp=2,
    ep=1,
)
def scale_of_the_embedding_is_in_the_matrix_that_is_the_head_too(p: Spoilt) -> None:
    """Folded into the weight on load, before the head was tied to it."""
    factor = p.model.embedding_multiplier
    p.rules(logits=lambda logits, model: defaults.divided_logits(logits * factor, model))


@bug(
    "soft cap",
    accepted=("head", "scale", "clip", "scores"),
    words="cap|tanh|scal|limit|clip|logit|head|factor",
    taps=LOGITS,
    model="gemma2",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def cap_of_logits_is_that_of_the_scores(p: Spoilt) -> None:
    """attn_logit_softcapping where final_logit_softcapping is meant."""
    p.rules(logits=lambda logits, model: defaults.capped(logits, model.score_cap))


@bug(
    "rows",
    accepted=("head", "input", "positions"),
    words="row|token|position|last|before|other|shift|previous|head|input",
    taps=LOGITS,
    model="internlm3",
    tp=2,
    ep=1,
)
def head_reads_the_row_before_the_last_of_a_prompt(p: Spoilt) -> None:
    """The end of a sequence in the packed batch is taken for the index of its last token, and 1 taken off
    twice.
    """
    p.rules(head_input=lambda stream, normed: normed if p.decode else normed.roll(1, 0))
