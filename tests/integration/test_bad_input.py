"""Every mistake gets one clear sentence and an exit code other than 0; nothing stored is lost and no process is left."""

import asyncio
import fcntl
import json
import os
import re
import shutil
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.runtime import cli
from rubato.runtime.store.embedded import EmbeddedRedis
from tests.jobs import ACTING, LEARNING, Ended, clean_environment, left_behind, rubato, write_model

pytestmark = pytest.mark.slow

BAD_ENVS = Path(__file__).parent / "bad_envs.py"

LAUNCH = ("launch", "small.yaml", "--run-dir", "run")

OWN_LOSS = """
def fn(logprobs_N, *rest, **clips):
    return logprobs_N.sum()
"""

BAD_REWARDS = """
def raises(completions, **columns):
    raise KeyError("answer")

def leaves(completions, **columns):
    raise SystemExit(3)

def nan(completions, **columns):
    return [float("nan")] * len(completions)
"""

LARGEST_FILE = 2_500_000
"""Bytes: more than the tiny model's weights, less than its optimiser's state. A file that can't grow stands for a full disk."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Path:
    """A folder of the user's: configs, broken environments, and folders that are not what they should be."""
    (tmp_path / "small.yaml").write_text(LEARNING.replace("env: {", f"env: {{class: '{BAD_ENVS}:Uneven', ") + f"model: {{path: {model}}}\n")
    (tmp_path / "acting.yaml").write_text(ACTING + f"\nmodel: {{path: {model}}}\n")
    (tmp_path / "broken.yaml").write_text("run: {steps: 2\n")
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "unfinished.py").write_text("def broken(:\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "metrics.jsonl").write_text('{"step": 41}\n')
    (tmp_path / "held" / ".lock").write_text("rubato\n")
    (tmp_path / "mine" / "logs").mkdir(parents=True)
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "logs").touch()
    (tmp_path / "headless").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, tmp_path / "headless")
    shutil.copy(BAD_ENVS, tmp_path / "envs.py")
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model: Path) -> Path:
    """A run of two steps with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.yaml").write_text(LEARNING)
    ended = rubato(*LAUNCH, f"model.path={model}", f"env.class={BAD_ENVS}:Uneven", cwd=folder)
    assert ended.code == 0, ended.err
    return folder / "run"


@pytest.fixture
def stopped(finished: Path, place: Path) -> Path:
    """A copy of that run, to go on with."""
    return Path(shutil.copytree(finished, place / "run"))


@pytest.fixture(scope="module")
def running(tmp_path_factory, model: Path) -> Iterator[Path]:
    """The folder of a run that waits: nothing in it trains."""
    folder = tmp_path_factory.mktemp("running")
    (folder / "acting.yaml").write_text(ACTING + f"\nmodel: {{path: {model}}}\n")
    command = [sys.executable, "-m", "rubato.runtime.cli", "launch", "acting.yaml", "--run-dir", str(folder / "run")]
    with (folder / "out").open("wb") as out:
        job = subprocess.Popen(command, cwd=folder, env=clean_environment(), stdout=out, stderr=out)
    try:
        while "actors" not in (folder / "out").read_text() and job.poll() is None:
            with pytest.raises(subprocess.TimeoutExpired):
                job.wait(0.1)
        yield folder / "run"
    finally:
        rubato("stop", "--run", folder / "run", "--now", cwd=folder)
        job.wait(30)


CONFIGS = [
    pytest.param((*LAUNCH, "staleness.alhpa=1"), "staleness.alhpa is not a key. Did you mean staleness.alpha?", id="mistyped key"),
    pytest.param((*LAUNCH, "colour=red"), "colour is not a key.", id="unknown key"),
    pytest.param((*LAUNCH, "staleness.colour=1"), "staleness.colour is not a key. staleness has alpha, alpha_min, alpha_max, bounded, stragglers.", id="unknown key of a section"),
    pytest.param((*LAUNCH, "actors.engin.count=2"), "actors.engin names no class. Did you mean actors.engine?", id="mistyped role"),
    pytest.param((*LAUNCH, "train.lr", "=", "5"), "train.lr is not of the form key.sub=value without spaces", id="spaces around ="),
    pytest.param((*LAUNCH, "train.lr=fast"), "train.lr is 'fast'; it must be a number above 0.", id="wrong type"),
    pytest.param((*LAUNCH, "rollout.top_p=2"), "rollout.top_p is 2; it must be a number above 0 and at most 1.", id="out of range"),
    pytest.param((*LAUNCH, "env.isolation=cage"), "it must be one of auto, inline, process.", id="unknown choice"),
    pytest.param((*LAUNCH, "staleness.alpha"), "staleness.alpha is not of the form key.sub=value", id="override without a value"),
    pytest.param((*LAUNCH, "staleness.alpha=-1"), "staleness.alpha: -1 is neither a whole number at least 0 nor auto.", id="alpha negative"),
    pytest.param((*LAUNCH, "staleness.alpha=sometimes"), "staleness.alpha: 'sometimes' is neither a whole number at least 0 nor auto.", id="alpha is no number"),
    pytest.param((*LAUNCH, "staleness.alpha=auto", "staleness.alpha_min=9"), "staleness: alpha_min=9 is above alpha_max=8. Swap them.", id="bounds of alpha the wrong way round"),
    pytest.param((*LAUNCH, "staleness.stragglers=skip"), "staleness.stragglers", id="stragglers that neither wait nor drop"),
    pytest.param((*LAUNCH, "staleness.stragglers=drop", "tail_batching.enabled=true"), "stragglers=drop has no effect beside tail_batching", id="stragglers of whole rounds"),
    pytest.param((*LAUNCH, "staleness.alpha=auto", "staleness.bounded=false"), "staleness: alpha=auto moves a bound, and bounded=false lifts it.", id="alpha that moves and has no bound"),
    pytest.param((*LAUNCH, "train.group_size=1"), "train.group_size is 1; it must be a whole number at least 2.", id="group size 1"),
    pytest.param((*LAUNCH, "rollout.max_new_tokens=600"), "rollout.max_new_tokens is 600; it must be below rollout.max_len, which is 512.", id="turns longer than trajectories"),
    pytest.param((*LAUNCH, "rollout.max_len=4096"), "rollout.max_len is 4096; it must be at most engine.max_len, which is 1024.", id="trajectories longer than the engine takes"),
    pytest.param((*LAUNCH, "rollout.hold_s=20"), "rollout.hold_s is 20; it must be at most a third of samples.ticket_ttl_s, which is 30.", id="tickets that lapse"),
    pytest.param((*LAUNCH, "rollout.top_p=0.9"), "rollout.top_p is 0.9; it must be 1, since the trainer can't recompute", id="top-p in training"),
    pytest.param((*LAUNCH, "engine.kind=vllm", "rollout.temperature=2.5"), "rollout.temperature is 2.5, but engine.kind=vllm takes 2 at most: lower it", id="hotter than vLLM samples"),
    pytest.param((*LAUNCH, "eval.samples=4", "eval.top_p=0.9"), "eval.top_p is 0.9, but engine.kind=scripted has no top-p: set eval.top_p=1", id="top-p with an engine that has none"),
    pytest.param((*LAUNCH, "rollout.top_k=20"), "rollout.top_k is not a key.", id="top-k in training"),
    pytest.param((*LAUNCH, "rollout.temperature=0.001"), "rollout.temperature is 0.001; it must be at least 0.01.", id="temperature that an engine would raise"),
    pytest.param((*LAUNCH, "rollout.temperature=0"), "rollout.temperature is 0: all rollouts of a group would be the same, and nothing is learned from equal rewards. Set it to 1.", id="greedy training"),
    pytest.param((*LAUNCH, "tasks={hot: {class: 'envs.py:Good'}, cold: {class: 'envs.py:Good', temperature: 0}}", "--dry-run"), "tasks.cold.temperature is 0: all rollouts of a group would be the same, and nothing is learned from equal rewards. Set it to 1, or tasks.cold.weight to 0 if it is only to be evaluated.", id="greedy training of one task"),
    pytest.param((*LAUNCH, "actors.env_manager.count=0"), "Set actors.env_manager.count=1,", id="zero env managers"),
    pytest.param((*LAUNCH, "actors.trainer.count=2"), "Set actors.trainer.count=1.", id="two trainers"),
    pytest.param((*LAUNCH, "actors.trainer.class=rubato.actors.training.trainer:Trainr"), "Did you mean Trainer?", id="mistyped actor class"),
    pytest.param((*LAUNCH, "engine.kind=foo"), "engine.kind: foo is not torch, vllm, vllm_server or scripted, nor a class of yours as package.module:Class.", id="unknown engine"),
    pytest.param((*LAUNCH, "engine.kind=nope:Engine"), "engine.kind: nope:Engine does not exist: there is no module nope.", id="engine class missing"),
    pytest.param((*LAUNCH, "env.class=gone.py:Env"), "env.class: gone.py:Env does not exist: there is no file", id="env file missing"),
    pytest.param((*LAUNCH, "env.class=envs.py:Godo"), "env.class: envs.py:Godo does not exist: envs.py defines no Godo", id="env class missing"),
    pytest.param((*LAUNCH, "env.class=unfinished.py:Env"), "env.class: unfinished.py:Env can't be imported: SyntaxError: invalid syntax", id="env file broken"),
    pytest.param((*LAUNCH, "prepare=[no.such.module]"), "prepare: there is no module no.such.module.", id="preparation missing"),
    pytest.param((*LAUNCH, "train.loss=gsppo"), "train.loss: 'gsppo' is none of grpo, dr_grpo, dapo, gspo, cispo, ppo, and no path/to/file.py:function. Did you mean gspo?", id="unknown loss"),
    pytest.param((*LAUNCH, "train.loss=gone.py:fn"), "train.loss: gone.py:fn does not exist: there is no file", id="loss file missing"),
    pytest.param((*LAUNCH, "train.advantage=rlo"), "train.advantage: 'rlo' is none of group, rloo, reinforce_pp. Did you mean rloo?", id="unknown advantage"),
    pytest.param((*LAUNCH, "train.clip_low=0.5"), "train: clip_low=0.5 is above clip_high=0.28", id="clip bounds the wrong way round"),
    pytest.param((*LAUNCH, "train.importance.cap=0.5"), "train.importance.cap is 0.5; it must be a number at least 1.", id="importance cap below 1"),
    pytest.param((*LAUNCH, "train.betas=[1.5,0.9]"), "train.betas.0 is 1.5; it must be below 1.", id="betas out of range"),
    pytest.param((*LAUNCH, "actors.reward_service={class: 'rubato.actors.rewards.service:RewardService'}", "reward.functions=[nope:f]"), "reward.functions: nope:f does not exist: there is no module nope.", id="reward module missing"),
    pytest.param((*LAUNCH, "reward.functions=[nope:f]"), "reward.functions names nope:f, but actors has no reward_service to call it.", id="reward without a service"),
    pytest.param((*LAUNCH, "run.steps=true"), "run.steps is true; it must be a whole number at least 0.", id="true for a count"),
    pytest.param((*LAUNCH, "train.lr=yes"), "train.lr is 'yes'; it must be a number above 0.", id="yes for a number"),
    pytest.param(("launch", "nowhere.yaml"), "nowhere.yaml does not exist.", id="missing config file"),
    pytest.param(("launch", "broken.yaml"), "broken.yaml: not valid YAML", id="broken config file"),
    pytest.param(("launch", "small.yaml", "--run-dir", "", "--force"), "--run-dir is empty.", id="empty run folder"),
    pytest.param(("launch", "small.yaml", "--run-dir", "mine", "--force"), "mine holds logs, but no run of ours", id="force on a folder of the user's"),
    pytest.param(("launch", "small.yaml", "--run-dir", "x" * 300), "can't be used as a run folder: File name too long", id="name too long"),
    pytest.param(("launch", "small.yaml", "--run-dir", "blocked"), "blocked holds logs, but no run of ours", id="file in the way"),
    pytest.param(("launch", "small.yaml", "--run-dir", "x" * 300, "--resume"), "File name too long", id="resume with a name too long"),
    pytest.param(("lanch", "small.yaml"), "lanch is not a command. Did you mean rubato launch?", id="mistyped command"),
    pytest.param(("add", "env_manager", "--run", "empty"), "empty holds no run", id="add to no run"),
    pytest.param(("drain", "env_manager-1", "--run", "empty"), "empty holds no run", id="drain in no run"),
    pytest.param(("monitor", "empty", "--once"), "empty holds no run", id="monitor of no run"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "sentence"), CONFIGS)
def test_a_mistake_in_a_command_or_config_is_refused_at_once(command, sentence, place, monkeypatch, capsys):
    monkeypatch.chdir(place)

    code = cli.main(command)

    _check_one_sentence(Ended(code, *capsys.readouterr()), sentence, place)
    assert not (place / "run").exists()


def test_a_refused_launch_leaves_no_file_or_loop_open(place, monkeypatch):
    monkeypatch.chdir(place)
    refused = (*LAUNCH, "env.class=gone.py:Env")
    cli.main(refused)  # what a process opens once stays open
    fds = os.listdir("/proc/self/fd")

    cli.main(refused)

    assert len(os.listdir("/proc/self/fd")) == len(fds)


REFUSED = [
    pytest.param(("launch", "small.yaml", "--run-dir", "held"), "held already holds a run (step 41). Add --resume", id="folder holds a run"),
    pytest.param(("launch", "small.yaml", "--run-dir", "file"), "file can't be used as a run folder", id="folder is a file"),
    pytest.param(("launch", "small.yaml", "--run-dir", "empty", "--resume"), "empty holds no run to resume.", id="nothing to resume"),
    pytest.param((*LAUNCH, "state.url=redis://127.0.0.1:1/0"), "redis://127.0.0.1:1/0 could not be reached", id="redis unreachable"),
    pytest.param((*LAUNCH, "state.url=unix:///no/such.sock"), "unix:///no/such.sock could not be reached", id="redis socket missing"),
    pytest.param((*LAUNCH, "state.url=redis://127.0.0.1:notaport"), "state.url names no server: Port could not be cast", id="redis port malformed"),
    pytest.param((*LAUNCH, "state.url=redis://127.0.0.1:99999"), "state.url names no server: Port out of range 0-65535.", id="redis port too high"),
    pytest.param((*LAUNCH, "report.console=nope:X"), "report.console: nope:X does not exist: there is no module nope.", id="console missing"),
    pytest.param((*LAUNCH, "state.url=localhost"), "state.url", id="redis url malformed"),
    pytest.param((*LAUNCH, "model.path={place}/headless"), "headless has no *.safetensors. Set model.path", id="model without weights"),
    pytest.param((*LAUNCH, "model.path={place}/gone"), "gone does not exist. Set model.path", id="model folder missing"),
    pytest.param((*LAUNCH, "train={{kl_coef: 0.1, reference: gone}}"), "run/gone does not exist. Set train.reference to a folder in HF format.", id="reference model missing"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "sentence"), REFUSED)
def test_a_launch_that_can_not_succeed_is_refused_before_any_actor_starts(command, sentence, place):
    before = _contents(place / "held")

    ended = rubato(*(part.format(place=place) for part in command), cwd=place)

    _check_one_sentence(ended, sentence, place)
    assert _contents(place / "held") == before


SOON = ("env.isolation=auto", "env.reset_timeout_s=0.3", "env.step_timeout_s=0.3", "env.workers=1")

ENVIRONMENTS = [
    pytest.param("envs.py:WantsAnArgument", "raised in __init__", id="constructor raises"),
    pytest.param("envs.py:RaisesInReset", "raised in reset (seed 1): KeyError('goal'). 8 of 8 seeds failed", id="raises in reset"),
    pytest.param("envs.py:HangsInReset", "hung in reset", id="hangs in reset"),
    pytest.param("envs.py:BlocksInReset", "hung in reset", id="blocks in reset"),
    pytest.param("envs.py:ReturnsOneValue", "a str instead of (observation, info)", id="wrong shape from reset"),
    pytest.param("envs.py:RaisesInStep", "raised in step", id="raises in step"),
    pytest.param("envs.py:HangsInStep", "hung in step", id="hangs in step"),
    pytest.param("envs.py:ReturnsFourValues", "4 values instead of (observation, reward, terminated, truncated, info)", id="wrong shape from step"),
    pytest.param("envs.py:RewardsNan", "a reward of nan, which is not finite", id="NaN reward"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "sentence"), ENVIRONMENTS)
def test_a_broken_environment_ends_the_job_with_one_sentence(target, sentence, place):
    ended = rubato("launch", "acting.yaml", "--run-dir", "run", f"env.class={target}", *SOON, cwd=place)

    _check_one_sentence(ended, sentence, place)
    assert ended.err.startswith(f"env {place}/{target} ")
    assert f"Log: {place}/run/logs/env_manager-1.jsonl" in ended.err


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("fn", "my_loss.py:fn returned (), not one number with a gradient for each of the "),
        ("gone", "train.loss: my_loss.py:gone does not exist: my_loss.py defines no gone."),
    ],
)
def test_a_loss_of_ones_own_that_is_none_ends_the_job_with_one_sentence(name, sentence, place):
    (place / "my_loss.py").write_text(OWN_LOSS)

    ended = rubato(*LAUNCH, f"train.loss=my_loss.py:{name}", cwd=place)

    _check_one_sentence(ended, sentence.format(place=place), place)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_launch_prepares_ends_it_without_a_trace(number, place):
    (place / "slow.py").write_text("import time\nprint('{}', flush=True)\ntime.sleep(600)\n")
    environment = clean_environment()
    environment["PYTHONPATH"] = f"{place}:{environment['PYTHONPATH']}"
    command = [sys.executable, "-m", "rubato.runtime.cli", *LAUNCH, "prepare=[slow]"]

    with tempfile.TemporaryDirectory(prefix="t-") as sockets:  # pytest's folders are too long for sockets
        environment["TMPDIR"] = sockets
        with subprocess.Popen(
            command, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # under nohup it would be ignored, as it should
        ) as job:  # fmt: skip
            assert any("redis" in line for line in iter(job.stdout.readline, ""))
            job.send_signal(number)
            out, err = job.communicate(timeout=60)
        assert list(Path(sockets).iterdir()) == []

    assert (job.returncode, out, err) == (130, "", "")
    assert left_behind(place) == []


def test_a_wrong_redis_password_is_refused(place):
    async def refused() -> Ended:
        server = EmbeddedRedis(place / "server")
        url = await server.start()
        try:
            wrong = url.replace("password=", "password=x")
            return await asyncio.to_thread(rubato, *LAUNCH, f"state.url={wrong}", cwd=place)
        finally:
            await server.stop()

    ended = asyncio.run(refused())

    _check_one_sentence(ended, "refused the password. Set state.url with one, or leave state.url out", place)


@pytest.fixture
def stranger() -> Iterator[int]:
    """A port on which something listens that is no Redis."""

    class Answer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_port_taken_by_another_server_is_named(stranger, place):
    ended = rubato(*LAUNCH, f"state.url=redis://127.0.0.1:{stranger}/0", cwd=place)

    _check_one_sentence(ended, f"redis://127.0.0.1:{stranger}/0 is taken by a server that is not Redis.", place)


def test_a_temporary_folder_too_long_for_sockets_is_refused(place, monkeypatch):
    folder = place / ("x" * 100)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))

    ended = rubato(*LAUNCH, cwd=place)

    _check_one_sentence(ended, f"{folder} is too long for the paths of sockets. Set TMPDIR=/tmp.", place)


REWARDS = [
    pytest.param("raises", "reward function {place}/rewards.py:raises raised KeyError('answer')", id="raises"),
    pytest.param("leaves", "reward function {place}/rewards.py:leaves failed: its process ended with exit code 3", id="exits"),
    pytest.param("nan", "reward function {place}/rewards.py:nan returned nan", id="NaN"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sentence"), REWARDS)
def test_a_reward_function_that_never_scores_ends_the_job_with_one_sentence(name, sentence, place):
    (place / "rewards.py").write_text(BAD_REWARDS)
    service = "actors.reward_service={class: rubato.actors.rewards.service:RewardService}"

    command = ("launch", "acting.yaml", "--run-dir", "run", service, f"reward.functions=[rewards.py:{name}]")
    ended = rubato(*command, "env.concurrency=64", "train.batch_groups=32", cwd=place)

    _check_one_sentence(ended, sentence.format(place=place), place)


HOPELESS = [
    pytest.param(("rollout.system_prompt={long}",), "a rollout ended as generation_failed", id="system prompt too long"),
    pytest.param(("model.path=rejecting",), "returned an observation from reset that can't be shown", id="template rejects a text"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "sentence"), HOPELESS)
def test_rollouts_that_fail_every_time_end_the_job_with_one_sentence(overrides, sentence, place, model):
    shutil.copytree(model, place / "rejecting")
    plain = "{% for m in messages %}{{ m.content }}<e>{% endfor %}"
    template = "{{ raise_exception('no boards') if '\\n' in messages[-1].content }}" + plain
    settings = json.loads((model / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (place / "rejecting" / "tokenizer_config.json").write_text(json.dumps(settings))
    (place / "rejecting" / "chat_template.jinja").write_text(template)
    given = [part.format(long="long " * 600).replace("=rejecting", f"={place}/rejecting") for part in overrides]

    ended = rubato("launch", "acting.yaml", "--run-dir", "run", *given, "env.isolation=auto", cwd=place)

    _check_one_sentence(ended, sentence, place)
    assert "32 of the last 32 tasks failed" in ended.err


def test_where_four_tasks_in_seven_fail_the_user_is_told_and_the_others_are_trained_on(place):
    soon = ("env.isolation=auto", "env.step_timeout_s=0.3", "rollout.max_turns=6", "env.concurrency=16")
    ended = rubato(*LAUNCH, "env.class=envs.py:FourInSeven", *soon, "run.steps=10", "train.kind=scripted", cwd=place)

    assert ended.code == 0, ended.err
    assert len(_rows(place / "run")) == 10
    for what in ("raised in step", "hung in step", "a reward of nan", "crashed in step"):
        assert what in ended.out
    assert re.search(r"\d of the last \d+ tasks failed in their environment; the job goes on with the others", ended.out)
    samples = [json.loads(line) for line in (place / "run" / "samples.jsonl").read_text().splitlines()]
    assert {line["reason"] for line in samples if line["fate"] == "failed"} == {
        "env_step_failed", "env_timeout", "env_bad_result"
    }  # fmt: skip


def test_an_environment_that_fails_on_the_first_seed_that_is_tried_is_told_and_the_job_goes_on(place):
    ended = rubato(*LAUNCH, "env.class=envs.py:FailsOnOneSeed", "env.isolation=auto", "train.kind=scripted", cwd=place)

    assert ended.code == 0, ended.err
    assert "raised in reset (seed 1): KeyError('goal')" in ended.out
    assert "The job goes on: another seed works (tried: 2)" in ended.out


def test_a_run_folder_belongs_to_one_launcher(stopped, place):
    with (stopped / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = rubato(*LAUNCH, "--resume", cwd=place)

    _check_one_sentence(ended, f"{place}/run is running already. Watch it with: rubato monitor", place)


RUNNING = [
    pytest.param(("add", "env_manger", "--run", "{run}"), "env_manger is not a role of this run. Its roles are sample_buffer,", id="add unknown role"),
    pytest.param(("add", "sample_buffer", "--run", "{run}"), "a run has at most 1, and 1 runs already.", id="add a second buffer"),
    pytest.param(("drain", "sample_buffer-1", "--run", "{run}"), "sample_buffer-1 can't be drained: a run needs at least 1 sample_buffer. Save and end", id="drain the buffer"),
    pytest.param(("drain", "llm_proxy-1", "--run", "{run}"), "llm_proxy-1 can't be drained: a run needs at least 1 llm_proxy. Save and end", id="drain the last proxy"),
    pytest.param(("add", "engine", "--run", "{run}", "-n", "0"), "can't add 0 actors", id="add none"),
    pytest.param(("drain", "engine-9", "--run", "{run}"), "engine-9 is not in this run, so nothing was done. Running:", id="drain unknown name"),
    pytest.param(("launch", "acting.yaml", "--run-dir", "{run}"), "is running already", id="launch into a running run"),
    pytest.param(("launch", "acting.yaml", "--run-dir", "{run}", "--resume"), "is running already", id="resume a running run"),
    pytest.param(("launch", "acting.yaml", "--run-dir", "{run}", "--force"), "is running already", id="overwrite a running run"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "sentence"), RUNNING)
def test_a_mistake_leaves_a_running_job_alone(command, sentence, running, place):
    ended = rubato(*(part.format(run=running) for part in command), cwd=place)

    _check_one_sentence(ended, sentence, place)
    state = json.loads(rubato("monitor", running, "--json", cwd=place).out)
    assert {actor["state"] for actor in state["actors"]} == {"ready"}


def test_a_truncated_checkpoint_is_passed_over_for_the_one_before(stopped, place):
    _truncate(stopped / "checkpoints" / "step_2")

    ended = rubato(*LAUNCH, "--resume", "run.steps=3", cwd=place)

    assert ended.code == 0, ended.err
    assert f"checkpoint {stopped}/checkpoints/step_2: model.safetensors is truncated" in ended.out
    assert "going on after step 2 with the weights of step 1" in ended.out
    assert [row["step"] for row in _rows(stopped)] == [1, 2, 3]


def test_a_forced_launch_that_can_not_start_leaves_the_run_as_it_was(stopped, place):
    ended = rubato(*LAUNCH, "--force", f"model.path={place}/gone", cwd=place)

    _check_one_sentence(ended, "gone does not exist. Set model.path", place)
    assert [row["step"] for row in _rows(stopped)] == [1, 2]
    assert checkpoints.check(stopped / "checkpoints" / "step_2").step == 2


def test_a_launch_that_made_no_step_is_repeated_without_a_flag(place, model):
    refused = rubato(*LAUNCH, f"model.path={place}/gone", cwd=place)
    again = rubato(*LAUNCH, f"model.path={place}/gone", cwd=place)

    _check_one_sentence(refused, "gone does not exist. Set model.path", place)
    assert again.err == refused.err


def test_resume_says_what_of_the_config_it_does_not_follow(stopped, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    (place / "small.yaml").write_text((place / "small.yaml").read_text().replace("steps: 2", "steps: 9"))

    code = cli.main((*LAUNCH, "--resume", "--dry-run", "train.lr=0.5"))

    said = capsys.readouterr()
    assert code == 0
    assert "steps: 2" in said.out
    assert "lr: 0.5" in said.out
    assert said.err.splitlines() == [
        "changed from here on: train.lr was 0.0005, is 0.5",
        "small.yaml differs from the run's own config, under which it goes on: run.steps is 2, not 9. "
        "Give what shall change as key.sub=value.",
    ]


LOSS_CHANGES = [
    (["train.loss=gspo"], ["clip_low was 0.2, is 0.0003", "clip_high was 0.28, is 0.0004"]),
    (["train.loss=cispo", "train.clip_high=2"], ["clip_high was 0.28, is 2.0", "clip_low was 0.2, is 1.0"]),
    (["train.loss=dapo"], []),
]


@pytest.mark.parametrize(("changes", "told"), LOSS_CHANGES)
def test_a_resumed_run_with_another_loss_has_the_clip_bounds_of_that_loss(changes, told, stopped, place, monkeypatch, capsys):
    monkeypatch.chdir(place)

    code = cli.main(("launch", "--resume", "run", "--dry-run", *changes))

    said = capsys.readouterr().err
    assert code == 0
    assert [each in said for each in told] == [True] * len(told)
    assert ("clip" in said) == bool(told)


BAD_CHANGES = [
    pytest.param(["train.loss=grop"], "train.loss: 'grop' is none of grpo,", id="unknown loss"),
    pytest.param(["train.advantage=roo"], "train.advantage: 'roo' is none of group, rloo, reinforce_pp. Did you mean rloo?", id="unknown advantage"),
    pytest.param(["train.loss=gone.py:fn"], "train.loss: gone.py:fn does not exist: there is no file", id="loss file missing"),
    pytest.param(["train.loss=envs.py:fn"], "train.loss: envs.py:fn does not exist: envs.py defines no fn", id="loss function missing"),
    pytest.param(["train.clip_low=0.9"], "train: clip_low=0.9 is above clip_high=", id="clip bounds the wrong way round"),
    pytest.param(["train.kl_coef=0.1", "train.reference=/gone"], "model folder /gone does not exist. Set train.reference", id="reference model missing"),
    pytest.param(["rollout.top_p=0.5"], "rollout.top_p is 0.5; it must be 1", id="top-p in training"),
    pytest.param(["eval.samples=0"], "eval.samples is 0; it must be a whole number", id="k below 1"),
    pytest.param(["engine.kind=tensorflow"], "engine.kind: tensorflow is not torch, vllm, vllm_server or scripted", id="unknown engine"),
    pytest.param(["env.class=gone.py:Env"], "env.class: gone.py:Env does not exist: there is no file", id="env missing"),
    pytest.param(["model.path=/gone"], "model folder /gone does not exist. Set model.path", id="model missing"),
    pytest.param(["model.path={place}/other"], "is another model than the one that", id="another model"),
    pytest.param(["run.steps=1"], "has trained 2 steps already. Give run.steps=3 or more to go on.", id="steps below what is trained"),
    pytest.param(["run.seed=9"], "run.seed is 1 in this run and can't become 9", id="another seed"),
    pytest.param(["run.stpes=9"], "run.stpes is not a key. Did you mean run.steps?", id="mistyped key"),
]  # fmt: skip


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize(("changes", "sentence"), BAD_CHANGES)
def test_a_run_that_is_resumed_with_a_mistake_stays_as_it_was(changes, sentence, dry, stopped, place, model, monkeypatch, capsys):
    monkeypatch.chdir(place)
    shutil.copytree(place / "headless", place / "other")
    shutil.copy(model / "model.safetensors", place / "other")
    (place / "other" / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + "\n")
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}

    given = ["launch", "--resume", "run", *(change.format(place=place) for change in changes)]
    code = cli.main([*given, "--dry-run"] if dry else given)

    said = capsys.readouterr()
    told = [line for line in said.err.splitlines() if not line.startswith("changed from here on")]
    _check_one_sentence(Ended(code, said.out, "\n".join(told)), sentence, place)
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


def test_without_an_intact_checkpoint_a_run_is_not_resumed(stopped, place):
    for step in (1, 2):
        _truncate(stopped / "checkpoints" / f"step_{step}")

    ended = rubato(*LAUNCH, "--resume", "run.steps=3", cwd=place)

    _check_one_sentence(ended, "step_2: model.safetensors is truncated", place)
    assert "No earlier one is intact. Put the checkpoint back, or start anew with --force." in ended.err
    assert [row["step"] for row in _rows(stopped)] == [1, 2]


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before_as_it_was(stopped, place):
    ended = rubato(*LAUNCH, "--resume", "run.steps=4", cwd=place, largest_file=LARGEST_FILE)

    _check_one_sentence(ended, "could not be written: File too large", place)
    assert f"checkpoint {stopped}/checkpoints/waiting_3." in ended.err
    assert "The one before it is intact: mend that and --resume." in ended.err
    assert checkpoints.check(stopped / "checkpoints" / "step_2").step == 2
    assert sorted(path.name for path in (stopped / "checkpoints").glob("step_*")) == ["step_1", "step_2"]


def _check_one_sentence(ended: Ended, sentence: str, place: Path) -> None:
    assert ended.code not in (0, None)
    assert sentence in ended.err
    assert len(ended.err.splitlines()) == 1
    assert "Traceback" not in ended.out + ended.err
    assert left_behind(place) == []


def _truncate(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def _rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
