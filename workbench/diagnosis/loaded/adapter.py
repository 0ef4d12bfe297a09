"""A LoRA adapter (arXiv:2106.09685) as PEFT saves it: what it adds to each of the weights that it is made for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
from torch import Tensor

from lockstep.engine.checkpoint.files import pickle_error, read_json
from lockstep.engine.checkpoint.safetensors import SafetensorsSource
from lockstep.engine.errors import CheckpointError, ConfigError
from lockstep.engine.parallel.shards import Span
from lockstep.engine.text import printable
from lockstep.workbench.diagnosis.loaded.places import key_of

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_FACTOR = re.compile(r"(.+)\.lora_([AB])(?:\.[^.]+)?\.weight", re.ASCII)
#: What changes the formula, and is not read.
_OTHER_FORMULAS = ("use_dora", "lora_bias", "fan_in_fan_out", "megatron_config", "use_qalora")


class _Config(msgspec.Struct):
    """Of adapter_config.json what scales. `alpha_pattern`: by the end of a module's name."""

    lora_alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    alpha_pattern: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class Addition:
    """`scale` · b · a is added to a weight [out, in]: `a` [rank, in], `b` [out, rank]."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return len(self.b), self.a.shape[1]

    def part(self, rows: Span, columns: Span | None) -> Tensor:
        """What some rows and columns (None: all) get, in float64."""
        a = self.a if columns is None else self.a[:, columns.start : columns.stop]
        return self.scale * (self.b[rows.start : rows.stop].double() @ a.double())


@dataclass(frozen=True, slots=True)
class Adapter:
    """`additions`: by what the names of weights have in common, as of `key_of`. `own`: tensors that it has of other
    kinds, such as embeddings of its own."""

    path: Path
    additions: Mapping[str, Addition]
    own: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: Path) -> Self:
        """ConfigError and CheckpointError where the folder is none that PEFT writes, or has another formula."""
        if not (path / CONFIG).is_file():
            raise CheckpointError(f"{path}: no LoRA adapter: it has no {CONFIG}")
        if (path / PICKLED).is_file() and not (path / WEIGHTS).is_file():
            raise pickle_error(path / PICKLED)
        read = read_json(path / CONFIG)
        try:
            config = msgspec.convert(read, _Config)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path / CONFIG}: {error}") from error
        other = [key for key in _OTHER_FORMULAS if read.get(key)]
        if config.peft_type != "LORA" or other:
            what = ", ".join(other) or f"peft_type {printable(config.peft_type, 40)}"
            raise ConfigError(f"{path / CONFIG}: {what}: plain LoRA alone is compared")
        factors, own = dict[str, dict[str, Tensor]](), list[str]()
        with SafetensorsSource(path / WEIGHTS) as source:
            for name in sorted(source.names()):
                if (match := _FACTOR.fullmatch(name)) is None:
                    own.append(name)
                else:
                    factors.setdefault(match[1], {})[match[2]] = source.read(name)
        if not factors:
            raise CheckpointError(f"{path / WEIGHTS}: no lora_A and lora_B in it")
        return cls(path, dict(_additions(path / WEIGHTS, factors, config)), tuple(own))


def factor_of(name: str) -> tuple[str, str] | None:
    """Of a tensor's name in memory, whose weight's addition it is part of (as of `key_of`), and which: "A" or "B"."""
    match = _FACTOR.fullmatch(name)
    return None if match is None else (key_of(f"{match[1]}.weight"), match[2])


def _additions(
    file: Path, factors: Mapping[str, Mapping[str, Tensor]], config: _Config
) -> Iterator[tuple[str, Addition]]:
    for module, pair in factors.items():
        name = printable(module)
        if set(pair) != {"A", "B"}:
            raise CheckpointError(f"{file}: {name} has lora_{''.join(pair)} alone")
        a, b = pair["A"], pair["B"]
        if a.ndim != 2 or b.ndim != 2 or not len(a) == b.shape[1] > 0:
            raise CheckpointError(
                f"{file}: {name}: lora_A {list(a.shape)} and lora_B {list(b.shape)} do not fit"
            )
        rank, alpha = len(a), _of(config.alpha_pattern, module, config.lora_alpha)
        yield (
            key_of(f"{module}.weight"),
            Addition(a, b, alpha / (math.sqrt(rank) if config.use_rslora else rank)),
        )


def _of(pattern: Mapping[str, float], module: str, otherwise: float) -> float:
    """The number of the first name that a module's ends with. PEFT takes them for regular expressions, which a stranger
    must not choose."""
    found = (value for name, value in pattern.items() if f".{module}".endswith(f".{name.lstrip('^')}"))
    return next(found, otherwise)
