"""Choosing the next token from a row of logits: greedy, or sampled under temperature, top-k and top-p.

The draw is keyed by (seed, sequence, position), not by a generator's history: going back, forking a
branch or changing the batch cannot change what a position draws, and every tp draws alike.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.engine.run.results import TokenChoice
from lockstep.engine.run.sampling import Sampling

#: Tokens with the highest logits that are kept of each choice.
TOP = 20


def uniform(seed: int, sequence: int, position: int) -> float:
    """A number in [0, 1) that is a function of its key alone."""
    key = f"{seed}/{sequence}/{position}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64


@dataclass(frozen=True, slots=True)
class Draw:
    """How the token for `position` of `sequence` is to be chosen."""

    sampling: Sampling
    sequence: int
    position: int


def choose(logits: Tensor, sampling: Sampling, sequence: int, position: int, top: int = TOP) -> TokenChoice:
    """Choose from logits [vocab] for the token at `position` of `sequence`.

    NaN never wins by accident: a row that holds NaN yields its first NaN's index, as argmax does in
    torch, and so breaks visibly and the same way every time.
    """
    return choose_each(logits[None], [Draw(sampling, sequence, position)], top)[0]


def choose_each(logits: Tensor, draws: Sequence[Draw], top: int = TOP) -> list[TokenChoice]:
    """`choose` from each row of logits [S, vocab]. A GPU reads all rows at once and hands over what is reported of
    them; on the CPU each row is read alone, so that its bits do not depend on the others."""
    parts = [logits] if logits.is_cuda else list(logits.split(1))
    found = np.concatenate([summary(part, top).cpu().numpy() for part in parts])
    return choose_by(found, logits, draws)


def choose_by(found: NDArray[np.float64], logits: Tensor, draws: Sequence[Draw]) -> list[TokenChoice]:
    """`choose` from each row of logits [S, vocab] and from its `summary`."""
    return [_choice(row, one, draw) for row, one, draw in zip(logits, found, draws, strict=True)]


def summary(logits: Tensor, top: int = TOP) -> Tensor:
    """What rows of logits [S, vocab] come to, [S, 3 + 2 * top] float64: normaliser, entropy, likeliest token, and the
    best tokens with their logits. Numbers of tokens are exact in float64. Nothing here waits for a GPU."""
    # Their copy is changed in place: to get and lose a megabyte of memory takes as long as a pass over it.
    rows = logits.to(torch.float64, copy=True)
    highest = rows.amax(-1, keepdim=True)
    # Below -800 exp is 0 in float64: cut there, so that 0 * -inf cannot make a NaN of the entropy.
    shifted = rows.sub_(highest).clamp_(min=-800)
    weights = shifted.exp()
    total = weights.sum(-1, keepdim=True)
    log_z = highest + total.log()
    entropy = total.log() - weights.mul_(shifted).sum(-1, keepdim=True) / total  # minus the sum of p log p
    # As they are: to select from two bytes takes a GPU a fraction of what eight take.
    best, ids = logits.topk(min(top, logits.shape[-1]))
    likeliest = logits.argmax(-1, keepdim=True)
    return torch.cat((log_z, entropy, *(one.double() for one in (likeliest, ids, best))), -1)


def _choice(row: Tensor, found: NDArray[np.float64], draw: Draw) -> TokenChoice:
    """From a row of logits [vocab] and what was reported of it."""
    log_z, entropy, token = found[:3].tolist()
    top = (len(found) - 3) // 2
    ids, best = found[3 : 3 + top], found[3 + top :]
    if draw.sampling.temperature and math.isfinite(log_z):
        u = uniform(draw.sampling.seed, draw.sequence, draw.position)
        token = _draw(row.double().cpu(), draw.sampling, u)
    return TokenChoice(int(token), ids.astype(np.int64).tolist(), best.tolist(), log_z, entropy)


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
