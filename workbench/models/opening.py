"""From the MODEL that a user names to what can be run (torch-free)."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from lockstep.engine import extras
from lockstep.engine.checkpoint.files import gguf_file
from lockstep.engine.checkpoint.gguf.split import split_name
from lockstep.engine.checkpoint.hub import HUB_ID
from lockstep.engine.checkpoint.resolve import open_checkpoint, resolve
from lockstep.engine.config import ModelConfig
from lockstep.engine.errors import CheckpointError, ConfigError
from lockstep.workbench.demo import MODEL_DIR
from lockstep.workbench.demo.checkpoints import DEMOS, demo_path
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.models.dumps import recognised
from lockstep.workbench.models.tokenizer import Tokenizer, find_tokenizer
from lockstep.workbench.paths import session_of

DEMO = "demo"


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A checkpoint that was found and whose headers were read; `name` is short and for people."""

    name: str
    path: Path
    config: ModelConfig
    tokenizer: Tokenizer | None

    @property
    def offers_prompt(self) -> bool:
        """Whether there is a question to put to it when nobody asks one."""
        return self.name in DEMOS

    @property
    def directory(self) -> Path:
        """Where the checkpoint's configuration and tokenizer are: its directory, or the GGUF file that holds all."""
        return self.path if self.path.is_dir() or self.path.suffix == ".gguf" else self.path.parent


def refuse_dump(name: str) -> None:
    """UsageError where MODEL is a recording, or the folder that another engine has written, which is to become one
    first."""
    given = shlex.quote(name)
    if (recording := session_of(name)) is not None and recording.is_file():
        raise UsageError(
            f"{name} is a recording, not a model: `lockstep replay {given}` opens it, "
            f"`lockstep check {given}` judges it"
        )
    if not os.path.isdir(name) or os.path.exists(os.path.join(name, "config.json")):
        return
    if forms := recognised(Path(name)):
        which = f"{forms[0]} dump" if len(forms) == 1 else f"dump ({' or '.join(forms)})"
        raise UsageError(
            f"{name} is a {which}, not a model: make a session of it, "
            f"`lockstep import {forms[0]} {given} -o run.session`, and name that"
        )


def open_to_run(name: str, what: str = "running a model") -> OpenedModel:
    """As `open_model`. MissingExtra before anything is looked for where the extra `engine`, which `what` needs, is not
    installed."""
    extras.need("engine", what)
    return open_model(name)


def open_model(name: str) -> OpenedModel:
    """Find MODEL: a directory or file (safetensors, GGUF), a hub id, or one of `DEMOS`. Without the extra `engine` it
    has no tokenizer: what it is made of can be read all the same.

    CheckpointError states what is wrong with it, its configuration or its tokenizer; UsageError where it is a dump.
    """
    refuse_dump(name)
    path = demo_path(name) or resolve(name)
    try:
        path = gguf_file(path) or path
        config, source = open_checkpoint(path)
        source.close()
        tokenizer = find_tokenizer(path) if find_spec("tokenizers") is not None else None
        found = OpenedModel(DEMO, path, config, tokenizer)
    except ConfigError as error:  # the files' fault, not the command line's
        raise CheckpointError(str(error)) from error
    return found if path == MODEL_DIR else replace(found, name=_short_name(name, found.directory))


def _short_name(typed: str, directory: Path) -> str:
    """A file's or a directory's own name, not that of what a link leads to: in the hub's cache a file is a link, and a
    directory a commit."""
    if directory.is_dir() and HUB_ID.fullmatch(typed) and not Path(typed).exists():
        return typed.rpartition("/")[2]
    own = os.path.basename(os.path.abspath(directory))
    split = split_name(own)
    return own.removesuffix(".gguf") if split is None else split.stem
