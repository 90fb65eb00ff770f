"""Import paths in a config: what they load and what a wrong one is answered with."""

import sys

import pytest

from runtime.actor import Actor
from runtime.errors import ConfigError
from runtime.importer import load_class, load_object


def test_a_module_path_loads_its_object():
    assert load_class("runtime.actor:Actor", Actor) is Actor


def test_a_file_path_loads_and_its_folder_goes_to_the_end_of_the_path(tmp_path):
    (tmp_path / "mine.py").write_text("import beside\nVALUE = beside.VALUE")
    (tmp_path / "beside.py").write_text("VALUE = 7")

    assert load_object(f"{tmp_path}/mine.py:VALUE") == 7
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
        load_object(target, key="env.class")

    assert said in str(caught.value)


def test_a_module_that_raises_is_a_config_error_with_its_reason(tmp_path):
    (tmp_path / "broken.py").write_text("raise KeyError('goal')")

    with pytest.raises(ConfigError, match=r"broken.py:X can't be imported: KeyError: 'goal'"):
        load_object(f"{tmp_path}/broken.py:X")
    sys.path.remove(str(tmp_path))
