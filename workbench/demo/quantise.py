"""The demo model as GGUF: F16 written by gguf-py, Q8_0 and Q4_K_M quantised from it by llama.cpp itself.

    pip install 'lockstep-llm[llamacpp]'
    python -m lockstep.workbench.demo.quantise            # writes workbench/demo/gguf/*.gguf

The F16 file is not shipped: it is made from the checkpoint when MODEL `demo-f16` is first asked for, the same on every
machine, byte by byte.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from lockstep.engine.checkpoint.header import read_header
from lockstep.workbench.demo import GGUF_DIR, MODEL_DIR
from lockstep.workbench.paths import cache_directory

_ARCHITECTURE = gguf.MODEL_ARCH.QWEN2


def f16() -> Path:
    """The F16 file, written where it is not there yet. Its name has the digest of what it is made from."""
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(MODEL_DIR.iterdir()):
        digest.update(file.read_bytes())
    path = cache_directory() / f"demo-f16-{digest.hexdigest()}" / "demo-f16.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent) as directory:  # whoever looks meanwhile sees no half of it
            write_f16(Path(directory) / path.name)
            (Path(directory) / path.name).replace(path)
    return path


def write_f16(path: Path) -> None:
    """The demo model as a GGUF file: matrices in F16, vectors in F32, with tokenizer and chat template."""
    config = json.loads((MODEL_DIR / "config.json").read_text())
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[_ARCHITECTURE])
    writer.add_name("Lockstep demo")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer)
    names = gguf.get_tensor_name_map(_ARCHITECTURE, config["num_hidden_layers"])
    for name, values in _weights():
        stored = names.get_name(name, (".weight", ".bias"))
        if stored is None:
            raise ValueError(f"{name} has no name in GGUF")
        writer.add_tensor(stored, values.astype(np.float16) if values.ndim > 1 else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    described = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    special: dict[str, int] = {token["content"]: token["id"] for token in described["added_tokens"]}
    ids: Mapping[str, int] = described["model"]["vocab"] | special
    settings = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    tokens = sorted(ids, key=lambda token: ids[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if token in special else kinds.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in described["model"]["merges"]])
    writer.add_eos_token_id(ids[settings["eos_token"]])
    writer.add_pad_token_id(ids[settings["pad_token"]])
    writer.add_bos_token_id(json.loads((MODEL_DIR / "config.json").read_text())["bos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(settings["chat_template"])


def _weights() -> Iterator[tuple[str, NDArray[Any]]]:
    """Each tensor of the bfloat16 checkpoint, widened to float32."""
    path = MODEL_DIR / "model.safetensors"
    for name, entry in read_header(path).entries.items():
        bits = np.fromfile(path, "<u2", (entry.stop - entry.start) // 2, offset=entry.start)
        yield name, (bits.astype(np.uint32) << 16).view(np.float32).reshape(entry.shape)


def quantise(source: Path, target: Path, file_type: gguf.LlamaFileType) -> None:
    """llama.cpp's own `llama_model_quantize`, which decides for each tensor which type suits it."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = file_type.value
    params.nthread = 1
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params)
    if failed:
        raise ValueError(f"llama.cpp could not quantise {source} to {file_type.name}")


def main() -> None:
    """Write the two quantised files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=GGUF_DIR)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, file_type in (
        ("demo-q8_0.gguf", gguf.LlamaFileType.MOSTLY_Q8_0),
        ("demo-q4_k_m.gguf", gguf.LlamaFileType.MOSTLY_Q4_K_M),
    ):
        quantise(f16(), out / name, file_type)


if __name__ == "__main__":
    main()
