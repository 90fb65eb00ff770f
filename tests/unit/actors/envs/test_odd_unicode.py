"""What is no Unicode comes from user code as U+FFFD, wherever the code runs, and fails nothing."""

import pytest

from rubato.actors.envs.hosting import EnvHost
from rubato.actors.envs.section import EnvSection
from rubato.bus.message import well_formed

ENV = """
class Odd:
    def reset(self, *, seed):
        return "a\\ud83d b", {"k\\ud83d": ["v\\ud83d"]}

    def step(self, action):
        return [{"role": "user", "content": "c\\ud83d"}], 1.0, True, False, {"n\\ud83d": 2.0}

    def close(self):
        pass
"""


async def test_a_worker_sends_what_an_environment_returns(tmp_path):
    (tmp_path / "odd.py").write_text(ENV)
    host = EnvHost(EnvSection.model_validate({"class": f"{tmp_path}/odd.py:Odd", "isolation": "process"}))
    await host.start()
    try:
        env, observation, info = await host.begin("train", 1)
        step = await env.step("x")
    finally:
        await host.close()

    assert (observation, info) == ("a\ufffd b", {"k\ufffd": ["v\ufffd"]})
    assert step == ([{"role": "user", "content": "c\ufffd"}], 1.0, True, False, {"n\ufffd": 2.0})


@pytest.mark.parametrize(
    ("given", "expected"),
    [("a\ud83d\ude00b", "a\N{GRINNING FACE}b"), ("\ude00\ud83d", "\ufffd\ufffd"), ("é\0", "é\0"), ({"\ud83d": ("x", 1)}, {"\ufffd": ["x", 1]})],
)  # fmt: skip
def test_halves_that_belong_together_are_one_character(given, expected):
    assert well_formed(given) == expected
