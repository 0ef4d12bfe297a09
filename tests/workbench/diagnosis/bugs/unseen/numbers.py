"""Dtypes: what is rounded that should not be, and what overflows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.workbench.diagnosis.bugs.bug import QKV, bug
from tests.workbench.diagnosis.bugs.patched import Patched

PRECISION = "precision|round|fp16|bf16|float16|tf32|mantissa|fp8|float8"


@bug(
    "numbers",
    accepted=("precision", "reduce"),
    words=PRECISION,
    taps=("attn.o_proj",),
    model="llama",
    tp=2,
)
def sums_travel_in_bfloat16(p: Patched) -> None:
    for _, layer in p.layers():
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            module.reduce = lambda partial, known=module.reduce: known(partial.bfloat16().to(partial.dtype))


@bug(
    "numbers",
    accepted=("precision", "softmax"),
    words=PRECISION,
    taps=("attn.context",),
    layers=(1,),
    model="qwen3",
)
def probabilities_of_one_layer_rounded_for_tensor_cores(p: Patched) -> None:
    p.attention((1,), context=lambda probs, v: probs.bfloat16().to(v.dtype) @ v)


@bug(
    "numbers",
    accepted=("overflow", "norm", "precision"),
    words="overflow|fp16|float16|half|inf|range|zero",
    taps=("final_norm",),
    model="llama-massive",
)
def final_norm_squares_in_float16(p: Patched) -> None:
    norm = p.decoder.norm

    def forward(x: Tensor) -> Tensor:
        square = x.half().pow(2).float().mean(-1, keepdim=True)
        weighted: Tensor = norm.weight * (x * (square + norm.variance_epsilon).rsqrt())
        return weighted

    norm.forward = forward


@bug("numbers", accepted=("precision",), words=PRECISION, taps=("mlp.down",), layers=(1,), model="llama")
def one_product_sums_in_float16(p: Patched) -> None:
    down = p.mlp(1).down_proj
    weight = down.weight.half()
    down.forward = lambda x: nn.functional.linear(x.half(), weight).to(x.dtype)


@bug("numbers", accepted=("precision",), words=PRECISION, taps=QKV, model="qwen2-tied")
def tf32_left_on(p: Patched) -> None:
    """All products take ten bits of each mantissa."""

    def short(x: Tensor) -> Tensor:
        return ((x.contiguous().view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)

    for module in p.decoder.layers.modules():
        if isinstance(module, nn.Linear):
            p.weight(module, short)
            p.input(module, short)


@bug("numbers", accepted=("precision", "head"), words=PRECISION, taps=("logits",), step=1, model="llama")
def logits_of_decode_rounded_to_bfloat16(p: Patched) -> None:
    p.output(p.model.lm_head, lambda logits: logits.bfloat16().to(logits.dtype) if p.decode else logits)


@bug(
    "numbers",
    accepted=("precision", "weight"),
    words=PRECISION + "|weight|quant",
    taps=("mlp.down",),
    layers=(1,),
    model="mistral-full",
)
def one_down_projection_stored_in_fp8(p: Patched) -> None:
    p.weight(p.mlp(1).down_proj, lambda weight: weight.to(torch.float8_e4m3fn).to(weight.dtype))


@bug(
    "numbers",
    accepted=("precision", "scores", "scale"),
    words=PRECISION,
    taps=("attn.scores",),
    step=1,
    model="llama-sharp",
)
def decode_scores_in_bfloat16(p: Patched) -> None:
    def product(q: Tensor, k: Tensor) -> Tensor:
        if p.decode:
            return (q.bfloat16() @ k.bfloat16().transpose(2, 3)).to(q.dtype)
        return q @ k.transpose(2, 3)

    p.attention(product=product)
