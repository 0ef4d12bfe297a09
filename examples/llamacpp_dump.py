"""Every tensor of a llama.cpp run as .npy files, in the form that `lockstep import llamacpp` reads.

    python llamacpp_dump.py model.gguf DUMP 4 1 15043 3186      # 4 tokens after these three ids; needs llama-cpp-python

A folder a pass: ids.npy, and 00012.MUL_MAT.Qcur-3.npy for each tensor: number, operation, name.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp.llama_cpp as api
import numpy as np
from llama_cpp import _ggml


class Head(ctypes.Structure):
    """The beginning of `struct ggml_tensor`."""

    _fields_ = (
        ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
    )  # fmt: skip


def dump(model: str, folder: Path, steps: int, ids: list[int]) -> None:
    """Read `ids` and, greedily, `steps` further tokens."""
    ggml, home, count = _ggml.libggml, folder, 0
    ggml.ggml_get_name.restype = ggml.ggml_op_desc.restype = ctypes.c_char_p
    ggml.ggml_nbytes.restype = ctypes.c_size_t
    for function in (ggml.ggml_get_name, ggml.ggml_op_desc, ggml.ggml_nbytes):
        function.argtypes = (ctypes.c_void_p,)
    ggml.ggml_backend_tensor_get.argtypes = (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
    )

    def see(tensor: int, ask: bool, _data: object) -> bool:
        nonlocal count
        head = Head.from_address(tensor)
        if ask or head.type != api.GGML_TYPE_F32:
            return True
        raw = np.empty(ggml.ggml_nbytes(tensor) // 4, np.float32)
        ggml.ggml_backend_tensor_get(tensor, raw.ctypes.data, 0, raw.nbytes)
        array = np.ndarray(head.ne[::-1], np.float32, raw, 0, head.nb[::-1])
        name, operation = ggml.ggml_get_name(tensor).decode(), ggml.ggml_op_desc(tensor).decode()
        np.save(home / f"{count:05d}.{operation}.{name.replace('/', '_')}.npy", array)
        count += 1
        return True

    api.llama_backend_init()
    loaded = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
    options = api.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = len(ids) + steps  # a pass in one piece
    options.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED  # else attention is one kernel
    options.type_k = options.type_v = (
        api.GGML_TYPE_F32
    )  # else keys and values are rounded to float16, which is found
    callback = api.ggml_backend_sched_eval_callback(see)
    options.cb_eval = callback
    context = api.llama_init_from_model(loaded, options)
    if not context:
        sys.exit(f"llama.cpp cannot load {model}")
    batch, read = api.llama_batch_init(len(ids), 0, 1), 0
    for step in range(steps + 1):
        home, count = folder / f"pass{step}", 0
        home.mkdir(parents=True)
        np.save(home / "ids.npy", np.array(ids, np.int32))
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):  # logits of every token: else the last layer keeps one row
            batch.token[i], batch.pos[i], batch.logits[i], batch.n_seq_id[i] = token, read + i, 1, 1
            batch.seq_id[i][0] = 0
        if api.llama_decode(context, batch) != 0:
            sys.exit("llama_decode failed")
        read += len(ids)
        vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(loaded))
        logits = np.ctypeslib.as_array(api.llama_get_logits_ith(context, -1), (vocab,))
        ids = [int(logits.argmax())]


if __name__ == "__main__":
    dump(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), [int(token) for token in sys.argv[4:]])
