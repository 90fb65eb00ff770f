"""Refuse product files over 500 lines of code (no docstring, comment or blank line) and functions over 60 lines."""

import ast
import subprocess
import sys
from pathlib import Path

FILE_LIMIT = 500
FUNCTION_LIMIT = 60


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


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], capture_output=True, text=True, check=True
    )
    files = [Path(line) for line in listed.stdout.splitlines() if not line.startswith("tests/") and Path(line).exists()]
    refused = 0
    for path in files:
        text = path.read_text()
        tree = ast.parse(text)
        lines = code_lines(text, tree)
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
