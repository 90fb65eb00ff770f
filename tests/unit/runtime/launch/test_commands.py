"""What a host that would join is refused for before it asks anybody: one sentence, and nothing is written."""

import os

import pytest

from rubato.runtime import cli
from rubato.runtime.config.compose import load
from rubato.runtime.launch import commands
from rubato.runtime.launch.card import KEYS_FILE, RunKeys
from rubato.runtime.launch.folder import RunFolder, make_keys
from rubato.runtime.launch.token import JoinToken, read_token, write_token
from tests.jobs import LEARNING

GATE = "tcp://127.0.0.1:7788"
STATE = "unix:///tmp/s?password=p"


@pytest.fixture
def keys(tmp_path) -> RunKeys:
    return make_keys(tmp_path / "keys")


def refused(command, capsys) -> str:
    """The one sentence that `rubato COMMAND…` ends with."""
    assert cli.main(command) == 2

    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    return said.err


HOSTS = [
    pytest.param("192.0.2.1", "--host 192.0.2.1 is not an address of this host (", id="another's"),
    pytest.param("bo gus", "--host bo gus is no IP address. Name one of this host's own.", id="no address"),
    pytest.param("a..b", "--host a..b is no IP address.", id="no name either"),
    pytest.param("*", "--host * is no IP address.", id="star"),
    pytest.param("0.0.0.0", "--host 0.0.0.0 is no address that another host could use.", id="all"),
    pytest.param("[::]", "--host [::] is no address that another host could use.", id="all of IPv6"),
]


@pytest.mark.parametrize(("host", "sentence"), HOSTS)
def test_a_host_address_that_can_not_be_this_hosts_is_refused(host, sentence, tmp_path, keys, capsys):
    token = write_token(JoinToken("run-1a2b", GATE, STATE, keys))
    folder = tmp_path / "second"

    assert sentence in refused(["add", "engine", "--join", token, "--host", host, "--run-dir", str(folder)], capsys)
    assert not folder.exists()


@pytest.mark.parametrize("num", ["0", "-3", "65"])
def test_a_number_of_actors_that_the_run_would_refuse_is_refused_here(num, tmp_path, keys, capsys):
    token = write_token(JoinToken("run-1a2b", GATE, STATE, keys))
    folder = tmp_path / "second"

    said = refused(["add", "engine", "--join", token, "-n", num, "--run-dir", str(folder)], capsys)

    assert said == f"can't add {num} actors: between 1 and 64 at a time.\n"
    assert not folder.exists()


def test_a_host_that_is_not_let_in_keeps_neither_keys_nor_the_way_to_the_state(tmp_path, keys, capsys, monkeypatch):
    monkeypatch.setattr("rubato.runtime.launch.launcher.REACH_S", 0.05)
    token = write_token(JoinToken("run-1a2b", "tcp://127.0.0.1:1", STATE, keys))
    folder = tmp_path / "second"

    said = refused(["add", "engine", "--join", token, "--run-dir", str(folder)], capsys)

    assert "the run run-1a2b could not be reached at tcp://127.0.0.1:1" in said
    assert not (folder / KEYS_FILE).exists()
    assert not (folder / "run.json").exists()


@pytest.mark.parametrize("given", [["a=b"], ["--run-dir", "x"]])
def test_what_a_host_that_joins_may_say_is_not_ignored_without_a_token(given, tmp_path, capsys):
    said = refused(["add", "engine", *given, "--run", str(tmp_path)], capsys)

    assert said.startswith(f"{given[0]} goes with --join alone: ")


LEADS_NOWHERE = [
    pytest.param("tcp://127.0.0.1:99999", STATE, "Port out of range 0-65535", id="port too high"),
    pytest.param("tcp://127.0.0.1:0", STATE, "names no address", id="port 0"),
    pytest.param("bogus", STATE, "names no address", id="no address"),
    pytest.param("tcp://[::1", STATE, "Invalid IPv6 URL", id="unclosed"),
    pytest.param("", STATE, "names no address", id="a socket of another host"),
]


@pytest.mark.parametrize(("gate", "state_url", "why"), LEADS_NOWHERE)
def test_a_token_that_leads_nowhere_is_refused(gate, state_url, why, tmp_path, keys, capsys):
    token = write_token(JoinToken("run-1a2b", gate, state_url, keys))

    said = refused(["add", "engine", "--join", token, "--run-dir", str(tmp_path / "second")], capsys)

    assert said.startswith("this is no join token (")
    assert why in said
    assert not (tmp_path / "second").exists()


@pytest.fixture
def launched(tmp_path):
    """Makes a run's folder, with keys, as a launch that this process holds left it."""
    folders = []

    def make(**card_fields):
        folder = RunFolder(tmp_path / "run")
        folders.append(folder)
        card = folder.open(resume=False, force=False)
        card.host, card.state_url = "10.0.0.5", STATE
        for name, value in card_fields.items():
            setattr(card, name, value)
        folder.write(card)
        make_keys(folder.path)
        return folder.path

    yield make
    for folder in folders:
        folder.close()


@pytest.mark.parametrize("state_url", [STATE, "rediss://u:p@10.0.0.9:6380"])
def test_the_folder_of_a_host_that_joined_prints_no_token(state_url, launched, capsys):
    folder = launched(node="node-2", state_url=state_url)

    said = refused(["keys", "join-token", "--run", str(folder)], capsys)

    assert said.startswith(f"{folder} belongs to node-2, a host that joined the run: print the token on the run's first")


def test_a_run_launched_before_it_had_keys_prints_no_token(launched, capsys):
    folder = launched()

    said = refused(["keys", "join-token", "--run", str(folder)], capsys)

    assert said == f"the run in {folder} was launched before it had these keys. Stop it and go on with --resume.\n"


def test_the_folder_of_the_first_host_prints_a_token(launched, capsys):
    folder = launched(gate=GATE)

    assert cli.main(["keys", "join-token", "--run", str(folder)]) == 0
    said = f"it does not expire; rubato keys new --run {folder} --replace and a resume void it\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("name", "gate"), [("head.of-the-run", "tcp://head.of-the-run:7788"), ("fd00::5", "tcp://[fd00::5]:7788")])
def test_a_token_may_name_the_first_host_otherwise_than_by_its_address(name, gate, launched, capsys):
    folder = launched(gate="tcp://10.0.0.5:7788")

    assert cli.main(["keys", "join-token", "--run", str(folder), "--host", name]) == 0
    assert read_token(capsys.readouterr().out).gate == gate


@pytest.mark.parametrize("name", ["a b", "a/b", "-a", "é", "a" * 300])
def test_what_is_no_name_of_a_host_is_in_no_token(name, launched, capsys):
    folder = launched(gate=GATE)

    said = refused(["keys", "join-token", "--run", str(folder), f"--host={name}"], capsys)

    assert said == f"--host {name} is no name of a host, and no address.\n"


@pytest.mark.parametrize("verb", ["new", "show", "join-token"])
def test_an_empty_folder_for_keys_is_refused(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    assert refused(["keys", verb, "--run", ""], capsys) == "--run is empty. Name the run's folder.\n"
    assert os.listdir(tmp_path) == []


LONG = "x" * 5000
TOO_LONG = [
    pytest.param(["keys", "new", "--run", LONG], "can't be written", id="keys new"),
    pytest.param(["keys", "show", "--run", LONG], "can't be read", id="keys show"),
    pytest.param(["keys", "join-token", "--run", LONG], "holds no run", id="join-token"),
    pytest.param(["monitor", LONG, "--why"], "holds no run", id="monitor --why"),
    pytest.param(["add", "engine", "--run", LONG], "holds no run", id="add"),
]


@pytest.mark.parametrize(("command", "sentence"), TOO_LONG)
def test_a_path_too_long_for_the_system_is_refused_in_one_sentence(command, sentence, capsys):
    assert sentence in refused(command, capsys)


def test_two_launches_in_one_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rubato.runtime.launch.commands.wall_s", lambda: 1_800_000_000.0)

    first, second = commands._fresh_folder("small"), commands._fresh_folder("small")

    assert second.name == f"{first.name}-2"
    assert first.is_dir()
    assert second.is_dir()


def test_a_folder_made_for_a_launch_that_was_refused_goes_again(tmp_path, keys, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    token = write_token(JoinToken("run-1a2b", GATE, STATE, keys))

    refused(["add", "engine", "--join", token, "-n", "0"], capsys)

    assert list((tmp_path / "runs").iterdir()) == []


# -- going on with a run ---------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """The folder of a run that trained two of four steps, seen from another folder, where its config lies too."""
    (tmp_path / "small.yaml").write_text(LEARNING.replace("steps: 2", "steps: 4") + "\nmodel: {path: m}\n")
    held = RunFolder(tmp_path / "run")
    held.write(held.open(resume=False, force=False))
    held.config.write_text(load(tmp_path / "small.yaml", ["train.kind=scripted", "train.lr=0.001"]).dump())
    (held.path / "checkpoints" / "step_2").mkdir(parents=True)
    (held.path / "metrics.jsonl").write_text('{"step": 2}\n')
    held.close()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return held.path


def dry(*command, capsys):
    """(exit code, printed config, sentences) of `rubato launch … --dry-run`."""
    code = cli.main(["launch", *map(str, command), "--dry-run"])
    said = capsys.readouterr()
    return code, said.out, said.err.splitlines()


@pytest.mark.parametrize(
    "named", [["--resume", "{run}"], ["--resume", "--run-dir", "{run}"], ["{run}/config.yaml", "--resume"],
              ["{run}/config.yaml", "--run-dir", "{run}", "--resume"], ["--resume", "{run}", "run.watch_s=30"]]
)  # fmt: skip
def test_a_run_is_resumed_from_any_folder_without_a_config(named, stopped, capsys):
    code, out, said = dry(*(part.format(run=stopped) for part in named), capsys=capsys)

    assert (code, said) == (0, [])
    assert "lr: 0.001" in out


def test_changes_of_a_resumed_run_are_told_with_what_was(stopped, capsys):
    code, out, said = dry("--resume", stopped, "train.lr=0.5", "run.steps=9", capsys=capsys)

    assert code == 0
    assert "lr: 0.5" in out
    assert said == ["changed from here on: run.steps was 4, is 9; train.lr was 0.001, is 0.5"]


@pytest.mark.parametrize(
    "named", [["{config}", "--resume", "{run}"], ["--resume", "{run}", "{config}"], ["--resume", "{config}", "{run}"],
              ["{run}/config.yaml", "{config}", "--resume"], ["{config}", "--run-dir", "{run}", "--resume"]]
)  # fmt: skip
def test_all_keys_on_which_a_named_config_differs_are_told_also_those_it_does_not_set(named, stopped, capsys):
    words = (part.format(run=stopped, config=stopped.parent / "small.yaml") for part in named)

    code, _, (said,) = dry(*words, capsys=capsys)

    assert code == 0
    assert said.startswith(f"{stopped.parent}/small.yaml differs from the run's own config, under which it goes on: ")
    assert "train.kind is scripted, not torch; train.lr is 0.001, not 0.0005." in said
    assert said.endswith("Give what shall change as key.sub=value.")


REFUSED_CHANGES = [
    pytest.param(["run.seed=7"], "run.seed is 1 in this run and can't become 7: groups under way would mix", id="seed"),
    pytest.param(["run.steps=1"], "run.steps is 1, and {run} has trained 2 steps already. Give run.steps=3", id="steps"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED_CHANGES)
def test_a_change_that_would_ruin_a_resumed_run_is_refused(changes, sentence, stopped, capsys):
    before = (stopped / "config.yaml").read_text()

    code = cli.main(["launch", "--resume", str(stopped), *changes])

    assert code == 2
    assert capsys.readouterr().err.startswith(sentence.format(run=stopped))
    assert (stopped / "config.yaml").read_text() == before


NOWHERE = [
    pytest.param(["--resume"], "--resume: which run? Name its folder", id="no folder"),
    pytest.param(["--resume", "gone"], "gone does not exist: there is no run to resume.", id="no such folder"),
    pytest.param(["{run}"], "is a folder, and a config is a file. To go on with the run in it: rubato launch --resume", id="no flag"),
    pytest.param(["a.yaml", "b.yaml", "run.steps=2"], "launch takes one config, and a.yaml and b.yaml are named.", id="two"),
    pytest.param(["--resume", "{run}", "{run}"], "is a folder, and a config is a file.", id="two runs"),
    pytest.param(["run.steps=2"], "launch needs a config", id="no config"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "sentence"), NOWHERE)
def test_a_launch_that_names_nothing_says_what_to_name(command, sentence, stopped, capsys):
    assert sentence in refused(["launch", *(part.format(run=stopped) for part in command)], capsys)


def test_a_dry_run_says_all_that_is_wrong(stopped, capsys):
    wrong = ["env.class=gone.py:Env", "prepare=[no.such.module]", "train.kind=torch", "report.console=nope:X", "model.path=/m"]
    code, _, said = dry(stopped.parent / "small.yaml", *wrong, "--run-dir", stopped, capsys=capsys)

    assert code == 2
    assert len(said) == 5
    assert f"{stopped} already holds a run (step 2). Add --resume" in said[0]
    assert said[1:3] == ["prepare: there is no module no.such.module.", "report.console: nope:X does not exist: there is no module nope."]
    assert said[3].startswith("env.class: gone.py:Env does not exist: there is no file")
    assert said[4] == "model folder /m does not exist. Set model.path to a folder in HF format."


def test_a_dry_run_does_not_miss_the_model_that_the_launch_will_make(stopped, capsys):
    prepared = ["train.kind=torch", "prepare=[rubato.actors.training.base_model]"]

    assert dry(stopped.parent / "small.yaml", *prepared, capsys=capsys)[0] == 0
    assert dry(stopped.parent / "small.yaml", *prepared, "model.path=/no/such", capsys=capsys)[0] == 2


PARTS = [
    ([], "say what to add: one role"),
    (["engine", "--pools", "far=1"], "say what to add: one role"),
    (["--pools", "far=0"], "can't add 0 actors: between 1 and 64 at a time."),
    (["--pools", "far=65"], "can't add 65 actors: between 1 and 64 at a time."),
]


@pytest.mark.parametrize(("what", "sentence"), PARTS)
def test_what_a_host_is_to_bring_is_said_once_and_within_bounds(what, sentence, tmp_path, keys, capsys):
    token = write_token(JoinToken("run-1a2b", GATE, STATE, keys))
    folder = tmp_path / "second"

    assert sentence in refused(["add", *what, "--join", token, "--run-dir", str(folder)], capsys)
    assert not folder.exists()


@pytest.mark.parametrize("pools", ["far", "far=", "=2", "far=1,far=2", "far=-1", "far=²"])
def test_pools_that_are_no_numbers_by_name_are_refused(pools, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["add", "--pools", pools, "--join", "rubato1.x"])

    assert ended.value.code == 2
    assert "is not of the form NAME=N,NAME=N with each name once" in capsys.readouterr().err


def test_several_pools_go_with_a_host_that_joins(tmp_path, capsys):
    assert "--pools goes with --join alone" in refused(["add", "--pools", "far=1", "--run", str(tmp_path)], capsys)
