"""The shape of a session's model, as whoever asks what can act on it needs it."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import cast

import msgspec

from lockstep.engine.config import ModelConfig
from lockstep.engine.errors import EngineError
from lockstep.workbench.views.source import SessionSource


def model_config(source: SessionSource) -> ModelConfig:
    """The checkpoint's own configuration where it is on this machine. Else what the session has of it, which may lack
    fields: AttributeError."""
    # Imported here: the first paint waits for no reader of checkpoints.
    from lockstep.engine.checkpoint.resolve import open_checkpoint

    path = source.model_path
    if path is not None:
        with suppress(EngineError, OSError):
            model, checkpoint = open_checkpoint(path)
            checkpoint.close()
            return model
    return cast(ModelConfig, SimpleNamespace(**msgspec.to_builtins(source.meta.model)))
