"""Nothing of ours turns bytes into code: the modules and calls that could are not in the source, so no peer can reach one."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("bus", "runtime", "planning", "actors", "sim", "examples")
"""What is installed, and what users copy; the drivers of other systems under tools/bench use what those need."""
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing"}
OWN_SOURCE = {ROOT / "sim/simtest/mutations.py": ["compile", "exec"]}
"""Edits methods of ours, which it reads from our source files; nothing that arrives gets there."""
CALLS = {"eval", "exec", "compile", "recv_pyobj", "send_pyobj", "recv_multipart_pyobj"}


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def offences(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (f"import {a.name}" for a in node.names if a.name.partition(".")[0] in MODULES)
            yield from (f"torch as {a.asname}" for a in node.names if a.name == "torch" and a.asname)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield f"from {node.module}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            yield from ("from torch import load" for a in node.names if a.name == "load")
        elif isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node.value).startswith("torch"):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[str]:
    called = node.func
    if isinstance(called, ast.Name) and called.id in CALLS:
        yield called.id
    if isinstance(called, ast.Attribute):
        if called.attr.endswith("_pyobj"):
            yield called.attr
        loads_yaml = called.attr in ("load", "unsafe_load", "full_load")
        if loads_yaml and isinstance(called.value, ast.Name) and called.value.id == "yaml":
            safe = called.attr == "load" and (len(node.args) == 2 or any(k.arg == "Loader" for k in node.keywords))
            yield from () if safe else (f"yaml.{called.attr}",)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_source_file_holds_no_way_from_bytes_to_code(path):
    assert sorted(offences(path.read_text())) == OWN_SOURCE.get(path, [])


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import multiprocessing.connection",
        "from cloudpickle import loads",
        "socket.recv_pyobj()",
        "eval(body)",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "read = torch.load",
        "torch.jit.load(path)",
        "from torch import load",
        "import torch as t",
        "yaml.unsafe_load(text)",
        "yaml.load(text)",
    ],
)
def test_the_check_itself_finds_what_it_looks_for(text):
    assert list(offences(text))
