"""Train the demo model from nothing, in one command: `python -m lockstep.workbench.demo.train.train`."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from lockstep.workbench.demo import MODEL_DIR
from lockstep.workbench.demo.train.corpus import Example, training_examples, unseen_examples
from lockstep.workbench.demo.train.evaluate import answer_all, largest_key_biases, success
from lockstep.workbench.demo.train.tokenizer import END_OF_TEXT, IM_END, chat, save_tokenizer, train_tokenizer

SEED = 41
BATCH = 32
REPORT_EVERY = 500


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of training with an optimizer, a stream of examples and a schedule of its own.

    The rate ramps up to `peak_rate`, then follows a cosine that would end at step `horizon`.
    """

    steps: int
    horizon: int
    warmup: int
    peak_rate: float
    data_seed: int
    number_share: float


#: The first stage learns the lines and the copying, and stops while the rate is still at a third of
#: its peak. By then only made-up words of rare tokens go wrong, so the second shows mostly words;
#: it starts from the weights rounded to bf16, as they are saved, and takes the rate down.
STAGES: tuple[Stage, ...] = (
    Stage(steps=3_000, horizon=5_000, warmup=100, peak_rate=2e-3, data_seed=42, number_share=0.5),
    Stage(steps=800, horizon=800, warmup=50, peak_rate=7e-4, data_seed=43, number_share=0.25),
)

#: A token of the nonce counts as much as this many others: copying it is the whole task, and it is
#: two or three tokens in twenty.
NONCE_WEIGHT = 3.0

#: k-biases at the start of training, one layer a row: (channel, value). The channels are those that
#: RoPE turns fastest. There a constant key becomes a pattern over distance, which the model comes
#: to lean on; on a slow channel it would shift all scores alike and the softmax would cancel it.
KEY_BIASES: tuple[tuple[tuple[int, float], ...], ...] = (
    ((0, -34.0), (17, -15.0), (2, -14.0), (19, 12.0), (33, 15.0), (48, -12.0), (50, 14.0)),
    ((1, 12.0), (16, -15.0), (18, -34.0), (3, 14.0), (32, -14.0), (49, 15.0), (35, -12.0)),
    ((0, 15.0), (17, 12.0), (2, -14.0), (32, -34.0), (33, 14.0), (50, -15.0)),
    ((1, -15.0), (16, 14.0), (34, 12.0), (49, -14.0), (48, 11.0)),
)


def model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """`config.json`, in the words of the published Qwen2.5 checkpoints."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "eos_token_id": tokenizer.token_to_id(IM_END),
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": 768,
        "max_position_embeddings": 512,
        "max_window_layers": 4,
        "model_type": "qwen2",
        "num_attention_heads": 8,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": tokenizer.get_vocab_size(),
    }


def build_model(config: dict[str, Any]) -> Qwen2ForCausalLM:
    """A fresh model in fp32, with large k-biases in place."""
    model = Qwen2ForCausalLM(Qwen2Config(**{**config, "torch_dtype": "float32"}))
    with torch.no_grad():
        for layer, biases in zip(model.model.layers, KEY_BIASES, strict=True):
            for channel, value in biases:
                layer.self_attn.k_proj.bias[channel] = value
    return model


def save_model(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder that transformers loads as it is: bf16 weights, tied head left out."""
    save_tokenizer(tokenizer, folder)
    config = model_config(tokenizer)
    generation = {
        "bos_token_id": config["bos_token_id"],
        "do_sample": False,
        "eos_token_id": [config["eos_token_id"], tokenizer.token_to_id(END_OF_TEXT)],
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tensors = {
        name: parameter.detach().to(torch.bfloat16).contiguous()
        for name, parameter in model.named_parameters()
        if name != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def encode(tokenizer: Tokenizer, example: Example) -> tuple[list[int], list[float]]:
    """One row: the ids of the whole conversation, and the weight of each in the loss."""
    prompt = tokenizer.encode(chat(example.question)).ids
    answer = tokenizer.encode(example.answer)
    first = example.answer.index(example.nonce)
    last = first + len(example.nonce)
    weights = [NONCE_WEIGHT if start < last and end > first else 1.0 for start, end in answer.offsets]
    end_ids = tokenizer.encode(IM_END).ids
    return prompt + answer.ids + end_ids, [0.0] * len(prompt) + weights + [1.0] * len(end_ids)


def batches(tokenizer: Tokenizer, stage: Stage) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of ids and weights, one example a row.

    Rows are padded on the right with weight 0; a causal model never looks there.
    """
    stream = training_examples(stage.data_seed, stage.number_share)
    while True:
        rows = [encode(tokenizer, example) for example in itertools.islice(stream, BATCH)]
        width = max(len(ids) for ids, _ in rows)
        pad = tokenizer.token_to_id(END_OF_TEXT)
        yield (
            torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows]),
            torch.tensor([weights + [0.0] * (width - len(weights)) for _, weights in rows]),
        )


def loss_of(model: Qwen2ForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted cross-entropy of the answers; only their positions pass through the head."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    targets, weights = ids[:, 1:], weights[:, 1:]
    counted = weights > 0
    losses = cross_entropy(model.lm_head(hidden[counted]), targets[counted], reduction="none")
    return (losses * weights[counted]).sum() / weights.sum()


def rate_at(step: int, stage: Stage) -> float:
    """The share of the peak rate at a step: a short ramp, then a cosine down to nearly nothing."""
    if step < stage.warmup:
        return (step + 1) / stage.warmup
    progress = (step - stage.warmup) / max(1, stage.horizon - stage.warmup)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(model: PreTrainedModel, stage: Stage) -> torch.optim.AdamW:
    """AdamW; biases and norms do not decay, or the large k-biases would melt away."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=stage.peak_rate, betas=(0.9, 0.95), fused=True)


def run_stage(model: Qwen2ForCausalLM, tokenizer: Tokenizer, stage: Stage, folder: Path) -> None:
    """Train through one stage; now and then save, and report on unseen questions."""
    hf_tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # Not the 200 questions of the published figure: those are for the end alone.
    watched = unseen_examples(64, seed=7)
    optimizer = make_optimizer(model, stage)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, stage))
    started = time.monotonic()
    for step, (ids, weights) in enumerate(itertools.islice(batches(tokenizer, stage), stage.steps), 1):
        loss = loss_of(model, ids, weights)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f} {time.monotonic() - started:.0f} s", flush=True)
        if step % REPORT_EVERY == 0 or step == stage.steps:
            save_model(model, tokenizer, folder)
            model.train(False)
            share = success(answer_all(model, hf_tokenizer, watched))
            biases = " ".join(f"{value:.1f}" for value, _, _ in largest_key_biases(model))
            print(f"step {step}: unseen right {share:.1%}; largest k-biases {biases}", flush=True)
            model.train()


def train(folder: Path, first_stage: int) -> None:
    """Train stage by stage and leave the model in `folder`."""
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer(SEED)
    save_tokenizer(tokenizer, folder)
    for number, stage in enumerate(STAGES, 1):
        if number < first_stage:
            continue
        if number == 1:
            model = build_model(model_config(tokenizer))
        else:
            model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        print(f"stage {number} of {len(STAGES)}: {stage}", flush=True)
        run_stage(model.train(), tokenizer, stage, folder)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    parser.add_argument("--from-stage", type=int, default=1, help="go on from what lies in --out")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options.out, options.from_stage)


if __name__ == "__main__":
    main()
