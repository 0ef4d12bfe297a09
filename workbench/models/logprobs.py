"""Log-probabilities that a framework reported, from a JSON file: a list for each sequence, or an object by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from lockstep.engine.plain_files import PlainFileError, open_plain
from lockstep.workbench.exit_codes import UsageError

#: Bytes of such a file: some hundred thousand figures.
_MOST = 64 << 20


def read_logprobs(path: Path) -> Mapping[int, Sequence[float]]:
    """The figures by sequence; null, which a framework writes for the first token, is NaN. UsageError where the file is
    something else."""
    try:
        with open_plain(path, _MOST) as file:
            content = file.read()
        found = msgspec.json.decode(content, type=list[list[float | None]] | dict[str, list[float | None]])
        numbered = found.items() if isinstance(found, dict) else enumerate(found)
        return {int(seq): [float("nan") if x is None else x for x in row] for seq, row in numbered}
    except (OSError, PlainFileError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path}: {reason}") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UsageError(
            f'{path}: not a list of log-probabilities for each sequence, as [[-0.1, -2.3], …] or {{"0": […]}}: {error}'
        ) from error
