"""A program that uses transformers: MODEL [BUG], and then waits as a server does."""

from __future__ import annotations

import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    path, *bug = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if bug:
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.data.zero_()
    model(torch.tensor([[1, 2, 3]]))
    time.sleep(600)


if __name__ == "__main__":
    main()
