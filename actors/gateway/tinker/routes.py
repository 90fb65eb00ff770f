"""Tinker's requests over HTTP, as the SDK 0.38 makes them: all POST below /api/v1/, where nothing else is said.

    client/config, client/dynamic_config, GET get_server_capabilities, GET healthz, telemetry
    create_session, session_heartbeat, sessions/ID/finish
    create_model, get_info, unload_model, forward_backward, optim_step, save_weights, save_weights_for_sampler, load_weights, weights_info
    create_sampling_session, join_sampling_session, GET samplers/ID, asample, cancel_future
    retrieve_future

An error of a request is a status with a sentence; one of an operation is what retrieve_future tells, so that the operation has its turn.
"""

import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from rubato.actors.gateway.server import BODY_S, key_of, until_gone
from rubato.actors.gateway.session import Refused
from rubato.actors.gateway.tinker import requests as bodies
from rubato.actors.gateway.tinker.journal import SEQ_DIGITS, Area, Entry, Owned, Told, digest_of
from rubato.actors.gateway.tinker.models import Model
from rubato.actors.gateway.tinker.requests import body_of, invalid, read
from rubato.actors.gateway.tinker.sampling import Sampler
from rubato.actors.gateway.tinker.tenants import Session
from rubato.actors.gateway.tinker.wire import PROTOBUF, asked_in, named_in
from rubato.actors.messages.tinker import Begin, Follow, Load, Save

if TYPE_CHECKING:
    from starlette.requests import Request

    from rubato.actors.gateway.tinker.server import Place, TinkerServer

API = "/api/v1/"

CLIENT_CONFIG: dict[str, Any] = {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": False, "custom_loss_server_side": False}
"""What the SDK is to do; the rest as it does by itself."""

DYNAMIC_CONFIG: dict[str, Any] = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}

ABSENT = (
    "save_weights_external", "create_custom_loss", "copy_weights", "retrieve_futures", "auth/token", "training_runs", "sessions", "checkpoints",
    "audit", "billing", "forward",
)  # fmt: skip
"""Of the hosted service, and not here; refused by name."""

LARGE = 256 * 1024
"""Bytes of a body that is read in a thread, while others are answered."""

TOLD_AHEAD = 64 * 1024
"""Bytes of a body by which its model and its turn are known, though it is too large to be taken."""

Endpoint = Callable[[str, "Request"], Awaitable[Any]]
"""Of a tenant's request; its answer."""


class Routes:
    """Of one server."""

    def __init__(self, server: "TinkerServer") -> None:
        self._server = server
        self._most = server.config.tinker.max_body_mb * 2**20

    def app(self) -> Any:
        """The ASGI application."""
        from starlette.routing import Route, Router  # for jobs alone that have this actor

        posted: dict[str, Endpoint] = {
            "client/config": partial(self._fixed, CLIENT_CONFIG),
            "client/dynamic_config": partial(self._fixed, DYNAMIC_CONFIG),
            "telemetry": partial(self._fixed, {"status": "accepted"}),
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{id}/finish": self._finish,
            "create_model": self._create_model,
            "get_info": self._info,
            "unload_model": self._unload,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": partial(self._save, "weights"),
            "save_weights_for_sampler": partial(self._save, "sampler_weights"),
            "load_weights": self._load,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampler,
            "join_sampling_session": self._join_sampler,
            "asample": self._sample,
            "cancel_future": self._cancel,
            "retrieve_future": self._retrieve,
        }
        got: dict[str, Endpoint] = {
            "get_server_capabilities": self._capabilities,
            "healthz": partial(self._fixed, {"status": "ok"}),
            "samplers/{id}": self._sampler,
        }
        routes = [Route(API + path, Answering(self, endpoint), methods=["POST"]) for path, endpoint in posted.items()]
        routes += [Route(API + path, Answering(self, endpoint), methods=["GET"]) for path, endpoint in got.items()]
        every = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        return Router([*routes, Route("/{path:path}", Answering(self, self._absent), methods=every)])

    def tenant_of(self, request: "Request") -> str:
        """Raises Refused."""
        return self._server.tenants.by(key_of(request))

    async def _body(self, request: "Request") -> bytes:
        """Raises Refused."""
        if request.headers.get("content-encoding"):
            raise Refused(415, "unsupported", "the body is compressed, which client/config does not ask for: send it as it is")
        body, whole = await body_of(request, self._most, BODY_S)
        if not whole:
            raise self._too_large()
        return body

    def _too_large(self) -> Refused:
        return Refused(413, "too_large", f"tinker.max_body_mb={self._most // 2**20} MiB are the most that a request may have")

    async def _read(self, request: "Request", kind: type[bodies.BodyT]) -> bodies.BodyT:
        return read(await self._body(request), kind)

    async def _fixed(self, told: Any, tenant: str, request: "Request") -> Any:
        return told

    async def _absent(self, tenant: str, request: "Request") -> Any:
        path = request.url.path.removeprefix(API)
        named = next((each for each in ABSENT if path == each or path.startswith(f"{each}/")), "")
        raise Refused(404, "not_there", f"{named or path[:128]} is not there: see docs/tinker.md for what is")

    async def _capabilities(self, tenant: str, request: "Request") -> Any:
        most = self._server.sampling.limits.most_tokens
        return {
            "supported_models": [
                {"model_name": name, "max_context_length": most, "trainable": True, "sampleable": True} for name in self._server.names
            ]
        }

    # -- sessions ------------------------------------------------------------------------------------------------------

    async def _create_session(self, tenant: str, request: "Request") -> Any:
        asked = await self._read(request, bodies.CreateSession)
        session = Session(f"sess-{secrets.token_hex(12)}", tenant, (asked.display_name or "")[:256])
        await self._server.on_disk(self._server.folder, self._server.sessions.book.add, session)
        self._server.sessions.open(session)
        return {"type": "create_session", "session_id": session.id}

    async def _heartbeat(self, tenant: str, request: "Request") -> Any:
        asked = await self._read(request, bodies.OfSession)
        self._server.sessions.found(tenant, asked.session_id)
        return {"type": "session_heartbeat"}

    async def _finish(self, tenant: str, request: "Request") -> Any:
        await self._body(request)
        await self._server.end_session(self._server.sessions.found(tenant, request.path_params["id"]))
        return {}

    # -- models --------------------------------------------------------------------------------------------------------

    async def _create_model(self, tenant: str, request: "Request") -> Any:
        asked = await self._read(request, bodies.CreateModel)
        self._server.sessions.found(tenant, asked.session_id)
        self._check_base(asked.base_model)
        asked.optimizer_config.check()
        lora = asked.lora_config
        if lora is None:
            raise invalid("lora_config is missing: whole models can't be trained here, adapters can")
        lora.check()
        name = _model_id(asked.session_id, asked.model_seq_id)
        begin = Begin(asked.base_model, lora.rank, _seed(name) if lora.seed is None else lora.seed % 2**31, lora.train_attn, lora.train_mlp)
        owned = Owned(name, tenant, asked.session_id, asked.base_model, lora.rank, lora.train_attn, lora.train_mlp, asked.user_metadata)
        return await self._begin(owned, Entry(begin, {"type": "create_model", "model_id": name}))

    async def _begin(self, owned: Owned, entry: Entry) -> Any:
        model = await self._server.add_model(owned)
        await model.accept(0, entry)
        return _promise(model, 0)

    def _check_base(self, base: str) -> None:
        if base not in self._server.names:
            raise invalid(f"{base[:128]!r} is not served here; {', '.join(self._server.names)} is")

    async def _info(self, tenant: str, request: "Request") -> Any:
        owned = self._server.model_of(tenant, (await self._read(request, bodies.OfModel)).model_id).owned
        here = self._server.tokenizer_is_here or "/" not in owned.base
        tokenizer = str(self._server.run.folder / self._server.config.model.path) if here else owned.base
        return {
            "type": "get_info",
            "model_id": owned.id,
            "model_name": owned.base,
            "is_lora": True,
            "lora_rank": owned.rank,
            "model_data": {"arch": self._server.architecture, "model_name": owned.base, "tokenizer_id": tokenizer},
        }

    async def _unload(self, tenant: str, request: "Request") -> Any:
        model = self._server.model_of(tenant, (await self._read(request, bodies.OfModel)).model_id)
        await self._server.unload(model)
        return {"request_id": f"{model.owned.id}:unload", "model_id": model.owned.id}

    # -- operations ----------------------------------------------------------------------------------------------------

    async def _forward_backward(self, tenant: str, request: "Request") -> Any:
        if request.headers.get("content-encoding"):
            raise Refused(415, "unsupported", "the body is compressed, which client/config does not ask for: send it as it is")
        body, whole = await body_of(request, self._most, BODY_S, kept=TOLD_AHEAD)
        if not whole:
            named = named_in(body)
            if named is None:
                raise self._too_large()
            model = self._server.model_of(tenant, named[0])
            await model.refuse(named[1], body, str(self._too_large()))
            return _promise(model, named[1])
        asked = await self._server.offload(asked_in, body) if len(body) > LARGE else asked_in(body)
        model = self._server.model_of(tenant, asked.model_id)
        if asked.operation is None:
            await model.refuse(asked.seq_id, body, asked.flaw)
        else:
            await model.accept(asked.seq_id, Entry(asked.operation, samples=asked.sequences if any(asked.sequences) else ()))
        return _promise(model, asked.seq_id)

    async def _optim_step(self, tenant: str, request: "Request") -> Any:
        async def operation(model: Model, body: bytes, seq: int) -> Entry:
            return Entry(read(body, bodies.OptimStepRequest).step())

        return await self._operate(tenant, request, operation)

    async def _save(self, area: Area, tenant: str, request: "Request") -> Any:
        async def operation(model: Model, body: bytes, seq: int) -> Entry:
            asked = read(body, bodies.SaveWeights)
            asked.check()
            name, kind, owned = asked.path or "", "save_" + area.replace("sampler_weights", "weights_for_sampler"), model.owned
            folder, ttl_s, metadata = str(model.journal.save_folder(seq)), asked.ttl_seconds, asked.user_metadata
            if area == "sampler_weights" and not name:
                if asked.sampling_session_seq_id is None:
                    raise invalid("path names what is saved, or sampling_session_seq_id the sampling session that is to come of it")
                sampler = _sampler_id(owned.session, asked.sampling_session_seq_id)
                answer = {"type": kind, "sampling_session_id": sampler}
                saving = Follow() if asked.kind == "inflight" else Save(folder, optimizer=False)
                return Entry(saving, answer, area, sampler=sampler)
            name = name or f"{seq:06d}"
            path = f"tinker://{owned.id}/{area}/{name}"
            saving, replaces = Save(folder, optimizer=area == "weights"), asked.overwrite or area != "weights"
            return Entry(saving, {"type": kind, "path": path}, area, name, ttl_s, metadata, overwrite=replaces)

        return await self._operate(tenant, request, operation)

    async def _load(self, tenant: str, request: "Request") -> Any:
        body = await self._body(request)
        asked = read(body, bodies.LoadWeights)
        if asked.model_id is not None:
            return await self._operate_by(tenant, body, partial(self._loading, tenant))
        if asked.session_id is None or asked.model_seq_id is None:
            raise invalid("model_id and seq_id, or session_id and model_seq_id, say which model is to load")
        asked.check()
        self._server.sessions.found(tenant, asked.session_id)
        place = await self._server.place_of(tenant, asked.path)
        self._check_loaded(place, asked)
        base = asked.base_model or place.owned.base
        self._check_base(base)
        was, name = place.owned, _model_id(asked.session_id, asked.model_seq_id)
        folder = str(self._server.save_folder(was.id, place.named.seq))
        begin = Begin(base, was.rank, _seed(name), was.train_attn, was.train_mlp, start=folder, optimizer=asked.optimizer)
        owned = Owned(name, tenant, asked.session_id, base, was.rank, was.train_attn, was.train_mlp, asked.user_metadata)
        return await self._begin(owned, Entry(begin, {"type": "load_weights", "path": asked.path, "model_id": name}))

    async def _loading(self, tenant: str, model: Model, body: bytes, seq: int) -> Entry:
        asked = read(body, bodies.LoadWeights)
        asked.check()
        place = await self._server.place_of(tenant, asked.path)
        self._check_loaded(place, asked)
        folder = str(self._server.save_folder(place.owned.id, place.named.seq))
        return Entry(Load(folder, asked.optimizer), {"type": "load_weights", "path": asked.path, "model_id": model.owned.id})

    def _check_loaded(self, place: "Place", asked: bodies.LoadWeights) -> None:
        if asked.optimizer and place.area != "weights":
            raise invalid(f"{place.path} was saved for sampling, without the optimizer: load it with optimizer=false")

    async def _operate(self, tenant: str, request: "Request", operation: Callable[[Model, bytes, int], Awaitable[Entry]]) -> Any:
        return await self._operate_by(tenant, await self._body(request), operation)

    async def _operate_by(self, tenant: str, body: bytes, operation: Callable[[Model, bytes, int], Awaitable[Entry]]) -> Any:
        """Take an operation in; one that can't be carried out has its turn, and its error then."""
        asked = read(body, bodies.Numbered)
        if asked.seq_id < 1:
            raise invalid(f"seq_id is {asked.seq_id}; a model's requests have numbers from 1 on")
        model = self._server.model_of(tenant, asked.model_id)
        try:
            entry = await operation(model, body, asked.seq_id)
        except Refused as why:
            await model.refuse(asked.seq_id, body, str(why))
        else:
            await model.accept(asked.seq_id, entry)
        return _promise(model, asked.seq_id)

    async def _weights_info(self, tenant: str, request: "Request") -> Any:
        asked = await self._read(request, bodies.OfPath)
        owned = (await self._server.place_of(tenant, asked.tinker_path or asked.path)).owned
        return {
            "base_model": owned.base,
            "is_lora": True,
            "lora_rank": owned.rank,
            "train_unembed": False,
            "train_mlp": owned.train_mlp,
            "train_attn": owned.train_attn,
        }

    # -- sampling ------------------------------------------------------------------------------------------------------

    async def _create_sampler(self, tenant: str, request: "Request") -> Any:
        asked = await self._read(request, bodies.CreateSampler)
        self._server.sessions.found(tenant, asked.session_id)
        name = _sampler_id(asked.session_id, asked.sampling_session_seq_id)
        sampler = await self._sampler_of(tenant, name, asked.session_id, asked.model_path, asked.base_model)
        if self._server.sampling.is_another(sampler):
            raise invalid(f"sampling_session_seq_id {asked.sampling_session_seq_id} is taken, by a sampling session of something else")
        return {"type": "create_sampling_session", "sampling_session_id": await self._server.sampling.open(sampler)}

    async def _sampler_of(self, tenant: str, name: str, session: str, path: str | None, base: str | None) -> Sampler:
        if path is None:
            if base is None:
                raise invalid("model_path or base_model says what to sample from")
            self._check_base(base)
            return Sampler(name, tenant, session, base)
        place = await self._server.place_of(tenant, path)
        return Sampler(name, tenant, session, place.owned.base, path, place.owned.id, place.named.seq, place.named.version)

    async def _join_sampler(self, tenant: str, request: "Request") -> Any:
        raise Refused(404, "not_there", "join_sampling_session is not there: client/config does not ask for it")

    async def _sampler(self, tenant: str, request: "Request") -> Any:
        sampler = self._server.sampling.found(tenant, request.path_params["id"])
        return {"sampler_id": sampler.id, "base_model": sampler.base, "model_path": sampler.path or None}

    async def _sample(self, tenant: str, request: "Request") -> Any:
        body = await self._body(request)
        asked = await self._server.offload(read, body, bodies.SampleRequest) if len(body) > LARGE else read(body, bodies.SampleRequest)
        if asked.sampling_session_id is not None:
            if asked.seq_id is None:
                raise invalid("seq_id is missing: requests of a sampling session have numbers")
            sampler = self._server.sampling.found(tenant, asked.sampling_session_id)
        else:
            sampler = await self._sampler_of(tenant, f"once-{secrets.token_hex(8)}", "", asked.model_path, asked.base_model)
        self._server.sessions.heard_of(sampler.session)
        name, sequences = self._server.sampling.ask(sampler, asked, body)
        return {"request_id": name, "sample_sequence_ids": sequences}

    async def _cancel(self, tenant: str, request: "Request") -> Any:
        self._server.sampling.cancel(tenant, (await self._read(request, bodies.Retrieve)).request_id)
        return {}

    # -- results -------------------------------------------------------------------------------------------------------

    async def _retrieve(self, tenant: str, request: "Request") -> Any:
        name = (await self._read(request, bodies.Retrieve)).request_id
        wait_s = self._server.config.tinker.poll_s
        async with until_gone(request):
            if (future := self._server.sampling.future(tenant, name)) is not None:
                self._server.sessions.heard_of(future.session)
                return self._told(await self._server.sampling.told(name, future, wait_s), name, ("active", ""))
            model_id, _, number = name.rpartition(":")
            if number == "unload":
                return {"type": "unload_model", "model_id": model_id}
            model = self._server.models.get(model_id)
            if model is None or model.owned.tenant != tenant or not (number.isdecimal() and len(number) <= SEQ_DIGITS):
                raise Refused(410, "unknown_request", "no such request is known: ask for what is wanted again")
            self._server.sessions.heard_of(model.owned.session)
            return self._told(await model.told(int(number), wait_s), name, model.why_waiting())

    def _told(self, told: Told | None, name: str, waits: tuple[str, str]) -> Any:
        from starlette.responses import Response

        if told is None:
            state = {"type": "try_again", "request_id": name, "queue_state": waits[0], "queue_state_reason": waits[1] or None}
            return Response(msgspec.json.encode(state), 408, media_type="application/json")
        return Response(told.body, media_type=PROTOBUF if told.kind == "pb" else "application/json")


class Answering:
    """An endpoint for those whose key is known, and how it refuses."""

    def __init__(self, routes: Routes, answer: Endpoint) -> None:
        self._routes, self._answer = routes, answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request
        from starlette.responses import Response

        request = Request(scope, receive)
        try:
            told = await self._answer(self._routes.tenant_of(request), request)
        except Refused as why:
            told = Response(
                msgspec.json.encode({"error": str(why), "code": why.code, "category": "server" if why.status >= 500 else "user"}),
                why.status,
                media_type="application/json",
            )
        response = told if isinstance(told, Response) else Response(msgspec.json.encode(told), media_type="application/json")
        await response(scope, receive, send)


def _promise(model: Model, seq: int) -> dict[str, Any]:
    return {"request_id": f"{model.owned.id}:{seq}", "model_id": model.owned.id}


def _model_id(session: str, seq: int) -> str:
    return f"{session}:train:{seq}"


def _sampler_id(session: str, seq: int) -> str:
    return f"{session}:sample:{seq}"


def _seed(model: str) -> int:
    """For an adapter whose client names none: the same for the same request again."""
    return int(digest_of(model.encode())[:7], 16)
