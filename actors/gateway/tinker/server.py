"""A Tinker server: clients of its SDK train and sample models over HTTP, on the job's own trainer and engines.

What its trainer and its engines do for it is in actors/messages; the requests over HTTP are in routes.py.
"""

import asyncio
import importlib.util
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

import msgspec

from rubato.actors.adapters.shapes import NAME_FORM
from rubato.actors.checkpoints.model_folder import read_description, text_part
from rubato.actors.config import ModelSection
from rubato.actors.engines.section import EngineSection
from rubato.actors.gateway.server import http_server
from rubato.actors.gateway.session import Refused
from rubato.actors.gateway.tinker.ages import Ages, Noted
from rubato.actors.gateway.tinker.journal import NAME, Area, Book, ModelJournal, Named, Owned
from rubato.actors.gateway.tinker.models import NONE, TRAINER, Model
from rubato.actors.gateway.tinker.routes import Routes
from rubato.actors.gateway.tinker.sampling import Sampler, Samplings, limits_of
from rubato.actors.gateway.tinker.section import TinkerSection, names_of
from rubato.actors.gateway.tinker.tenants import OWN_TENANT, PREFIX, Session, Sessions, Tenants, new_key, read_keys
from rubato.actors.messages.generation import GENERATION
from rubato.actors.messages.tinker import TINKER, ForgetModel
from rubato.bus.address import bind_listener, host_port, is_loopback, spelt
from rubato.bus.errors import AskFailed
from rubato.runtime.actor import Actor
from rubato.runtime.config import ActorConfig
from rubato.runtime.config import Config as Job
from rubato.runtime.errors import ConfigError
from rubato.runtime.kernel import Kernel
from rubato.runtime.observe.trace import wall_s

FILE = "tinker.json"
"""Of the run's folder, for its owner alone: address and key."""

FOLDER = "tinker"

SWEEP_S = 30.0
"""Between two looks at what is over."""

SCHEME = "tinker://"


class Address(msgspec.Struct):
    """What clients need, in FILE."""

    url: str = ""
    api_key: str = ""
    """Empty where tinker.keys has them."""

    @property
    def port(self) -> int:
        """0: none."""
        return urlsplit(self.url).port or 0


class Place(NamedTuple):
    """What a path names."""

    owned: Owned
    area: Area
    name: str
    named: Named

    @property
    def path(self) -> str:
        return path_of(self.owned.id, self.area, self.name)


def path_of(model: str, area: Area, name: str) -> str:
    return f"{SCHEME}{model}/{area}/{name}"


class TinkerServer(Actor):
    """Keeps what it acknowledges in RUN/tinker, and goes on with it where it is started again."""

    role: ClassVar[str] = TINKER
    needs: ClassVar[tuple[str, ...]] = ("llm_proxy", GENERATION, TRAINER)
    least: ClassVar[int] = 1
    most: ClassVar[int] = 1
    drain_order: ClassVar[int] = 10

    class Config(ActorConfig):
        model: ModelSection = ModelSection()
        engine: EngineSection = EngineSection()
        tinker: TinkerSection = TinkerSection()

    config: Config

    @classmethod
    def check(cls, job: Job) -> None:
        section, path = job.section("tinker"), job.section("model").path
        for name, folder in section.models.items():
            if os.path.normpath(os.path.expanduser(folder)) != os.path.normpath(path):
                raise ValueError(
                    f"tinker.models has {name} at {folder}, and model.path is {path}: a job has one base model, under any names"
                )

    @classmethod
    def check_host(cls, config: Any) -> None:
        for package, module in (("starlette", "starlette"), ("protobuf", "google.protobuf")):
            try:
                found = importlib.util.find_spec(module)
            except ModuleNotFoundError:
                found = None
            if found is None:
                raise ConfigError(f"rubato.actors.gateway.tinker needs the package {package}: pip install -e '.[tinker]'")
        if config.tinker.keys:
            read_keys(Path(config.tinker.keys).expanduser())

    def __init__(self, config: Any, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self.folder = self.run.folder / FOLDER
        self.loop = asyncio.get_running_loop()
        self.ages = Ages(config.tinker.digests, Book(self.folder / "sampled.jsonl", Noted))
        self.models: dict[str, Model] = {}
        """Those that are trained, by id."""
        self.sessions = Sessions(Book(self.folder / "sessions.jsonl", Session))
        self.sampling = Samplings(self, Book(self.folder / "samplers.jsonl", Sampler))
        self.tenants = Tenants({})
        self.names = names_of(config.tinker, config.model.path)
        self.architecture = ""
        self._served: asyncio.Task[None] | None = None

    async def on_start(self) -> None:
        """Take up what a server of before left, and listen; an address that can't be had ends the job with a sentence."""
        section = self.config.tinker
        before = await self.offload(self._read_address)
        key = "" if section.keys else before.api_key if before.api_key.startswith(PREFIX) else new_key()
        self.tenants = Tenants({key: OWN_TENANT} if key else await self.offload(read_keys, Path(section.keys).expanduser()))
        await self.offload(self._load)
        for model in self.models.values():
            model.begin()
        self.spawn(self._sweep(), name=f"{self.name}.sweep")
        await self.listen(before, key)

    async def listen(self, before: Address, key: str) -> None:
        """Answer over HTTP, at the address of before where there is one."""
        host, port = host_port(self.config.tinker.listen)
        listening = await self._bound(host, port, before)
        if listening is None:
            return
        url = f"http://{spelt(host or '127.0.0.1')}:{listening.getsockname()[1]}"
        self._served = self.spawn(http_server(Routes(self).app()).run_on(listening), name=f"{self.name}.http")
        await self.offload(self._write_address, Address(url, key))
        self.log.info("tinker_listening", url=url, models=list(self.names))
        self.notice(f"Tinker's API is at {url}, for {', '.join(self.names)}; {self.run.folder / FILE} has the key", good=True)

    async def on_stop(self) -> None:
        """Who still waits is not answered, and asks again."""
        if self._served is not None:
            self._served.cancel()
            await asyncio.wait((self._served,))

    async def on_peers(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        trainers = {name for name in (*joined, *left) if name.rpartition("-")[0] == TRAINER}
        if trainers:
            self.sampling.forget_ready()
        if trainers & {*joined}:
            for model in self.models.values():
                model.doubt()

    async def _bound(self, host: str, port: int, before: Address) -> socket.socket | None:
        """Where the config leaves the port open, the one of before, at which clients ask again."""
        if port == 0 and before.port:
            with suppress(OSError):
                return bind_listener(host, before.port)
        try:
            return bind_listener(host, port)
        except OSError as error:
            listen = self.config.tinker.listen
            self.finish(f"tinker can't listen at {listen}: {error.strerror}. Set tinker.listen=127.0.0.1:0 for a free port", failed=True)
            return None

    def _read_address(self) -> Address:
        try:
            return msgspec.json.decode((self.run.folder / FILE).read_bytes(), type=Address)
        except (OSError, msgspec.MsgspecError):
            return Address()

    def _write_address(self, address: Address) -> None:
        path = self.run.folder / FILE
        draft = path.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(address))
        draft.replace(path)

    def _load(self) -> None:
        """What a server of before left. Blocks."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        model = self.run.folder / self.config.model.path
        self.sampling.limits = limits_of(model, self.config.engine.max_len)
        self.architecture = str(text_part(read_description(model)).get("model_type", ""))
        self.sessions.load()
        self.sampling.load()
        self.ages.load()
        for folder in sorted(self._models_folder.glob("*")):
            journal = ModelJournal(folder)
            owned = journal.owned()
            if owned is None:
                shutil.rmtree(folder, ignore_errors=True)  # its client was not told of it
            elif not owned.unloaded:
                found = self.models[owned.id] = Model(self, journal, owned)
                found.load()

    # -- models --------------------------------------------------------------------------------------------------------

    @property
    def pending_bytes(self) -> int:
        """Of operations that wait."""
        return sum(model.pending_bytes for model in self.models.values())

    @property
    def _models_folder(self) -> Path:
        return self.folder / "models"

    @property
    def tokenizer_is_here(self) -> bool:
        """Clients are on this host, and can read the base model's folder."""
        return is_loopback(host_port(self.config.tinker.listen)[0] or "0.0.0.0")

    def save_folder(self, model: str, seq: int) -> Path:
        return ModelJournal(self._models_folder / model).save_folder(seq)

    def model_of(self, tenant: str, name: str) -> Model:
        """Raises Refused."""
        model = self.models.get(name)
        if model is None or model.owned.tenant != tenant:
            raise Refused(404, "unknown_model", f"there is no model {name[:128]!r}")
        self.sessions.heard_of(model.owned.session)
        return model

    async def add_model(self, owned: Owned) -> Model:
        """A new one, or that of a request that came before. Raises Refused."""
        if (known := self.models.get(owned.id)) is not None:
            return known
        if len(self.models) >= self.config.tinker.max_models:
            raise Refused(429, "too_many_models", f"tinker.max_models={self.config.tinker.max_models} models are there: unload one")
        journal = ModelJournal(self._models_folder / owned.id)
        before = await self.offload(journal.owned)
        if (known := self.models.get(owned.id)) is not None:
            return known
        if before is not None:
            raise Refused(400, "model_over", f"{owned.id} was a model before, which is unloaded: take another model_seq_id")
        self.sessions.found(owned.tenant, owned.session)  # it may have ended meanwhile, and would leave this one behind
        model = self.models[owned.id] = Model(self, journal, owned)  # before the await: the same request again finds it
        async with model.writing(NONE):
            await self.on_disk(self.folder, journal.describe, owned)
        if not model.over:
            model.begin()
        return model

    async def unload(self, model: Model) -> None:
        """The trainer lets go of it; what was saved under a name stays."""
        if model.over:
            return
        self.models.pop(model.owned.id, None)
        await model.end()
        owned = msgspec.structs.replace(model.owned, unloaded=True)
        await self.on_disk(self.folder, model.journal.describe, owned)
        with suppress(AskFailed):
            await self.ref(TRAINER).ask(ForgetModel(owned.id), timeout=60.0)
        await self.offload(model.journal.end)

    async def place_of(self, tenant: str, path: str) -> Place:
        """What a path names. Raises Refused."""
        parts = path.removeprefix(SCHEME).split("/")
        place = await self.offload(self._place_of, parts) if path.startswith(SCHEME) and len(parts) == 3 else None
        if place is None or place.owned.tenant != tenant:
            raise Refused(404, "unknown_path", f"there is nothing at {path[:256]!r}")
        return place

    def _place_of(self, parts: list[str]) -> Place | None:
        """Blocks."""
        model, area, name = parts
        if area not in ("weights", "sampler_weights") or not NAME_FORM.fullmatch(model) or not NAME.fullmatch(name):
            return None
        journal = ModelJournal(self._models_folder / model)
        owned, named = journal.owned(), journal.named(area, name)
        return None if owned is None or named is None else Place(owned, area, name, named)

    # -- what is over --------------------------------------------------------------------------------------------------

    async def end_session(self, session: Session) -> None:
        """Its models are unloaded, and its sampling ends."""
        await self.on_disk(self.folder, self.sessions.book.add, msgspec.structs.replace(session, over=True))
        self.sessions.close(session)
        await self.sampling.close_session(session.id)
        for model in [each for each in self.models.values() if each.owned.session == session.id]:
            await self.unload(model)

    async def _sweep(self) -> None:
        while True:
            for model in list(self.models.values()):
                if not self.sessions.runs(model.owned.session):  # a server was killed while the session ended
                    await self.unload(model)
            await asyncio.sleep(SWEEP_S)
            for session in self.sessions.silent(self.config.tinker.session_s):
                self.log.info("tinker_session_silent", session=session.id)
                await self.end_session(session)
            for owned, area, name in await self.offload(self._expired):
                self.log.info("tinker_checkpoint_expired", path=path_of(owned, area, name))
                await self.offload(ModelJournal(self._models_folder / owned).unname, area, name)

    def _expired(self) -> list[tuple[str, Area, str]]:
        """Blocks."""
        now = wall_s()
        return [
            (folder.name, area, name)
            for folder in self._models_folder.glob("*")
            for area, name, named in ModelJournal(folder).names()
            if named.expires is not None and named.expires <= now
        ]
