"""A program that uses transformers as anyone would: MODEL RANKS, greedy tokens to stdout. MODEL may be a GGUF file.

Options of a row: `dtype`, `attention`, `experts`, of the model; `batch` for the workload's batches as they are, padded
on the left, in place of one request after the other; `expert_parallel` for whole experts on each rank; `loop` for calls
of the model itself; `generate` for others.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from real_bugs_of_transformers import BUGS, CHANGES
from transformers import AutoModelForCausalLM, modeling_utils
from transformers.distributed import DistributedConfig
from transformers.integrations import accelerate
from workload import BATCHES, options, planted


def loaded(path: str, ranks: int) -> Any:
    # Asked for before a model is put on a device or read from a GGUF file, but on a CPU nothing of it is used.
    accelerate.is_accelerate_available = modeling_utils.is_accelerate_available = lambda: True
    groups = {"ep_size": ranks} if options().get("expert_parallel") else {}
    split = DistributedConfig(tp_size=ranks, **groups)
    chosen: dict[str, Any] = {"distributed_config": split} if ranks > 1 else {}
    names = {"attention": "attn_implementation", "experts": "experts_implementation"}
    chosen |= {names[one]: value for one, value in options().items() if one in names}
    if path.endswith(".gguf"):
        chosen |= {"gguf_file": Path(path).name}
        path = str(Path(path).parent)
    dtype = getattr(torch, options().get("dtype", "float32"))
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **chosen)


def looped(model: Any, ids: list[int], count: int) -> list[int]:
    """Tokens by calls of the model with the cache that it returned."""
    cache, new, tokens = None, torch.tensor([ids]), list(ids)
    for _ in range(count):
        out = model(input_ids=new, cache=cache, use_cache=True)
        cache = out.cache
        tokens.append(int(out.logits[0, -1].argmax()))
        new = torch.tensor([tokens[-1:]])
    return tokens


def main() -> None:
    path, ranks = sys.argv[1:]
    if planted():
        (BUGS | CHANGES)[planted()]()
    model = loaded(path, int(ranks))
    together = BATCHES if options().get("batch") else [[one] for batch in BATCHES for one in batch]
    for batch in together:
        if options().get("loop"):
            print("tokens", looped(model, *batch[0]))
            continue
        longest = max(len(ids) for ids, _ in batch)
        rows = torch.tensor([[0] * (longest - len(ids)) + ids for ids, _ in batch])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in batch])
        more = {"max_new_tokens": max(count for _, count in batch), "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(
            rows, attention_mask=mask, do_sample=False, **more, **options().get("generate", {})
        )
        print("tokens", out.tolist())


if __name__ == "__main__":
    main()
