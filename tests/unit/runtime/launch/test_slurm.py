"""What a run asks Slurm for, and how it reads what Slurm says; the rest needs a cluster: tests/contract/test_placer.py."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rubato.runtime.cli import main
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.launch.card import RunCard
from rubato.runtime.launch.placer import HostSpec, JoinCommand, NotPlaced
from rubato.runtime.launch.slurm.groups import groups_of, node_groups
from rubato.runtime.launch.slurm.placer import MOST_BANNER, SlurmNode, SlurmPlacer, node_of

ACTOR = "rubato.runtime.actor:Actor"
JOB = f"""
run: {{name: small}}
actors:
  engine: {{class: "{ACTOR}", pools: {{near: {{count: 1}}, far: {{count: 0, gpus: 2, labels: [h20]}}}}}}
  env: {{class: "{ACTOR}"}}
launch: {{hosts: {{more: {{count: 2, pools: {{env: 4}}}}, far: {{pools: {{far: 3}}}}, wide: {{pools: {{env: 1}}, cpus: 8}}}}}}
"""


@pytest.fixture
def written(tmp_path, monkeypatch, capsys):
    """What `rubato slurm job.yaml --out job.sh …` writes, or says."""
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)

    def write(*arguments: str) -> tuple[int, str]:
        code = main(["slurm", "job.yaml", "--out", "job.sh", *arguments])
        said = capsys.readouterr()
        return code, Path("job.sh").read_text() if code == 0 else said.err

    return write


def test_hosts_that_need_the_same_of_their_nodes_lie_in_one_group():
    import yaml

    config = from_mapping({**yaml.safe_load(JOB), "bus": {"host": "127.0.0.1"}})

    assert groups_of(config) == {"more": 0, "far": 1, "wide": 2}
    assert [(group.num, group.needs.gpus, group.needs.cpus, group.needs.labels) for group in node_groups(config)] == [
        (3, 0, 0, ()),
        (1, 6, 0, ("h20",)),
        (1, 0, 8, ()),
    ]


def test_a_script_asks_for_a_group_of_nodes_for_each_need(written):
    _, script = written("--grace", "60", "--sbatch=--time=8:00:00", "--spare", "1")

    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert "--requeue" in lines
    assert "--signal=B:TERM@60" in lines
    assert lines[-8:] == [
        "--nodes=4 --ntasks-per-node=1 --exclusive",
        "--time=8:00:00",
        "hetjob",
        "--nodes=2 --ntasks-per-node=1 --exclusive --gres=gpu:6 --constraint=h20",
        "--time=8:00:00",
        "hetjob",
        "--nodes=2 --ntasks-per-node=1 --cpus-per-task=8",
        "--time=8:00:00",
    ]


FAKE = """
scontrol() { if [ "$2" = node ]; then echo " NodeAddr=127.0.0.1 NodeHostName=x"; else echo n7; echo n8; fi; }
exec() { printf '%s|' "$@"; }
"""


@pytest.mark.parametrize(("restarts", "there", "begins"), [("", False, "job.yaml|run.seed=2|launch.backend=slurm|--run-dir|a b|"),
                                                           ("1", False, "job.yaml|"), ("1", True, "--resume|a b|bus.host=")])  # fmt: skip
def test_a_script_launches_and_once_it_is_queued_again_resumes(written, restarts, there, begins):
    _, script = written("run.seed=2", "--run-dir", "a b")
    if there:
        Path("a b").mkdir()
        Path("a b/config.yaml").touch()
    environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[7-8]", **({"SLURM_RESTART_COUNT": restarts} if restarts else {})}

    done = subprocess.run(["bash", "-c", FAKE + script], env=environment, capture_output=True, text=True, check=True)

    assert done.stdout.partition("|launch|")[2].startswith(begins)
    assert done.stdout.endswith("|bus.host=127.0.0.1|")


def until_hup(code: int) -> str:
    """A launcher that ends so once its terminal is closed."""
    return f"rubato() {{ trap 'exit {code}' HUP; echo up; for _ in $(seq 400); do sleep 0.05; done; }}"


@pytest.mark.parametrize(
    ("launcher", "number", "ends"),
    [
        (until_hup(130), signal.SIGUSR1, (130, "requeue 7")),
        (until_hup(130), signal.SIGTERM, (130, "")),
        (until_hup(0), signal.SIGUSR1, (0, "")),
        ("rubato() { echo up; exit 3; }", None, (3, "")),
        ("rubato() { echo up; }", None, (0, "")),
    ],
)
def test_a_script_until_done_has_a_job_queued_again_whose_time_was_over_before_its_steps(written, launcher, number, ends):
    _, script = written("launch.hosts={}", "--until-done", "--grace", "60")
    fake = f'scontrol() {{ echo "$@"; }}\n{launcher}\n' + script.replace(f"{sys.executable} -P -m rubato.runtime.cli", "rubato")

    environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", "-c", fake], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        begun = process.stdout.readline()
        if number is not None:
            process.send_signal(number)
        said = process.stdout.read().strip()

    assert "#SBATCH --signal=B:USR1@60" in script
    assert begun == "up\n"
    assert (process.returncode, said) == ends


def test_a_run_without_further_hosts_is_a_job_of_one_node(written):
    _, script = written("launch.hosts={}")

    assert "--nodes=1 --ntasks-per-node=1 --exclusive" in script
    assert "launch.backend" not in script
    assert "bus.host" not in script


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--grace", "0"], "--grace 0 is not between 1 and 65535.\n"),
        (["--spare", "-1"], "--spare -1 is not between 0 and 1024.\n"),
        (["--sbatch=time=1"], "--sbatch='time=1' is no option of sbatch."),
        (["--sbatch=--time=1\nrm"], "--sbatch='--time=1\\nrm' is no option of sbatch."),
        (["launch.hosts.far.labels=['a&b']"], "the label a&b can't be a feature of Slurm's nodes"),
        (["state.url=redis://:hunter2@h:1/0"], "state.url has a password in it, which the script would show. Write ${NAME} in its place"),
        (["--out", "job.yaml"], "job.yaml was not made by rubato slurm. Name another file.\n"),
        (["--out", "no/job.sh"], "no/job.sh can't be written: No such file or directory.\n"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(written, arguments, why):
    code, said = written(*arguments)

    assert code == 2
    assert said.startswith(why)
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "node"),
    [
        ("n1|2|(null)|(null)|idle", SlurmNode("n1", 2, 0, frozenset(), True)),
        ("n2|64|h20,ib|gpu:8|mix", SlurmNode("n2", 64, 8, frozenset(("h20", "ib")), True)),
        ("n3|64|h20|gpu:a100:4(S:0-1),nvme:1,gpu:h20:2|down*", SlurmNode("n3", 64, 6, frozenset(("h20",)), False)),
        ("n4|64|(null)|(null)|mix*", SlurmNode("n4", 64, 0, frozenset(), False)),
    ],
)
def test_a_node_is_read_as_slurm_describes_it(line, node):
    assert node_of(line) == node


def test_a_host_that_asks_for_no_cores_has_its_node_alone():
    node = SlurmNode("n1", 8, 4, frozenset(), True)
    whole, half = HostSpec("a", 1), HostSpec("b", 1, cpus=4, gpus=2)

    assert node.has_room(whole, [])
    assert node.has_room(half, [half])
    assert not node.has_room(half, [half, half])
    assert not node.has_room(half, [whole])
    assert not node.has_room(whole, [half])
    assert not node._replace(up=False).has_room(whole, [])


# -- what a step prints ---------------------------------------------------------------------------------------------

COMMANDS = {"squeue": 'test "$2" = --steps || echo "7|7|n1"', "sinfo": 'echo "n1|2|(null)|(null)|idle"', "scancel": "kill $(cat srun.pid)"}
BANNER = "echo Welcome to the cluster.; echo; echo up since Monday, says the site; "
STAYS = "exec cat"
HANGS = "for _ in $(seq 90); do printf '%01000d\\n' 0; done; : >said; exec sleep 600"
"""More than a pipe holds: once it says so, its first line was read."""


@pytest.fixture
def printing(tmp_path, monkeypatch):
    """A placer whose srun prints what a shell command does, in place of a step's output."""
    hosts = tmp_path / "hosts"
    hosts.mkdir()
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(RunCard("run", "", "", 0, 0.0)))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(hosts)
    job = {"actors": {"env": {"class": ACTOR}}, "launch": {"backend": "slurm", "address": 7}}

    def make(what: str) -> SlurmPlacer:
        for name, does in {**COMMANDS, "srun": f"echo $$ >srun.pid; {what}"}.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
            (tmp_path / name).chmod(0o755)
        return SlurmPlacer(from_mapping(job), tmp_path)

    return make


JOIN = JoinCommand("none", (), "secret")


async def test_a_step_is_known_behind_the_banner_of_a_site(printing):
    placer = printing(f"{BANNER} echo up 0 n1; {STAYS}")

    host = await placer.place(HostSpec("far", 1), JOIN)
    await placer.close()

    assert host.id == "7.0"
    assert (await host.ended()).how == f"signal {int(signal.SIGKILL)}"


async def test_a_place_that_is_cancelled_behind_a_banner_leaves_no_srun(printing):
    placer = printing(HANGS)
    os.mkfifo("said")

    async with asyncio.TaskGroup() as tasks:
        placing = tasks.create_task(placer.place(HostSpec("far", 1), JOIN))
        await asyncio.to_thread(Path("said").read_text)
        placing.cancel()

    assert not Path("/proc", Path("srun.pid").read_text().strip()).exists()


async def test_a_step_that_prints_without_end_is_no_host_and_ends(printing):
    placer = printing("exec yes")

    with pytest.raises(NotPlaced, match=f"its step printed {MOST_BANNER} lines before it was up"):
        await placer.place(HostSpec("far", 1), JOIN)

    assert not Path("/proc", Path("srun.pid").read_text().strip()).exists()
