"""Import paths in a config, and a user's code as the run began with it: what is loaded, what is kept, and what a wrong one is answered with."""

import os
import re
import sys
import traceback
from pathlib import Path

import pytest

from rubato.runtime.actor import Actor
from rubato.runtime.code_search import find_module
from rubato.runtime.errors import ConfigError, LaunchError
from rubato.runtime.importer import OURS, VARIABLE, KeptCode, LoadError, absolute, load_class, load_configured, load_object, use
from rubato.runtime.kept_code import keep, pack, unpack


def test_a_module_path_loads_its_object():
    assert load_class("rubato.runtime.actor:Actor", Actor) is Actor


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
        ("rubato.runtime.actor", "is not of the form package.module:Name"),
        ("no_such_thing.at_all:X", "there is no module no_such_thing"),
        ("rubato.runtime.actor:Actro", "Did you mean Actor?"),
        ("nowhere.py:X", "there is no file"),
        ("runtime.actor:Actor", "is called rubato.runtime.actor:Actor now"),
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
    (tmp_path / "mine.py").write_text("import rubato_test_neighbour\nclass Env:\n    value = rubato_test_neighbour.VALUE\n")

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


@pytest.mark.parametrize(
    "target", ["json:loads", "json.decoder:JSONDecoder", "email:message", f"{__file__}:test_a_module_path_loads_its_object"]
)
def test_a_module_that_is_somewhere_is_found(target):
    find_module(target)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class Mine: pass", "mine.py defines no Min. Did you mean Mine?"),
        ("def broken(:", "can't be imported: SyntaxError: invalid syntax"),
        ("import rubato_missing.part\nMin = 3", "it imports rubato_missing, and there is no such module"),
        ("from rubato_missing import Min", "it imports rubato_missing, and there is no such module"),
    ],
)
def test_a_file_whose_text_shows_that_it_can_not_serve_is_told_without_running_it(text, words, tmp_path):
    (tmp_path / "mine.py").write_text(f"{text}\nraise SystemExit(3)\n")

    with pytest.raises(LoadError, match=re.escape(words)):
        find_module(f"{tmp_path}/mine.py:Min")


@pytest.mark.parametrize(
    "text",
    [
        "from os import *",
        "globals()['Min'] = 3",
        "def __getattr__(name): return 3",
        "import beside\nMin = beside.Min",
        "try:\n    import rubato_missing\nexcept ImportError:\n    Min = 3",
        "for Min in (): pass",
        "import os as Min",
    ],
)
def test_a_file_whose_text_can_not_tell_is_taken_on_trust(text, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "beside.py").touch()

    find_module(f"{tmp_path}/mine.py:Min")


def test_looking_for_a_module_runs_nothing_of_its_package(tmp_path, monkeypatch):
    (tmp_path / "looked_at").mkdir()
    (tmp_path / "looked_at" / "__init__.py").write_text("raise SystemExit(3)")
    (tmp_path / "looked_at" / "inner.py").write_text("f = 3\nraise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)

    find_module("looked_at.inner:f")


@pytest.fixture(autouse=True)
def imports(monkeypatch):
    """What a test imports is forgotten behind it."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not isinstance(finder, KeptCode)])
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    (folder / "kept_pkg" / "deep").mkdir(parents=True)
    (folder / "judge.py").write_text(
        "import json\nfrom kept_helper import VALUE\n\nclass Judge:\n    value = VALUE\n\n    def fail(self):\n"
        "        from kept_pkg.deep import tool\n        raise ValueError(tool.NAME)\n"
    )
    (folder / "kept_helper.py").write_text("VALUE = 1\n")
    (folder / "kept_pkg" / "__init__.py").write_text("from .deep import tool\n")
    (folder / "kept_pkg" / "deep" / "tool.py").write_text("NAME = 'first'\n")
    (folder / "json.py").write_text("raise RuntimeError('hides an installed one')\n")
    (folder / "unused.py").write_text("")
    return folder


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py"))


def edit(folder: Path) -> None:
    (folder / "judge.py").write_text("broken(\n")
    (folder / "kept_helper.py").write_text("VALUE = 2\n")
    (folder / "kept_pkg" / "deep" / "tool.py").unlink()


def test_what_the_config_names_is_kept_with_what_it_imports_from_its_own_folder(mine, tmp_path):
    keep(tmp_path / "code", {"actors": {"judge": {"class": f"{mine}/judge.py:Judge"}}, "run": {"steps": 3}})

    assert files_in(tmp_path / "code") == [
        "mine/judge.py", "mine/kept_helper.py", "mine/kept_pkg/__init__.py", "mine/kept_pkg/deep/tool.py",
    ]  # fmt: skip


def test_an_edit_changes_nothing_in_a_run_and_errors_name_the_users_own_file(mine, tmp_path):
    keep(tmp_path / "code", {"env": {"class": f"{mine}/judge.py:Judge"}})
    edit(mine)
    use(tmp_path / "code")

    judge = load_object(f"{mine}/judge.py:Judge")
    with pytest.raises(ValueError, match="first") as raised:
        judge().fail()

    assert judge.value == 1
    assert sys.modules[judge.__module__].__file__ == str(mine / "judge.py")
    assert sys.modules["kept_helper"].__file__ == str(mine / "kept_helper.py")
    assert traceback.extract_tb(raised.value.__traceback__)[-1].filename == str(mine / "judge.py")


def test_a_file_that_is_gone_is_still_found_and_what_is_not_kept_is_the_users(mine, tmp_path):
    keep(tmp_path / "code", {"reward": {"functions": [f"{mine}/kept_helper.py:VALUE"]}})
    (mine / "kept_helper.py").unlink()
    use(tmp_path / "code")

    find_module(f"{mine}/kept_helper.py:VALUE")
    assert load_object(f"{mine}/kept_helper.py:VALUE") == 1
    with pytest.raises(LoadError, match=f"there is no file {mine}/nothing.py"):
        load_object(f"{mine}/nothing.py:VALUE")
    with pytest.raises(LoadError, match=f"{mine}/kept_helper.py defines no OTHER"):
        load_object(f"{mine}/kept_helper.py:OTHER")


def test_a_module_of_the_working_folder_is_kept_too(mine, tmp_path, monkeypatch):
    monkeypatch.chdir(mine)
    keep(tmp_path / "code", {"env": {"class": "kept_pkg.deep.tool:NAME"}, "other": "json:loads"})
    edit(mine)
    monkeypatch.chdir(tmp_path)
    use(tmp_path / "code")

    assert files_in(tmp_path / "code") == ["mine/kept_pkg/__init__.py", "mine/kept_pkg/deep/tool.py"]
    assert load_object("kept_pkg.deep.tool:NAME") == "first"


def test_a_process_that_a_run_starts_is_told_by_its_environment(mine, tmp_path, monkeypatch):
    keep(tmp_path / "code", {"env": {"class": f"{mine}/judge.py:Judge"}})
    edit(mine)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "code"))

    assert load_object(f"{mine}/judge.py:Judge").value == 1


def test_what_was_kept_stays_when_the_run_goes_on_and_what_changed_is_known(mine, tmp_path):
    config = {"env": {"class": f"{mine}/judge.py:Judge"}}
    keep(tmp_path / "code", config)
    (mine / "kept_helper.py").write_text("VALUE = 2\n")
    keep(tmp_path / "code", {**config, "more": f"{mine}/unused.py:X"})

    assert (tmp_path / "code" / "mine" / "kept_helper.py").read_text() == "VALUE = 1\n"
    assert "mine/unused.py" in files_in(tmp_path / "code")
    assert KeptCode(tmp_path / "code").changed() == [mine / "kept_helper.py"]


def test_a_joining_host_gets_what_is_kept_and_nothing_outside(mine, tmp_path):
    keep(tmp_path / "code", {"env": {"class": f"{mine}/judge.py:Judge"}})
    unpack(pack(tmp_path / "code"), tmp_path / "there")
    edit(mine)
    use(tmp_path / "there")

    assert load_object(f"{mine}/judge.py:Judge").value == 1
    with pytest.raises(LaunchError, match="leads out of"):
        unpack(b"\x81\xa4../x\xc4\x00", tmp_path / "there")


def test_a_library_is_no_user_code(tmp_path, monkeypatch):
    monkeypatch.setattr("rubato.runtime.kept_code.MOST_FILES", 3)
    (tmp_path / "kept_lib").mkdir()
    for number in range(5):
        (tmp_path / "kept_lib" / f"m{number}.py").touch()
    (tmp_path / "mine.py").write_text("import kept_lib\n")

    with pytest.raises(LaunchError, match="too many to keep"):
        keep(tmp_path / "code", {"env": {"class": f"{tmp_path}/mine.py:Env"}})


def test_paths_of_code_become_whole_and_other_values_stay(mine, monkeypatch):
    monkeypatch.chdir(mine)
    monkeypatch.setenv("HOME", str(mine.parent))
    given = {"a": "judge.py:Judge", "b": ["~/mine/judge.py:Judge"], "c": "see judge.py:Judge", "d": 3, "e": "gone.py:X"}

    judge = f"{os.path.realpath(mine)}/judge.py:Judge"
    assert absolute(given) == {**given, "a": judge, "b": [judge]}


def test_a_launch_from_a_checkout_of_ours_keeps_nothing_of_ours(mine, tmp_path, monkeypatch):
    monkeypatch.chdir(OURS)
    keep(tmp_path / "code", {"class": "rubato.actors.samples.buffer:SampleBuffer", "env": f"{mine}/kept_helper.py:VALUE"})

    assert files_in(tmp_path / "code") == ["mine/kept_helper.py"]
