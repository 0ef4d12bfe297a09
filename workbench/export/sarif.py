"""SARIF 2.1.0 (OASIS, 2020; errata of 2023), as code scanning reads it: one result for each operation that diverged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

import msgspec

from lockstep.sessions.text import clean

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
#: What results are of: the one rule that there is.
RULE = "diverged-operation"


@dataclass(frozen=True, slots=True)
class SarifResult:
    """One operation: its tap, where it stands (`file`: the recording), one sentence, and figures."""

    tap: str
    file: str
    message: str
    level: str = "error"
    figures: dict[str, float | int | str] = field(default_factory=dict)


def sarif(
    results: Sequence[SarifResult], *, version: str, notes: Sequence[str] = (), well: bool = True
) -> str:
    """The document. `notes` are of the run as a whole; `well`: whether it came to a verdict. Foreign strings are made
    safe here."""
    driver = {
        "name": "lockstep",
        "version": version,
        "rules": [
            {
                "id": RULE,
                "shortDescription": {"text": "An operation computes something else than it did"},
            }
        ],
    }
    invocation = {
        "executionSuccessful": well,
        "toolExecutionNotifications": [
            {"level": "note" if well else "warning", "message": {"text": clean(note)}} for note in notes
        ],
    }
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "results": [_result(one) for one in results],
    }
    document = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def _result(one: SarifResult) -> dict[str, object]:
    tap = clean(one.tap, limit=200)
    return {
        "ruleId": RULE,
        "ruleIndex": 0,
        "level": one.level,
        "message": {"text": clean(one.message)},
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": _uri(one.file)}},
                "logicalLocations": [{"fullyQualifiedName": tap, "kind": "function"}],
            }
        ],
        "partialFingerprints": {"tap/v1": tap},
        "properties": dict(one.figures),
    }


def _uri(path: str) -> str:
    """A relative reference: what is no plain character is escaped."""
    return quote(clean(path, limit=200))
