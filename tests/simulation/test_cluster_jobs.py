"""Jobs that share a rollout pool and a training pool, in one virtual loop: what each of them trains is what it trains alone."""

import asyncio
import json

import pytest

from rubato.actors.cluster.permits import TTL_S, Permits
from rubato.actors.cluster.rollmux import PermittedOrders
from rubato.actors.config import ClusterSection
from rubato.actors.engines.engine import EngineError
from rubato.actors.engines.section import EngineSection, ScriptedSection
from rubato.actors.engines.worker import EngineWorker
from rubato.actors.messages.engines import WakeEngine
from rubato.actors.scripted.train_engine import ScriptedTrainEngine
from rubato.actors.training.train_engine import StepResult
from rubato.actors.training.trainer import Trainer
from rubato.bus.errors import Failed
from rubato.bus.message import unpack_i32
from rubato.runtime.config import ActorConfig
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.embed import embed
from rubato.runtime.errors import ConfigError
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.store.store import StoreUnavailable
from rubato.sim.simtest.toys import write_tokenizer
from tests.simulation.test_engine_worker import Bench, Proxy, request
from tests.virtual import virtual

STEPS = 4


class Talk:
    """Two turns; the reward is in what was said."""

    async def reset(self, seed):
        self.seed, self.turns = seed, 0
        await asyncio.sleep(0.3)
        return f"task {seed}", {}

    async def step(self, action):
        self.turns += 1
        await asyncio.sleep(0.05)
        return "on", float(len(action) % 7), self.turns == 2, False, {}

    async def close(self):
        pass


PARTS = 4
LASTS_S = {"wake": TTL_S + 4, "part": TTL_S / 2}
"""Waking alone is longer than a lease; a part of a step is not."""


class PartsEngine(ScriptedTrainEngine):
    """A step is in parts, and the reward that it shows goes through all of them."""

    def parts(self, step, groups):
        rewards = []
        for part in range(PARTS):
            yield
            rewards += [t.reward for group in groups for t in group][part::PARTS]
        self.train(step, groups)
        return StepResult({"reward/mean": sum(rewards) / len(rewards)}, len(rewards))


class PartsTrainer(Trainer):
    """Its engine's wake-up and parts last; `computed` in the run folder says when each began."""

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        at_once = self.offload

        async def offload(fn, *args, cost_s=0.0):
            name = getattr(fn, "__name__", "")
            if name in LASTS_S:
                with (self.run.folder / "computed").open("a") as file:
                    file.write(f"{name} {asyncio.get_running_loop().time()}\n")
            return await at_once(fn, *args, cost_s=LASTS_S.get(name, cost_s))

        self.offload = offload

    def _build(self):
        return PartsEngine(self.config.model, self.config.train, steps=self.run.steps, seed=self.run.seed)


IN_PARTS = f"actors.trainer={{class: '{__file__}:PartsTrainer'}}"


def computed(folder, began=0.0, ended=float("inf")):
    """What its trainer began between these two moments."""
    lines = [line.split() for line in (folder / "computed").read_text().splitlines()]
    return [what for what, at in lines if began <= float(at) < ended]


def rewards(folder):
    return [json.loads(line)["reward/mean"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def config(model, name, *overrides):
    return from_mapping(
        {
            "run": {"name": name, "steps": STEPS, "seed": 3},
            "actors": {
                "sample_buffer": {"class": "rubato.actors.samples.buffer:SampleBuffer"},
                "llm_proxy": {"class": "rubato.actors.proxy.proxy:LLMProxy"},
                "engine": {"class": "rubato.actors.engines.worker:EngineWorker", "count": 2},
                "env_manager": {"class": "rubato.actors.envs.manager:EnvManager", "count": 2},
                "trainer": {"class": "rubato.actors.training.trainer:Trainer"},
            },
            "model": {"path": str(model)},
            "env": {"class": f"{__file__}:Talk", "concurrency": 16, "isolation": "inline"},
            "engine": {"kind": "scripted", "num_slots": 4},
            "rollout": {"max_turns": 2, "max_new_tokens": 12},
            "staleness": {"alpha": 0},
            "train": {"kind": "scripted", "batch_groups": 2, "group_size": 4, "scripted": {"step_s": 0}},
            "check": {"enabled": False},
            "eval": {"every": 0, "final_num_tasks": 0},
        },
        overrides,
    )


class Link:
    """A job's way to the Store of its cluster; while it is cut nothing arrives, as where the job's processes are stopped."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.whole = asyncio.Event()
        self.whole.set()
        self._refused = False

    def cut(self, how: str) -> None:
        """Until it is mended, calls are `silent` or `refused`."""
        self._refused = how == "refused"
        self.whole.clear()

    def mend(self) -> None:
        self.whole.set()

    def __getattr__(self, name):
        async def ask(*args, **kwargs):
            if self._refused and not self.whole.is_set():
                raise StoreUnavailable("the Store is away")
            await self.whole.wait()
            return await getattr(self._store, name)(*args, **kwargs)

        return ask


class SharedCluster:
    """Its Store, and each job's link to it, by `cluster.dir`."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.links: dict[str, Link] = {}
        self.permits = Permits(self.store)

    def open(self, folder: str) -> Link:
        return self.links.setdefault(folder, Link(self.store))

    async def turns(self, pool: str) -> list[str]:
        """Who held the pool, in order."""
        return [event.stand.job for _, event in await self.permits.events(pool) if event.kind == "holds"]

    async def held(self, pool: str, job: str, times: int = 1) -> None:
        """Return once `job` holds it, or has held it so many times."""
        after = 0
        while True:
            for index, event in await self.permits.events(pool, after, wait_s=1000):
                after = index
                times -= event.kind == "holds" and event.stand.job == job
                if not times:
                    return


@pytest.fixture
def cluster(monkeypatch) -> SharedCluster:
    made = SharedCluster()
    monkeypatch.setattr("rubato.actors.cluster.permits.open_shared", lambda folder: made.open(str(folder)))
    return made


def share(name: str) -> tuple[str, ...]:
    return (f"cluster.dir={name}", f"cluster.job={name}")


async def run(folder, given, beside=None, **goes_on) -> list[dict]:
    """The job's ledger, by id. `beside` does something to the running job."""
    async with embed(given, folder, **goes_on) as job:
        if beside is not None:
            await beside(job)
        await job.done()
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    keys = ("trajectory_id", "group_id", "task", "fate", "step", "reward", "tokens", "turns")
    return sorted(({key: sample[key] for key in keys} for sample in samples), key=lambda s: s["trajectory_id"])


JOBS = {"a": ("run.seed=3",), "b": ("run.seed=4", "rollout.max_new_tokens=20")}


@virtual
async def test_each_of_two_jobs_trains_the_samples_that_it_trains_alone(tmp_path, cluster):
    model = write_tokenizer(tmp_path / "model")
    alone = {name: await run(tmp_path / f"solo_{name}", config(model, name, *own)) for name, own in JOBS.items()}

    async with asyncio.TaskGroup() as tasks:
        together = {name: tasks.create_task(run(tmp_path / name, config(model, name, *own, *share(name)))) for name, own in JOBS.items()}

    for name, ledger in together.items():
        assert len(ledger.result()) == STEPS * 8
        assert ledger.result() == alone[name]
    for pool in ("rollout", "training"):
        turns = await cluster.turns(pool)
        assert turns.count("a") == turns.count("b") == STEPS


@virtual
async def test_a_job_that_stands_still_in_its_rollout_loses_the_pool_and_still_trains_what_it_trains_alone(tmp_path, cluster):
    model = write_tokenizer(tmp_path / "model")
    own = ("run.seed=3", "rollout.max_new_tokens=200")
    alone = await run(tmp_path / "solo", config(model, "a", *own))

    async with asyncio.TaskGroup() as tasks:
        stalled = tasks.create_task(run(tmp_path / "a", config(model, "a", *own, *share("a"))))
        await cluster.held("rollout", "a")
        cluster.links["a"].whole.clear()
        assert len(await run(tmp_path / "b", config(model, "b", "run.seed=4", *share("b")))) == STEPS * 8
        turns = await cluster.turns("rollout")
        cluster.links["a"].whole.set()

    assert turns == ["a", *["b"] * STEPS]
    assert stalled.result() == alone


@virtual
async def test_a_job_that_waits_for_its_turn_longer_than_for_a_completion_loses_nothing(tmp_path, cluster):
    model, own = write_tokenizer(tmp_path / "model"), ("run.seed=3", "rollout.generate_timeout_s=20")
    alone = await run(tmp_path / "solo", config(model, "a", *own))

    async with asyncio.TaskGroup() as tasks, cluster.permits.hold("rollout", "rollout", "b"):
        waiting = tasks.create_task(run(tmp_path / "a", config(model, "a", *own, *share("a"))))
        await asyncio.sleep(1000)
    assert waiting.result() == alone


@virtual
async def test_the_tail_of_a_rollout_moves_together_and_the_next_job_begins_on_the_other_engines(tmp_path, cluster):
    model = write_tokenizer(tmp_path / "model")
    long = ("rollout.max_new_tokens=400", "engine.scripted.stop_share=0.01", "engine.num_slots=8", "rollout.max_len=1024")
    alone = {n: await run(tmp_path / f"solo_{n}", config(model, n, *own, *long)) for n, own in JOBS.items()}

    async with asyncio.TaskGroup() as tasks:
        together = {name: tasks.create_task(run(tmp_path / name, config(model, name, *JOBS[name], *long, *share(name)))) for name in JOBS}

    events = [event for _, event in await cluster.permits.events("rollout")]
    narrowed = [at for at, event in enumerate(events) if event.kind == "narrows"]
    assert narrowed
    for at in narrowed:
        assert len(events[at].stand.places) == 1
        after = [(event.kind, event.stand.job) for event in events[at + 1 :]]
        assert after[0] == ("holds", "b" if events[at].stand.job == "a" else "a")
    assert {name: ledger.result() for name, ledger in together.items()} == alone


@pytest.mark.parametrize("actor", ["llm_proxy-1", "engine-1", "env_manager-1"])
@virtual
async def test_an_actor_that_is_killed_in_its_rollout_costs_no_sample_and_lets_nobody_in(tmp_path, cluster, actor):
    model, own = write_tokenizer(tmp_path / "model"), ("rollout.max_new_tokens=200", "engine.scripted.stop_share=0")
    alone = await run(tmp_path / "solo", config(model, "a", *own))

    async def kill(job):
        await cluster.held("rollout", "a")
        await asyncio.sleep(1.0)
        job._agent.host._hosted[actor].instance.kill()

    async with asyncio.TaskGroup() as tasks:
        job = tasks.create_task(run(tmp_path / "a", config(model, "a", *own, *share("a")), kill))
        await cluster.held("rollout", "a")
        tasks.create_task(run(tmp_path / "b", config(model, "b", "run.seed=4", *share("b"))))

    assert job.result() == alone
    turns = await cluster.turns("rollout")
    assert turns[:2] == (["a", "a"] if actor == "llm_proxy-1" else ["a", "b"])


@pytest.mark.parametrize("lost", ["silent", "refused"])
@virtual
async def test_an_engine_that_alone_lost_sight_of_its_permit_is_woken_again_under_it(tmp_path, cluster, lost):
    model, own = write_tokenizer(tmp_path / "model"), ("rollout.max_new_tokens=200", "engine.scripted.stop_share=0")
    alone = await run(tmp_path / "solo", config(model, "a", *own))
    links, together = [], cluster.open

    def open_own(folder):  # each engine has a way of its own to the Store
        if not asyncio.current_task().get_name().startswith("engine-"):
            return together(folder)
        links.append(Link(cluster.store))
        return links[-1]

    cluster.open = open_own

    async def cut(job):
        await cluster.held("rollout", "a")
        await asyncio.sleep(0.5)
        for link in links:
            link.cut(lost)
        await asyncio.sleep(TTL_S + 1)
        for link in links:
            link.mend()

    assert await run(tmp_path / "a", config(model, "a", *own, "engine.scripted.token_s=0.1", *share("a")), cut) == alone
    assert len(await cluster.turns("rollout")) == STEPS


@virtual
async def test_a_job_that_is_drained_does_not_wait_for_its_turn_to_train(tmp_path, cluster):
    given = config(write_tokenizer(tmp_path / "model"), "a", "checkpoint.every=100", *share("a"))
    loop = asyncio.get_running_loop()
    async with embed(given, tmp_path / "a") as job:
        rows = job.rows()
        await anext(rows)
        async with cluster.permits.hold("training", "training", "b"):
            while not (await cluster.permits.lines())["training"].queue:  # noqa: ASYNC110 - in virtual time
                await asyncio.sleep(0.1)
            began = loop.time()
            await job._agent.stop("interrupted")
            took_s = loop.time() - began

    assert took_s < 20
    assert [path.name for path in (tmp_path / "a" / "checkpoints").iterdir() if path.name.startswith("step_")]


@pytest.mark.parametrize("within", LASTS_S)
@virtual
async def test_a_trainer_that_loses_its_permit_computes_nothing_until_the_pool_is_its_own_again(tmp_path, cluster, within):
    model, loop = write_tokenizer(tmp_path / "model"), asyncio.get_running_loop()
    alone = await run(tmp_path / "solo", config(model, "a", IN_PARTS))

    async with asyncio.TaskGroup() as tasks:
        stalled = tasks.create_task(run(tmp_path / "a", config(model, "a", IN_PARTS, *share("a"))))
        await cluster.held("training", "a")
        await asyncio.sleep(1.0 if within == "wake" else LASTS_S["wake"] + 1.5 * LASTS_S["part"])
        cluster.links["a"].cut("silent")
        async with cluster.permits.hold("training", "training", "b"):
            began = loop.time()
            await asyncio.sleep(50)
            cluster.links["a"].mend()
            await asyncio.sleep(50)
            ended = loop.time()

    assert stalled.result() == alone
    assert rewards(tmp_path / "a") == rewards(tmp_path / "solo")
    assert computed(tmp_path / "a", began, ended) == []
    assert computed(tmp_path / "a", 0, began)[-1] == within
    assert computed(tmp_path / "a", ended)[0] == "wake"
    assert computed(tmp_path / "a").count("part") == STEPS * (PARTS + 1)
    assert await cluster.turns("training") == ["a", "b", *["a"] * STEPS]


@virtual
async def test_a_job_that_is_drained_within_a_step_whose_permit_was_lost_trains_that_step_when_it_goes_on(tmp_path, cluster):
    model, every = write_tokenizer(tmp_path / "model"), "checkpoint.every=100"
    alone = await run(tmp_path / "solo", config(model, "a", IN_PARTS, every))
    given, store = config(model, "a", IN_PARTS, every, *share("a")), MemoryStore()

    async with embed(given, tmp_path / "a", store=store) as job:
        await anext(job.rows())
        await cluster.held("training", "a", 2)
        await asyncio.sleep(LASTS_S["wake"] + 1.5 * LASTS_S["part"])
        cluster.links["a"].cut("silent")
        async with cluster.permits.hold("training", "training", "b"):
            cluster.links["a"].mend()
            await asyncio.sleep(TTL_S)
            await job._agent.stop("interrupted")
    saved = list((tmp_path / "a" / "checkpoints").glob("step_*"))

    assert saved == [], "model and optimiser were those of no step"
    assert await run(tmp_path / "a", given, store=store, resume=True) == alone
    assert rewards(tmp_path / "a") == rewards(tmp_path / "solo")


@virtual
async def test_held_out_tasks_are_rolled_out_under_the_permit_too(tmp_path, cluster):
    given = config(write_tokenizer(tmp_path / "model"), "a", "eval.every=2", "eval.final_num_tasks=4", "eval.num_tasks=4", *share("a"))

    assert len(await run(tmp_path / "a", given)) >= STEPS * 8

    evals = [json.loads(line) for line in (tmp_path / "a" / "evals.jsonl").read_text().splitlines()]
    assert [each["version"] for each in evals] == [0, 2, 4]
    assert all(each["failed"] == 0 for each in evals)


@virtual
async def test_an_engine_computes_nothing_under_a_permit_that_is_not_held(tmp_path, cluster):
    async with asyncio.TaskGroup() as tasks:
        bench = Bench(tasks, tmp_path)
        await bench.start(Proxy, "llm_proxy-1", ActorConfig())
        section = EngineSection(kind="scripted", scripted=ScriptedSection(token_s=0.1))
        shared = ClusterSection(dir="a", job="a")
        worker = await bench.start(EngineWorker, "engine-1", EngineWorker.Config(engine=section, cluster=shared))
        asked = tasks.create_task(bench.ask(request(num=50)))

        async with cluster.permits.hold("rollout", "rollout", "a") as old:
            await bench.ask(WakeEngine(old.term))
            await asyncio.sleep(1.0)
        async with cluster.permits.hold("rollout", "rollout", "b") as other:
            await asyncio.sleep(TTL_S)
            num, asleep = worker._num_tokens, worker._engine.load().asleep
            with pytest.raises(Failed, match=f"term {old.term} does not hold rollout now"):
                await bench.ask(WakeEngine(old.term))
            await asyncio.sleep(1.0)
            assert worker._num_tokens == num
        async with cluster.permits.hold("rollout", "rollout", "a") as new:
            await bench.ask(WakeEngine(new.term))
            reply = await asked

        assert asleep
        assert 0 < num < 50
        assert len(unpack_i32(reply.tokens.ids)) == 50
        assert new.term > other.term > old.term
        for kernel in bench.kernels.values():
            kernel.stop()


class SlowBlobs(MemoryBlobStore):
    """Weights are longer on their way than a lease lasts."""

    async def get(self, name, version, *, check=True):
        await asyncio.sleep(TTL_S + 4)
        return await super().get(name, version, check=check)


@virtual
async def test_an_engine_sleeps_when_its_permit_is_over_though_no_proxy_can_be_told(tmp_path, cluster):
    async with asyncio.TaskGroup() as tasks:
        bench = Bench(tasks, tmp_path)
        await bench.start(Proxy, "llm_proxy-1", ActorConfig())
        section = EngineSection(kind="scripted", scripted=ScriptedSection(token_s=0.1))
        worker = await bench.start(EngineWorker, "engine-1", EngineWorker.Config(engine=section, cluster=ClusterSection(dir="a", job="a")))
        asked = tasks.create_task(bench.ask(request(num=100)))

        async with cluster.permits.hold("rollout", "rollout", "a") as held:
            await bench.ask(WakeEngine(held.term))
            tell, worker.tell_proxies = worker.tell_proxies, lambda: asyncio.sleep(30)
            cluster.links["a"].cut("silent")  # its host is cut off
            await asyncio.sleep(TTL_S)
            num = worker._num_tokens
            await asyncio.sleep(TTL_S)

            assert 0 < num < 100
            assert worker._num_tokens == num
            cluster.links["a"].mend()
            worker.tell_proxies = tell
            await bench.ask(WakeEngine(held.term))
            assert len(unpack_i32((await asked).tokens.ids)) == 100
        for kernel in bench.kernels.values():
            kernel.stop()


@virtual
async def test_the_permit_of_a_turn_whose_engines_did_not_all_say_that_they_sleep_lapses(tmp_path, cluster, monkeypatch):
    model, loop, sleep = write_tokenizer(tmp_path / "model"), asyncio.get_running_loop(), PermittedOrders._sleep
    heard, refused = asyncio.Event(), []

    async def deaf(orders, engine, level):
        if orders.worker.name == "engine-2" and not heard.is_set():
            refused.append(loop.time())
            raise EngineError("its host is cut off")
        return await sleep(orders, engine, level)

    monkeypatch.setattr(PermittedOrders, "_sleep", deaf)
    async with asyncio.TaskGroup() as tasks:
        job = tasks.create_task(run(tmp_path / "a", config(model, "a", "run.steps=20", *share("a"))))
        await cluster.held("rollout", "a")
        async with cluster.permits.hold("rollout", "rollout", "b"):
            assert loop.time() - refused[-1] > TTL_S / 2
            heard.set()

    assert len(job.result()) == 20 * 8
    assert (await cluster.turns("rollout"))[:3] == ["a", "b", "a"]


@virtual
async def test_an_engine_that_loses_the_permit_of_the_link_swaps_no_weights_in_until_the_link_is_its_own_again(tmp_path, cluster):
    async with asyncio.TaskGroup() as tasks:
        bench = Bench(tasks, tmp_path)
        bench.blobs = SlowBlobs()
        await bench.start(Proxy, "llm_proxy-1", ActorConfig())
        section, shared = EngineSection(kind="scripted"), ClusterSection(dir="a", job="a")
        worker = await bench.start(EngineWorker, "engine-1", EngineWorker.Config(engine=section, cluster=shared))

        await bench.publish(1)
        await cluster.held("weight_sync", "a.engine-1")
        cluster.links["a"].cut("silent")
        async with cluster.permits.hold("weight_sync", "weight_sync", "b.engine-1"):
            await asyncio.sleep(TTL_S + 4)
            cluster.links["a"].mend()
            await asyncio.sleep(TTL_S)
            within = worker._weights.version
        await worker._weights.wait_for(1)

        assert within == 0
        assert await cluster.turns("weight_sync") == ["a.engine-1", "b.engine-1", "a.engine-1"]
        for kernel in bench.kernels.values():
            kernel.stop()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("staleness.alpha=1", "with staleness.alpha above 0 rollouts never pause"),
        ("actors.llm_proxy.count=2", "it must be 1"),
        ("engine.kind=vllm", "engine.kind=vllm starts anew each time"),
        ("orchestrator.enabled=true", "engines sleep and wake by the job's turns"),
    ],
)
def test_a_job_that_can_not_take_turns_is_refused(tmp_path, override, said):
    orchestrator = "actors.orchestrator={class: 'rubato.actors.orchestrator.orchestrator:Orchestrator'}"
    with pytest.raises(ConfigError, match=said):
        config(tmp_path, "a", "cluster.dir=c", orchestrator, override)
