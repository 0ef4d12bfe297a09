"""llama.cpp's tensors as files: what a `cb_eval` callback keeps, and what llama-debug leaves.

Names and operations are those that llama.cpp's graph of qwen2 has (test_llamacpp.py has the library itself, marked
`llamacpp`); logits and ids as examples/debug/debug.cpp writes them, log lines as common/debug.cpp (and, before that,
examples/eval-callback) prints them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tests.workbench.foreign.readers.activations import Computed, Taps


def graph(taps: Taps, layers: int, head: int) -> Iterator[tuple[str, str, Tensor]]:
    """Operation, name and tensor in the order of execution: [T, features], or [T, heads, head_dim] for q and k."""

    def heads(x: Tensor) -> Tensor:
        return x.reshape(len(x), -1, head)

    yield "GET_ROWS", "embd", taps["embed"]
    for i in range(layers):
        at = f"layers.{i}."
        yield "RMS_NORM", f"norm-{i}", taps[at + "attn_norm"] * 0.5
        yield "MUL", f"attn_norm-{i}", taps[at + "attn_norm"]
        for x in "qkv":
            bias = taps[f"{at}attn.{x}_proj"]
            yield "MUL_MAT", f"{x.upper()}cur-{i}", bias - 1  # the product, before its bias
            yield "ADD", f"{x.upper()}cur-{i}", bias
        for x in "qk":
            yield "RESHAPE", f"{x.upper()}cur-{i} (reshaped)", heads(taps[f"{at}attn.{x}_proj"])
            yield "ROPE", f"{x.upper()}cur-{i}", heads(taps[f"{at}attn.{x}_rope"])
        yield "CONT", f"kqv_out-{i}", taps[at + "attn.context"]
        yield "MUL_MAT", f"node_{i}", taps[at + "attn.o_proj"]
        yield "ADD", f"ffn_inp-{i}", taps[at + "attn_residual"]
        yield "MUL", f"ffn_norm-{i}", taps[at + "mlp_norm"]
        yield "MUL_MAT", f"ffn_gate-{i}", taps[at + "mlp.gate"]
        yield "MUL_MAT", f"ffn_up-{i}", taps[at + "mlp.up"]
        yield "GLU", f"ffn_swiglu-{i}", taps[at + "mlp.act"]
        yield "MUL_MAT", f"ffn_out-{i}", taps[at + "mlp.down"]
        yield "ADD", f"l_out-{i}", taps[at + "mlp_residual"]
    yield "MUL", "result_norm", taps["final_norm"]
    yield "MUL_MAT", "result_output", taps["logits"]


def four(x: Tensor) -> np.ndarray:
    """As ggml has it, the outermost dimension first."""
    return np.ascontiguousarray(x.numpy().reshape((1,) * (4 - x.ndim) + tuple(x.shape)))


def write_callback(folder: Path, model: Any, run: Computed) -> None:
    """A folder a pass."""
    for k, taps in enumerate(run.passes):
        home = folder / f"pass{k}"
        home.mkdir(parents=True)
        np.save(home / "ids.npy", np.array(run.ids[k], np.int32))
        for number, (operation, name, x) in enumerate(
            graph(taps, model.config.num_hidden_layers, head(model))
        ):
            np.save(home / f"{number:05d}.{operation}.{name}.npy", four(x))


def head(model: Any) -> int:
    return int(model.model.layers[0].self_attn.head_dim)


def write_debug(folder: Path, model: Any, run: Computed, *, prefix: str = "common_debug_cb_eval") -> None:
    """`llama-debug --save-logits --verbose`, its output kept in a log."""
    taps = run.passes[0]
    folder.mkdir()
    np.array(run.ids[0], "<i4").tofile(folder / "llamacpp-tiny-tokens.bin")
    taps["logits"][-1].numpy().astype("<f4").tofile(folder / "llamacpp-tiny.bin")
    (folder / "llamacpp-tiny.txt").write_text("0: 0.5\n")
    lines = ["llama_model_loader: loaded meta data\n"]
    for operation, name, x in graph(taps, model.config.num_hidden_layers, head(model)):
        ne = ", ".join(str(size) for size in reversed(four(x).shape))
        lines.append(
            f"{prefix}: {name:>24} = (f32) {operation:>10}(a{{64, 4, 1, 1}}, b{{64, 64, 1, 1}}}}) = {{{ne}}}\n"
        )
        lines += ["    [\n", "            [      0.0434,   ...,      -0.0372  ],\n", "    ]\n"]
        lines.append(f"    sum = {float(x.sum()):f}\n")
        if prefix == "ggml_debug":
            lines.append(f"                                     sum_sq = {float((x * x).sum()):f}\n")
    (folder / "debug.log").write_text("".join(lines))
