"""Harmless, of experts, latents and states: another formula, another order, another dtype within."""

from __future__ import annotations

import torch

from lockstep.engine.rules import mamba
from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt


@control("scores", model="granitemoe", tp=2, ep=2)
def scores_of_experts_are_powers_below_their_logarithmic_sum(p: Spoilt) -> None:
    def scores(logits, experts):
        wide = logits.float()
        return (wide - wide.logsumexp(-1, keepdim=True)).exp()

    p.rules(router_scores=scores)


@control("choice", model="dots1", tp=2, ep=2)
def experts_are_chosen_one_after_the_other(p: Spoilt) -> None:
    """Groups as well; what was taken is marked by minus infinity."""

    def best(scores, count):
        left, taken = scores.clone(), []
        for _ in range(count):
            taken.append(left.argmax(-1, keepdim=True))
            left.scatter_(-1, taken[-1], -torch.inf)
        return torch.cat(taken, -1)

    def choice(scores, correction, experts):
        corrected = scores + correction
        groups = corrected.unflatten(-1, (experts.groups, -1))
        sums = groups.gather(-1, best(groups.flatten(0, 1), experts.group_best).view(*groups.shape[:2], -1))
        allowed = torch.zeros(groups.shape[:2], dtype=torch.bool)
        allowed.scatter_(-1, best(sums.sum(-1), experts.top_groups), True)
        seen = groups.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
        return best(seen, experts.top_k).sort(-1).values

    p.rules(choice=choice)


@control("weights", model="mixtral", tp=2, ep=1)
def shares_are_a_softmax_of_the_chosen_logarithms(p: Spoilt) -> None:
    """As routers do that choose by logits."""

    def shares(scores, ids, correction, experts):
        return scores.gather(-1, ids).log().softmax(-1)

    p.rules(choice_weights=shares)


@control("activation", model="minimax-m2", tp=2, ep=2)
def silu_of_experts_is_made_by_a_tanh(p: Spoilt) -> None:
    def act(gate, up, activation):
        return gate * (1 + (gate / 2).tanh()) / 2 * up

    p.rules(act=act)


@control("latent", model="deepseek-v2-lite", tp=2, ep=1)
def values_are_made_of_weighed_latents(p: Spoilt) -> None:
    """As kernels with absorbed matrices do: the probabilities weigh latents, of which each head makes its context."""

    def spoil(decoder):
        for layer in decoder.layers:
            attention = layer.attention
            latent, right = attention.latent, attention._each
            (matrix,) = attention.products["kv_b_proj"].weight.parts().values()
            of_values = matrix.unflatten(0, (attention.heads, -1))[:, latent.plain_dim :]

            def each(
                q, batch, inputs, pool, attention=attention, latent=latent, right=right, of_values=of_values
            ):
                explicit = attention._explicit
                spans = iter(batch.spans)

                def absorbed(one):
                    explicit(one)
                    rows, _ = pool.read(attention.cache, next(spans).rows)
                    scores = (one.q @ one.k.mT).double() * attention.scale
                    if one.tiling.queries > 1:
                        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
                        scores = scores.masked_fill(hidden, -torch.inf)
                    weighed = scores.softmax(-1) @ rows.flatten(1).double()
                    return (weighed @ of_values.double().mT.unsqueeze(1)).to(q.dtype)

                attention._explicit = absorbed
                found = right(q, batch, inputs, pool)
                attention._explicit = explicit
                return found

            attention._each = each

    p.loaded(spoil)


@control("rule", model="qwen3-next", tp=2, ep=2)
def delta_rule_goes_token_by_token(p: Spoilt) -> None:
    def rule(state, q, k, v, beta, decay):
        parts = []
        for at in range(len(q)):
            state = state * decay[at].float().exp()[:, None, None]
            key = k[at].float().unsqueeze(1)
            wrong = (v[at].float().unsqueeze(1) - key @ state) * beta[at].float()[:, None, None]
            state = state + key.mT @ wrong
            parts.append((q[at].float().unsqueeze(1) @ state).squeeze(1) * q.shape[-1] ** -0.5)
        return torch.stack(parts), state

    p.rules(delta_rule=rule)


@control("scan", model="bamba", dtype="bfloat16", tp=2, ep=1)
def scan_goes_in_chunks_of_three_tokens(p: Spoilt) -> None:
    def scan(state, x, b, c, step, rate):
        parts = []
        for at in range(0, len(x), 3):
            read, state = mamba.scan(state, *(one[at : at + 3] for one in (x, b, c, step)), rate)
            parts.append(read)
        return torch.cat(parts), state

    p.rules(ssm_scan=scan)


@control("convolution", model="lfm2", dtype="bfloat16", tp=2, ep=1)
def short_convolution_is_a_sum_of_shifted_rows(p: Spoilt) -> None:
    """In float32 within, and rounded once."""

    def convolved(rows, weight):
        width = weight.shape[1]
        new = len(rows) - width + 1
        return sum(rows[i : i + new].float() * weight[:, i].float() for i in range(width)).to(rows.dtype)

    p.rules(plain_conv=convolved)
