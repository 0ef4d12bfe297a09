"""A program that uses vLLM with an adapter: MODEL TP IDS [ADAPTER], greedy tokens to stdout."""

from __future__ import annotations

import sys


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    path, tp, ids, *adapter = sys.argv[1:]
    model = LLM(
        path, tensor_parallel_size=int(tp), dtype="float32", max_model_len=256, enable_lora=True, max_lora_rank=8
    )  # fmt: skip
    prompts = [{"prompt_token_ids": [int(token) for token in ids.split(",")]}]
    request = LoRARequest("it", 1, adapter[0]) if adapter else None
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for one in model.generate(prompts, sampling, lora_request=request):
        print("tokens", list(one.outputs[0].token_ids))


if __name__ == "__main__":
    main()
