"""Harmless: the same by another kernel, in another order or another dtype within."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lockstep.engine.rules import recurrence
from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt


@control("renormalisation", model="qwen3-moe", ep=1)
def shares_are_made_by_the_reciprocal_of_the_sum(p: Spoilt) -> None:
    def shares(scores, ids, correction, experts):
        taken = scores.gather(-1, ids)
        return taken * (1 / taken.sum(-1, keepdim=True))

    p.rules(choice_weights=shares)


@control("scores", model="glm4-moe", tp=2, ep=2)
def sigmoid_of_the_router_by_a_tanh(p: Spoilt) -> None:
    p.rules(router_scores=lambda logits, experts: 0.5 * (1 + (0.5 * logits.float()).tanh()))


@control("combine", model="qwen3.5-moe", tp=2, ep=2)
def slots_are_summed_in_double_precision(p: Spoilt) -> None:
    def combine(outputs, weights):
        return (outputs.double() * weights.double().unsqueeze(-1)).sum(1).to(outputs.dtype)

    p.rules(combine=combine)


@control("activation", model="ernie4-5-moe", dtype="bfloat16", ep=1)
def silu_times_up_is_rounded_once(p: Spoilt) -> None:
    p.rules(act=lambda gate, up, activation: (F.silu(gate.float()) * up.float()).to(gate.dtype))


@control("sinks", model="gpt-oss", tp=2, ep=1)
def sinks_join_the_sum_behind_the_exponentials(p: Spoilt) -> None:
    """No column is put beside the scores."""

    def softmax(scores, sinks, dtype):
        most = scores.amax(-1, keepdim=True).maximum(sinks)
        found = (scores - most).exp()
        return (found / (found.sum(-1, keepdim=True) + (sinks - most).exp())).to(dtype)

    p.rules(sinks=softmax)


@control("softmax", model="gemma3", ep=1)
def softmax_in_two_parts_of_the_keys(p: Spoilt) -> None:
    """Each with its own maximum, joined by their sums; a part may be masked whole."""

    def softmax(scores, dtype):
        half = (scores.shape[-1] + 1) // 2
        parts = [one.float() for one in scores.split(half, -1)]
        tops = [one.amax(-1, keepdim=True).clamp(min=-1e30) for one in parts]
        found = [(one - top).exp() for one, top in zip(parts, tops, strict=True)]
        most = torch.stack(tops).amax(0)
        shares = [(top - most).exp() for top in tops]
        total = sum(one.sum(-1, keepdim=True) * by for one, by in zip(found, shares, strict=True))
        return torch.cat([one * (by / total) for one, by in zip(found, shares, strict=True)], -1).to(dtype)

    p.rules(softmax=softmax)


@control("norm", model="glm4", dtype="bfloat16", tp=2, ep=1)
def norms_round_once_behind_their_weight(p: Spoilt) -> None:
    def norm(x, weight, eps, form):
        return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)

    p.rules(norm=norm)


@control("rotation", model="smollm3", tp=2, ep=1)
def angles_are_made_in_double_precision(p: Spoilt) -> None:
    def angles(positions, inv_freq, factor, dtype):
        found = positions.double()[:, None, None] * inv_freq.double()
        return (found.cos() * factor).to(dtype), (found.sin() * factor).to(dtype)

    p.rules(rope_angles=angles)


@control("norm", model="youtu", ep=1)
def latents_are_divided_by_a_root(p: Spoilt) -> None:
    def norm(x, weight, eps, form):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    p.rules(norm=norm)


@control("softmax", model="deepseek-v3", tp=2, ep=2)
def latent_attention_has_its_softmax_in_double_precision(p: Spoilt) -> None:
    p.rules(softmax=lambda scores, dtype: scores.double().softmax(-1).to(dtype))


@control("delta", model="qwen3.5", ep=1)
def delta_rule_in_chunks_of_four(p: Spoilt) -> None:
    def in_chunks(state, *tokens):
        read = []
        for own in zip(*(one.split(4) for one in tokens), strict=True):
            part, state = recurrence.delta_rule(state, *own)
            read.append(part)
        return torch.cat(read), state

    p.rules(delta_rule=in_chunks)


@control("gated norm", model="qwen3-next", dtype="bfloat16", tp=2, ep=1)
def silu_of_the_gated_norm_is_rounded_before_the_product(p: Spoilt) -> None:
    """And the norm is weighed in float32."""

    def gated(x, weight, gate, eps):
        normed = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
        return (normed * F.silu(gate).float()).to(x.dtype)

    p.rules(gated_norm=gated)


@control("scan", model="bamba", tp=2, ep=1)
def scan_of_mamba_goes_token_by_token_in_double_precision(p: Spoilt) -> None:
    def scan(state, x, b, c, step, rate):
        read, state = [], state.double()
        for t in range(len(x)):
            left = (step[t] * rate).double().exp()[:, None, None]
            added = (step[t].unsqueeze(-1) * x[t]).double().unsqueeze(-1) * b[t].double().unsqueeze(-2)
            state = left * state + added
            read.append((state @ c[t].double().unsqueeze(-1)).squeeze(-1))
        return torch.stack(read).float(), state.float()

    p.rules(ssm_scan=scan)


@control("convolution", model="granite4", tp=2, ep=1)
def convolution_of_mamba_adds_its_bias_last(p: Spoilt) -> None:
    """In double precision, the kernel's columns from the newest on."""

    def convolved(rows, weight, bias):
        new, columns = len(rows) - weight.shape[1] + 1, range(weight.shape[1])
        total = sum(rows[i : i + new].double() * weight[:, i].double() for i in reversed(columns))
        return F.silu((total + bias.double()).to(rows.dtype))

    p.rules(ssm_conv=convolved)


@control("step", model="nemotron-h", ep=1)
def step_sizes_by_a_logarithm_of_two_exponentials(p: Spoilt) -> None:
    def step(dt, dt_bias, limits):
        x = dt.float() + dt_bias.float()
        return torch.logaddexp(x, torch.zeros_like(x)).clamp(*limits)

    p.rules(ssm_step=step)
