"""From what a user typed to an open checkpoint: a directory, a file, or a Hugging Face hub id. Torch-free."""

from __future__ import annotations

from pathlib import Path

from lockstep.engine.checkpoint.files import PICKLES, gguf_file, pickle_error, read_json
from lockstep.engine.checkpoint.fused import UnstackedSource
from lockstep.engine.checkpoint.gguf.source import open_gguf
from lockstep.engine.checkpoint.hub import HUB_ID, fetch
from lockstep.engine.checkpoint.safetensors import SafetensorsSource
from lockstep.engine.checkpoint.source import Source
from lockstep.engine.checkpoint.ties import settle
from lockstep.engine.checkpoint.wrapped import naming
from lockstep.engine.config import ModelConfig
from lockstep.engine.errors import CheckpointError, ConfigError
from lockstep.engine.graph.checkpoint_names import FUSED
from lockstep.engine.text import printable


def open_checkpoint(path: Path) -> tuple[ModelConfig, Source]:
    """Open a checkpoint directory, a GGUF file, or one safetensors file beside its config.json.

    Headers are validated, tensors not yet read: `load.verify` holds them against the configuration.
    ConfigError for the configuration, CheckpointError for the weights.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    if gguf := gguf_file(path):
        return open_gguf(gguf)
    if not path.is_dir():
        _refuse_format(path)
    directory = path if path.is_dir() else path.parent
    config_file = directory / "config.json"
    if not config_file.exists():
        raise _no_config(directory)
    config = read_json(config_file)
    generation_file = directory / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else None
    model = ModelConfig.from_hf(config, generation, str(config_file))
    stored = open_stored(path, model, config_file.read_bytes())
    stacked = model.family in FUSED or model.experts is not None
    source: Source = UnstackedSource(stored, model) if stacked else stored
    return settle(model, source), source


def open_stored(path: Path, model: ModelConfig, config: bytes = b"") -> SafetensorsSource:
    """The safetensors of a checkpoint as they lie in its files, stacked or not, by the names of the model's tensors.
    `config` is the raw config.json."""
    return SafetensorsSource(path, config, naming(model))


def resolve(model: str) -> Path:
    """The path that `model` means: itself where it exists, otherwise a hub id, from the cache or downloaded.

    CheckpointError where it is neither, or cannot be fetched.
    """
    path = Path(model).expanduser()
    if model and path.exists():  # Path("") would be the working directory
        return path
    if (match := HUB_ID.fullmatch(model)) is None:
        raise CheckpointError(
            f"{printable(repr(model))}: no such file or directory, and not a hub id (owner/name, or of GGUF files "
            "owner/name:FILE)"
        )
    return fetch(match["repository"], match["file"])


def _no_config(directory: Path) -> ConfigError:
    """What is missing, and where it may be instead: in a subfolder, or (the hub's cache) in a snapshot."""
    found = sorted(
        str(file.parent) for where in ("*", "snapshots/*") for file in directory.glob(f"{where}/config.json")
    )
    step = "name the folder that has it, or download it beside the weights"
    if found:
        others = len(found) - 1
        which = "1 other folder that has one" if others == 1 else f"{others} other folders that have one"
        more = f" (or {which})" if others else ""
        step = f"did you mean {printable(found[0])}{more}?"
    return ConfigError(f"{directory}: no config.json: not a Hugging Face checkpoint; {step}")


def _refuse_format(path: Path) -> None:
    if path.suffix in PICKLES:
        raise pickle_error(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: neither a directory nor a .safetensors or .gguf file")
