"""Harmless changes: what engines do otherwise, and rightly. Each moves bits, no one more than rounding does."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from lockstep.engine.rules import mamba
from lockstep.engine.rules.norm import scaled
from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt


@control("combine", model="olmoe", tp=2, ep=2)
def slots_are_summed_from_the_last(p: Spoilt) -> None:
    def combine(outputs, weights):
        total = torch.zeros_like(outputs[:, 0], dtype=torch.float32)
        for slot in reversed(range(outputs.shape[1])):
            total = total + outputs[:, slot].float() * weights[:, slot, None].float()
        return total.to(outputs.dtype)

    p.rules(combine=combine)


@control("combine", model="deepseek-v2", dtype="bfloat16", ep=1)
def routed_and_shared_are_rounded_once(p: Spoilt) -> None:
    """The shared expert is an epilogue of the combine, in float32."""

    held = {}

    def combine(outputs, weights):
        held["wide"] = (outputs.float() * weights.float().unsqueeze(-1)).sum(1)
        return held["wide"].to(outputs.dtype)

    def add(routed, shared, gate, comm):
        return (held["wide"] + shared.float()).to(routed.dtype)

    p.rules(combine=combine, shared_expert=add)


@control("routing", model="mixtral", dtype="bfloat16", tp=2, ep=1)
def weights_come_from_logarithms(p: Spoilt) -> None:
    """log softmax, and the exponential of what is over after the chosen ones' sum."""

    def weights(scores, ids, correction, experts):
        taken = scores.log().gather(-1, ids)
        return (taken - taken.logsumexp(-1, keepdim=True)).exp()

    p.rules(choice_weights=weights)


@control("routing", model="glm4-moe", tp=2, ep=2)
def factor_is_divided_by_the_sum_first(p: Spoilt) -> None:
    """The factor over the sum is one number a token."""

    def weights(scores, ids, correction, experts):
        taken = scores.gather(-1, ids)
        return taken * (experts.factor / (taken.sum(-1, keepdim=True) + experts.shares_eps))

    p.rules(choice_weights=weights)


@control("experts", model="qwen3-moe", ep=1)
def all_experts_compute_all_rows_in_one_product(p: Spoilt) -> None:
    """And what was not chosen is not read."""

    def spoil(decoder):
        for i in (0, 2):
            moe = decoder.layers[i].mlp
            stack = torch.cat(
                [torch.cat(list(one.gate_up.parameters().values())) for one in moe.experts]
            )  # [E * 2 I, H]

            def products(x, ids, rows, stack=stack, moe=moe):
                sizes = moe.experts[0].gate_up.sizes
                every = (x[:, 0].double() @ stack.double().T).to(x.dtype).unflatten(-1, (-1, sum(sizes)))
                chosen = every.gather(1, ids.unsqueeze(-1).expand(-1, -1, sum(sizes)))
                return chosen.split_with_sizes(sizes, -1)

            moe._products = products

    p.loaded(spoil)


@control("reduce", model="glm4-moe", dtype="bfloat16", tp=4, ep=2)
def ranks_are_summed_from_the_last_in_their_dtype(p: Spoilt) -> None:
    def reduce(partial, comm):
        total, *rest = comm.ring.gather(comm.rank, partial.clone())[::-1]
        for other in rest:
            total = total + other
        return partial.copy_(total)

    p.rules(reduce=reduce)


@control("attention", model="gemma2", ep=1)
def tanh_of_the_cap_by_exponentials(p: Spoilt) -> None:
    p.rules(soft_cap=lambda x, cap: cap * (1 - 2 / (1 + torch.exp(2 * x / cap))))


@control("attention", model="gpt-oss", tp=2, ep=1)
def sink_begins_the_online_sum(p: Spoilt) -> None:
    """Its exponential is there before the first key's, and the maximum is that of both."""

    def softmax(scores, sinks, dtype):
        wide, sinks = scores.float(), sinks.float()
        most = torch.maximum(wide.amax(-1, keepdim=True), sinks)
        powers = (wide - most).exp()
        return (powers / ((sinks - most).exp() + powers.sum(-1, keepdim=True))).to(dtype)

    p.rules(sinks=softmax)


@control("attention", model="olmo3", ep=1)
def powers_of_two_in_the_softmax(p: Spoilt) -> None:
    def softmax(scores, dtype):
        wide = scores.float() * math.log2(math.e)
        powers = torch.exp2(wide - wide.amax(-1, keepdim=True))
        return (powers / powers.sum(-1, keepdim=True)).to(dtype)

    p.rules(softmax=softmax)


@control("norm", model="minimax-m2", tp=4, ep=4)
def squares_of_the_ranks_are_gathered_and_summed_backwards(p: Spoilt) -> None:
    def summed(squares, comm):
        return torch.stack(comm.ring.gather(comm.rank, squares.clone())[::-1]).double().sum(0).float()

    p.rules(sum_squares=summed)


@control("latent", model="deepseek-v3", tp=2, ep=1)
def keys_are_absorbed_into_the_queries(p: Spoilt) -> None:
    """A query goes through the key half of the expansion, and meets the latents themselves."""

    def spoil(decoder):
        for layer in decoder.layers:
            attention, cached = layer.attention, {}
            read = attention._without_index

            def kept(rows, read=read, cached=cached):
                cached["latent"], cached["rope"] = read(rows)
                return cached["latent"], cached["rope"]

            def scores(one, tile, attention=attention, cached=cached):
                plain = attention.latent.plain_dim
                (weight,) = attention.products["kv_b_proj"].parameters().values()
                into = weight.unflatten(0, (attention.heads, -1))[:, :plain]  # [heads, plain, latent]
                q = one.q[tile.heads, :, tile.rows]
                absorbed = q[..., :plain] @ into[tile.heads].unsqueeze(1)
                latents, rope = (cached[name][tile.keys, 0] for name in ("latent", "rope"))
                found = (absorbed @ latents.T + q[..., plain:] @ rope.T) * attention.scale
                if (bias := one.bias(tile)) is not None:
                    found[..., -bias.shape[1] :] += bias
                return found

            attention._without_index, attention._scores = kept, scores

    p.loaded(spoil)


@control("state", model="qwen3-next", tp=2, ep=2)
def state_goes_on_token_by_token(p: Spoilt) -> None:
    def rule(state, q, k, v, beta, decay):
        read = []
        for t in range(len(q)):
            state = state * decay[t].exp()[:, None, None]
            wrong = v[t].float() - (state * k[t][..., None]).sum(1)
            state = state + k[t][..., None] * (beta[t][:, None] * wrong)[:, None]
            read.append((state * (q[t] * q.shape[-1] ** -0.5)[..., None]).sum(1))
        return torch.stack(read), state

    p.rules(delta_rule=rule)


@control("state", model="nemotron-h-moe", tp=2, ep=2)
def scan_of_mamba_in_chunks_of_four(p: Spoilt) -> None:
    """The configuration's own size; the engine takes more at a time."""

    def scan(state, x, b, c, step, rate):
        parts = []
        for start in range(0, len(x), 4):
            own = slice(start, start + 4)
            part, state = mamba.scan(state, x[own], b[own], c[own], step[own], rate)
            parts.append(part)
        return torch.cat(parts), state

    p.rules(ssm_scan=scan)


@control("state", model="lfm2", ep=1)
def convolution_as_a_sum_of_shifted_rows(p: Spoilt) -> None:
    def summed(rows, weight):
        count = len(rows) - weight.shape[1] + 1
        terms = [rows[i : i + count].float() * weight[:, i].float() for i in range(weight.shape[1])]
        return sum(terms[::-1]).to(rows.dtype)

    p.rules(plain_conv=summed)


@control("state", model="qwen3.5", ep=1)
def softplus_of_the_decay_in_two_branches(p: Spoilt) -> None:
    """max(x, 0) + log(1 + exp(-|x|))."""

    def decay(a, a_log, dt_bias):
        x = a.float() + dt_bias
        return -torch.exp2(a_log.float() * math.log2(math.e)) * (x.clamp(min=0) + (-x.abs()).exp().log1p())

    p.rules(decay=decay)


@control("state", model="qwen3.5", dtype="bfloat16", tp=2, ep=1)
def gated_norm_is_rounded_once(p: Spoilt) -> None:
    def gated(x, weight, gate, eps):
        normed = F.rms_norm(x.float(), x.shape[-1:], None, eps)
        return (weight.float() * normed * F.silu(gate.float())).to(x.dtype)

    p.rules(gated_norm=gated)


@control("indexer", model="deepseek-v32", tp=2, ep=1)
def heads_of_the_indexer_are_added_one_by_one(p: Spoilt) -> None:
    """Queries carry the scale."""

    def scores(q, k, weights, config):
        total = torch.zeros(len(q), len(k))
        for head in reversed(range(q.shape[1])):
            product = (q[:, head].float() * config.dim**-0.5) @ k.float().T
            total = total + product.relu() * (weights[:, head, None].float() * config.heads**-0.5)
        return total

    p.rules(index_scores=scores)


@control("norm", model="gemma3", ep=1)
def norms_divide_by_the_root(p: Spoilt) -> None:
    def norm(x, weight, eps, form):
        wide = x.float()
        normed = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
        return scaled(normed, weight, form, x.dtype)

    p.rules(norm=norm)
