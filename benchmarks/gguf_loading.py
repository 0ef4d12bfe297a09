"""Loading a GGUF file: CPU seconds, peak memory and bytes read of a rank, against transformers' own GGUF path.

    python benchmarks/gguf_loading.py [--type Q4_K] [--layers 8] [--threads 1]

A random Qwen2 model of twice the width of the 0.5B one (rows are whole blocks of 256), written for the occasion; each
load in a process of its own. Of transformers its `load_gguf_checkpoint` alone, which dequantises every tensor.
`quantised`: one rank that keeps the file's blocks (`--weights quantised`). Targets: a third of transformers' time; a
rank's shards and one tensor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np


class Shape(NamedTuple):
    """Sizes of a Qwen2 model."""

    hidden: int
    width: int
    heads: int
    kv_heads: int
    vocabulary: int


_FLOATS = {"F32": np.float32, "F16": np.float16}
WIDE = Shape(1792, 9728, 28, 4, 32768)


def write(path: Path, kind: str, layers: int, shape: Shape = WIDE) -> None:
    """Random blocks whose scales are small and finite, or floats."""
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([str(token) for token in range(shape.vocabulary)])
    writer.add_token_merges(["1 0"])  # llama.cpp wants one
    kv = shape.kv_heads * shape.hidden // shape.heads
    rng, stored = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
    elements, nbytes = gguf.GGML_QUANT_SIZES[stored]

    def matrix(name: str, rows: int, columns: int) -> None:
        if elements == 1:  # floats: bytes at random would be of any size
            raw = rng.normal(0, 0.02, (rows, columns)).astype(_FLOATS[kind]).view(np.uint8)
        else:
            raw = rng.integers(0, 40, (rows, columns // elements * nbytes), np.uint8)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=stored)

    def vector(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, np.float32))

    matrix("token_embd", shape.vocabulary, shape.hidden)
    for i in range(layers):
        for name, rows in (("q", shape.hidden), ("k", kv), ("v", kv)):
            matrix(f"blk.{i}.attn_{name}", rows, shape.hidden)
            vector(f"blk.{i}.attn_{name}.bias", rows)
        matrix(f"blk.{i}.attn_output", shape.hidden, shape.hidden)
        matrix(f"blk.{i}.ffn_gate", shape.width, shape.hidden)
        matrix(f"blk.{i}.ffn_up", shape.width, shape.hidden)
        matrix(f"blk.{i}.ffn_down", shape.hidden, shape.width)
        vector(f"blk.{i}.attn_norm.weight", shape.hidden)
        vector(f"blk.{i}.ffn_norm.weight", shape.hidden)
    vector("output_norm.weight", shape.hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def peak_mib() -> int:
    """The largest resident set of this process so far, by the kernel."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


def load(path: Path, how: str, threads: int) -> dict[str, float]:
    """One load in this process: `transformers`, `quantised`, or the number of ranks of which this is rank 0."""
    import torch

    torch.set_num_threads(threads)
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from lockstep.engine.checkpoint.load import shards_of
    from lockstep.engine.checkpoint.resolve import open_checkpoint
    from lockstep.engine.config import EngineConfig
    from lockstep.engine.model import Decoder
    from lockstep.engine.parallel import shards
    from lockstep.engine.parallel.comm import Comm
    from lockstep.engine.rules import CORRECT
    from lockstep.engine.run.loading import Loader
    from lockstep.workbench.references.gguf_loading import gguf_config

    before, start = peak_mib(), time.process_time()
    if how == "transformers":
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(gguf_config(path))
        reported = load_gguf_checkpoint(
            str(path), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
        )
        kept, read = list(reported["tensors"].values()), path.stat().st_size
    elif how == "quantised":
        comm, engine = Comm(), EngineConfig(weights="quantised")
        loader = Loader(path, engine, comm)
        decoder = Decoder(loader.model, engine, comm, CORRECT)
        read = loader(decoder, CORRECT).bytes_read
        kept = list(decoder.parameters().values())
    else:
        config, source = open_checkpoint(path)
        plans = {name: shards.plan(name, config, int(how), 0) for name in shards.parameters(config)}
        parameters = {name: torch.empty(plan.local_shape) for name, plan in plans.items()}
        for name, tensor in shards_of(source, config, int(how), 0, dtype="float32"):
            parameters[name].copy_(tensor)
        kept, read = list(parameters.values()), source.bytes_read
    seconds = time.process_time() - start
    weights = sum(tensor.nbytes for tensor in kept) / 2**20
    return {"seconds": seconds, "peak": peak_mib() - before, "weights": weights, "read": read / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--type", default="Q4_K")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs=2, metavar=("FILE", "HOW"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(load(Path(options.only[0]), options.only[1], options.threads)))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        write(file, options.type, options.layers)
        print(f"{options.type}, {options.layers} layers, {file.stat().st_size / 2**20:.0f} MiB on disk")
        print(f"{'':14}{'CPU s':>9}{'peak MiB':>10}{'weights MiB':>13}{'read MiB':>10}")
        for how in ("transformers", "1", "2", "4", "quantised"):
            command = [sys.executable, __file__, "--threads", str(options.threads), "--only", str(file), how]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found = json.loads(out.splitlines()[-1])
            name = f"rank 0 of {how}" if how.isdigit() else how
            print(
                f"{name:14}{found['seconds']:9.2f}{found['peak']:10.0f}{found['weights']:13.0f}{found['read']:10.0f}"
            )


if __name__ == "__main__":
    main()
