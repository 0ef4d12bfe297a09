"""Load a checkpoint with transformers, offline and strictly: a golden model with a random head is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from packaging.version import Version
from transformers.utils import logging
from transformers.utils.quantization_config import Mxfp4Config

from lockstep.engine.checkpoint.wrapped import other_part
from lockstep.engine.config.wrappers import SUPPORTED
from lockstep.engine.machine import full_gpu
from lockstep.engine.text import printable
from lockstep.workbench.references import experts, wrapped
from lockstep.workbench.references.attention import register
from lockstep.workbench.references.doubles import widen_rotary
from lockstep.workbench.references.gguf_loading import fill_from_gguf, gguf_config, scale_rotary
from lockstep.workbench.references.request import DType, ReferenceFailure

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

#: What transformers calls the cache that a model is given and that its output has; the name changed with 5.24.
CACHE = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


def load_golden(path: Path, dtype: DType, device: str) -> Any:
    """The transformers model of a checkpoint directory or a GGUF file, in eval mode, with the tapped eager attention.

    ReferenceFailure where transformers cannot read it, where it is of a family whose taps are not mapped, or
    where weights are missing, left over or misshapen: transformers itself would only warn and go on with
    random ones.
    """
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model = (_load_directory if path.is_dir() else _load_gguf)(path, TORCH_DTYPES[dtype])
        model = model.eval().to(device)
    except ReferenceFailure:
        raise
    except torch.OutOfMemoryError as error:
        raise ReferenceFailure(f"{path}: no room for transformers' model: {full_gpu(str(error))}") from error
    except Exception as error:  # transformers raises whatever it likes; whoever asked needs one line
        reason = f"{type(error).__name__}: {printable(error, 400)}"
        raise ReferenceFailure(f"{path}: transformers cannot load it: {reason}") from error
    if dtype == "float64":
        widen_rotary(model.double())  # some routers are float32 in a model of any dtype
    if not path.is_dir():
        scale_rotary(model, path)
    return model


def import_family(path: Path) -> None:
    """Import what `load_golden` will of the checkpoint's family. ReferenceFailure where transformers cannot."""
    try:
        if path.is_dir():
            config: Any = wrapped.config_of(path)
        else:
            config = gguf_config(path)
        _check_family(path, config.model_type)
        wrapped.import_class(config)
    except ReferenceFailure:
        raise
    except torch.OutOfMemoryError as error:
        raise ReferenceFailure(f"{path}: no room for transformers' model: {full_gpu(str(error))}") from error
    except Exception as error:  # transformers raises whatever it likes
        raise ReferenceFailure(f"{path}: {type(error).__name__}: {printable(error, 400)}") from error


def _load_directory(directory: Path, dtype: torch.dtype) -> Any:
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    config = wrapped.config_of(directory)
    _check_family(directory, config.model_type)
    if hasattr(config, "quantization_config"):  # whose blocks are MXFP4: our config reader refuses others
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    loaded: Any = wrapped.auto_class(config).from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        attn_implementation=register(),
        experts_implementation=experts.register(),
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # so that they are reported by name, and refused below
        **options,
    )
    model, info = loaded
    _refuse_incomplete(directory, info)
    return wrapped.text_model(model)


def _load_gguf(path: Path, dtype: torch.dtype) -> Any:
    config = gguf_config(path)
    _check_family(path, config.model_type)
    model = wrapped.empty_model(
        config, dtype=dtype, attn_implementation=register(), experts_implementation=experts.register()
    )
    fill_from_gguf(model, path)
    return model


def _check_family(path: Path, family: object) -> None:
    if family not in SUPPORTED:
        raise ReferenceFailure(
            f"{path}: model_type {printable(family)!r}; the reference records {', '.join(SUPPORTED)}"
        )


def _refuse_incomplete(path: Path, info: Mapping[str, object]) -> None:
    what = {
        "missing_keys": "has no",
        "mismatched_keys": "holds in another shape",
        "unexpected_keys": "holds, but the model has no place for,",
        "error_msgs": "could not be read:",
    }
    for key, verb in what.items():
        names = map(str, cast(Iterable[object], info.get(key) or ()))
        if found := sorted(name for name in names if not other_part(name)):
            named = printable(", ".join(found[:3]), 300) + (
                f" and {len(found) - 3} more" if found[3:] else ""
            )
            raise ReferenceFailure(
                f"{path}: the checkpoint {verb} {named}; a golden reference needs exactly the model's weights"
            )
