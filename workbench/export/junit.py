"""JUnit XML, as CI systems read it: one test a judged tap."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal
from xml.etree import ElementTree

from lockstep.sessions.text import clean

Result = Literal["pass", "suspect", "fail", "absent"]

#: What XML 1.0 (§2.2) does not allow and `clean` leaves: the non-characters.
_NOT_XML = re.compile("[\ufffe\uffff]")


@dataclass(frozen=True, slots=True)
class JUnitCase:
    """One judgement. Cases of one `suite` must follow each other. `message` is the line that a CI shows;
    `detail` what it shows when asked. Foreign strings are made safe here."""

    suite: str
    group: str
    name: str
    result: Result
    message: str = ""
    detail: str = ""


def junit(title: str, cases: Iterable[JUnitCase]) -> str:
    """The document. "fail" is a failure, "absent" is skipped; "suspect" passes and states why on its output."""
    root = ElementTree.Element("testsuites", name=_text(title))
    totals = dict.fromkeys(("tests", "failures", "skipped"), 0)
    for suite, members in groupby(cases, key=lambda case: case.suite):
        counts = dict.fromkeys(totals, 0)
        element = ElementTree.SubElement(root, "testsuite", name=_text(suite), errors="0")
        for case in members:
            _case(element, case)
            counts["tests"] += 1
            counts["failures"] += case.result == "fail"
            counts["skipped"] += case.result == "absent"
        for name, count in counts.items():
            element.set(name, str(count))
            totals[name] += count
    for name, count in totals.items():
        root.set(name, str(count))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, case: JUnitCase) -> None:
    element = ElementTree.SubElement(suite, "testcase", classname=_text(case.group), name=_text(case.name))
    if case.result == "fail":
        failure = ElementTree.SubElement(element, "failure", message=_text(case.message), type="diverged")
        failure.text = _text(case.detail, newlines=True)
    elif case.result == "absent":
        ElementTree.SubElement(element, "skipped", message=_text(case.message or "absent"))
    elif case.result == "suspect":
        output = ElementTree.SubElement(element, "system-out")
        output.text = _text(f"suspect: {case.message}" if case.message else "suspect")


def _text(text: str, *, newlines: bool = False) -> str:
    return _NOT_XML.sub("�", clean(text, newlines=newlines))
