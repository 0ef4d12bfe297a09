"""A program that makes vLLM reuse, evict and preempt: MODEL TP, greedy tokens to stdout.

Prompts are read in chunks; later ones begin as earlier ones did, or have a block of theirs behind another beginning;
three at once need more blocks than there are; of two that share blocks at a time the first ends early, and others want
what it had.
"""

from __future__ import annotations

import sys

LONG = [3 + (7 * at * at + 11 * at) % 121 for at in range(75)]
#: Of the first block the first tokens are those of LONG, not the rest.
ALIKE = [*LONG[:20], *range(130, 160)]
#: The second block of LONG, behind the first of ALIKE.
MOVED = [*ALIKE[:32], *LONG[32:64], *range(60, 68)]
CROWD = [[300 + 70 * one + 3 * at for at in range(60)] for one in range(3)]
BATCHES = [
    [LONG, LONG[40:60]],
    [LONG[:70]],
    [ALIKE],
    [MOVED],
    CROWD,
    [LONG],
    [LONG[:70], LONG[:66], *CROWD[:2]],
]
#: How many tokens each is to give: of the last batch the first one, and the others more.
COUNTS = [*([6] * len(batch) for batch in BATCHES[:-1]), [1, 20, 20, 20]]


def main() -> None:
    from vllm import LLM, SamplingParams

    path, tp = sys.argv[1:]
    model = LLM(
        path, tensor_parallel_size=int(tp), dtype="float32", max_model_len=96, max_num_batched_tokens=32,
        max_num_seqs=4, block_size=32, num_gpu_blocks_override=8, enable_prefix_caching=True,
    )  # fmt: skip
    for batch, counts in zip(BATCHES, COUNTS, strict=True):
        sampling = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in counts]
        for one in model.generate([{"prompt_token_ids": ids} for ids in batch], sampling):
            print("tokens", list(one.outputs[0].token_ids))


if __name__ == "__main__":
    main()
