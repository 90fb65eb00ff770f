"""Import paths in a config: what they load and what a wrong one is answered with."""

import sys

import pytest

from runtime.actor import Actor
from runtime.errors import ConfigError
from runtime.importer import LoadError, find_module, load_class, load_configured, load_object


def test_a_module_path_loads_its_object():
    assert load_class("runtime.actor:Actor", Actor) is Actor


def test_a_file_path_loads_and_its_folder_goes_to_the_end_of_the_path(tmp_path):
    (tmp_path / "mine.py").write_text("import beside\nVALUE = beside.VALUE")
    (tmp_path / "beside.py").write_text("VALUE = 7")

    assert load_configured(f"{tmp_path}/mine.py:VALUE") == 7
    assert sys.path[-1] == str(tmp_path)
    sys.path.remove(str(tmp_path))
    del sys.modules["beside"]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("runtime.actor", "is not of the form package.module:Name"),
        ("no_such_thing.at_all:X", "there is no module no_such_thing"),
        ("runtime.actor:Actro", "Did you mean Actor?"),
        ("nowhere.py:X", "there is no file"),
    ],
)
def test_a_path_that_leads_nowhere_names_the_key(target, said):
    with pytest.raises(ConfigError, match=r"^env\.class: ") as caught:
        load_configured(target, key="env.class")

    assert said in str(caught.value)


def test_a_module_that_raises_is_a_config_error_with_its_reason(tmp_path):
    (tmp_path / "broken.py").write_text("raise KeyError('goal')")

    with pytest.raises(ConfigError, match=r"broken.py:X can't be imported: KeyError: 'goal'"):
        load_configured(f"{tmp_path}/broken.py:X")
    sys.path.remove(str(tmp_path))


def test_a_file_is_loaded_once_and_may_import_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "rubato_test_neighbour.py").write_text("VALUE = 4\n")
    (tmp_path / "mine.py").write_text(
        "import rubato_test_neighbour\nclass Env:\n    value = rubato_test_neighbour.VALUE\n"
    )

    first, second = (load_object(f"{tmp_path}/mine.py:Env") for _ in range(2))

    assert first is second
    assert first.value == 4
    assert sys.path[-1] == str(tmp_path)


def test_a_module_in_the_working_folder_is_found_and_names_may_be_nested(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rubato_test_module.py").write_text("class Outer:\n    class Inner: pass\n")

    assert load_object("rubato_test_module:Outer.Inner").__name__ == "Inner"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("json", "is not of the form"),
        (":loads", "is not of the form"),
        ("json:lods", "json defines no lods"),
        ("rubato_no_such_module.sub:f", "there is no module rubato_no_such_module"),
        ("json.nothing:f", "there is no module json.nothing"),
        ("no/such/file.py:Env", "there is no file"),
    ],
)
def test_a_name_that_leads_nowhere_is_a_sentence(target, words):
    with pytest.raises(LoadError, match=words):
        load_object(target)


def test_what_a_users_module_raises_itself_passes_through_and_it_can_be_loaded_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "broken.py"
    file.write_text("import rubato_missing_dependency\n")

    with pytest.raises(ModuleNotFoundError, match="rubato_missing_dependency"):
        load_object(f"{file}:Env")
    file.write_text("Env = 3\n")

    assert load_object(f"{file}:Env") == 3


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nowhere:f", "there is no module nowhere"),
        ("json.nowhere:f", "there is no module json.nowhere"),
        ("json.nowhere.deep:f", "there is no module json.nowhere"),
        ("json.decoder.deeper:f", "there is no module json.decoder.deeper"),
        ("nowhere.py:f", "there is no file"),
        ("json", "is not of the form"),
    ],
)
def test_a_module_that_is_nowhere_is_told_without_importing(target, words):
    with pytest.raises(LoadError, match=words):
        find_module(target)


@pytest.mark.parametrize("target", ["json:loads", "json.decoder:JSONDecoder", f"{__file__}:anything"])
def test_a_module_that_is_somewhere_is_found(target):
    find_module(target)


def test_looking_for_a_module_runs_nothing_of_its_package(tmp_path, monkeypatch):
    (tmp_path / "looked_at").mkdir()
    (tmp_path / "looked_at" / "__init__.py").write_text("raise SystemExit(3)")
    (tmp_path / "looked_at" / "inner.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)

    find_module("looked_at.inner:f")
