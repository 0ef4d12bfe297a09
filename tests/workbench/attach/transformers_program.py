"""A program that uses transformers as anyone would: MODEL IDS [tp], greedy tokens to stdout. `tp`: 2 torchrun ranks."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.integrations import accelerate


def main() -> None:
    path, ids, *how = sys.argv[1:]
    # Asked for before a model is put on a device, but on a CPU nothing of it is used.
    accelerate.is_accelerate_available = lambda: True
    options = {"distributed_config": DistributedConfig(tp_size=2)} if how == ["tp"] else {}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    prompt = torch.tensor([[int(token) for token in ids.split(",")]])
    print("tokens", model.generate(prompt, max_new_tokens=4, do_sample=False)[0].tolist())


if __name__ == "__main__":
    main()
