"""Rotation, norm and gated activation in a kernel each, in Triton's language; imported where a GPU is at hand alone."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def rotate(
    x, cos, sin, out, heads, half, token_stride, head_stride, cos_stride, sin_stride, HALF: tl.constexpr
):  # fmt: skip
    """One head of one token: pairs (i, i + half), each product and sum rounded as by a kernel of its own."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, HALF)
    there = at < half
    start = x + token * token_stride + head * head_stride
    first = tl.load(start + at, mask=there, other=0.0)
    second = tl.load(start + half + at, mask=there, other=0.0)
    c = tl.load(cos + token * cos_stride + at, mask=there, other=0.0).to(tl.float32)
    s = tl.load(sin + token * sin_stride + at, mask=there, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    a = (first.to(tl.float32) * c).to(kind).to(tl.float32) - (second.to(tl.float32) * s).to(kind).to(
        tl.float32
    )
    b = (second.to(tl.float32) * c).to(kind).to(tl.float32) + (first.to(tl.float32) * s).to(kind).to(
        tl.float32
    )
    to = out + (token * heads + head) * 2 * half + at
    tl.store(to, a.to(kind), mask=there)
    tl.store(to + half, b.to(kind), mask=there)


@triton.jit
def rms_norm(
    x, weight, out, heads, width, token_stride, head_stride, eps,
    PLUS_ONE: tl.constexpr, ROUNDED_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of `width` elements, the head `row % heads` of a token, over its root mean square in float32, times the
    weight: rounded before that, or after."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < width
    start = x + (row // heads) * token_stride + (row % heads) * head_stride
    values = tl.load(start + at, mask=there, other=0.0).to(tl.float32)
    by = tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    normed = values * (1.0 / tl.sqrt_rn(tl.sum(values * values) / width + eps))
    kind = out.dtype.element_ty
    if ROUNDED_FIRST:
        normed = normed.to(kind).to(tl.float32)
    if PLUS_ONE:
        by += 1.0
    tl.store(out + row * width + at, (normed * by).to(kind), mask=there)


@triton.jit
def silu_times(gate, up, out, width, gate_stride, up_stride, BLOCK: tl.constexpr):
    """A block of one row of silu(gate) * up, the first rounded as by a kernel of its own."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    x = tl.load(gate + row * gate_stride + at, mask=there, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + at, mask=there, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    activated = (x / (1.0 + tl.exp(-x))).to(kind).to(tl.float32)
    tl.store(out + row * width + at, (activated * y).to(kind), mask=there)
