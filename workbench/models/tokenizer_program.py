"""A tokenizer, served over a socket: `python -m lockstep.workbench.models.tokenizer_program SOCKET LIFELINE
CHECKPOINT`.

It loads the tokenizer, reports what it found, then answers requests until its starter is gone. Each may take SECONDS of
the processor, all of it MEMORY. `workbench.models.tokenizer_process` is the other side.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from pathlib import Path

from tokenizers import Tokenizer

from lockstep.engine.errors import CheckpointError, EngineError, panics_as_errors
from lockstep.engine.lifeline import end_with_starter
from lockstep.engine.ranks.wire import Connection, Disconnected
from lockstep.engine.text import printable
from lockstep.workbench.models.tokenizer_backend import load
from lockstep.workbench.models.tokenizer_messages import (
    MEMORY,
    REQUESTS,
    SECONDS,
    DecodeRequest,
    EncodeRequest,
    IdsAnswer,
    PieceRequest,
    TextAnswer,
    TokenizerAbsent,
    TokenizerAnswer,
    TokenizerFound,
    TokenizerRefused,
    TokenizerRequest,
)


def _serve(connection: Connection[TokenizerRequest], checkpoint: Path) -> None:
    loaded = load(checkpoint)
    if loaded is None:
        connection.send(TokenizerAbsent())
        return
    backend, special, template, where = loaded
    connection.send(
        TokenizerFound(
            {name: _valid(text) for name, text in special.items()},
            None if template is None else _valid(template),
            os.fsencode(where),
        )
    )
    while True:
        request = connection.receive()
        _allow_seconds()
        try:
            with panics_as_errors():
                connection.send(_answered(backend, request))
        except Disconnected:
            raise
        except Exception as error:  # the library raises nothing more specific
            connection.send(_refusal(where, error))


def _answered(backend: Tokenizer, request: TokenizerRequest) -> TokenizerAnswer:
    match request:
        case EncodeRequest():
            return IdsAnswer(list(backend.encode(request.text, add_special_tokens=request.special).ids))
        case DecodeRequest():
            return TextAnswer(str(backend.decode(request.ids, skip_special_tokens=not request.special)))
        case PieceRequest():
            known = backend.id_to_token(request.token) is not None
            return TextAnswer(
                str(backend.decode([request.token], skip_special_tokens=False)) if known else None
            )


def _refusal(where: object, error: Exception) -> TokenizerRefused:
    stated = (
        f"{printable(where, 1000)}: the tokenizer failed: {printable(error, 300) or type(error).__name__}"
    )
    return TokenizerRefused(
        CheckpointError.__name__, f"{stated}; give token ids with --ids 1,2,3 instead of text"
    )


def _valid(text: str) -> str:
    """Without lone surrogates, which JSON can write and nothing else."""
    return text.encode("utf-8", "replace").decode()


def _allow_seconds() -> None:
    """From now on the processor for SECONDS; then the system ends the process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = int(used.ru_utime + used.ru_stime) + SECONDS + 1
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _main() -> None:
    descriptor, lifeline, checkpoint = sys.argv[1:]
    _allow_seconds()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl+c is its starter's
    end_with_starter(int(lifeline), lambda: None)
    connection = Connection(socket.socket(fileno=int(descriptor)), REQUESTS)
    try:
        with panics_as_errors():
            _serve(connection, Path(checkpoint))
    except Disconnected:
        return
    except EngineError as error:
        connection.send(TokenizerRefused(type(error).__name__, str(error)))
    except Exception as error:
        connection.send(_refusal(checkpoint, error))


if __name__ == "__main__":
    _main()
    os._exit(0)
