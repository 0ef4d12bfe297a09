"""Rotation in one kernel, in Triton's language; imported where a GPU is at hand alone."""

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
