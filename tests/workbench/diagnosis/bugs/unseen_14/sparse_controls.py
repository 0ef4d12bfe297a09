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


@control("combine", model="dots1", tp=2, ep=2)
def outputs_of_a_token_are_added_from_the_last_expert_to_the_first(p: Spoilt) -> None:
    """Each is multiplied by its weight and added to what there is, as a kernel does that scatters rows."""

    def combine(outputs, weights):
        total = torch.zeros_like(outputs[:, 0])
        for slot in reversed(range(outputs.shape[1])):
            total = total + outputs[:, slot] * weights[:, slot, None]
        return total

    p.rules(combine=combine)


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
    """As kernels with absorbed matrices do: the probabilities weigh latents, of which each head makes its
    context.
    """

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


@control("convolution", model="lfm2-moe", tp=2, ep=2)
def short_convolution_is_a_sum_of_shifted_rows_from_the_newest(p: Spoilt) -> None:
    def convolved(rows, weight):
        width = weight.shape[1]
        new = len(rows) - width + 1
        return sum(rows[i : i + new] * weight[:, i] for i in reversed(range(width)))

    p.rules(plain_conv=convolved)
