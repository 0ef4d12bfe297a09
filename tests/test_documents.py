"""The documents as a site: it can be built, its links lead somewhere, and its commands exist."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lockstep.workbench.cli.subcommands import COMMANDS, FORMER
from lockstep.workbench.debugger.core.registry import commands

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
#: Made from the commands' help, and not kept.
MADE = DOCS / "commands.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target and not target.startswith("#"):
            found = (page.parent / target.partition("#")[0]).resolve()
            assert found.exists() or found == MADE, f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_are_shown_exist(page: Path) -> None:
    shown = re.findall(r"^(?:    |\$ )lockstep (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for line in shown:
        word = line.split()[0]
        assert word.startswith("-") or word in {*COMMANDS, *FORMER}, line


def test_the_page_of_commands_has_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    text = runpy.run_path(str(DOCS / "commands.py"))["page"]()
    for name in COMMANDS:
        assert f"## lockstep {name}\n" in text
    for one in commands().values():
        assert f"| `{one.usage}` |".replace("|", "\\|")[2:-2] in text or one.usage.replace("|", "\\|") in text
    assert "`--fault`, `--rule` `NAME=VALUE`" in text


def test_every_page_is_in_the_navigation() -> None:
    reported = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"[\w/-]+\.md", str(reported["nav"])))
    assert listed == {str(page.relative_to(DOCS)) for page in [*DOCS.rglob("*.md"), MADE]}


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    made = not MADE.exists()
    MADE.write_text(runpy.run_path(str(DOCS / "commands.py"))["page"](), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        if made:
            MADE.unlink()
    assert done.returncode == 0, shlex.join(command) + done.stderr
    assert (tmp_path / "site" / "start" / "gguf" / "index.html").is_file()
