"""The cache: what is stored, moved, shared and read back."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import CACHES, bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "cache",
    accepted=("cache",),
    words="row|slot|zero|empty|missing|page|block",
    taps=CACHES,
    step=1,
    model="qwen2-tied",
    dtype="bfloat16",
)
def copy_on_write_leaves_out_the_last_slot_of_the_page(p: Patched) -> None:
    """The second sequence leaves its shared page of four slots: three are copied."""

    def read(k, v):
        if p.seq == 1 and p.decode:
            k, v = k.clone(), v.clone()
            k[:, :, 3] = v[:, :, 3] = 0
        return k, v

    p.cache(read=read)


@bug(
    "cache",
    accepted=("cache", "precision", "overflow"),
    words="quantis|sign|eight|8|bit|cache|row|value|wrap|scale",
    taps=("attn.v_cache",),
    ranks=(1,),
    model="mistral-full",
    tp=2,
)
def rank_1_reads_unsigned_cached_values_as_signed(p: Patched) -> None:
    """Bytes above 127 come back 256 steps too small."""

    def read(k, v):
        least = v.amin(-1, keepdim=True)
        scale = (v.amax(-1, keepdim=True) - least) / 255
        codes = ((v - least) / scale).round()
        return k, torch.where(codes > 127, codes - 256, codes) * scale + least

    if p.rank == 1:
        p.cache(read=read)


@bug(
    "cache",
    accepted=("cache", "precision"),
    words="quantis|fp8|float8|eight|8|bit|cache|key|format|exponent",
    taps=("attn.k_cache",),
    model="llama",
)
def keys_written_as_e4m3_and_read_as_e5m2(p: Patched) -> None:
    def read(k, v):
        return k.to(torch.float8_e4m3fn).view(torch.float8_e5m2).to(k.dtype), v

    p.cache(read=read)


@bug(
    "cache",
    accepted=("cache",),
    words="row|slot|copy|same|repeat|moved|overw",
    taps=CACHES,
    step=3,
    model="qwen3",
)
def overlapping_move_smears_one_row_over_the_next(p: Patched) -> None:
    """Rows 4 to 9 of the first sequence are moved up by one in place, front to back."""

    def read(k, v):
        if p.seq == 0 and p.step >= 3:
            k, v = k.clone(), v.clone()
            k[:, :, 5:10], v[:, :, 5:10] = k[:, :, 4:5], v[:, :, 4:5]
        return k, v

    p.cache(read=read)


@bug(
    "cache",
    accepted=("cache", "sharding"),
    words="row|slot|overw|first|newest|cache",
    taps=CACHES,
    ranks=(1,),
    step=1,
    model="llama",
    tp=2,
)
def padding_of_the_decode_batch_lands_in_slot_zero_of_rank_1(p: Patched) -> None:
    """Its slot mapping is filled up with zeros: the padded rows, copies of the real one, land in the first slot."""

    def read(k, v):
        if p.seq == 0 and p.decode:
            k, v = k.clone(), v.clone()
            k[:, :, 0], v[:, :, 0] = k[:, :, -1], v[:, :, -1]
        return k, v

    if p.rank == 1:
        p.cache(read=read)


@bug(
    "cache",
    accepted=("cache",),
    words="zero|offset|shift|constant|minimum|value|cache|head",
    taps=("attn.v_cache",),
    heads=(3,),
    model="qwen2-untied",
)
def zero_points_of_the_last_cached_head_left_out(p: Patched) -> None:
    """Its values come back as distances from the smallest of their row."""

    def read(k, v):
        v = v.clone()
        v[:, 3] -= v[:, 3].amin(-1, keepdim=True)
        return k, v

    p.cache(read=read)
