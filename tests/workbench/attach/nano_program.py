"""A program that generates with nano-vllm on a CPU: MODEL IDS[;IDS…], tokens to stdout.

nano-vllm wants CUDA, triton and flash-attn. What stands in for them here computes the same (attention over the paged
cache, the write into it), and nothing is compiled; all else is its own code. At TP 2 the fork on the package index
(nano-vllm-fork 20260210) does not run: what it sends to other ranks lacks a field. The sampler draws at a temperature
so low that the likeliest token wins.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # which looks through torch for functions that it knows, before they are replaced
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

BLOCKS = 4
_new_group, _default_device = dist.init_process_group, torch.set_default_device


def module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(content)
    sys.modules[name] = made
    return made


def attention(q: Any, k: Any, v: Any, scale: float) -> Any:
    """[T, heads, D] on [K, KV heads, D], the last row of q on the last of k."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    sees = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    return scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale).transpose(0, 1)


def paged(cache: Any, table: Any, length: int) -> Any:
    return cache[table[table >= 0].long()].flatten(0, 1)[:length]


def varlen(q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, softmax_scale: float, block_table: Any,
           **_: Any) -> Any:  # fmt: skip
    out = []
    ends, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for at in range(len(ends) - 1):
        length = keys[at + 1] - keys[at]
        own = [
            x[keys[at] : keys[at + 1]] if block_table is None else paged(x, block_table[at], length)
            for x in (k, v)
        ]
        out.append(attention(q[ends[at] : ends[at + 1]], *own, softmax_scale))
    return torch.cat(out)


def with_cache(q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, block_table: Any, softmax_scale: float,
               **_: Any) -> Any:  # fmt: skip
    lengths = zip(q, block_table, cache_seqlens.tolist(), strict=True)
    return torch.stack([
        attention(row, paged(k_cache, table, length), paged(v_cache, table, length), softmax_scale)
        for row, table, length in lengths
    ])  # fmt: skip


def store(key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any) -> None:
    for new, cache in ((key, k_cache), (value, v_cache)):
        cache.flatten(0, 1)[slots.long()] = new


def config_of_transformers_4(path: str) -> Any:
    """The model's config, with the frequencies of RoPE where nano-vllm looks for them."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    theta = config.rope_parameters["rope_theta"]
    config.rope_parameters = config.rope_scaling = None
    config.rope_theta = theta
    return config


def stand_in() -> None:
    """Put what a CPU can do in the place of what it cannot."""
    language = module("triton.language", constexpr=int)
    module("triton", jit=lambda function: function, language=language)
    module("flash_attn", flash_attn_varlen_func=varlen, flash_attn_with_kvcache=with_cache)
    nothing: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
    block = 2 * 4 * 256 * 64 * 1024  # bytes, more than a block of the models of the tests
    for name in ("set_device", "empty_cache", "reset_peak_memory_stats", "synchronize"):
        setattr(torch.cuda, name, nothing)
    torch.cuda.mem_get_info = lambda *_: (block, block)
    torch.cuda.memory_stats = lambda *_: {"allocated_bytes.all.current": 0}
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.set_default_device = lambda device: _default_device("cpu")
    for name in ("tensor", "zeros"):
        make = getattr(torch, name)
        setattr(torch, name, lambda *a, make=make, pin_memory=False, **k: make(*a, **k))
    dist.init_process_group = lambda backend, *args, **kwargs: _new_group("gloo", *args, **kwargs)
    import nanovllm.config
    import nanovllm.layers.attention

    nanovllm.layers.attention.store_kvcache = store
    nanovllm.config.AutoConfig = SimpleNamespace(from_pretrained=config_of_transformers_4)
    for name in ("triton", "triton.language", "flash_attn"):  # which torch would take for the real one
        del sys.modules[name]


def main() -> None:
    from nanovllm import LLM, SamplingParams

    path, prompts = sys.argv[1:]
    tokenizer = SimpleNamespace(eos_token_id=-1, decode=str)
    model = LLM(
        path, enforce_eager=True, tokenizer=tokenizer, max_model_len=256,
        max_num_batched_tokens=256, max_num_seqs=4,
    )  # fmt: skip
    ids = [[int(one) for one in prompt.split(",")] for prompt in prompts.split(";")]
    sampling = SamplingParams(temperature=1e-6, max_tokens=6, ignore_eos=True)
    for one in model.generate(ids, sampling, use_tqdm=False):
        print("tokens", one["token_ids"], flush=True)


torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
torch.compile = lambda function: function
stand_in()
if __name__ == "__main__":
    main()
