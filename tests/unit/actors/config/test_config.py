import os

import pytest
from pydantic import ValidationError

from rubato.actors.config import ModelSection, RewardSection, RolloutSection, StalenessSection, TrainSection
from rubato.actors.data.tasks import TaskSection
from rubato.actors.envs.section import EnvSection, resolved


def test_a_home_folder_is_written_out_once_for_everybody_who_reads_the_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/u")

    assert ModelSection(path="~/models/a").path == "/home/u/models/a"
    assert ModelSection(path="models/~a").path == "models/~a"


def test_off_is_a_word_though_yaml_reads_it_as_false():
    assert TrainSection(importance={"mode": False}).importance.mode == "off"


# -- what is learned -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"loss": "gsppo"}, "'gsppo' is none of grpo, dr_grpo, dapo, gspo, cispo, ppo, and no path/to/file.py:function. Did you mean gspo?"),
        ({"advantage": "rlo"}, "'rlo' is none of group, rloo, reinforce_pp. Did you mean rloo?"),
        ({"clip_low": 0.4}, "clip_low=0.4 is above clip_high=0.28"),
        ({"proximal": "behaviour", "importance": {"level": "sequence"}}, "Set train.proximal=recomputed"),
        ({"reference": "base"}, "reference=base has no effect with kl_coef=0"),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_from_is_refused_in_one_sentence(given, sentence):
    with pytest.raises(ValidationError) as refused:
        TrainSection(**given)

    assert sentence in refused.value.errors()[0]["msg"]


def test_clips_are_those_of_the_losses_paper_where_none_are_given():
    of = {loss: TrainSection(loss=loss) for loss in ("dapo", "gspo", "cispo")}

    assert {loss: (s.clip_low, s.clip_high) for loss, s in of.items()} == {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 0.28)}
    assert TrainSection(loss="gspo", clip_high=0.5).clip_high == 0.5
    assert TrainSection(loss="my_loss.py:fn").clip_high == 0.28


@pytest.mark.parametrize(
    ("alpha", "given", "proximal", "mode"),
    [
        (0, {}, "behaviour", "off"),
        (1, {}, "behaviour", "truncate"),
        (-1, {}, "behaviour", "truncate"),
        (8, {"importance": {"mode": False}}, "behaviour", "off"),
        (8, {"proximal": "recomputed"}, "recomputed", "truncate"),
        (8, {"importance": {"level": "sequence"}}, "recomputed", "truncate"),
        (0, {"importance": {"mode": "mask"}}, "behaviour", "mask"),
        (1, {"loss": "my_loss.py:fn"}, "behaviour", "off"),
        (1, {"loss": "my_loss.py:fn", "importance": {"mode": "truncate"}}, "behaviour", "truncate"),
        (1, {"loss": "my_loss.py:fn", "proximal": "recomputed"}, "recomputed", "truncate"),
    ],
)
def test_older_samples_are_weighed_where_there_may_be_some(tmp_path, alpha, given, proximal, mode):
    """YAML reads `off` as false."""
    found = TrainSection(**given).resolved(alpha=alpha, folder=tmp_path)

    assert (found.proximal, found.importance.mode) == (proximal, mode)


def test_a_reference_lies_in_the_run_folder_unless_its_path_is_whole(tmp_path):
    def of(reference):
        return TrainSection(kl_coef=0.1, reference=reference).resolved(alpha=0, folder=tmp_path).reference

    assert (of("base"), of("/models/base"), of("")) == (str(tmp_path / "base"), "/models/base", "")


# -- staleness -------------------------------------------------------------------------------------------------------


def test_a_number_that_the_environment_gives_is_text_and_is_taken_beside_auto():
    assert StalenessSection.model_validate({"alpha": "3"}).alpha == 3
    assert EnvSection.model_validate({"workers": "8"}).workers == 8


def test_the_bound_of_an_alpha_that_adapts_is_its_largest():
    auto = StalenessSection(alpha="auto", alpha_max=5)

    assert auto.bound == 5
    assert StalenessSection(alpha=3).bound == 3
    assert StalenessSection(bounded=False).bound == -1


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"alpha": "auto", "alpha_min": 3, "alpha_max": 2}, "alpha_min=3 is above alpha_max=2. Swap them"),
        ({"stragglers": "drop", "bounded": False}, "stragglers=drop ends what is older than the bound, and bounded=false lifts it"),
        ({"alpha": "auto", "bounded": False}, "alpha=auto moves a bound, and bounded=false lifts it"),
        ({"alpha": 2, "alpha_max": 5}, "alpha_max=5 bounds an alpha that moves, but alpha=2. Set alpha=auto, or leave it out"),
        ({"alpha_min": 1}, "alpha_min=1 bounds an alpha that moves, but alpha=1. Set alpha=auto, or leave it out"),
        ({"alpha": "often"}, "'often' is neither a whole number at least 0 nor auto"),
        ({"alpha": True}, "True is neither a whole number at least 0 nor auto"),
    ],
)
def test_a_bound_that_is_none_is_refused_in_one_sentence(given, sentence):
    with pytest.raises(ValidationError) as refused:
        StalenessSection(**given)

    assert sentence in refused.value.errors()[0]["msg"]


# -- sandboxes -------------------------------------------------------------------------------------------------------


def test_a_key_of_a_sandbox_without_one_is_refused():
    with pytest.raises(ValidationError, match="sandbox_network has no effect without a sandbox"):
        RewardSection(sandbox_network=True)


def test_an_environment_in_its_managers_process_has_no_sandbox():
    with pytest.raises(ValidationError, match="isolation=inline is in the manager's own process, and sandbox=bwrap in workers"):
        EnvSection(sandbox="bwrap", isolation="inline")


def test_a_sandbox_shows_the_rows_that_graders_of_ones_own_read(tmp_path):
    tasks = {
        "sums": TaskSection(data={"path": f"{tmp_path}/rows.jsonl", "eval_path": f"{tmp_path}/held_out.jsonl", "grader": "my.py:grade"})
    }
    sandboxed = resolved(tasks, EnvSection(sandbox="bwrap", sandbox_read=("~/more",)), RolloutSection(), RewardSection())

    assert sandboxed["sums"].env.sandbox_read == (os.path.expanduser("~/more"), f"{tmp_path}/rows.jsonl", f"{tmp_path}/held_out.jsonl")
    assert resolved(tasks, EnvSection(), RolloutSection(), RewardSection())["sums"].env.sandbox_read == ()
