"""MODEL TP TOKENS FILE: generate greedily with vLLM; seconds into FILE."""

from __future__ import annotations

import sys
import time
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    path, tp, tokens, told = sys.argv[1:]
    # Eager without a tap as well: the ratio is that of recording, not of compiling.
    model = LLM(
        path, tensor_parallel_size=int(tp), dtype="float32", max_model_len=256, enforce_eager=True,
        enable_prefix_caching=False,
    )  # fmt: skip
    prompt = {"prompt_token_ids": list(range(1, 17))}

    def generate(count: int) -> None:
        model.generate([prompt], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))

    generate(2)
    began = time.perf_counter()
    generate(int(tokens))
    Path(told).write_text(str(time.perf_counter() - began))


if __name__ == "__main__":
    main()
