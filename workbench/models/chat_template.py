"""A checkpoint's chat template, rendered in a process of its own: it is a stranger's program.

Jinja's sandbox keeps it from reaching out, not from running forever or filling the memory. `python -m
workbench.models.chat_template FD` is that process: it reads a request from the file of that descriptor and writes the
answer to stdout.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import msgspec

from lockstep.engine.children import start_python
from lockstep.engine.errors import CheckpointError, RequestError
from lockstep.engine.text import bytes_text, printable

#: What rendering may take. Real templates take milliseconds; most of the memory is Python's own.
SECONDS = 5.0
MEMORY = 512 << 20
#: Bytes of text that a template may write: more than any context holds.
LONGEST = 16 << 20

Messages = Sequence[Mapping[str, str]]


class RenderRequest(msgspec.Struct, frozen=True):
    """A template, the conversation, and the special tokens by the names that templates use."""

    template: str
    messages: list[dict[str, str]]
    special: dict[str, str]


class RenderAnswer(msgspec.Struct, frozen=True):
    """The text, or why there is none: the template refused the conversation, or it failed."""

    text: str = ""
    refused: str = ""
    failed: str = ""


def render(template: str, messages: Messages, special: Mapping[str, str], where: object) -> str:
    """The conversation as `template` writes it. RequestError where the template refuses it; CheckpointError, with
    `where` the template is from, where it fails or takes more than SECONDS or MEMORY."""
    request = RenderRequest(template, [dict(one) for one in messages], dict(special))
    answer = _answer(request)
    if answer.refused:
        raise RequestError(f"{where}: the chat template refuses this: {printable(answer.refused)}")
    if answer.failed:
        raise CheckpointError(
            f"{where}: the chat template failed: {printable(answer.failed)}; give the prompt without --chat"
        )
    return answer.text


def _answer(request: RenderRequest) -> RenderAnswer:
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as reported:
        asked.write(msgspec.json.encode(request))
        asked.flush()
        child = start_python(
            "-m", __name__, str(asked.fileno()),
            stdout=reported, stderr=subprocess.DEVNULL, pass_fds=[asked.fileno()],
        )  # fmt: skip
        try:
            code = child.wait(
                4 * SECONDS
            )  # its processor time is limited more tightly; a busy machine is slow
        except subprocess.TimeoutExpired:
            code = 1
        finally:
            child.kill()
            child.wait()
        reported.seek(0)
        if code == 0:
            return msgspec.json.decode(reported.read(2 * LONGEST), type=RenderAnswer)
    return RenderAnswer(failed=f"it takes more than {SECONDS:.0f} s or {bytes_text(MEMORY)}")


def _render(request: RenderRequest) -> RenderAnswer:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals.update(raise_exception=_refuse, strftime_now=_strftime_now)
    try:
        text = sandbox.from_string(request.template).render(
            messages=request.messages,
            add_generation_prompt=True,
            tools=None,
            documents=None,
            **request.special,
        )
    except _Refused as error:
        return RenderAnswer(refused=printable(error, 1000) or "no reason given")
    except MemoryError:
        raise  # the process ends, and its starter reports of what
    except TemplateError as error:
        return RenderAnswer(failed=printable(error, 1000) or type(error).__name__)
    except Exception as error:  # a template is a program, which may fail as any does
        return RenderAnswer(failed=f"{type(error).__name__}: {printable(error, 1000)}".removesuffix(": "))
    text = text.encode("utf-8", "replace").decode()  # JSON can write lone surrogates, and nothing else
    if len(text) > LONGEST:
        return RenderAnswer(failed=f"it writes {len(text)} characters, {LONGEST} at most")
    return RenderAnswer(text)


class _Refused(Exception):
    """The template called `raise_exception`."""


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    """As transformers has it: Jinja's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(SECONDS), int(SECONDS) + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with os.fdopen(int(sys.argv[1]), "rb") as asked:
        asked.seek(0)
        request = msgspec.json.decode(asked.read(), type=RenderRequest)
    sys.stdout.buffer.write(msgspec.json.encode(_render(request)))


if __name__ == "__main__":
    _main()
