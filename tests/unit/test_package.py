"""The package as a program imports it: one name, its stable names, and nothing loaded before it is used."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rubato


def test_import_rubato_loads_no_module_of_its_own_and_no_torch():
    code = "import sys, rubato; print([m for m in sys.modules if m.startswith('rubato.') or m == 'torch'])"

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert ended.stdout.strip() == "[]"


def test_all_stable_names_are_there_and_load_no_torch():
    code = "import sys, rubato; [getattr(rubato, name) for name in rubato.__all__]; print('torch' in sys.modules)"

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert ended.stdout.strip() == "False"


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Actr'"):
        _ = rubato.Actr


def test_a_module_has_one_name_and_the_path_that_one_edits():
    import rubato.bus.message

    assert "bus.message" not in sys.modules
    assert "/rubato/bus/" not in str(rubato.bus.message.__file__).removeprefix(rubato.__path__[0])


def test_a_checkout_without_links_is_imported_as_one_with_them(tmp_path):
    top = Path(rubato.__path__[-1])
    shutil.copytree(top.parent / "bus", tmp_path / "bus", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "rubato").mkdir()
    shutil.copy(top / "__init__.py", tmp_path / "rubato")
    (tmp_path / "rubato" / "bus").write_text("../bus")  # as git writes a link where the file system has none
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import rubato.bus.address as it; print(it.__file__)"

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert ended.stdout.strip() == str(tmp_path / "bus" / "address.py")
