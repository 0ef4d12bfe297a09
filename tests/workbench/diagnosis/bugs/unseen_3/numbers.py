"""Low precision where it was not asked for: sums, probabilities, inputs of products."""

from __future__ import annotations

from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "numbers",
    accepted=("softmax", "precision"),
    words="round|precis|bf16|bfloat16|sum|normali|low|denominator",
    taps=("attn.probs",),
    model="qwen3",
)
def denominator_of_the_softmax_in_bfloat16(p: Patched) -> None:
    def softmax(scores: Tensor) -> Tensor:
        raised = (scores - scores.amax(-1, keepdim=True)).exp()
        return raised / raised.sum(-1, keepdim=True).bfloat16().float()

    p.attention(softmax=softmax)


@bug(
    "numbers",
    accepted=("softmax", "precision"),
    words="round|precis|quant|bit|low",
    taps=("attn.probs",),
    step=1,
    model="llama",
)
def probabilities_of_decode_in_eight_bits(p: Patched) -> None:
    def softmax(scores: Tensor) -> Tensor:
        probs = scores.softmax(-1)
        return (probs * 255).round() / 255 if p.decode else probs

    p.attention(softmax=softmax)


@bug(
    "numbers",
    accepted=("precision", "weight"),
    words="round|precis|bf16|bfloat16|low|accumulat",
    taps=("mlp.down",),
    model="mistral-full",
)
def split_sums_of_down_kept_in_bfloat16(p: Patched) -> None:
    """Four parts of the inputs, each rounded before they are added."""
    for i, _ in p.layers():
        down = p.mlp(i).down_proj

        def forward(x: Tensor, weight: Tensor = down.weight) -> Tensor:
            parts = zip(x.split(24, -1), weight.split(24, 1), strict=True)
            return sum((a @ b.T).bfloat16().float() for a, b in parts)  # type: ignore[return-value]

        down.forward = forward


@bug(
    "numbers",
    accepted=("precision", "input", "weight"),
    words="round|precis|quant|bit|low",
    taps=("attn.o_proj",),
    model="qwen2-tied",
)
def input_of_o_quantised_by_token(p: Patched) -> None:
    def quantised(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale

    for i, _ in p.layers():
        p.input(p.attn(i).o_proj, quantised)
