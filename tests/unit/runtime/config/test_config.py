"""Configuration: how sections compose, how values resolve, and what a mistake is answered with."""

import math
import textwrap

import pytest
import yaml

from rubato.runtime.actor import Actor
from rubato.runtime.config import ActorConfig
from rubato.runtime.config.compose import load
from rubato.runtime.config.config import root_model
from rubato.runtime.errors import ConfigError

ACTORS = """
from typing import Any, Literal
from pydantic import Field, model_validator
from rubato.runtime.actor import Actor
from rubato.runtime.config import ActorConfig
from rubato.runtime.config import Section


class StalenessSection(Section):
    alpha: int = Field(default=1, ge=0)


class TrainSection(Section):
    lr: float = Field(default=5e-4, gt=0, lt=1)
    batch_groups: int = 32
    dtype: Literal["float32", "bfloat16"] = "float32"
    betas: tuple[float, float] = (0.9, 0.95)
    clip: bool = True
    extra: dict[str, Any] = {}


class EnvSection(Section):
    target: str = Field(alias="class")


class Trainer(Actor):
    role = "trainer"

    class Config(ActorConfig):
        staleness: StalenessSection = StalenessSection()
        train: TrainSection = TrainSection()

        @model_validator(mode="after")
        def fits(self):
            if self.train.batch_groups < self.staleness.alpha:
                raise ValueError("train.batch_groups must be at least staleness.alpha")
            return self


class Buffer(Actor):
    role = "sample_buffer"

    class Config(ActorConfig):
        staleness: StalenessSection = StalenessSection()


class Manager(Actor):
    class Config(ActorConfig):
        env: EnvSection


class NeedsTrainer(Actor):
    needs = ("trainer",)


class NotAnActor:
    pass
"""

CONFIG = """
run: {name: small, seed: 3}
actors:
  trainer: {class: "FILE:Trainer", restarts: 2}
  sample_buffer: {class: "FILE:Buffer", count: 2}
staleness:
  alpha: 2
train: {lr: 5e-4}
"""


@pytest.fixture
def write(tmp_path):
    """Writes a config whose FILE is a module of test actors; returns its path."""
    module = tmp_path / "my_actors.py"
    module.write_text(ACTORS)

    def written(text=CONFIG, name="job.yaml"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text).replace("FILE", str(module)))
        return path

    return written


def refusal(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value).replace(str(path), "job.yaml")


def test_a_config_resolves_to_the_sections_its_actors_declare(write):
    config = load(write())

    assert (config.run.name, config.run.seed, config.run.steps) == ("small", 3, 60)
    assert config.section("staleness").alpha == 2
    assert config.section("train").lr == 5e-4
    assert config.actors["sample_buffer"].count == 2
    assert config.actors["trainer"].restarts == 2


def test_an_actor_gets_its_sections_and_shares_them_with_others(write):
    config = load(write())

    trainer, buffer = config.actor_config("trainer"), config.actor_config("sample_buffer")

    assert config.actor_class("trainer").role == "trainer"
    assert isinstance(trainer, config.actor_class("trainer").Config)
    assert trainer.staleness is buffer.staleness
    assert not hasattr(buffer, "train")


def test_overrides_are_yaml_and_win_over_the_file(write):
    config = load(write(), ["train.lr=1e-5", "staleness.alpha=0", "train.extra.names=[a, b]", "train.clip=false"])

    train = config.section("train")
    assert (train.lr, train.extra, train.clip) == (1e-5, {"names": ["a", "b"]}, False)
    assert config.section("staleness").alpha == 0


def test_numbers_without_a_dot_are_numbers_in_free_form_values_too(write):
    config = load(write(), ["train.extra.p=1e-3"])

    assert config.section("train").extra == {"p": 1e-3}


def test_a_dump_holds_every_default_and_loads_as_the_same(write, tmp_path):
    config = load(write(), ["staleness.alpha=1"])

    (tmp_path / "config.yaml").write_text(config.dump())

    data = yaml.safe_load(config.dump())
    assert data["staleness"]["alpha"] == 1
    assert data["state"] == {"url": "", "durability": "everysec", "shared": False}
    assert load(tmp_path / "config.yaml").dump() == config.dump()


def test_free_form_values_are_the_same_for_the_launcher_and_for_who_reads_the_runs_own_config(write, tmp_path):
    file = write(
        CONFIG.replace(
            "5e-4}", "5e-4, extra: {at: 12:30:00, id: 010, is: no, day: 2026-11-25, top: .inf, map: {on: off, 1: a, '1': b, 2.5: c, ~: d}}}"
        )
    )

    first = load(file, ["train.extra.text=a: b # c"])
    (tmp_path / "config.yaml").write_text(first.dump())

    extra = load(tmp_path / "config.yaml").section("train").extra
    assert extra == first.section("train").extra
    assert extra == {
        "at": "12:30:00", "id": 10, "is": "no", "day": "2026-11-25", "top": math.inf,
        "map": {"on": "off", 1: "a", "1": "b", 2.5: "c", None: "d"}, "text": "a: b # c",
    }  # fmt: skip


def test_a_variable_is_filled_in_from_the_environment_and_written_as_it_stands(write, tmp_path, monkeypatch):
    file = write(CONFIG.replace("5e-4}", "'${LR}', extra: {key: 'a-${KEY}', list: ['${KEY}'], other: '${NONE:-x}', text: '$${KEY}'}}"))
    monkeypatch.setenv("KEY", "hunter2: #")
    monkeypatch.setenv("LR", "1e-3")

    first = load(file, ["run.name=${NONE:-named}", "train.clip=${CLIP:-false}"])
    (tmp_path / "config.yaml").write_text(first.dump())
    again = load(tmp_path / "config.yaml")

    for config in (first, again):
        train = config.section("train")
        assert (train.lr, train.clip, config.run.name) == (1e-3, False, "named")
        assert train.extra == {"key": "a-hunter2: #", "list": ["hunter2: #"], "other": "x", "text": "${KEY}"}
        assert "hunter2" not in config.dump()
        assert config.tree()["train"]["extra"]["key"] == "a-${KEY}"
        assert config.tree()["train"]["lr"] == "${LR}"


def test_a_variable_that_is_not_set_is_refused_by_key_and_name(write, monkeypatch):
    monkeypatch.delenv("KEY", raising=False)
    file = write(CONFIG.replace("5e-4}", "5e-4, extra: {key: ['${KEY}']}}"))

    assert refusal(file) == (
        "job.yaml: train.extra.key.0 names ${KEY}, and the environment here has no KEY. "
        "Set it, or write $${KEY} for the text itself. (line 8)"
    )


@pytest.mark.parametrize(
    "override",
    ["train.dtype=${KEY}", "train.lr=${KEY}", "train.betas.x=${KEY}", "bus.ports=${KEY}", "run.x=${KEY}", "train=${KEY}", "run.name=a ${KEY}",
     "actors.trainer.class=${KEY}", "actors.trainer.class=a.py:${KEY}", "actors.trainer.pools.a.set.train.lr=${KEY}", "actors.trainer.pools={'${KEY}': 1}",
     "run={name: [1, '${KEY}']}"],
)  # fmt: skip
def test_no_mistake_shows_what_the_environment_gave(write, monkeypatch, override):
    monkeypatch.setenv("KEY", "hun'ter\n2-is-a-very-long-secret-that-is-cut-where-values-are-shown-briefly")

    told = refusal(write(), override)

    assert "hun" not in told
    assert "very-long" not in told


def test_a_range_of_ports_that_is_too_narrow_for_the_job_is_refused(write):
    narrow = ["bus.host=127.0.0.1", "bus.ports=31000-31003"]

    assert refusal(write(), *narrow).endswith(
        "bus.ports=31000-31003 is too narrow: this job needs 6 ports, one for each actor, the node agent, the gate and a command of rubato."
    )


def test_an_empty_section_means_its_defaults(write):
    config = load(write(CONFIG + "state:\n"))

    assert config.state.durability == "everysec"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CONFIG.replace("alpha", "alhpa"), "job.yaml: staleness.alhpa is not a key. Did you mean staleness.alpha? (line 7)"),
        (CONFIG + "alpha: 3\n", "job.yaml: alpha is not a key. Did you mean staleness.alpha? (line 9)"),
        (CONFIG + "run: {}\n", "job.yaml: not valid YAML: run is given twice, on lines 2 and 9."),
        ("run: {name: a}", "job.yaml names no actors. Add a section actors with a class for each role."),
        ("actors: [1]", "job.yaml: actors is [1]; it must be key: value pairs. (line 1)"),
        ("- 1", "job.yaml must hold sections of key: value pairs, not a list."),
        ("", "job.yaml is empty."),
        ("a: [1", "job.yaml: not valid YAML: expected ',' or ']', but got '<stream end>'. (line 1)"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence(write, text, said):
    path = write(text)

    assert refusal(path) == said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("staleness.alhpa=1", "staleness.alhpa is not a key. Did you mean staleness.alpha?"),
        ("trian.lr=1", "trian is not a key. Did you mean train?"),
        ("actors.trainer.cuont=1", "actors.trainer.cuont is not a key. Did you mean actors.trainer.count?"),
        ("zzzzz=1", "zzzzz is not a key."),
        ("staleness.alpha=-1", "staleness.alpha is -1; it must be a whole number at least 0."),
        ("staleness.alpha=1.5", "staleness.alpha is 1.5; it must be a whole number at least 0."),
        ("train.lr=two", "train.lr is 'two'; it must be a number above 0 and below 1."),
        ("train.lr=.nan", "train.lr is nan; it must be a number above 0 and below 1."),
        ("train.lr=", "train.lr is empty; it must be a number above 0 and below 1."),
        ("train.clip=maybe", "train.clip is 'maybe'; it must be true or false."),
        ("train.dtype=int8", "train.dtype is 'int8'; it must be one of float32, bfloat16."),
        ("train.betas=[1]", "train.betas.1 is missing."),
        ("staleness=3", "staleness is 3; it must be a section of key: value pairs."),
        ("bus.ports=31100-31000", "bus.ports: must be two ports from 1 to 65535 in order, such as 31000-31100."),
        ("bus.ports=many", "bus.ports: must be two ports from 1 to 65535 in order, such as 31000-31100."),
        ("run.name.x=1", "run.name.x=1 can't be set: run.name is the value 'small'."),
        (
            "train.lr=[",
            "the value of train.lr is not valid YAML: [ (expected the node content, but found '<stream end>'). "
            "Text that begins with [ stands in quotes: train.lr='\"…\"'",
        ),
        ("train.clip=yes", "train.clip is 'yes'; it must be true or false. Write true."),
        ("train.clip=OFF", "train.clip is 'OFF'; it must be true or false. Write false."),
        ("train.clip=1", "train.clip is 1; it must be true or false. Write true."),
        ("state.shared=no", "state.shared is 'no'; it must be true or false. Write false."),
        ("run.dir=2026", "run.dir is 2026; it must be text. Put it in quotes."),
        ("run.name=a\udcffb", "run.name=a\\udcffb is no text in UTF-8."),
        ("actors.trainer={}", "actors.trainer.class is missing."),
        ("actors.node.class=a:B", "actors.node can't be a role: use small letters, digits and _, and not the name node."),
    ],
)
def test_a_mistake_in_an_override_is_one_sentence(write, override, said):
    assert refusal(write(), override) == f"command line: {said}"


def test_an_override_without_an_equals_sign_is_refused(write):
    assert refusal(write(), "staleness") == "staleness is not of the form key.sub=value without spaces, e.g. staleness.alpha=1."


def test_a_missing_file_is_one_sentence(tmp_path):
    said = refusal(tmp_path / "none.yaml")

    assert said == "job.yaml does not exist. Give the path of a YAML file, or a name that rubato configs lists."


def test_a_folder_is_no_config(tmp_path):
    assert refusal(tmp_path) == "job.yaml is a folder, and a config is a file. To go on with the run in it: rubato launch --resume job.yaml"


def test_several_mistakes_are_several_sentences(write):
    said = refusal(write(), "train.lr=-1", "staleness.alpha=x")

    assert len(said.splitlines()) == 2


def test_a_section_that_an_actor_needs_must_be_given(write):
    said = refusal(write(CONFIG + "env:\n").parent / "job.yaml", f"actors.env_manager.class={write().parent}/my_actors.py:Manager")

    assert said == "job.yaml: env is missing."


def test_checks_of_an_actor_across_its_sections_count(write):
    assert refusal(write(), "train.batch_groups=1") == "job.yaml: train.batch_groups must be at least staleness.alpha."


@pytest.mark.parametrize(
    ("name", "said"),
    [("Trianer", "defines no Trianer. Did you mean Trainer?"), ("NotAnActor", "is not a subclass of rubato.runtime.actor:Actor.")],
)
def test_a_wrong_actor_class_is_one_sentence(write, name, said):
    path = write(CONFIG.replace("FILE:Trainer", f"FILE:{name}"))

    assert said in refusal(path)
    assert refusal(path).startswith("job.yaml: actors.trainer.class: ")


def test_two_actors_that_declare_a_section_differently_are_refused(write):
    config = load(write())
    shared = config.section("staleness")

    class Other(type(shared)):
        pass

    class Stranger(Actor):
        class Config(ActorConfig):
            staleness: Other = Other()

    with pytest.raises(ConfigError, match=r"trainer and stranger declare the section staleness as two classes.*must share"):
        root_model({"trainer": config.actor_class("trainer"), "stranger": Stranger})


def test_an_actor_cannot_take_over_a_section_of_the_runtime():
    class Greedy(Actor):
        class Config(ActorConfig):
            run: int = 3

    with pytest.raises(ConfigError, match="it is the runtime's own"):
        root_model({"greedy": Greedy})


@pytest.mark.parametrize(
    ("trainer", "sentence"),
    [
        ("trainr", "job.yaml: actors.trainr can't be a Trainer: others look for that under the role trainer. Did you mean actors.trainer? (line 4)"),
        ("manager", "job.yaml: actors has no trainer, which manager needs. Add actors.trainer with its class. (line 3)"),
        ("trainers", "job.yaml: actors has no trainer, which trainers needs. Did you mean that by actors.trainers? (line 3)"),
    ],
)  # fmt: skip
def test_a_role_that_is_missing_or_mistyped_is_named(write, trainer, sentence):
    cls = "Trainer" if trainer == "trainr" else "NeedsTrainer"

    assert refusal(write(CONFIG.replace('trainer: {class: "FILE:Trainer"', f'{trainer}: {{class: "FILE:{cls}"'))) == sentence


def test_a_section_of_a_role_that_was_left_out_says_so(write):
    text = CONFIG.replace('  trainer: {class: "FILE:Trainer", restarts: 2}\n', "")

    assert refusal(write(text)) == "job.yaml: train is not a key: no role under actors reads it. Is one missing there? (line 7)"
