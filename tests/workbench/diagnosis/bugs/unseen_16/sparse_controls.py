"""Changes to sparse and recurrent models that are right: other orders of summation and equivalent formulas."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.config.families import Gating
from lockstep.engine.config.indexer import IndexerConfig
from lockstep.engine.kv.pool import KVPool
from lockstep.engine.layers.experts import MixtureOfExperts, Router
from lockstep.engine.layers.latent_attention import LatentAttention
from lockstep.engine.model import Decoder
from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.engine_ranks import RingComm, Spoilt


def _mixtures(decoder: Decoder) -> list[MixtureOfExperts]:
    return [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, MixtureOfExperts)]


# -- experts -------------------------------------------------------------------------------------------------


@control("router", model="mixtral", tp=2, ep=1)
def router_is_multiplied_in_float64(p: Spoilt) -> None:
    """Its logits are rounded once, behind the sum."""

    class Wide(Router):
        def __call__(self, x: Tensor) -> Tensor:
            (weight,) = self.weight.parts().values()
            return (x.double() @ weight.double().T).to(self.store.dtype)

    def change(decoder: Decoder) -> None:
        for mixture in _mixtures(decoder):
            mixture.router.__class__ = Wide

    p.loaded(change)


@control("router", model="qwen3-moe", tp=2, ep=2)
def softmax_over_the_chosen_logits_makes_the_shares(p: Spoilt) -> None:
    """The logarithms of a softmax differ from the logits by the same number, which cancels."""

    def weigh(scores: Tensor, ids: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
        return scores.gather(-1, ids).log().softmax(-1)

    p.rules(choice_weights=weigh)


@control("experts", model="qwen2-moe", tp=2, ep=2)
def products_of_experts_are_summed_in_two_parts(p: Spoilt) -> None:
    """Split-K: the columns' halves one after the other."""

    def change(decoder: Decoder) -> None:
        for mixture in _mixtures(decoder):
            for expert in mixture.experts[mixture.held.start : mixture.held.stop]:
                dense = torch.cat(list(expert.gate_up.weight.parts().values()))

                def product(x: Tensor, bias: Tensor | None = None, dense: Tensor = dense) -> Tensor:
                    half = x.shape[-1] // 2
                    return x[:, :half] @ dense[:, :half].T + x[:, half:] @ dense[:, half:].T

                expert.gate_up.weight.product = product  # type: ignore[method-assign]

    p.loaded(change)


@control("experts", model="hunyuan-moe", ep=1)
def silu_of_experts_is_made_of_a_tanh(p: Spoilt) -> None:
    """sigmoid(x) = (1 + tanh(x / 2)) / 2."""

    def act(gate: Tensor, up: Tensor, activation: Gating) -> Tensor:
        return gate * (0.5 * (1 + (0.5 * gate).tanh())) * up

    p.rules(act=act)


@control("combine", model="olmoe", tp=2, ep=2)
def slots_are_summed_from_the_last_to_the_first(p: Spoilt) -> None:
    """The kernel goes through a token's experts backwards."""

    def combine(outputs: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(outputs[:, 0])
        for slot in reversed(range(outputs.shape[1])):
            total = torch.addcmul(total, outputs[:, slot], weights[:, slot, None])
        return total

    p.rules(combine=combine)


@control("combine", model="granitemoe", dtype="bfloat16", tp=2, ep=1)
def outputs_are_weighed_before_they_are_widened(p: Spoilt) -> None:
    """Each product is rounded once, as it is where the down kernel multiplies by the weight."""

    def combine(outputs: Tensor, weights: Tensor) -> Tensor:
        terms = outputs * weights.to(outputs.dtype).unsqueeze(-1)
        return terms.float().sum(1).to(outputs.dtype)

    p.rules(combine=combine)


@control("sum over ranks", model="deepseek-v2", tp=4, ep=4)
def ranks_with_experts_are_summed_in_a_tree(p: Spoilt) -> None:
    """Pairs of neighbours first."""

    def reduce(partial: Tensor, comm: RingComm) -> Tensor:
        a, b, c, d = comm.ring.gather(comm.rank, partial.clone())
        return (a + c) + (b + d)

    p.rules(reduce=reduce)


# -- attention -----------------------------------------------------------------------------------------------


@control("latents", model="glm4-moe-lite", tp=2, ep=1)
def decode_multiplies_queries_by_what_makes_keys_of_latents(p: Spoilt) -> None:
    """Absorbed: q (W c) = (q W) c, and the rotated part beside it."""

    def change(decoder: Decoder) -> None:
        for one in (layer.attention for layer in decoder.layers):
            assert isinstance(one, LatentAttention)
            cached: list[Tensor] = []

            def read(
                index: int,
                rows: Tensor,
                pool: KVPool,
                one: Any = one,
                right: Any = one._read,
                cached: Any = cached,
            ) -> tuple[Tensor, Tensor]:
                found: tuple[Tensor, Tensor] = right(index, rows, pool)
                cached[:] = [x.squeeze(1).clone() for x in pool.read(one.cache, rows)]
                return found

            def scores(
                seen: Any, tile: Any, one: Any = one, right: Any = one._scores, cached: Any = cached
            ) -> Tensor:
                if not p.decode:
                    return right(seen, tile)
                (weight,) = one.products["kv_b_proj"].weight.parts().values()
                plain = one.latent.plain_dim
                own = weight.unflatten(0, (one.heads, -1))[tile.heads, None, :plain]
                q = seen.q[tile.heads, :, tile.rows]
                latent, rope = (x[tile.keys] for x in cached)
                return ((q[..., :plain] @ own) @ latent.T + q[..., plain:] @ rope.T) * one.scale

            one._read, one._scores = read, scores

    p.loaded(change)


@control("indexer", model="deepseek-v32", ep=1)
def heads_of_the_indexer_are_summed_one_by_one(p: Spoilt) -> None:
    """A loop over heads instead of a product of matrices."""

    def scores(q: Tensor, k: Tensor, weights: Tensor, indexer: IndexerConfig) -> Tensor:
        total = q.new_zeros(len(q), len(k))
        for head in range(q.shape[1]):
            own = (q[:, head] @ k.T).relu() * weights[:, head, None]
            total = total + own * (indexer.dim**-0.5 * indexer.heads**-0.5)
        return total

    p.rules(index_scores=scores)


@control("sinks", model="gpt-oss", tp=2, ep=2)
def sinks_come_in_by_a_sigmoid_behind_the_softmax(p: Spoilt) -> None:
    """exp(s) / (sum + exp(sink)) = softmax(s) sigmoid(log sum - sink)."""

    def beside(scores: Tensor, sinks: Tensor, dtype: torch.dtype) -> Tensor:
        wide = scores.float()
        share = (wide.logsumexp(-1, keepdim=True) - sinks.float()).sigmoid()
        return (wide.softmax(-1) * share).to(dtype)

    p.rules(sinks=beside)


@control("softmax", model="gemma3", tp=2, ep=1)
def softmax_of_a_window_is_made_of_powers_of_two(p: Spoilt) -> None:
    """2 ** (x log2 e)."""

    def softmax(scores: Tensor, dtype: torch.dtype) -> Tensor:
        wide = scores.float() * math.log2(math.e)
        powers = (wide - wide.amax(-1, keepdim=True)).exp2()
        return (powers / powers.sum(-1, keepdim=True)).to(dtype)

    p.rules(softmax=softmax)


@control("cap", model="gemma2", ep=1)
def tanh_of_the_cap_is_made_of_an_exponential(p: Spoilt) -> None:
    """tanh(x) = 1 - 2 / (exp(2 x) + 1), in float64 within."""

    def capped(scores: Tensor, cap: float) -> Tensor:
        wide = scores.double() / cap
        return (cap * (1 - 2 / ((2 * wide).exp() + 1))).to(scores.dtype)

    p.rules(soft_cap=capped)


# -- states --------------------------------------------------------------------------------------------------


@control("delta rule", model="qwen3-next", tp=2, ep=1)
def recurrence_of_the_delta_rule_is_a_loop(p: Spoilt) -> None:
    """The recurrence as it is defined, in place of products of matrices."""

    def rule(
        state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor
    ) -> tuple[Tensor, Tensor]:
        parts = []
        for t in range(len(q)):
            state = state * decay[t].float().exp()[:, None, None]
            found = torch.einsum("hd,hdv->hv", k[t].float(), state)
            wrong = beta[t].float()[:, None] * (v[t].float() - found)
            state = state + torch.einsum("hd,hv->hdv", k[t].float(), wrong)
            parts.append(torch.einsum("hd,hdv->hv", q[t].float(), state) * q.shape[-1] ** -0.5)
        return torch.stack(parts), state

    p.rules(delta_rule=rule)


@control("scan", model="bamba", tp=2, ep=1)
def mamba_s_scan_goes_token_by_token(p: Spoilt) -> None:
    """The same of Mamba-2."""

    def scan(
        state: Tensor, x: Tensor, b: Tensor, c: Tensor, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, Tensor]:
        parts = []
        for t in range(len(x)):
            into = (step[t, :, None] * x[t].float())[:, :, None] * b[t].float()[:, None, :]
            state = state * (step[t] * rate).exp()[:, None, None] + into
            parts.append(torch.einsum("hpn,hn->hp", state, c[t].float()))
        return torch.stack(parts), state

    p.rules(ssm_scan=scan)


@control("convolution", model="lfm2-moe", tp=2, ep=2)
def short_convolution_adds_shifted_rows(p: Spoilt) -> None:
    """The newest row first."""

    def convolve(rows: Tensor, weight: Tensor) -> Tensor:
        width, wide = weight.shape[1], rows.float()
        new = len(rows) - width + 1
        total = wide.new_zeros(new, rows.shape[1])
        for tap in reversed(range(width)):
            total = total + wide[tap : tap + new] * weight[:, tap].float()
        return total.to(rows.dtype)

    p.rules(plain_conv=convolve)
