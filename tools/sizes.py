"""Refuse product files over 500 lines of code (no docstring, comment or blank line), functions over 60 lines, and small files that one other
file alone imports: they are part of that one."""

import ast
import re
import subprocess
import sys
from pathlib import Path

FILE_LIMIT = 500
FUNCTION_LIMIT = 60

SMALL = 60
"""Lines of code. Below, a file with a single importer of its own package is joined to it, unless it is found by import path, or is loaded
within a function, where a message or the config asks for it."""

PACKAGES = ("bus", "runtime", "planning", "actors")

STAYS = {"actors/adapters/publishing.py": "of a library, docs/adapters.md"}


def code_lines(text: str, tree: ast.AST) -> int:
    """Lines of `text` that are neither blank, a comment, nor part of a docstring (of a module, class, function or field)."""
    prose = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in prose
        for number, line in enumerate(text.splitlines(), start=1)
    )


def alone(trees: dict[str, ast.Module], sizes: dict[str, int], found_by_path: str) -> dict[str, str]:
    """Small file → its only importer; `found_by_path` is the text in which import paths stand."""
    importers: dict[str, set[str]] = {}
    at_once: set[tuple[str, str]] = set()
    """Module, and a file that imports it when it is imported itself."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            modules = set[str]()
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                modules = {alias.name for alias in node.names}
            for module in modules:
                importers.setdefault(module, set()).add(path)
                if node in tree.body:
                    at_once.add((module, path))
    found: dict[str, str] = {}
    for path, size in sizes.items():
        package, module = path.partition("/")[0], "rubato." + path.removesuffix(".py").replace("/", ".")
        known = importers.get(module, set())
        if size < SMALL and package in PACKAGES and len(known) == 1 and path not in STAYS and not path.endswith("__init__.py"):
            (importer,) = known
            joins = importer.startswith(f"{package}/") and (module, importer) in at_once
            if joins and not re.search(rf"{re.escape(module)}(?![\w.]| import)", found_by_path):
                found[path] = importer
    return found


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "*.py"], capture_output=True, text=True, check=True)
    files = [Path(line) for line in listed.stdout.splitlines() if not line.startswith("tests/") and Path(line).exists()]
    refused = 0
    texts = {str(path): path.read_text() for path in files}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    sizes = {path: code_lines(text, trees[path]) for path, text in texts.items()}
    configs = [path.read_text() for path in Path("configs").rglob("*.yaml")]
    for path, importer in alone(trees, sizes, "\n".join([*texts.values(), *configs])).items():
        print(f"{path}: {sizes[path]} lines of code, which {importer} alone imports: join them")
        refused += 1
    for path, tree in trees.items():
        lines = sizes[path]
        if lines > FILE_LIMIT:
            print(f"{path}: {lines} lines of code")
            refused += 1
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > FUNCTION_LIMIT:
                    print(f"{path}:{node.lineno}: {node.name} has {length} lines")
                    refused += 1
    median = sorted(len(p.read_text().splitlines()) for p in files)[len(files) // 2]
    print(f"{len(files)} files, median {median} lines, {refused} over the limit")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
