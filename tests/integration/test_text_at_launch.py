"""A model whose text can't be made or ended is refused by name before anything starts."""

import pytest

from rubato.runtime import cli
from tests.chat_models import CHATML, chat_model
from tests.jobs import SMALL

pytestmark = pytest.mark.slow

SCRIPTED = ("train.kind=scripted", "env.class=rubato.actors.envs.frozen_lake:FrozenLakeText")


@pytest.fixture
def dry(tmp_path, monkeypatch, capsys):
    """(exit code, sentences) of `rubato launch --dry-run` with a model folder made as said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL)

    def run(*overrides, **made):
        folder = chat_model(tmp_path / "model", **made)
        code = cli.main(["launch", "small.yaml", *SCRIPTED, *overrides, f"model.path={folder}", "--dry-run"])
        return code, capsys.readouterr().err.splitlines()

    return run


REFUSED = [
    pytest.param(["{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"], [],
                 "can't render messages of user: system first. Set rollout.system_prompt.", id="first prompt"),
    pytest.param(["{{ raise_exception('no system') if messages[0].role == 'system' }}"], ["rollout.system_prompt=be good"],
                 "no system. Leave rollout.system_prompt empty.", id="system message"),
    pytest.param(["{{ raise_exception('once') if messages | length > 1 }}"], [],
                 "can't render messages of user, assistant, user: once. Where one turn is all, set rollout.max_turns=1.", id="second turn"),
    pytest.param(["{{ nobody_has_this() }}"], [], "'nobody_has_this' is undefined.", id="unknown function"),
    pytest.param([], ["rollout.stop=[999999]"], "rollout.stop names token 999999", id="stop"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "overrides", "said"), REFUSED)
def test_what_a_template_cannot_render_is_refused_by_one_sentence(dry, more, overrides, said):
    code, told = dry(*overrides, template="".join(more) + CHATML)

    assert code == 2
    assert len(told) == 1
    assert said in told[0]


def test_a_template_of_one_turn_will_do_where_one_turn_is_all(dry):
    assert dry("rollout.max_turns=1", template="{{ messages[0].content }}") == (0, [])


def test_a_folder_that_names_no_end_of_turn_is_refused_until_the_config_does(dry):
    code, (told,) = dry(eos_token=None)

    assert code == 2
    assert "names no end of turn" in told
    assert told.endswith("Set rollout.stop to what ends one, such as <|im_end|>, by which its chat template ends turns.")
    for stop in ("rollout.stop=[257]", "rollout.stop=<|im_end|>", 'rollout.stop=["</answer>", "\\nQ:"]'):
        assert dry(stop, eos_token=None) == (0, [])
