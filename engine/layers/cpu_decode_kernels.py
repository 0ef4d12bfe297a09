"""The kernel of `cpu_decode`, which numba compiles; imported by it alone."""

# mypy: ignore-errors
import math

import numpy as np
from numba import carray, njit

from lockstep.engine.compiled import OPTIONS
from lockstep.engine.taps.cpu_kernels import pointer


@njit(**OPTIONS)
def attend(
    q,
    keys,
    values,
    slots,
    scores,
    probs,
    out,
    sequences,
    heads,
    kv_heads,
    width,
    room,
    ends,
    scale,
    window,
    first,
    last,
):
    """`attend_each` of tensors at those addresses; `room`: slots of the pool."""
    rows, cells = ends[-1], heads * ends[-1]
    attend_each(
        carray(pointer(np.float32, q), (sequences, heads, width)),
        carray(pointer(np.float32, keys), (room, kv_heads, width)),
        carray(pointer(np.float32, values), (room, kv_heads, width)),
        carray(pointer(np.int64, slots), rows),
        ends,
        np.float32(scale),
        window,
        carray(pointer(np.float32, scores), cells),
        carray(pointer(np.float32, probs), cells),
        carray(pointer(np.float32, out), (sequences, heads, width)),
        first,
        last,
    )


@njit(**OPTIONS)
def attend_each(q, keys, values, slots, ends, scale, window, scores, probs, out, first, last):
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
