"""A Tinker server on virtual time: a client that repeats, gives up and leaves, while server and trainer are killed, ends with the same weights."""

import asyncio
import random
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest

from rubato.actors.gateway.tinker.routes import Routes
from rubato.actors.gateway.tinker.server import TinkerServer
from rubato.actors.gateway.tinker.tenants import OWN_TENANT, Tenants
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.embed import embed
from rubato.sim.virtual import run_virtual
from tests.tinker_job import JOB, PUBLISHED, SAMPLED, Client, ScriptedTrainer, datum, output_of, write_model

KEY = "tml-simulated-0123456789"

STEPS = 7

EARLY, LATE, END = 3, 6, 2 * STEPS + 3
"""Numbers of requests: one that the server refuses before its turn, one that the trainer does in it, and the last."""

RIGHT = [seq for seq in range(1, END) if seq not in (EARLY, LATE)]


class Unheard(TinkerServer):
    """It is asked without sockets, by whoever has its application."""

    apps = []

    async def listen(self, before, key):
        self.tenants = Tenants({KEY: OWN_TENANT})
        Unheard.apps[:] = [(self, Routes(self).app())]

    async def on_stop(self):
        await super().on_stop()
        Unheard.apps[:] = [each for each in Unheard.apps if each[0] is not self]


class Wire(httpx.AsyncBaseTransport):
    """To whichever server lives now."""

    async def handle_async_request(self, request):
        if not Unheard.apps:
            raise httpx.ConnectError("no server")
        server, app = Unheard.apps[0]
        answer = await httpx.ASGITransport(app).handle_async_request(request)
        if (server, app) not in Unheard.apps:
            raise httpx.ReadError("the server died")  # before its answer came
        return answer


@asynccontextmanager
async def simulated(folder, *overrides):
    PUBLISHED.clear()
    SAMPLED.clear()
    ScriptedTrainer.applied, ScriptedTrainer.hold, ScriptedTrainer.pace_s = {}, None, 0.2
    model = write_model(folder.parent / "model")
    actors = {**JOB["actors"], "tinker": {"class": "tests.simulation.test_tinker:Unheard", "restarts": 1000}}
    config = from_mapping({**JOB, "actors": actors}, [f"model.path={model}", f"tinker.models={{toy: {model}}}", *overrides])
    async with embed(config, folder) as job:
        client = Client("http://server", KEY)
        client.http = httpx.AsyncClient(transport=Wire(), base_url="http://server/api/v1/", headers={"X-API-Key": KEY})
        yield job, client


async def surely(send, chance, *, refused=()):
    """As a client that asks until it is answered: it gives up on some tries, which may have come in or not, and repeats others."""
    while True:
        try:
            async with asyncio.timeout(chance.choice((0.01, 1.0, 100.0))):
                answer = await send()
        except (TimeoutError, httpx.TransportError):
            await asyncio.sleep(chance.uniform(0.0, 0.3))
            continue
        if answer.status_code not in (408, 429, 503):
            assert answer.status_code == 200, answer.text
            if chance.random() < 0.7:
                return answer
        await asyncio.sleep(chance.uniform(0.0, 0.1))


async def played(folder, seed, victims=()):
    """Losses of all steps, and the odds that were saved at the end."""
    chance = random.Random(seed)
    async with simulated(folder) as (job, client):

        async def kill():
            while True:
                await asyncio.sleep(chance.uniform(0.1, 1.5))
                hosted = job._agent.host._hosted.get(chance.choice(victims))
                if hosted is not None:
                    hosted.instance.kill()

        killing = asyncio.ensure_future(kill()) if victims else None  # noqa: TID251 - of this test alone
        session = (await surely(lambda: client.post("create_session", {}), chance)).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 4}}
        made = (await surely(lambda: client.post("create_model", body), chance)).json()
        model, order = made["model_id"], list(range(1, END + 1))
        sends = {
            EARLY: lambda: client.step(model, rate=-1.0, seq=EARLY),
            LATE: lambda: client.learn(model, loss="nonsense", seq=LATE),
            END: lambda: client.numbered_post("save_weights", model, seq=END, path="end"),
        }
        learning, moving = RIGHT[::2], RIGHT[1::2]
        for step, (learn, move) in enumerate(zip(learning, moving, strict=True)):
            row = datum((1, 2), ((3 * step) % 11, (5 * step) % 7))
            sends[learn] = lambda seq=learn, row=row: client.learn(model, row, seq=seq)
            sends[move] = lambda seq=move: client.step(model, seq=seq)
        chance.shuffle(order)
        promises = {}
        for seq in order:
            promises[seq] = (await surely(sends[seq], chance)).json()
            await asyncio.sleep(chance.uniform(0.0, 0.3))
        told = {}
        for seq, promise in sorted(promises.items()):
            told[seq] = await surely(lambda promise=promise: client.post("retrieve_future", promise), chance)
        assert told[END].json()["path"].endswith("/weights/end")
        assert [told[seq].json()["category"] for seq in (EARLY, LATE)] == ["user", "user"]
        if killing is not None:
            killing.cancel()
        saves = folder / "tinker" / "models" / model / "saves" / str(END)
        return [output_of(told[seq].content)[1]["loss:sum"] for seq in learning], np.load(saves / "odds.npy")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run_virtual(lambda: played(tmp_path_factory.mktemp("quiet") / "run", 0))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "victims", [(), ("tinker-1",), ("trainer-1",), ("tinker-1", "trainer-1")], ids=["nobody", "server", "trainer", "both"]
)
def test_a_client_that_repeats_and_leaves_ends_where_an_undisturbed_one_does(tmp_path, undisturbed, seed, victims):
    losses, odds = run_virtual(lambda: played(tmp_path / "run", seed, victims))
    assert losses == pytest.approx(undisturbed[0], rel=1e-6)
    assert np.array_equal(odds, undisturbed[1])


def test_a_session_that_nothing_is_heard_of_is_over(tmp_path):
    async def silent():
        async with simulated(tmp_path / "run", "tinker.session_s=100") as (_, client):
            session = await client.session()
            model = await client.model(session)
            for _ in range(5):
                await asyncio.sleep(60)
                await client.asked("session_heartbeat", {"session_id": session})
            assert (await client.learn(model)).status_code == 200
            await asyncio.sleep(200)
            assert (await client.post("session_heartbeat", {"session_id": session})).status_code == 410
            assert (await client.learn(model)).status_code == 404
            assert not (tmp_path / "run" / "tinker" / "models" / model).exists()

    run_virtual(silent)
