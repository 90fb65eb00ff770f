"""The warm parent: its children are the launcher's, and its death, stop or refusal costs no more than an import."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from rubato.runtime.config.compose import from_mapping
from rubato.runtime.launch import forks as module
from rubato.runtime.launch.children import is_stopped
from rubato.runtime.launch.forks import Forks, NotForked, forks
from rubato.runtime.launch.processes import ProcessBackend
from tests.jobs import clean_environment, import_path, left_behind

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not module.can_fork(), reason="needs Linux")]


@pytest.fixture
def run(tmp_path):
    """A run folder whose card never comes: an actor that starts there waits for it, and so lives."""
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "run.json")
    return tmp_path


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Modules by their text, to be imported by a warm parent."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda name, text: (tmp_path / f"{name}.py").write_text(text)


def parent_of(kept: Forks) -> asyncio.subprocess.Process:
    assert kept._parent is not None
    return kept._parent


def words_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


async def test_what_is_forked_is_a_child_of_ours_with_a_session_and_a_title_of_its_own(run):
    async with asyncio.TaskGroup() as tasks, forks(run, ["json"], tasks) as kept:
        parent = parent_of(kept)
        child = await kept.fork("engine-1", ["json"])

        parents = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        assert int(parents[1]) == os.getpid()
        assert os.getsid(child.pid) == child.pid
        assert words_of(child.pid)[1:] == ["-m", "rubato.runtime.node", str(run), "engine-1"]
        assert words_of(parent.pid)[2:4] == ["rubato.runtime.launch.warm", str(run)]
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == -signal.SIGTERM
        child.send_signal(signal.SIGTERM)  # of nobody
    assert not left_behind(run)


async def test_a_child_that_can_not_start_ends_with_its_own_exit_code_and_sentence(run):
    (run / "run.json").unlink()
    async with asyncio.TaskGroup() as tasks, forks(run, [], tasks) as kept:
        child = await kept.fork("engine-1", [])

        assert await child.wait() == 1
    assert f"{run} holds no run" in (run / "logs" / "engine-1.stderr").read_text()


async def test_killing_the_warm_parent_ends_no_child_and_another_takes_its_place(run):
    async with asyncio.TaskGroup() as tasks, forks(run, [], tasks) as kept:
        first = parent_of(kept)
        before = await kept.fork("engine-1", [])
        first.kill()
        await first.wait()
        await kept.begun.wait()
        second = parent_of(kept)

        after = await kept.fork("engine-1", [])

        assert second.pid != first.pid
        assert before.returncode is None
        for child in (before, after):
            child.send_signal(signal.SIGKILL)
            assert await child.wait() == -signal.SIGKILL


async def test_actors_wait_only_for_what_they_need(run, modules):
    modules("never", "import time\ntime.sleep(600)")
    async with asyncio.TaskGroup() as tasks, forks(run, ["json", "never"], tasks) as kept:
        child = await kept.fork("engine-1", ["json", "not_imported_before"])

        child.send_signal(signal.SIGKILL)
        await child.wait()


async def test_a_warm_parent_that_dies_while_it_is_asked_has_forked_nobody(run, modules):
    modules("dies", "import os\nos.kill(os.getpid(), 9)")
    async with asyncio.TaskGroup() as tasks, forks(run, ["dies"], tasks) as kept:
        with pytest.raises(NotForked, match="died"):
            await kept.fork("engine-1", ["dies"])


async def test_a_warm_parent_that_stands_still_is_killed_and_has_forked_nobody(run, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_S", 0.1)
    async with asyncio.TaskGroup() as tasks, forks(run, [], tasks) as kept:
        parent = parent_of(kept)
        await kept._imported
        parent.send_signal(signal.SIGSTOP)
        while not is_stopped(parent.pid):  # noqa: ASYNC110 - another process can only be watched
            await asyncio.sleep(0)

        with pytest.raises(NotForked, match="died"):
            await kept.fork("engine-1", [])
    assert not left_behind(run)


async def test_nobody_is_forked_once_an_import_has_started_a_thread(run, modules):
    modules("threads", "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()")
    async with asyncio.TaskGroup() as tasks, forks(run, ["threads"], tasks) as kept:
        with pytest.raises(NotForked, match="1 threads"):
            await kept.fork("engine-1", ["threads"])


async def test_a_module_that_can_not_be_imported_is_left_to_the_actor_that_needs_it(run, modules):
    modules("raises", "raise RuntimeError('no such chip')")
    async with asyncio.TaskGroup() as tasks, forks(run, ["raises"], tasks) as kept:
        child = await kept.fork("engine-1", ["raises"])

        child.send_signal(signal.SIGKILL)
        await child.wait()
    assert "no such chip" in (run / "logs" / "warm.stderr").read_text()


async def test_nobody_is_left_of_a_fork_that_is_called_off(run, modules):
    modules("slow", "import pathlib; pathlib.Path(__file__).with_name('gate').read_text()")
    os.mkfifo(run / "gate")
    async with asyncio.TaskGroup() as tasks, forks(run, ["slow"], tasks) as kept:
        asking = tasks.create_task(kept.fork("engine-1", ["slow"]))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        await asyncio.to_thread((run / "gate").write_text, "go")
        await kept._imported

        child = await kept.fork("engine-2", [])  # told of after the other one

        child.send_signal(signal.SIGKILL)
        await child.wait()
        async with asyncio.timeout(20):
            while any("engine-1" in line for line in left_behind(run)):  # noqa: ASYNC110 - others can only be watched
                await asyncio.sleep(0.05)


async def test_sigterm_ends_the_warm_parent_also_while_it_imports(run, modules):
    modules("never", "import time\ntime.sleep(600)")
    async with asyncio.TaskGroup() as tasks, forks(run, ["never"], tasks) as kept:
        parent = parent_of(kept)
        child = await kept.fork("engine-1", [])

        parent.terminate()

        await parent.wait()
        child.send_signal(signal.SIGKILL)
        await child.wait()
    assert not left_behind(run)


LAUNCHER = """
import asyncio, os, signal, sys
from pathlib import Path
from rubato.runtime.launch.forks import forks

async def main(run):
    async with asyncio.TaskGroup() as tasks, forks(run, sys.argv[2:], tasks) as kept:
        children = [await kept.fork(name, []) for name in ("engine-1", "engine-2")]
        if len(sys.argv) == 2:
            kept._parent.kill()
        else:
            kept._parent.send_signal(signal.SIGSTOP)
        children[1].send_signal(signal.SIGSTOP)
        print("up", flush=True)
        await asyncio.sleep(600)

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("imports", [[], ["never"]], ids=["killed warm parent", "stopped while it imports"])
async def test_all_end_with_the_launcher_stopped_or_not_also_after_the_warm_parent(run, modules, imports):
    modules("never", "import time\ntime.sleep(600)")
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LAUNCHER, str(run), *imports, stdout=asyncio.subprocess.PIPE,
        env={**clean_environment(), "PYTHONPATH": f"{run}{os.pathsep}{import_path()}"},
    )  # fmt: skip
    assert launcher.stdout is not None
    assert await launcher.stdout.readline() == b"up\n"

    launcher.kill()
    await launcher.communicate()

    async with asyncio.timeout(20):
        while left_behind(run):  # noqa: ASYNC110 - another process can only be watched
            await asyncio.sleep(0.05)


NUMBERS = """
import os, threading
import torch

def add():
    torch.set_num_threads(2)
    torch.ones(1 << 21).add_(1).sum()
    return len(os.listdir("/proc/self/task"))
"""


async def test_torch_has_as_many_threads_in_a_child_as_it_asks_for(run, modules):
    """No pool of threads is made before the fork, and one is after it."""
    modules("numbers_too", NUMBERS)
    (run / "run.json").unlink()
    # The first thing that an actor imports by itself says what it finds.
    modules("uvloop", "import numbers_too, sys\nprint('threads', numbers_too.add(), numbers_too.torch.get_num_threads())\nsys.exit(3)")
    async with asyncio.TaskGroup() as tasks:
        kept = Forks(run, ["torch"])
        kept._modules.remove("uvloop")
        keeping = tasks.create_task(kept.keep())
        await kept.begun.wait()
        child = await kept.fork("engine-1", ["torch"])

        assert await child.wait() == 3
        keeping.cancel()
    _, running, wanted = (run / "logs" / "engine-1.stderr").read_text().split()
    assert int(running) > 1
    assert int(wanted) == 2


# -- the back end of a launch -------------------------------------------------------------------------------------


JOB = {"actors": {"reward_service": {"class": "rubato.actors.rewards.service:RewardService"}}}


async def test_an_actor_starts_by_itself_where_nobody_forks_it(run):
    job = from_mapping(JOB)
    async with asyncio.TaskGroup() as tasks, forks(run, [], tasks) as kept:
        forked = await ProcessBackend(run, job, kept).start("reward_service-1")
        executed = await ProcessBackend(run, job, None).start("reward_service-2")
        never = await ProcessBackend(run, job, Forks(run, [])).start("reward_service-3")

        for number, child in enumerate((forked, executed, never), start=1):
            assert words_of(child._process.pid)[1:] == ["-m", "rubato.runtime.node", str(run), f"reward_service-{number}"]
            child.kill()
            assert (await child.ended()).how == "signal 9"


@pytest.mark.parametrize(
    ("overrides", "forked"),
    [
        ([], True),
        (["actors.engine.threads=2"], False),
        (["model.device=cuda"], False),
        (["engine.kind=vllm"], False),
        (["engine.kind=my.engine:Engine"], False),
    ],
)
def test_what_needs_a_process_of_its_own_is_not_forked(overrides, forked, monkeypatch):
    from rubato.runtime.launch.processes import modules_of

    monkeypatch.setattr("rubato.actors.checkpoints.devices.GPUS", ())
    job = from_mapping({"actors": {"engine": {"class": "rubato.actors.engines.worker:EngineWorker"}}}, overrides)

    assert (("engine", "") in modules_of(job)) == forked


@pytest.mark.parametrize(
    ("pool", "forked"),
    [
        ({"hardware": "h20", "set": {"engine.num_slots": 4}}, True),
        ({"set": {"model.device": "cuda"}}, False),
        ({"gpus": 1}, False),
        ({"cores": 1}, False),
        ({"env": {"A": "b"}}, False),
    ],
)
def test_a_pool_decides_whether_its_processes_are_forked(pool, forked, monkeypatch):
    from rubato.runtime.launch.processes import modules_of

    monkeypatch.setattr("rubato.actors.checkpoints.devices.GPUS", ())
    engine = {"class": "rubato.actors.engines.worker:EngineWorker", "pools": {"decode": pool}}

    assert (("engine", "decode") in modules_of(from_mapping({"actors": {"engine": engine}}))) == forked
