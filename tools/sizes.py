"""Refuse product files over 500 lines and functions over 60; name functions over 40."""

import ast
import subprocess
import sys
from pathlib import Path

FILE_LIMIT = 500
FUNCTION_LIMIT, FUNCTION_AIM = 60, 40


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], capture_output=True, text=True, check=True
    )
    files = [Path(line) for line in listed.stdout.splitlines() if not line.startswith("tests/") and Path(line).exists()]
    refused = 0
    for path in files:
        text = path.read_text()
        lines = text.count("\n")
        if lines > FILE_LIMIT:
            print(f"{path}: {lines} lines")
            refused += 1
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > FUNCTION_AIM:
                    print(f"{path}:{node.lineno}: {node.name} has {length} lines")
                    refused += length > FUNCTION_LIMIT
    median = sorted(len(p.read_text().splitlines()) for p in files)[len(files) // 2]
    print(f"{len(files)} files, median {median} lines, {refused} over the limit")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
