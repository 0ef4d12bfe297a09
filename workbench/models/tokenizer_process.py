"""A checkpoint's tokenizer in a process of its own: its file is a stranger's program.

Normalizers and decoders may multiply a text without end, regular expressions may take for ever, and what goes wrong in
the library is a panic. `workbench.models.tokenizer_program` is that process, bounded in time and memory; this is the
side of its starter.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from lockstep.engine.answering import AnsweringProcess
from lockstep.engine.errors import CheckpointError
from lockstep.engine.extras import need
from lockstep.engine.ranks.wire import Connection, Disconnected, MalformedMessage
from lockstep.engine.text import bytes_text, printable
from lockstep.workbench.models.tokenizer_messages import (
    ANSWERS,
    KINDS,
    MEMORY,
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

#: How many times longer an answer is waited for: a busy machine is slow.
_PATIENCE = 12
#: Times that the process may fail before it is not started again.
_FAILURES = 3
#: Bytes of the longest answer: a piece, and for each byte or token that was asked about.
_ANSWER, _ANSWER_EACH = 8 << 20, 256
_PROGRAM = "lockstep.workbench.models.tokenizer_program"


class TokenizerProcess:
    """The tokenizer of a checkpoint, asked over a socket; the process ends with this object. Thread-safe.

    `found` is None where the checkpoint has none. CheckpointError where it fails or takes too much; ConfigError and
    UnsupportedTokenizer as in `tokenizer_backend.load`; MissingExtra where no library for it is installed.
    """

    def __init__(self, checkpoint: Path) -> None:
        need("engine", "a tokenizer")
        self._checkpoint, self._lock, self._failures = checkpoint, threading.Lock(), 0
        self._connection, self._end = self._start()
        try:
            answer = self._answer(_ANSWER)
        except CheckpointError:
            self._end()
            raise
        if isinstance(answer, TokenizerAbsent):
            self._end()
        self.found = answer if isinstance(answer, TokenizerFound) else None

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text."""
        answer = self._ask(EncodeRequest(text, special), len(text.encode()))
        return answer.ids if isinstance(answer, IdsAnswer) else []

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        """The text of ids."""
        answer = self._ask(DecodeRequest(ids, special), len(ids))
        return (answer.text or "") if isinstance(answer, TextAnswer) else ""

    def piece(self, token: int) -> str | None:
        """The text of one token; None for one that is not known."""
        answer = self._ask(PieceRequest(token), 1)
        return answer.text if isinstance(answer, TextAnswer) else None

    def _ask(self, request: TokenizerRequest, size: int) -> TokenizerAnswer:
        with self._lock:
            if self._failures >= _FAILURES:
                raise self._failed(f"it has failed {self._failures} times")
            if not self._end.alive:
                self._connection, self._end = self._start()
                self._answer(_ANSWER)  # what was found before
            try:
                self._connection.deadline = time.monotonic() + _PATIENCE * SECONDS
                self._connection.send(request)
            except Disconnected:
                raise self._broken() from None
            return self._answer(_ANSWER + _ANSWER_EACH * size)

    def _start(self) -> tuple[Connection[TokenizerAnswer], weakref.finalize[..., TokenizerProcess]]:
        started = AnsweringProcess.start(
            _PROGRAM,
            str(self._checkpoint),
            settings={"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"},
        )
        self._process = started.process
        connection = Connection(started.socket, ANSWERS, deadline=time.monotonic() + _PATIENCE * SECONDS)
        return connection, weakref.finalize(self, started.end)

    def _answer(self, most: int) -> TokenizerAnswer:
        self._connection.most = most
        try:
            answer = self._connection.receive()
        except Disconnected as error:
            raise self._broken(error) from None
        if isinstance(answer, TokenizerRefused):
            raise KINDS.get(answer.kind, CheckpointError)(answer.message)
        return answer

    def _broken(self, error: Disconnected | None = None) -> CheckpointError:
        """The process is of no further use: why."""
        self._failures += 1
        try:
            code = 0 if isinstance(error, MalformedMessage) else self._process.wait(1)
        except subprocess.TimeoutExpired:
            code = -signal.SIGXCPU  # it stands still: the deadline has passed
        self._end()
        if isinstance(error, MalformedMessage):
            return self._failed("it makes more text of a text than any")
        if code == -signal.SIGXCPU:
            return self._failed(f"it takes more than {SECONDS} s")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return self._failed(f"it takes more than {bytes_text(MEMORY)}, or its process was ended ({how})")

    def _failed(self, why: str) -> CheckpointError:
        where = printable(self._checkpoint, 1000)
        return CheckpointError(
            f"{where}: the tokenizer failed: {why}; download it again, or take it out of the model and give token ids "
            "with --ids 1,2,3"
        )
