"""JUnit: what CI systems count, and that nothing foreign breaks the document."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from lockstep.workbench.export.junit import JUnitCase, junit


def test_counts_and_kinds() -> None:
    cases = [
        JUnitCase("main, step 0", "layers.0", "attn.q_proj", "pass"),
        JUnitCase("main, step 0", "layers.0", "attn.k_proj", "suspect", "2.1 times the floor"),
        JUnitCase("main, step 0", "layers.0", "attn.scores", "fail", "820 NaN", "line 1\nline 2"),
        JUnitCase("main, step 1", "", "embed", "absent", "not captured"),
    ]
    root = ElementTree.fromstring(junit("demo", cases))
    assert (root.get("tests"), root.get("failures"), root.get("skipped")) == ("4", "1", "1")
    first, second = root.findall("testsuite")
    assert (first.get("tests"), first.get("failures"), second.get("skipped")) == ("3", "1", "1")
    failure = root.find(".//failure")
    assert failure is not None
    assert failure.get("message") == "820 NaN"
    assert failure.text == "line 1\nline 2"
    assert "2.1 times" in (root.findtext(".//system-out") or "")


@given(st.text(), st.text())
def test_any_text_makes_a_document(name: str, message: str) -> None:
    root = ElementTree.fromstring(junit(name, [JUnitCase(name, name, name, "fail", message, message)]))
    assert root.get("failures") == "1"


def test_no_cases_is_a_document_too() -> None:
    assert ElementTree.fromstring(junit("nothing", [])).get("tests") == "0"
