"""What a config must name is imported in one place: no function of an actor or a planner imports another part of them by itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("planning", "actors")
PARTS = ("actors", "planning", "sim")
PLACE = ROOT / "actors" / "plugins.py"


def imported_in_functions(source: str) -> Iterator[str]:
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in ast.walk(function):
                named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else named
                yield from (name for name in named if name.startswith("rubato.") and name.split(".")[1] in PARTS)


def imports_by_name(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module", "__import__"):
            yield ast.unparse(node)


def test_only_the_plug_ins_file_imports_parts_of_actors_and_planners_late():
    sources = {path: path.read_text() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}

    found = {
        str(path.relative_to(ROOT)): late
        for path, source in sources.items()
        if path != PLACE and (late := [*imported_in_functions(source)])
    }

    assert found == {}
    assert [*imports_by_name(sources[PLACE])] == ["import_module(module)"]


def test_an_import_within_a_function_is_seen():
    source = "import rubato.actors.fabric\ndef f():\n    async def g():\n        from rubato.planning.tail import Tail\n    import rubato.actors.batching"

    assert sorted({*imported_in_functions(source)}) == ["rubato.actors.batching", "rubato.planning.tail"]
