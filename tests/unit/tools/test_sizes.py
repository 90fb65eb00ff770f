"""Small files that one other file alone imports are part of that one."""

import ast
import runpy
from pathlib import Path

import pytest

alone = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "sizes.py"))["alone"]

IMPORTED = "from rubato.runtime.small import name"


@pytest.mark.parametrize(
    ("others", "size", "named", "found"),
    [
        pytest.param({"runtime/large.py": IMPORTED}, 59, "", {"runtime/small.py": "runtime/large.py"}, id="one importer"),
        pytest.param({"runtime/large.py": IMPORTED}, 60, "", {}, id="not small"),
        pytest.param({"runtime/large.py": IMPORTED, "tools/tool.py": "import rubato.runtime.small"}, 59, "", {}, id="two importers"),
        pytest.param({"runtime/large.py": f"def late():\n    {IMPORTED}"}, 59, "", {}, id="within a function"),
        pytest.param({"actors/large.py": IMPORTED}, 59, "", {}, id="another layer"),
        pytest.param({"runtime/large.py": IMPORTED}, 59, 'CLASS = "rubato.runtime.small:Class"', {}, id="found by import path"),
        pytest.param({"runtime/large.py": IMPORTED}, 59, 'CLASS = "rubato.runtime.small_one:Class"', {"runtime/small.py": "runtime/large.py"}, id="another's path"),
    ],
)  # fmt: skip
def test_a_small_file_is_joined_to_its_only_importer(others, size, named, found):
    trees = {path: ast.parse(text) for path, text in {"runtime/small.py": "name = 1", **others}.items()}

    assert alone(trees, {"runtime/small.py": size}, named) == found
