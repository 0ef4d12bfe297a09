"""The structure of the source in figures, and the rules about it that no linter has: `python tools/structure.py`.

Fails (exit code 1) where a class name stands twice, a file passes 500 lines, files import each other in a circle,
or more than 30 annotations are `dict[str, Any]`. The direction of imports is held by import-linter's contracts.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = "lockstep"
FOLDERS = ("engine", "sessions", "workbench")
MOST_LINES = 500
MOST_UNTYPED = 30
_UNTYPED = re.compile(r"dict\[str, Any\]")

Modules = Mapping[str, tuple[Path, str]]


def modules(root: Path) -> dict[str, tuple[Path, str]]:
    """Every module of the product by its dotted name: its file, relative to `root`, and its text."""
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    found = {}
    for path in [*sorted((root / PACKAGE).glob("*.py")), *paths]:
        place = path.relative_to(root)
        parts = place.with_suffix("").parts
        name = ".".join(parts if parts[0] == PACKAGE else (PACKAGE, *parts)).removesuffix(".__init__")
        found[name] = (place, path.read_text(encoding="utf-8"))
    return found


def classes_twice(found: Modules) -> dict[str, list[Path]]:
    """Names of top-level classes that stand in more than one place, and the files."""
    places: dict[str, list[Path]] = defaultdict(list)
    for path, text in found.values():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    return {name: paths for name, paths in sorted(places.items()) if len(paths) > 1}


def imports(found: Modules) -> dict[str, set[str]]:
    """Module -> the product's modules that it imports, wherever in the file, for types alone too."""
    graph: dict[str, set[str]] = {}
    for name, (_, text) in found.items():
        targets: set[str] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                targets.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    inside = f"{node.module}.{alias.name}"
                    targets.add(inside if inside in found else node.module)
        graph[name] = {target for target in targets if target in found and target != name}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other by imports (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in graph[module]:
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in graph:
        if module not in index:
            visit(module)
    return found


def problems(found: Modules) -> Iterator[str]:
    """What breaks a rule, a line each."""
    for name, paths in classes_twice(found).items():
        yield f"class {name} stands in {', '.join(map(str, paths))}: one name for each thing"
    for path, text in found.values():
        if (lines := text.count("\n")) > MOST_LINES:
            yield f"{path} has {lines} lines, {MOST_LINES} at most: split it by purpose"
    for group in circles(imports(found)):
        yield f"{', '.join(group)} import each other"
    if (count := untyped(found)) > MOST_UNTYPED:
        yield f"dict[str, Any] stands {count} times, {MOST_UNTYPED} at most: give the data a type"


def untyped(found: Modules) -> int:
    """How many lines have `dict[str, Any]`."""
    return sum(bool(_UNTYPED.search(line)) for _, text in found.values() for line in text.splitlines())


def figures(found: Modules) -> str:
    """The structure in numbers."""
    lines = sum(text.count("\n") for _, text in found.values())
    packages = {path.parent for path, _ in found.values()}
    return (
        f"{len(found)} files, {lines} lines, {len(packages)} packages, {len(circles(imports(found)))} circles, "
        f"{len(classes_twice(found))} class names twice, {untyped(found)} dict[str, Any]"
    )


def main() -> int:
    """The program: what is wrong on stderr, the figures on stdout."""
    found = modules(Path(__file__).resolve().parents[1])
    wrong = list(problems(found))
    for line in wrong:
        print(line, file=sys.stderr)
    print(figures(found))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
