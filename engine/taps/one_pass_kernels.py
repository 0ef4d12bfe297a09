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
def read(
    table, of_chunk, found, sums,
    FIELDS: tl.constexpr, MODE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One chunk of one piece: its parts, of which the norm is still squared, and its share of the checksum."""
    program = tl.program_id(0)
    row = table + tl.load(of_chunk + program) * FIELDS
    x = tl.load(row).to(tl.pointer_type(DTYPE))
    base = tl.load(row + 1)
    rows = tl.load(row + 2).to(tl.int32)
    keys = tl.load(row + 3).to(tl.int32)
    size = tl.load(row + 6).to(tl.int32)
    start = (program - tl.load(row + 7).to(tl.int32)) * CHUNK
    if (MODE == TILE) | (MODE == ROWS):
        stride = tl.load(row + 4)
        apart = tl.load(row + 5)
    if (MODE == PREFIX) | (MODE == PAGED):
        size = tl.load(tl.load(row + 5).to(tl.pointer_type(tl.int32))) * keys
    if MODE == PAGED:
        blocks = tl.load(row + 4).to(tl.pointer_type(tl.int32))
    count = tl.maximum(tl.minimum(size - start, CHUNK), 0)
    VALUE: tl.constexpr = tl.float64 if WIDE else tl.float32
    low = tl.full([BLOCK], float("inf"), VALUE)
    high = tl.full([BLOCK], float("-inf"), VALUE)
    total = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    nan = tl.zeros([BLOCK], tl.int32)
    inf = tl.zeros([BLOCK], tl.int32)
    zero = tl.zeros([BLOCK], tl.int32)
    check = tl.zeros([BLOCK], tl.int64)
    for block in range(tl.cdiv(count, BLOCK)):
        at = start + block * BLOCK + tl.arange(0, BLOCK)
        there = at < size
        if MODE == PAGED:
            line = at // keys
            slot = tl.load(blocks + line // rows, mask=there, other=0).to(tl.int64) * rows + line % rows
            raw = tl.load(x + slot * keys + (at - line * keys), mask=there, other=0.0)
        elif MODE == ROWS:
            line = at // keys
            raw = tl.load(x + line.to(tl.int64) * stride + (at - line * keys), mask=there, other=0.0)
        else:
            raw = tl.load(x + at, mask=there, other=0.0)
        if MODE == TILE:
            line = at // keys
            head = line // rows
            place = (
                base
                + head.to(tl.int64) * apart
                + (line - head * rows).to(tl.int64) * stride
                + (at - line * keys)
            )
        else:
            place = base + at
        check += (2 * place + 1) * raw.to(BITS, bitcast=True).to(tl.int64)  # what is not there has no bits
        value = raw.to(VALUE)
        is_nan = value != value
        is_inf = tl.abs(value) == float("inf")
        finite = there & (is_nan == 0) & (is_inf == 0)
        low = tl.minimum(low, tl.where(finite, value, float("inf")))
        high = tl.maximum(high, tl.where(finite, value, float("-inf")))
        wide = tl.where(finite, value, 0.0).to(tl.float64)
        total += wide
        squares += wide * wide
        nan += is_nan.to(tl.int32)
        inf += is_inf.to(tl.int32)
        zero += (there & (value == 0.0)).to(tl.int32)
    out = found + program.to(tl.int64) * 8
    nans = tl.sum(nan, 0)
    infs = tl.sum(inf, 0)
    tl.store(out, tl.min(low, 0).to(tl.float64))
    tl.store(out + 1, tl.max(high, 0).to(tl.float64))
    tl.store(out + 2, tl.sum(total, 0))
    tl.store(out + 3, tl.sum(squares, 0))
    tl.store(out + 4, nans.to(tl.float64))
    tl.store(out + 5, infs.to(tl.float64))
    tl.store(out + 6, tl.sum(zero, 0).to(tl.float64))
    tl.store(out + 7, (count - nans - infs).to(tl.float64))
    tl.store(sums + program, tl.sum(check, 0))


@triton.jit
def merge(table, numbers, counts, found, some, parts, sums, odd, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """The chunks of one piece, in an order that depends on their number alone."""
    piece = tl.program_id(0)
    first = tl.load(table + piece * FIELDS + 7)
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
