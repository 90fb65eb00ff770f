"""The environment manager on real kernels over the memory transport, with a sample buffer and a proxy that are small actors."""

import asyncio
import os
import threading
from array import array
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rubato.actors.engines.section import EngineSection
from rubato.actors.engines.worker import EngineWorker
from rubato.actors.envs import manager as manager_module
from rubato.actors.envs.manager import EnvManager
from rubato.actors.messages.generation import Completion, Generate, GenerateReply, Tokens, VersionSpan
from rubato.actors.messages.orchestration import Survey
from rubato.actors.messages.samples import (
    Admit,
    Cancel,
    GiveUp,
    NotScored,
    PolicyState,
    Put,
    RenewLeases,
    Score,
    Scores,
    Stored,
    Ticket,
    Tickets,
)
from rubato.actors.proxy.proxy import LLMProxy
from rubato.actors.scripted.engine import ScriptedEngine
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.bus.message import Ack
from rubato.runtime.actor import Actor, RunInfo, handler
from rubato.runtime.config import ActorConfig
from rubato.runtime.kernel import NODE, Kernel
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.messages import Drain, Finish, Notice
from rubato.runtime.observe.log import logger
from rubato.sim.virtual import run_virtual

TEMPLATE = "{% for m in messages %}<s>{{ m.content }}<e>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
POLICY = PolicyState(0, 1)
SECRET = "sk-1234"


class Buffer(Actor):
    """Hands `left` tickets out, as many as asked for, and those of `tickets`; keeps what comes back."""

    role = "sample_buffer"
    left, put, given_up, held, most = 0, [], [], [], 0
    tickets = []
    poison, issuer, aside = "", 0, False

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.issued = 0
        self.changed = asyncio.Event()
        Buffer.put, Buffer.given_up, Buffer.held, Buffer.most, Buffer.tickets = [], [], [], 0, []

    @handler(concurrency=4)
    async def admit(self, request: Admit) -> Tickets:
        if Buffer.left == 0:
            await asyncio.sleep(0.05)
            named, Buffer.tickets = tuple(Buffer.tickets), []
            return Tickets(named, POLICY)
        num = min(request.num, Buffer.left)
        Buffer.left -= num
        first, self.issued = self.issued, self.issued + num
        Buffer.most = max(Buffer.most, self.issued - len(Buffer.put) - len(Buffer.given_up))
        return Tickets(
            tuple(Ticket(f"t{i}", f"g{i // 8}", 1, i // 8, i // 8, 0) for i in range(first, first + num)),
            POLICY,
            issuer=Buffer.issuer,
            aside=Buffer.aside,
        )

    @handler
    async def take(self, request: Put) -> Stored:
        if request.trajectory.ticket.trajectory_id == Buffer.poison:
            raise ValueError("indigestible")
        Buffer.put.append(request.trajectory)
        self.changed.set()
        return Stored("", POLICY)

    @handler
    async def take_back(self, request: GiveUp) -> Stored:
        Buffer.given_up.append(request)
        self.changed.set()
        return Stored("failed", POLICY, Buffer.aside)

    @handler
    async def hold(self, request: RenewLeases) -> PolicyState:
        Buffer.held.append(request.held)
        self.changed.set()
        return POLICY

    async def until(self, condition):
        async with asyncio.timeout(20):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class Proxy(Actor):
    """Says "right" and "down" in turn; "mute" never answers."""

    role = "llm_proxy"
    mute = False
    ahead = 0
    """Above 0, second turns are sampled under weights that are so much newer than asked for, and later ones never answered."""
    asked: ClassVar[list[Generate]] = []

    @handler(concurrency=1024)
    async def generate(self, request: Generate) -> GenerateReply:
        Proxy.asked.append(request)
        turn = int(request.request_id.rpartition(".")[2])
        if Proxy.mute or (Proxy.ahead and turn > 1):
            await asyncio.get_running_loop().create_future()
        text = b"right" if turn % 2 else b"down"
        ids = array("i", [*text, 256])
        span = VersionSpan(request.weights.version + (Proxy.ahead if turn == 1 else 0), 0, len(ids))
        return Completion(request.request_id, Tokens(ids.tobytes(), bytes(4 * len(ids)), (span,)), "stop", "engine-1")


class Reward(Actor):
    role = "reward_service"
    asked: ClassVar[list[Score]] = []

    @handler(concurrency=64)
    async def score(self, request: Score) -> Scores | NotScored:
        Reward.asked.append(request)
        return Scores((0.25,))


class Node(Actor):
    role = "node"
    finishes, notices = [], []

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        Node.finishes, Node.notices = [], []
        self.changed = asyncio.Event()

    @handler
    async def finished(self, message: Finish) -> Ack:
        Node.finishes.append(message)
        self.changed.set()
        return Ack()

    @handler
    async def noticed(self, message: Notice) -> None:
        Node.notices.append(message.text)
        self.changed.set()

    async def end_of_job(self):
        async with asyncio.timeout(20):
            while not Node.finishes:
                self.changed.clear()
                await self.changed.wait()
        return Node.finishes[0]


class Told:
    """Says in its info what its reset was told."""

    inline = True

    def reset(self, *, seed, row, purpose, task="none", **options):
        return "go", {"seen": [row, purpose, task, *options]}

    def step(self, action):
        return "", 1.0, True, False, {}

    def close(self):
        pass


class ByTask(Told):
    """Plays the tasks that it knows by name."""

    def reset(self, *, seed, task):
        return {"near": "one step", "far": "ten steps"}[task], {}


class Leaving(Told):
    """Leaves a file where it is closed."""

    def __init__(self, folder):
        self.folder = folder

    def close(self):
        (Path(self.folder) / f"{os.getpid()}.{id(self)}").touch()


class Raising:
    """Raises in its resets."""

    inline = True
    held_out: ClassVar = {}
    good_resets = 0

    def reset(self, *, seed):
        type(self).good_resets -= 1
        if self.good_resets < 0:
            raise KeyError("goal")
        return "x", {}

    def step(self, action):
        return "x", 1.0, True, False, {}

    def close(self):
        pass


class RaisingLater(Raising):
    good_resets = 1


class RaisingSecrets(Raising):
    good_resets = 1

    def reset(self, *, seed):
        try:
            return super().reset(seed=seed)
        except KeyError:
            raise ConnectionError(f"refused by https://judge/?key={SECRET}") from None


class RaisingAside(Raising):
    good_resets = 1


class Dozing:
    def reset(self, *, seed):
        return "x", {}

    def step(self, action):
        threading.Event().wait(0.3)
        return "x", 1.0, True, False, {}

    def close(self):
        pass


class Gated:
    """Says that it steps, or resets for a rollout, and goes on once the folder has a file called open."""

    def __init__(self, folder, at):
        self.folder, self.at = Path(folder), at

    def wait(self):
        print("waiting")
        while not (self.folder / "open").exists():
            threading.Event().wait(0.02)

    def reset(self, *, seed, trajectory):
        if self.at == "reset" and trajectory:
            self.wait()
        return "x", {}

    def step(self, action):
        if self.at == "step":
            self.wait()
        return "x", 1.0, True, False, {}

    def close(self):
        pass


class WatchedEngine(ScriptedEngine):
    """Says when its load changed. A token takes it longer than any test."""

    def __init__(self, *given):
        super().__init__(*given)
        self.changed = asyncio.Event()

    def _admit(self):
        super()._admit()
        self.changed.set()

    def _leave(self, slot):
        super()._leave(slot)
        self.changed.set()

    async def until(self, condition):
        async with asyncio.timeout(20):
            while not condition(self.load()):
                self.changed.clear()
                await self.changed.wait()


class Sleeping:
    """Waits in each step, for somebody else's work."""

    async def reset(self, *, seed):
        return "x", {}

    async def step(self, action):
        await asyncio.sleep(5.0)
        return "x", 1.0, action == "right", False, {}

    def close(self):
        pass


def write_model(folder):
    """Token ids are bytes, 256 is the end."""
    vocab = {letter: i for i, letter in enumerate(_byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<e>", "<s>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<e>"}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def _byte_letters():
    """The byte-level alphabet in the order of the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


class Cluster:
    def __init__(self, tasks, folder):
        self.tasks, self.network, self.store = tasks, MemoryNetwork(), MemoryStore()
        self.run = RunInfo("test", folder, 7, 1, 0.0, lambda text: text.replace(SECRET, "${KEY}"))
        self.serving = {}

    async def start(self, actor_class, name, config=None):
        incarnation = await self.store.increment("incarnation")
        kernel = Kernel(
            actor_class,
            config or ActorConfig(),
            name=name,
            incarnation=incarnation,
            run=self.run,
            transport=MemoryTransport(Identity("test", name, incarnation), self.network),
            store=self.store,
            blobs=MemoryBlobStore(),
            log=logger("rubato.test"),
        )
        actor = kernel.build()
        self.serving[name] = self.tasks.create_task(kernel.serve(), name=name)
        await kernel.ready.wait()
        return kernel, actor


@asynccontextmanager
async def cluster(tmp_path, *, tickets, mute=False, engine=False, **sections):
    Buffer.left, Proxy.mute, Proxy.asked, Reward.asked = tickets, mute, [], []
    write_model(tmp_path / "model")
    settings = {"model": {"path": "model"}, "env": {}, "rollout": {"max_new_tokens": 8, "max_turns": 6}}
    settings = {key: {**settings.get(key, {}), **sections.get(key, {})} for key in {*settings, *sections}}
    async with asyncio.TaskGroup() as tasks:
        made = Cluster(tasks, tmp_path)
        _, made.node = await made.start(Node, NODE)
        _, made.buffer = await made.start(Buffer, "sample_buffer-1")
        if engine:
            section = EngineSection(kind=f"{__file__}:WatchedEngine", scripted={"token_s": 600.0, "vocab_size": 300})
            _, worker = await made.start(EngineWorker, "engine-1", EngineWorker.Config(engine=section))
            made.engine = worker._engine
        await made.start(LLMProxy if engine else Proxy, "llm_proxy-1", LLMProxy.Config() if engine else None)
        await made.start(Reward, "reward_service-1")
        made.kernel, made.manager = await made.start(EnvManager, "env_manager-1", EnvManager.Config.model_validate(settings))
        yield made
        for task in made.serving.values():
            task.cancel()


async def test_environments_of_all_tasks_are_closed_though_tasks_share_their_workers(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir()
    tasks = {name: {"class": f"{__file__}:Leaving", "kwargs": {"folder": str(folder)}} for name in ("near", "far")}
    async with cluster(tmp_path, tickets=0, env={"isolation": "process", "workers": 1}, tasks=tasks) as made:
        Buffer.tickets = [Ticket(f"t{i}", "g1", 1, i, i, 0, task=name) for i, name in enumerate(("near", "far"))]
        await made.buffer.until(lambda: len(Buffer.put) == 2)

        made.kernel.stop()
        await made.serving["env_manager-1"]

        assert len(list(folder.iterdir())) == 2


async def test_every_ticket_ends_in_a_scored_put_and_never_more_run_than_allowed(tmp_path):
    async with cluster(tmp_path, tickets=40, env={"concurrency": 8}, reward={"functions": ["m:f"]}) as made:
        await made.buffer.until(lambda: len(Buffer.put) == 40)

        assert sorted(t.ticket.trajectory_id for t in Buffer.put) == sorted(f"t{i}" for i in range(40))
        assert {t.reward for t in Buffer.put} <= {0.25, 1.25}
        assert Buffer.most <= 8
        assert not Buffer.given_up


async def test_a_trajectory_that_the_buffer_fails_on_becomes_a_dead_letter_and_its_attempt_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(Buffer, "poison", "t3")
    monkeypatch.setattr(manager_module, "PAUSE_S", 0.001)
    async with cluster(tmp_path, tickets=8) as made:
        await made.buffer.until(lambda: len(Buffer.put) == 7 and Buffer.given_up)

        assert [(g.ticket.trajectory_id, g.reason, g.retry) for g in Buffer.given_up] == [("t3", "dead_letter", True)]
        ((_, entry),) = await made.store.read("dead_letters", 0)
        letter = msgspec.msgpack.decode(entry)
        assert [letter[key] for key in ("trajectory_id", "holder", "request")] == ["t3", "env_manager-1", "Put"]
        assert "indigestible" in letter["error"]
        assert made.kernel.metrics.snapshot()["dead_letters"] == 1
        async with asyncio.timeout(20):
            while not Node.notices:
                made.node.changed.clear()
                await made.node.changed.wait()
        assert "3 deliveries failed" in Node.notices[0]


async def test_running_trajectories_are_held(tmp_path):
    async with cluster(tmp_path, tickets=2, mute=True, rollout={"hold_s": 0.05}) as made:
        await made.buffer.until(lambda: any(len(held) == 2 for held in Buffer.held))

        assert sorted(Buffer.held[-1]) == [("t0", 1), ("t1", 1)]


async def test_a_rollout_that_needs_weights_which_are_known_no_more_ends_as_its_lease_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "POLICY", PolicyState(2, 1, newest=3))
    async with cluster(tmp_path, tickets=0, mute=True, rollout={"hold_s": 0.05}) as made:
        Buffer.tickets = [Ticket(f"t{version}", "g1", 1, version, version, version) for version in (2, 3, 4)]
        await made.buffer.until(lambda: Buffer.given_up and any(len(held) == 2 for held in Buffer.held))

        assert [(each.ticket.trajectory_id, each.reason, each.retry) for each in Buffer.given_up] == [("t4", "cancelled", True)]
        assert sorted(Buffer.held[-1]) == [("t2", 1), ("t3", 1)]


async def test_a_rollout_that_weights_sampled_which_are_known_no_more_ends_as_its_lease_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "POLICY", PolicyState(2, 1, newest=3))
    monkeypatch.setattr(Proxy, "ahead", 2)
    async with cluster(tmp_path, tickets=0, rollout={"hold_s": 0.05}) as made:
        Buffer.tickets = [Ticket("t2", "g1", 1, 0, 0, 2)]  # its second turn is sampled under version 4
        await made.buffer.until(lambda: Buffer.given_up)

        assert [(each.ticket.trajectory_id, each.reason, each.tokens > 0) for each in Buffer.given_up] == [("t2", "cancelled", True)]


async def test_a_manager_tells_how_far_its_rollouts_are_and_what_those_that_ended_took(tmp_path):
    async with cluster(tmp_path, tickets=0) as made:
        manager = made.buffer.ref("env_manager-1")
        assert (await manager.ask(Survey(1), timeout=5)).trajectories == ()

        Buffer.left = 8
        await made.buffer.until(lambda: len(Buffer.put) == 8)
        Buffer.tickets = [Ticket("held-out", "g9", 1, 9, 9, 0, purpose="eval")]
        await made.buffer.until(lambda: len(Buffer.put) == 9)
        ended = (await manager.ask(Survey(1), timeout=5)).ended

        played = [each for each in Buffer.put if each.ticket.purpose == "train"]
        assert sorted((each.prompt, each.sampled, each.env_s) for each in ended) == sorted(
            (each.ticket.row, sum(part.mask.count(1) for part in each.segments), each.env_s) for each in played
        )
        assert all(each.whole and each.env_s > 0 and each.generate_s > 0 for each in ended)
        Proxy.mute, Buffer.tickets = True, [Ticket("late", "g10", 1, 10, 10, 3)]
        await made.buffer.until(lambda: Proxy.asked[-1].session == "late")
        again = await manager.ask(Survey(1, after=8), timeout=5)
        assert again.ended == ()
        ((session, row, sampled, most, version, away),) = [
            (each.session, each.prompt, each.sampled, each.limit, each.version, each.away) for each in again.trajectories
        ]
        assert (session, row, sampled, most, version, away) == ("late", 10, 0, 6 * 8, 3, False)
        assert Proxy.asked[-1].route.rollout


async def test_a_drained_manager_loses_nothing(tmp_path):
    async with cluster(tmp_path, tickets=30, env={"concurrency": 8}) as made:
        await made.buffer.until(lambda: len(Buffer.put) >= 5)

        await made.buffer.ref("env_manager-1").ask(Drain(), timeout=5)
        await asyncio.wait([made.serving["env_manager-1"]])

        ended = [each.ticket.trajectory_id for each in (*Buffer.put, *Buffer.given_up)]
        assert {each.reason for each in Buffer.given_up} <= {"drained"}
        assert len(set(ended)) == len(ended)
        assert made.buffer.issued - len(ended) <= 8  # tickets that were on their way are taken back from who left


def cancel_of(made, *names, incarnation=None, issuer=0):
    mine = made.kernel.incarnation if incarnation is None else incarnation
    return Cancel(tuple((name, 1) for name in names), mine, issuer)


async def test_a_cancelled_rollout_ends_at_once_and_its_request_with_it(tmp_path):
    async with cluster(tmp_path, tickets=2, engine=True) as made:
        await made.engine.until(lambda load: load.running == 2)
        ref = made.buffer.ref("env_manager-1")

        for _ in range(2):  # it may be told twice
            await ref.tell(cancel_of(made, "t1", "unknown"))
        await made.buffer.until(lambda: Buffer.given_up)
        await made.engine.until(lambda load: load.running == 1)

        assert [(g.ticket.trajectory_id, g.reason, g.retry) for g in Buffer.given_up] == [("t1", "cancelled", True)]
        assert list(made.manager._running) == [("t0", 1)]
        assert made.kernel.metrics.snapshot()["rollout/cancelled"] == 1


async def test_a_cancel_of_another_life_or_of_an_older_buffer_than_the_tickets_hits_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Buffer, "issuer", 7)
    async with cluster(tmp_path, tickets=3, engine=True) as made:
        await made.engine.until(lambda load: load.running == 3)
        ref = made.buffer.ref("env_manager-1")

        await ref.tell(cancel_of(made, "t0", incarnation=made.kernel.incarnation - 1, issuer=7))
        await ref.tell(cancel_of(made, "t1", issuer=6))
        await ref.tell(cancel_of(made, "t2", issuer=7))
        await made.buffer.until(lambda: Buffer.given_up)

        assert [g.ticket.trajectory_id for g in Buffer.given_up] == ["t2"]
        assert sorted(made.manager._running)[:2] == [("t0", 1), ("t1", 1)]


@pytest.mark.parametrize("at", ["reset", "step"])
@pytest.mark.parametrize("alone", [True, False])
async def test_what_runs_in_a_worker_process_is_not_waited_for(tmp_path, monkeypatch, alone, at):
    """Its process ends where it hosts nothing else; otherwise the other environments there go on behind it."""
    env = {"class": f"{__file__}:Gated", "isolation": "process", "workers": 1, "concurrency": 2}
    env["kwargs"] = {"folder": str(tmp_path), "at": at}
    steps = asyncio.Event()
    monkeypatch.setattr(EnvManager, "_output", lambda self, line: steps.set())
    async with cluster(tmp_path, tickets=1 if alone else 2, env=env) as made:
        async with asyncio.timeout(20):
            await steps.wait()
        (worker,) = made.manager._hosts[""].pool._workers

        await made.buffer.ref("env_manager-1").tell(cancel_of(made, "t0"))
        await made.buffer.until(lambda: Buffer.given_up)

        assert not (tmp_path / "open").exists()  # it still runs, or ended with its process
        assert worker.alive is not alone
        (tmp_path / "open").touch()
        if not alone:
            await made.buffer.until(lambda: len(Buffer.put) == 1)


async def test_what_is_not_finished_when_a_drain_begins_is_given_back_for_another_try(tmp_path):
    async with cluster(tmp_path, tickets=3, mute=True, rollout={"hold_s": 0.05}) as made:
        await made.buffer.until(lambda: any(len(held) == 3 for held in Buffer.held))

        await made.buffer.ref("env_manager-1").ask(Drain(), timeout=5)
        await asyncio.wait([made.serving["env_manager-1"]])

        assert sorted(g.ticket.trajectory_id for g in Buffer.given_up) == ["t0", "t1", "t2"]
        assert {(g.reason, g.retry) for g in Buffer.given_up} == {("drained", True)}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"class": "no_such_package:Env"}, "env no_such_package:Env can't be loaded"),
        ({"class": f"{__file__}:Raising", "isolation": "inline"}, "raised in reset (seed 7): KeyError('goal'). 8 of 8 seeds"),
    ],
    ids=["missing", "raising"],
)
async def test_a_broken_environment_ends_the_job_before_the_first_rollout(tmp_path, env, words):
    async with cluster(tmp_path, tickets=8, env=env) as made:
        finish = await made.node.end_of_job()

        assert finish.failed
        assert words in finish.reason
        assert made.buffer.issued == 0


async def test_a_model_folder_without_a_tokenizer_ends_the_job(tmp_path):
    async with cluster(tmp_path, tickets=8, model={"path": "elsewhere"}) as made:
        finish = await made.node.end_of_job()

        assert "has no tokenizer.json" in finish.reason


async def test_an_environment_that_breaks_later_is_told_once_and_ends_the_job(tmp_path):
    env = {"class": f"{__file__}:RaisingLater", "isolation": "inline", "reset_tries": 1}
    async with cluster(tmp_path, tickets=10_000, env=env) as made:
        finish = await made.node.end_of_job()

        assert "32 of the last 32 tasks failed in their environment" in finish.reason
        assert len(Node.notices) == 1
        assert {g.reason for g in Buffer.given_up} == {"env_reset_failed"}


async def test_the_value_of_a_variable_in_what_user_code_raises_leaves_no_manager(tmp_path):
    env = {"class": f"{__file__}:RaisingSecrets", "isolation": "inline", "reset_tries": 1}
    async with cluster(tmp_path, tickets=10_000, env=env) as made:
        finish = await made.node.end_of_job()

        told = [*Node.notices, finish.reason, *(given.detail for given in Buffer.given_up)]
        assert len(told) > 32
        assert all("https://judge/?key=${KEY}" in text and SECRET not in text for text in told)


async def test_a_manager_that_was_set_aside_does_not_end_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(Buffer, "aside", True)
    env = {"class": f"{__file__}:RaisingAside", "isolation": "inline", "reset_tries": 1}
    async with cluster(tmp_path, tickets=320, env=env) as made:
        await made.buffer.until(lambda: len(Buffer.given_up) == 320)

        assert not Node.finishes


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"env": {"class": f"{__file__}:Bandit"}}, 1),
        ({"env": {"class": f"{__file__}:Bandit", "eval_kwargs": {"arms": 3}}}, 0),
        ({"env": {"class": f"{__file__}:Bandit"}, "eval": {"every": 0, "final_num_tasks": 0}}, 0),
        ({"env": {}}, 0),
    ],
    ids=["none", "arguments", "no evaluation", "frozen lake"],
)
async def test_an_environment_without_a_held_out_split_is_told_of_once_in_a_run(tmp_path, settings, told):
    settings["env"]["isolation"] = "inline"
    async with cluster(tmp_path, tickets=1, **settings) as made:
        await made.start(EnvManager, "env_manager-2", made.manager.config)
        await made.buffer.until(lambda: len(Buffer.put) == 1)

        assert len(Node.notices) == told
        if told:
            assert "Bandit has no held-out split: evaluations use other seeds" in Node.notices[0]


@pytest.mark.parametrize(("max_turns", "told"), [(6, 1), (1, 0)])
async def test_a_template_that_drops_earlier_reasoning_is_told_of_once_in_a_run(tmp_path, monkeypatch, max_turns, told):
    monkeypatch.setitem(globals(), "TEMPLATE", TEMPLATE.replace("m.content", "m.content.split('</think>')[-1]"))
    async with cluster(tmp_path, tickets=1, env={"isolation": "inline"}, rollout={"max_turns": max_turns}) as made:
        await made.start(EnvManager, "env_manager-2", made.manager.config)
        await made.buffer.until(lambda: len(Buffer.put) == 1)

        assert ["reasoned in earlier turns" in notice for notice in Node.notices] == [True] * told


class Bandit:
    def __init__(self, arms=2):
        pass

    def reset(self, *, seed):
        return "x", {}

    def step(self, action):
        return "x", 1.0, True, False, {}

    def close(self):
        pass


async def test_prompts_that_never_fit_end_the_job_with_one_sentence(tmp_path):
    async with cluster(tmp_path, tickets=10_000, rollout={"max_len": 10}) as made:
        finish = await made.node.end_of_job()

        assert finish.failed
        assert "a rollout ended as generation_failed (task " in finish.reason
        assert "tokens; rollout.max_len is 10. Log: " in finish.reason
        assert len(Node.notices) == 1


async def test_a_crash_of_one_rollout_is_an_outcome_and_the_manager_lives_on(tmp_path):
    async with cluster(tmp_path, tickets=0) as made:
        whole, failures = made.manager._rollouts[""].renderer.decode, iter([True])

        def decode(ids):
            if next(failures, False):
                raise ZeroDivisionError
            return whole(ids)

        made.manager._rollouts[""].renderer.decode = decode
        Buffer.left = 5
        await made.buffer.until(lambda: len(Buffer.put) + len(Buffer.given_up) == 5)

        assert [(g.reason, g.retry) for g in Buffer.given_up] == [("crashed", True)]
        assert len(Buffer.put) == 4


def test_a_manager_whose_asynchronous_environments_wait_is_idle(tmp_path):
    async def main():
        env = {"class": f"{__file__}:Sleeping", "concurrency": 256, "isolation": "inline"}
        async with cluster(tmp_path, tickets=256, env=env) as made:
            await asyncio.sleep(9.0)
            assert len(made.manager._running) == 256
            assert made.kernel.metrics.idle() > 0.9

    run_virtual(main)


async def test_a_manager_whose_workers_are_asked_is_busy(tmp_path):
    env = {"class": f"{__file__}:Dozing", "concurrency": 4, "workers": 1, "isolation": "process"}
    async with cluster(tmp_path, tickets=4, env=env) as made:
        await made.buffer.until(lambda: len(Buffer.put) == 4)

        assert made.kernel.metrics.idle() < 0.9
        told = made.kernel.metrics.snapshot()
        assert (told["rollout/room"], told["rollout/env_workers"]) == (4, 1)


async def test_a_reset_is_told_what_its_signature_names_and_each_task_has_its_own_limits(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "x"}\n{"prompt": "b", "answer": "y"}\n')
    tasks = {
        "told": {"class": f"{__file__}:Told", "rewards": ["m:f"], "max_new_tokens": 3},
        "rows": {"data": {"path": str(rows)}, "system_prompt": "be brief"},
    }
    env = {"isolation": "inline"}
    async with cluster(tmp_path, tickets=0, env=env, tasks=tasks) as made:
        Buffer.tickets = [Ticket(f"t{n}", f"g{n}", 1, n, 9, 4, task=("told", "rows")[n % 2]) for n in range(2)]
        await made.buffer.until(lambda: len(Buffer.put) == 2)

        told, row = sorted(Buffer.put, key=lambda each: each.ticket.task == "rows")
        scored = {request.task: msgspec.msgpack.decode(request.columns) for request in Reward.asked}
        limits = {request.route.task: request.sampling.max_new_tokens for request in Proxy.asked}

        assert scored.keys() == {"told"}
        assert scored["told"]["seen"] == [0, "train", "told"]
        assert limits == {"told": 3, "rows": 8}
        assert (told.ticket.row, row.ticket.row) == (0, 1)


async def test_an_environment_is_tried_as_the_task_that_it_is_to_play(tmp_path):
    tasks = {name: {"class": f"{__file__}:ByTask"} for name in ("near", "far")}
    async with cluster(tmp_path, tickets=0, env={"isolation": "inline"}, tasks=tasks) as made:
        Buffer.tickets = [Ticket(f"t{n}", f"g{n}", 1, n, 9, 4, task=("near", "far")[n % 2]) for n in range(2)]
        await made.buffer.until(lambda: len(Buffer.put) == 2)

        assert Node.finishes == []


async def test_a_ticket_of_a_task_that_the_config_has_no_more_ends_the_job(tmp_path):
    async with cluster(tmp_path, tickets=0) as made:
        Buffer.tickets = [Ticket("t0", "g0", 1, 0, 9, 0, task="sums")]
        finish = await made.node.end_of_job()

        assert finish.reason.startswith("the run has unfinished groups of tasks.sums, which its config had before")
