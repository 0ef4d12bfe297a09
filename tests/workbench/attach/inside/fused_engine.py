"""A toy with the module names and the in-place kernels of vLLM, and the weights of a transformers model.

qkv and gate_up are merged, RoPE writes into its inputs, a norm adds the residual and overwrites both, a row-parallel
linear returns (out, bias).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Method:
    """vLLM's seam of a linear's product, before the all-reduce."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.weight, bias)


class Linear(nn.Module):
    def __init__(self, *parts: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([part.weight for part in parts]).detach(), requires_grad=False)
        self.bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts]).detach()
        self.quant_method = Method()

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.quant_method.apply(self, x, self.bias), None


class FusedNorm(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is not None:
            residual.add_(x)
            x.copy_(residual)
        else:
            x = x.clone()
        scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        x.copy_(self.weight * scaled.to(x.dtype))
        return x if residual is None else (x, residual)


class Rotary(nn.Module):
    """One for all layers; q and k are overwritten."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = [rotary]

    def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (one[0, :, None] for one in self.rotary[0](q, positions[None]))
        for x in (q, k):
            heads = x.view(len(x), -1, cos.shape[-1])
            half = torch.cat([-heads[..., cos.shape[-1] // 2 :], heads[..., : cos.shape[-1] // 2]], -1)
            heads.copy_(heads * cos + half * sin)
        return q, k


class Attend(nn.Module):
    """Causal attention within one prompt."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(1, len(x), -1, self.head_dim).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


class SiluAndMul(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)


class Attention(nn.Module):
    def __init__(self, theirs: Any, rotary: Rotary) -> None:
        super().__init__()
        config = theirs.config
        self.head_dim = theirs.head_dim
        self.total_num_kv_heads = config.num_key_value_heads
        self.q_size = config.num_attention_heads * self.head_dim
        self.kv_size = config.num_key_value_heads * self.head_dim
        self.qkv_proj = Linear(theirs.q_proj, theirs.k_proj, theirs.v_proj)
        self.rotary_emb, self.attn = rotary, Attend(self.head_dim)
        self.o_proj = Linear(theirs.o_proj)
        if hasattr(theirs, "q_norm"):
            self.q_norm, self.k_norm = FusedNorm(theirs.q_norm), FusedNorm(theirs.k_norm)

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x)[0].split([self.q_size, self.kv_size, self.kv_size], -1)
        if hasattr(self, "q_norm"):  # heads as rows, as SGLang does
            wide = self.q_norm.weight.numel() > self.head_dim
            q, k = (
                norm(one if wide else one.reshape(-1, self.head_dim)).view(one.shape)
                for norm, one in ((self.q_norm, q), (self.k_norm, k))
            )
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v))[0]


class Mlp(nn.Module):
    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.gate_up_proj = Linear(theirs.gate_proj, theirs.up_proj)
        self.act_fn, self.down_proj = SiluAndMul(), Linear(theirs.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]


class Layer(nn.Module):
    def __init__(self, theirs: Any, rotary: Rotary) -> None:
        super().__init__()
        self.input_layernorm = FusedNorm(theirs.input_layernorm)
        self.self_attn = Attention(theirs.self_attn, rotary)
        self.post_attention_layernorm = FusedNorm(theirs.post_attention_layernorm)
        self.mlp = Mlp(theirs.mlp)

    def forward(self, positions: Tensor, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(positions, x), residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    def __init__(self, theirs: Any) -> None:
        super().__init__()
        rotary = Rotary(theirs.rotary_emb)
        self.embed_tokens = theirs.embed_tokens
        self.layers = nn.ModuleList(Layer(layer, rotary) for layer in theirs.layers)
        self.norm = FusedNorm(theirs.norm)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x, residual = self.embed_tokens(ids), None
        for layer in self.layers:
            x, residual = layer(positions, x, residual)
        return self.norm(x, residual)[0]


class LogitsProcessor(nn.Module):
    def forward(self, head: Any, x: Tensor) -> Tensor:
        return F.linear(x[-1:], head.weight)


class FusedEngine(nn.Module):
    """`engine(input_ids, positions)`, then `engine.compute_logits(hidden)`: lm_head is a weight, never called."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.model, self.lm_head = Decoder(theirs.model), theirs.lm_head
        self.logits_processor = LogitsProcessor()

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.model(input_ids, positions)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.logits_processor(self.lm_head, hidden)
