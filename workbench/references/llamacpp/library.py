"""llama.cpp through llama-cpp-python: a model, its forward passes, and every tensor on the way (`cb_eval`)."""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lockstep.engine import extras
from lockstep.engine.extras import install
from lockstep.engine.text import printable
from lockstep.workbench.references.request import ReferenceFailure

INSTALL = (
    f"llama.cpp is not installed: {install('llamacpp')} (it is built from source, which takes minutes "
    "and a C++ compiler)"
)

Array = NDArray[np.float32]
#: Asked of each tensor before it is computed, by name and operation: whether to hand it over.
Wants = Callable[[str, str], bool]
#: Given a tensor that was wanted, [outermost … innermost], four dimensions.
Takes = Callable[[Array], None]

#: What llama.cpp last logged, for when it fails without a word.
_logged: deque[str] = deque(maxlen=8)


def is_installed() -> bool:
    """Whether llama-cpp-python is there; imports nothing."""
    return extras.is_installed("llamacpp")


def need_installed() -> None:
    """ReferenceFailure with the line that installs it, where llama-cpp-python is missing."""
    if not is_installed():
        raise ReferenceFailure(INSTALL)


class _Tensor(ctypes.Structure):
    """The head of `struct ggml_tensor`; all else is asked of exported functions."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    )


#: Every step has a thousand names again, the same as in the step before.
_NAMES = 1 << 14


@functools.lru_cache(_NAMES)
def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")


@functools.cache
class _Library:
    """The shared libraries, with their log kept instead of printed. One for the process: they keep the callback."""

    def __init__(self) -> None:
        need_installed()
        # Imported here: an extra.
        import llama_cpp.llama_cpp as api
        from llama_cpp import _ggml

        self.api: Any = api
        self.ggml: Any = _ggml.libggml
        self.ggml.ggml_get_name.restype = self.ggml.ggml_op_desc.restype = ctypes.c_char_p
        self.ggml.ggml_nbytes.restype = ctypes.c_size_t
        for function in (self.ggml.ggml_get_name, self.ggml.ggml_op_desc, self.ggml.ggml_nbytes):
            function.argtypes = (ctypes.c_void_p,)
        self.ggml.ggml_backend_tensor_get.argtypes = (
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t,
        )  # fmt: skip
        self.ggml.ggml_backend_tensor_get.restype = None
        self._log = api.llama_log_callback(
            lambda level, text, data: _logged.append(text.decode("utf-8", "replace"))
        )
        api.llama_log_set(self._log, None)
        api.llama_backend_init()

    def describe(self, tensor: int) -> tuple[str, str]:
        """Name and operation of a tensor."""
        return _text(self.ggml.ggml_get_name(tensor)), _text(self.ggml.ggml_op_desc(tensor))

    def read(self, tensor: int) -> Array:
        """A copy of a float32 tensor, whatever its strides, from whichever memory it is in."""
        head = _Tensor.from_address(tensor)
        if head.type != self.api.GGML_TYPE_F32:
            raise ReferenceFailure(
                f"llama.cpp computed {self.describe(tensor)[0]} in ggml type {head.type}, not F32"
            )
        raw = np.empty(self.ggml.ggml_nbytes(tensor) // 4, np.float32)
        self.ggml.ggml_backend_tensor_get(tensor, raw.ctypes.data, 0, raw.nbytes)
        return np.ndarray(head.ne[::-1], np.float32, raw, 0, head.nb[::-1])


def _failed(what: str, path: Path) -> ReferenceFailure:
    stated = printable(" ".join("".join(_logged).split()), 300) or "nothing"
    return ReferenceFailure(f"{path}: llama.cpp cannot {what} it; its last output: {stated}")


def dequantise(source: Path, target: Path, threads: int) -> None:
    """Write `source` to `target` with its matrices in float32, by llama.cpp's own dequantisation."""
    api = _Library().api
    options = api.llama_model_quantize_default_params()
    options.nthread = threads
    options.ftype = api.LLAMA_FTYPE_ALL_F32
    options.allow_requantize = True
    if api.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(options)) != 0:
        raise _failed("dequantise", source)


class LlamaModel:
    """A GGUF file loaded by llama.cpp, on the CPU. Close it, or use it in a `with` statement."""

    def __init__(self, path: Path, threads: int) -> None:
        self.library = _Library()
        self.threads = threads
        api = self.library.api
        options = api.llama_model_default_params()
        options.n_gpu_layers = 0
        self.handle = api.llama_model_load_from_file(str(path).encode(), options)
        if not self.handle:
            raise _failed("load", path)
        self._contexts: list[LlamaContext] = []

    def text(self, key: str) -> str | None:
        """A value of the file's metadata as llama.cpp prints it; None where there is none."""
        buffer = ctypes.create_string_buffer(256)
        api = self.library.api
        length = api.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return None if length < 0 else buffer.value.decode("utf-8", "replace")

    def number(self, key: str) -> float | None:
        """The same of a number."""
        text = self.text(key)
        try:
            return None if text is None else float(text)
        except ValueError:
            return None

    @property
    def vocab_size(self) -> int:
        api = self.library.api
        return int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.handle)))

    def context(self, tokens: int, wants: Wants, takes: Takes) -> LlamaContext:
        """An empty cache for up to `tokens` tokens; it is closed with the model."""
        context = LlamaContext(self, tokens, wants, takes)
        self._contexts.append(context)
        return context

    def close(self) -> None:
        for context in self._contexts:
            context.close()
        if self.handle:
            self.library.api.llama_model_free(self.handle)
            self.handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LlamaContext:
    """One sequence: a float32 cache, no flash attention, logits of every token."""

    def __init__(self, model: LlamaModel, tokens: int, wants: Wants, takes: Takes) -> None:
        self.library, self.read = model.library, 0
        self._wants, self._takes = wants, takes
        self._error: BaseException | None = None
        api = self.library.api
        options = api.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = tokens
        options.n_threads = options.n_threads_batch = model.threads
        options.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.type_k = options.type_v = api.GGML_TYPE_F32
        options.offload_kqv = options.op_offload = False
        self._callback = api.ggml_backend_sched_eval_callback(self._on_tensor)
        options.cb_eval = self._callback
        self.handle = api.llama_init_from_model(model.handle, options)
        if not self.handle:
            raise ReferenceFailure(
                f"llama.cpp has no room for a context of {tokens} tokens: {' '.join(_logged)}"
            )
        self._batch = api.llama_batch_init(tokens, 0, 1)
        self._vocab_size = model.vocab_size

    def forward(self, ids: Sequence[int]) -> Array:
        """Read the next tokens; the logits after the last, [vocab]."""
        batch = self._batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = token, self.read + i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        code = self.library.api.llama_decode(self.handle, batch)
        if self._error is not None:
            raise self._error
        if code != 0:
            raise ReferenceFailure(
                f"llama_decode failed with {code} at position {self.read}: {' '.join(_logged)}"
            )
        self.read += len(ids)
        logits = self.library.api.llama_get_logits_ith(self.handle, -1)
        return np.ctypeslib.as_array(logits, (self._vocab_size,)).copy()

    def _on_tensor(self, tensor: int, ask: bool, _data: object) -> bool:
        """llama.cpp asks of every tensor before it computes it, and hands over what was wanted. False to the latter
        ends the pass. An exception must not leave: it is raised by `forward`."""
        try:
            if ask:
                return self._wants(*self.library.describe(tensor))
            self._takes(self.library.read(tensor))
        except BaseException as error:  # ctypes would print it and go on
            self._error = self._error or error
            return False
        return True

    def close(self) -> None:
        if self.handle:
            self.library.api.llama_batch_free(self._batch)
            self.library.api.llama_free(self.handle)
            self.handle = None
