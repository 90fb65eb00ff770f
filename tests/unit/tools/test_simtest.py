"""What the simulation test is asked to do is checked before a seed runs."""

import pytest

from tools import simtest

MISTAKES = [
    pytest.param(["--seeds", "-5"], "--seeds is -5; it must be a whole number at least 1.", id="seeds negative"),
    pytest.param(["--seeds", "0"], "--seeds is 0; it must be a whole number at least 1.", id="no seeds"),
    pytest.param(["--jobs", "0"], "--jobs is 0; it must be a whole number at least 1.", id="no jobs"),
    pytest.param(["--rounds", "0"], "--rounds is 0; it must be a whole number at least 1.", id="no faults"),
    pytest.param(["--faults", "foo"], "--faults: 'foo' is no fault. Faults: ", id="unknown fault"),
    pytest.param(["--faults", "kill,"], "--faults: '' is no fault. Faults: ", id="empty fault"),
    pytest.param(["--mutate", "foo"], "foo is no mutation. Mutations: ", id="unknown mutation"),
]


@pytest.mark.parametrize(("given", "sentence"), MISTAKES)
def test_a_mistake_is_refused_in_one_sentence(given, sentence, monkeypatch, capsys):
    monkeypatch.setattr(simtest, "_seeds", lambda args: pytest.fail("seeds were run"))

    assert simtest.main(given) == 2

    said = capsys.readouterr().err
    assert said.startswith(sentence)
    assert len(said.splitlines()) == 1
