"""Choosing the next token from a row of logits: greedy, or sampled under temperature, top-k and top-p.

The draw is keyed by (seed, sequence, position), not by a generator's history: going back, forking a
branch or changing the batch cannot change what a position draws, and every tp draws alike.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from lockstep.engine.run.results import TokenChoice
from lockstep.engine.run.sampling import Sampling


def uniform(seed: int, sequence: int, position: int) -> float:
    """A number in [0, 1) that is a function of its key alone."""
    key = f"{seed}/{sequence}/{position}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64


def choose(logits: Tensor, sampling: Sampling, sequence: int, position: int, top: int = 20) -> TokenChoice:
    """Choose from logits [vocab] for the token at `position` of `sequence`.

    NaN never wins by accident: a row that holds NaN yields its first NaN's index, as argmax does in
    torch, and so breaks visibly and the same way every time.
    """
    row = logits.double().cpu()
    highest = row.max()
    # Below -800 exp is 0 in float64: cut there, so that 0 * -inf cannot make a NaN of the entropy.
    shifted = (row - highest).clamp_(min=-800)
    weights = shifted.exp()
    total = weights.sum()
    log_z = highest + total.log()
    entropy = total.log() - weights @ shifted / total  # minus the sum of p log p
    top_logits, top_ids = row.topk(min(top, row.numel()))
    greedy = sampling.temperature == 0 or not bool(torch.isfinite(log_z))
    token = int(row.argmax()) if greedy else _draw(row, sampling, uniform(sampling.seed, sequence, position))
    return TokenChoice(token, top_ids.tolist(), top_logits.tolist(), float(log_z), float(entropy))


def _draw(row: Tensor, sampling: Sampling, u: float) -> int:
    """Inverse transform over the tokens in descending order of probability (ties: lower id first)."""
    ordered, ids = torch.sort(row, descending=True, stable=True)
    if sampling.top_k:
        ordered, ids = ordered[: sampling.top_k], ids[: sampling.top_k]
    # The largest is taken off first: divided by a tiny temperature the logits themselves would be infinite.
    probabilities = torch.softmax((ordered - ordered[0]) / sampling.temperature, 0)
    before = probabilities.cumsum(0) - probabilities
    kept = probabilities[before < sampling.top_p]  # the token that crosses top_p stays
    cumulative = kept.cumsum(0) / kept.sum()
    return int(ids[min(int(torch.searchsorted(cumulative, u, right=True)), kept.numel() - 1)])
