"""The kernels of `one_pass`, in Triton's language; imported where a GPU is at hand alone."""

# mypy: ignore-errors
import triton
import triton.language as tl

#: As `one_pass` numbers them.
TILE = tl.constexpr(1)
PREFIX = tl.constexpr(2)
PAGED = tl.constexpr(3)
ROWS = tl.constexpr(4)


@triton.jit
def divided(x, by):
    """x // d of 31 bits, `by` as `one_pass` has prepared it: three instructions in place of some twenty."""
    high = tl.umulhi(x.to(tl.uint32), (by >> 8).to(tl.uint32))
    return tl.where(by == 0, x, (high >> (by & 255).to(tl.uint32)).to(tl.int32))


@triton.jit
def line_of(at, keys, rows, by_keys, by_rows):
    """Where an element of a piece stands: group of rows, row in it, key."""
    line = divided(at, by_keys)
    group = divided(line, by_rows)
    return group, line - group * rows, at - line * keys


@triton.jit
def loaded(x, at, there, blocks, stride, keys, rows, by_keys, by_rows, MODE: tl.constexpr):
    """Elements of a piece by their numbers; 0 where none is there."""
    if MODE == PAGED:
        page, row, key = line_of(at, keys, rows, by_keys, by_rows)
        slot = tl.load(blocks + page, mask=there, other=0).to(tl.int64) * rows + row
        return tl.load(x + slot * keys + key, mask=there, other=0.0)
    if MODE == ROWS:
        line = divided(at, by_keys)
        return tl.load(x + line.to(tl.int64) * stride + (at - line * keys), mask=there, other=0.0)
    return tl.load(x + at, mask=there, other=0.0)


@triton.jit
def both(
    low, high, total, squares, counts, check, low_2, high_2, total_2, squares_2, counts_2, check_2
):  # fmt: skip
    """What two lanes have taken in."""
    return (
        tl.minimum(low, low_2), tl.maximum(high, high_2), total + total_2, squares + squares_2,
        counts + counts_2, check + check_2,
    )  # fmt: skip


@triton.jit
def read(
    table, of_chunk, found, sums,
    FIELDS: tl.constexpr, MODE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr, BITS: tl.constexpr, VALUE: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """One chunk of one piece: its parts, of which the norm is still squared, and its share of the checksum. FAR: others
    of its tensor stand before the piece. A lane counts in one number, what is not finite and, in units of 65536, what
    is zero: a chunk has fewer elements than that."""
    program = tl.program_id(0)
    row = table + tl.load(of_chunk + program) * FIELDS
    x = tl.load(row).to(tl.pointer_type(DTYPE))
    base = tl.load(row + 1)
    rows = tl.load(row + 2).to(tl.int32)
    keys = tl.load(row + 3).to(tl.int32)
    stride = tl.load(row + 4)
    apart = tl.load(row + 5)
    size = tl.load(row + 6).to(tl.int32)
    by_rows = tl.load(row + 7)
    by_keys = tl.load(row + 8)
    start = (program - tl.load(row + 9).to(tl.int32)) * CHUNK
    if (MODE == PREFIX) | (MODE == PAGED):
        size = tl.load(apart.to(tl.pointer_type(tl.int32))) * keys
    blocks = stride.to(tl.pointer_type(tl.int32))
    count = tl.maximum(tl.minimum(size - start, CHUNK), 0)
    low = tl.full([BLOCK], float("inf"), VALUE)
    high = tl.full([BLOCK], float("-inf"), VALUE)
    total = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    counts = tl.zeros([BLOCK], tl.int32)
    check = tl.zeros([BLOCK], tl.int64)
    for block in range(tl.cdiv(count, BLOCK)):
        at = start + block * BLOCK + tl.arange(0, BLOCK)
        there = at < size
        raw = loaded(x, at, there, blocks, stride, keys, rows, by_keys, by_rows, MODE)
        if MODE == TILE:
            head, line, key = line_of(at, keys, rows, by_keys, by_rows)
            weight = 2 * (base + head.to(tl.int64) * apart + line.to(tl.int64) * stride + key) + 1
        else:
            weight = (2 * at + 1).to(tl.int64)  # of 32 bits: so its product is one instruction
        if FAR and MODE != TILE:
            weight += 2 * base
        check += weight * raw.to(BITS, bitcast=True).to(tl.int64)  # what is not there has no bits
        value = raw.to(VALUE)
        finite = tl.abs(value) < float("inf")
        kept = finite & there
        low = tl.minimum(low, tl.where(kept, value, float("inf")))
        high = tl.maximum(high, tl.where(kept, value, float("-inf")))
        wide = tl.where(finite, value, 0.0).to(tl.float64)
        total += wide
        squares += wide * wide
        counts += tl.where(finite, tl.where(there & (value == 0.0), 1 << 16, 0), 1)
    least, most, added, squared, counted, checked = tl.reduce(
        (low, high, total, squares, counts, check), 0, both
    )
    others = counted & 0xFFFF
    nans = others * 0
    if others > 0:  # rarely: the NaN among them are counted in a second pass
        nan = tl.zeros([BLOCK], tl.int32)
        for block in range(tl.cdiv(count, BLOCK)):
            at = start + block * BLOCK + tl.arange(0, BLOCK)
            value = loaded(x, at, at < size, blocks, stride, keys, rows, by_keys, by_rows, MODE).to(VALUE)
            nan += (value != value).to(tl.int32)
        nans = tl.sum(nan, 0)
    out = found + program.to(tl.int64) * 8
    tl.store(out, least.to(tl.float64))
    tl.store(out + 1, most.to(tl.float64))
    tl.store(out + 2, added)
    tl.store(out + 3, squared)
    tl.store(out + 4, nans.to(tl.float64))
    tl.store(out + 5, (others - nans).to(tl.float64))
    tl.store(out + 6, (counted >> 16).to(tl.float64))
    tl.store(out + 7, (count - others).to(tl.float64))
    tl.store(sums + program, checked)


@triton.jit
def merge(table, numbers, counts, found, some, parts, sums, odd, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """The chunks of one piece, in an order that depends on their number alone."""
    piece = tl.program_id(0)
    first = tl.load(table + piece * FIELDS + 9)
    to = tl.load(numbers + piece)
    chunks = tl.load(counts + piece).to(tl.int32)
    columns = tl.arange(0, 8)
    low = tl.full([BLOCK], float("inf"), tl.float64)
    high = tl.full([BLOCK], float("-inf"), tl.float64)
    added = tl.zeros([BLOCK, 8], tl.float64)
    check = tl.zeros([BLOCK], tl.int64)
    for start in range(0, chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        there = chunk < chunks
        at = found + (first + chunk) * 8
        low = tl.minimum(low, tl.load(at, mask=there, other=float("inf")))
        high = tl.maximum(high, tl.load(at + 1, mask=there, other=float("-inf")))
        added += tl.load(at[:, None] + columns, mask=there[:, None] & (columns > 1), other=0.0)
        check += tl.load(some + first + chunk, mask=there, other=0)
    whole = tl.sum(added, 0)
    whole = tl.where(columns == 0, tl.min(low, 0), tl.where(columns == 1, tl.max(high, 0), whole))
    tl.store(parts + to * 8 + columns, tl.where(columns == 3, tl.sqrt(whole), whole))
    tl.store(sums + to, tl.sum(check, 0) * odd)
