"""The kernels of `decode_attention`, in Triton's language; imported where a GPU is at hand alone.

`heads` query heads share `heads / kv_heads` by `kv_heads`; what belongs to one KV head is padded to GROUP rows, and
head_dim to WIDTH, as a product of tiles wants them.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def slots_of(table, keys, there, PAGE: tl.constexpr):
    """Slots of the pool that hold these keys of a sequence."""
    return tl.load(table + keys // PAGE, mask=there, other=0).to(tl.int64) * PAGE + keys % PAGE


@triton.jit
def scores(
    q, pool, out, lens, tables, scale, window, heads, kv_heads, head_dim, most, blocks,
    PAGE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Of one sequence's token, one KV head's queries by some keys: scaled, rounded as a product and a scale are."""
    seq, kv_head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens + seq)
    if block * KEYS < length:
        group = heads // kv_heads
        row, column = tl.arange(0, GROUP), tl.arange(0, WIDTH)
        head = kv_head * group + row
        inside = column < head_dim
        queries = tl.load(
            q + (seq * heads + head[:, None]) * head_dim + column,
            mask=(row < group)[:, None] & inside, other=0.0,
        )  # fmt: skip
        key = block * KEYS + tl.arange(0, KEYS)
        there = key < length
        slot = slots_of(tables + seq * blocks, key, there, PAGE)
        stored = tl.load(
            pool + (slot[:, None] * kv_heads + kv_head) * head_dim + column,
            mask=there[:, None] & inside,
            other=0.0,
        )
        found = tl.dot(queries, tl.trans(stored), input_precision="ieee").to(q.dtype.element_ty)
        found = found.to(tl.float32) * scale
        found = tl.where(key >= length - window, found, float("-inf")).to(q.dtype.element_ty)
        to = out + seq.to(tl.int64) * heads * most + head[:, None] * length + key
        tl.store(to, found, mask=(row < group)[:, None] & there)


@triton.jit
def softmax(x, out, lens, heads, most, KEYS: tl.constexpr):
    """Of one head's row of scores the probabilities, in float32."""
    seq, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lens + seq)
    first = seq.to(tl.int64) * heads * most + head * length
    highest = tl.full([KEYS], float("-inf"), tl.float32)
    for start in range(0, length, KEYS):
        key = start + tl.arange(0, KEYS)
        highest = tl.maximum(
            highest, tl.load(x + first + key, mask=key < length, other=float("-inf")).to(tl.float32)
        )
    most_of_all = tl.max(highest, 0)
    total = tl.zeros([KEYS], tl.float32)
    for start in range(0, length, KEYS):
        key = start + tl.arange(0, KEYS)
        value = tl.load(x + first + key, mask=key < length, other=float("-inf")).to(tl.float32)
        total += tl.where(key < length, tl.exp(value - most_of_all), 0.0)
    whole = tl.sum(total, 0)
    for start in range(0, length, KEYS):
        key = start + tl.arange(0, KEYS)
        value = tl.load(x + first + key, mask=key < length, other=0.0).to(tl.float32)
        tl.store(
            out + first + key,
            (tl.exp(value - most_of_all) / whole).to(out.dtype.element_ty),
            mask=key < length,
        )


@triton.jit
def weigh(
    probs, pool, parts, lens, tables, window, heads, kv_heads, head_dim, most, blocks, splits,
    PAGE: tl.constexpr, SHARE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One share of the keys of one sequence and KV head: the sum of values, each times its probability."""
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens + seq)
    group = heads // kv_heads
    row, column = tl.arange(0, GROUP), tl.arange(0, WIDTH)
    head = kv_head * group + row
    inside = column < head_dim
    start = tl.maximum(split * SHARE, tl.maximum(length - window, 0) // KEYS * KEYS)
    stop = tl.minimum((split + 1) * SHARE, length)
    total = tl.zeros([GROUP, WIDTH], tl.float32)
    for at in range(start, stop, KEYS):
        key = at + tl.arange(0, KEYS)
        there = (key < stop) & (key >= length - window)
        weights = tl.load(
            probs + seq.to(tl.int64) * heads * most + head[:, None] * length + key,
            mask=(row < group)[:, None] & there, other=0.0,
        )  # fmt: skip
        slot = slots_of(tables + seq * blocks, key, there, PAGE)
        stored = tl.load(
            pool + (slot[:, None] * kv_heads + kv_head) * head_dim + column,
            mask=there[:, None] & inside,
            other=0.0,
        )
        total += tl.dot(weights, stored, input_precision="ieee")
    to = parts + (((seq * splits + split) * heads + head[:, None]) * head_dim + column)
    tl.store(to, total, mask=(row < group)[:, None] & inside)


@triton.jit
def add_up(parts, out, size, splits, BLOCK: tl.constexpr):
    """The shares of one sequence, in order."""
    seq, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(parts + (seq * splits + split) * size + at, mask=at < size, other=0.0)
    tl.store(out + seq * size + at, total.to(out.dtype.element_ty), mask=at < size)
