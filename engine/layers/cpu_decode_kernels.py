"""The kernel of `cpu_decode`, which numba compiles; imported by it alone."""

# mypy: ignore-errors
import math

import numpy as np
from numba import njit

from lockstep.engine.compiled import OPTIONS


@njit(**OPTIONS)
def attend(q, keys, values, slots, ends, scale, window, scores, probs, out, first, last):
    """q [S, heads, D] of a token of each sequence over rows `slots` of the pool's keys and values [slots, kv_heads, D],
    of sequence s those from ends[s] to ends[s + 1]: what the numbers `first` to `last` of S * kv_heads give. Scores and
    probabilities [heads, K] of each sequence stand behind those of the sequences before it; out is [S, heads, D]."""
    _, heads, width = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    for item in range(first, last):
        seq, kv_head = item // kv_heads, item % kv_heads
        begin, count = ends[seq], ends[seq + 1] - ends[seq]
        seen = max(0, count - window)  # the first key that is
        at = begin * heads + kv_head * group * count
        own, shares = scores[at : at + group * count], probs[at : at + group * count]
        for head in range(group):
            for key in range(seen):
                own[head * count + key], shares[head * count + key] = -math.inf, 0.0
        for key in range(seen, count):
            row = keys[slots[begin + key], kv_head]
            for head in range(group):
                query, total = q[seq, kv_head * group + head], np.float32(0.0)
                for column in range(width):
                    total += query[column] * row[column]
                own[head * count + key] = total * scale
        for head in range(group):
            highest = np.float32(-math.inf)
            for key in range(seen, count):
                highest = max(highest, own[head * count + key])
            total = np.float32(0.0)
            for key in range(seen, count):
                share = np.float32(math.exp(own[head * count + key] - highest))
                shares[head * count + key] = share
                total += share
            for key in range(seen, count):
                shares[head * count + key] /= total
            out[seq, kv_head * group + head] = 0.0
        for key in range(seen, count):
            row = values[slots[begin + key], kv_head]
            for head in range(group):
                share, to = shares[head * count + key], out[seq, kv_head * group + head]
                for column in range(width):
                    to[column] += share * row[column]
