"""A job of a Tinker server whose trainer and engines are scripted: a model is a row of log-odds, one for each token."""

import asyncio
import itertools
import json
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np

from rubato.actors.gateway.tinker.wire import FLOAT32, INT64, PROTOBUF, message
from rubato.actors.messages.generation import Aborted, Completion, Generate, GenerateReply, Tokens, VersionSpan
from rubato.actors.messages.tinker import (
    Begin,
    Behind,
    Computed,
    Follow,
    ForgetModel,
    ForwardBackward,
    Load,
    Operate,
    Operated,
    OperationFailed,
    OptimStep,
    PrepareSampler,
    SamplerReady,
    SamplerRefused,
    Save,
    Score,
    Scored,
    Stands,
    Stepped,
    WithdrawSampler,
    changes,
)
from rubato.bus.message import Ack, pack_i32, unpack_i32
from rubato.runtime.actor import Actor, handler
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.embed import embed

VOCAB = 64

PUBLISHED: dict[str, tuple[int, np.ndarray]] = {}
"""By adapter: what the scripted engine samples under; of one test at a time."""

SAMPLED: list[tuple[str, int]] = []
"""(adapter, version) of every completion."""

NEEDED: list[int] = []
"""The least version that each was to be sampled under."""


class Toy:
    """One model."""

    def __init__(self):
        self.odds, self.gradient = np.zeros(VOCAB), np.zeros(VOCAB)
        self.version, self.stands, self.follows = 0, -1, False
        self.outcomes = {}

    def logprobs(self):
        return self.odds - np.log(np.exp(self.odds).sum())


class ScriptedTrainer(Actor):
    """Answers as TinkerTrainer does, and keeps files of every third step. `APPLIED` counts what each operation did in the life of the test."""

    role = "trainer"
    applied: dict[tuple[str, int], int] = {}
    hold: asyncio.Event | None = None
    """Where it is set, operations wait for it."""
    pace_s = 0.0
    """How long an operation takes."""

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.models: dict[str, Toy] = {}
        self.turns: dict[str, asyncio.Lock] = {}

    @handler(concurrency=64, outlives_asker=True)
    async def operate(self, request: Operate) -> Operated | Behind | OperationFailed:
        if ScriptedTrainer.hold is not None:
            await ScriptedTrainer.hold.wait()
        async with self.turns.setdefault(request.model, asyncio.Lock()):
            await asyncio.sleep(self.pace_s / 2)
            reply = self._operated(request)
            await asyncio.sleep(self.pace_s / 2)  # carried out, and not told yet
            return reply

    def _operated(self, request):
        operation, model = request.operation, self.models.get(request.model) or self._loaded(request.model)
        if model is not None and request.seq in model.outcomes:
            return Operated(request.seq, model.outcomes[request.seq], self._covered(request.model))
        if request.after > (-1 if model is None else model.stands):
            return Behind(-1 if model is None else model.stands)
        if isinstance(operation, ForwardBackward) and operation.loss == "nonsense":
            return OperationFailed(request.seq, "there is no loss nonsense", "user")
        if model is None:
            assert isinstance(operation, Begin)
            model = self.models[request.model] = Toy()
        assert request.seq > model.stands
        outcome = self._carry_out(request.model, model, operation)
        key = (request.model, request.seq)
        ScriptedTrainer.applied[key] = ScriptedTrainer.applied.get(key, 0) + 1
        if changes(operation):
            model.stands, model.outcomes = request.seq, {request.seq: outcome}
        if isinstance(operation, OptimStep) and model.version % 3 == 0:
            self._write(self._file(request.model), model)
        return Operated(request.seq, outcome, self._covered(request.model))

    def _carry_out(self, name, model, operation):
        match operation:
            case Begin(start=start):
                if start:
                    model.odds = np.load(Path(start) / "odds.npy")
            case ForwardBackward(data=data, forward_only=only):
                logprobs, losses = [], []
                for datum in data:
                    targets = np.frombuffer(datum.inputs["target_tokens"].data, np.int64)
                    given = datum.inputs.get("weights") or datum.inputs["advantages"]
                    weights = np.frombuffer(given.data, np.float32)
                    own = model.logprobs()[targets].astype(np.float32)
                    logprobs.append(own.tobytes())
                    losses.append((-own * weights).astype(np.float32).tobytes())
                    if not only:
                        for token, weight in zip(targets, weights, strict=True):
                            model.gradient += weight * np.exp(model.logprobs())
                            model.gradient[token] -= weight
                total = float(sum(np.frombuffer(each, np.float32).sum() for each in losses))
                return Computed(tuple(logprobs), tuple(losses), {"loss:sum": total})
            case OptimStep(learning_rate=rate):
                model.odds = model.odds - rate * model.gradient
                model.gradient = np.zeros(VOCAB)
                model.version += 1
                self._publish(name, model)
                return Stepped(model.version, {"optim/grad_norm": 1.0})
            case Save(folder=folder):
                Path(folder).mkdir(parents=True, exist_ok=True)
                np.save(Path(folder) / "odds.npy", model.odds)
            case Load(folder=folder):
                model.odds, model.version = np.load(Path(folder) / "odds.npy"), model.version + 1
                self._publish(name, model)
            case Follow():
                model.follows = True
                self._publish(name, model)
        return Stands(model.version)

    def _publish(self, name, model):
        if model.follows:
            PUBLISHED[name] = (model.version, model.odds.copy())

    def _file(self, name):
        return self.run.folder / "scripted" / f"{name}.json"

    def _write(self, path, model):
        path.parent.mkdir(exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps([model.odds.tolist(), model.version, model.stands, model.follows]))
        draft.rename(path)

    def _loaded(self, name):
        if not self._file(name).exists():
            return None
        model = self.models[name] = Toy()
        odds, model.version, model.stands, model.follows = json.loads(self._file(name).read_text())
        model.odds = np.array(odds)
        model.outcomes = {model.stands: Stepped(model.version, {})}
        self._publish(name, model)
        return model

    def _covered(self, name):
        return json.loads(self._file(name).read_text())[2] if self._file(name).exists() else -1

    @handler
    async def forget_model(self, request: ForgetModel) -> Ack:
        self.models.pop(request.model, None)
        PUBLISHED.pop(request.model, None)
        return Ack()

    @handler(concurrency=8)
    async def prepare_sampler(self, request: PrepareSampler) -> SamplerReady | SamplerRefused:
        PUBLISHED[request.adapter] = (1, np.load(Path(request.folder) / "odds.npy"))
        return SamplerReady(1)

    @handler(concurrency=8)
    async def withdraw_sampler(self, request: WithdrawSampler) -> Ack:
        PUBLISHED.pop(request.adapter, None)
        return Ack()

    @handler(concurrency=8)
    async def score(self, request: Score) -> Scored | SamplerRefused:
        odds = np.zeros(VOCAB)
        if request.folder:
            odds = np.load(Path(request.folder) / "odds.npy")
        elif request.model:
            model = self.models.get(request.model) or self._loaded(request.model)
            if model is None or model.version < request.version:
                return SamplerRefused("the model is behind", behind=True)
            odds = model.odds
        logprobs = odds - np.log(np.exp(odds).sum())
        found = logprobs[unpack_i32(request.tokens)].astype(np.float32)
        found[0] = np.nan
        return Scored(found.tobytes())


class ScriptedProxy(Actor):
    """Samples under what is published, without engines."""

    role = "llm_proxy"
    provides = frozenset({"generation"})

    @handler(concurrency=256)
    async def generate(self, request: Generate) -> GenerateReply:
        need = request.weights
        version, odds = PUBLISHED.get(need.adapter, (0, np.zeros(VOCAB))) if need.adapter else (0, np.zeros(VOCAB))
        if need.adapter and need.adapter not in PUBLISHED:
            return Aborted(request.request_id, Tokens(), f"there is no adapter {need.adapter}: none of that name is published")
        SAMPLED.append((need.adapter, version))
        NEEDED.append(need.version)
        logprobs = odds - np.log(np.exp(odds).sum())
        random = np.random.default_rng(request.sampling.seed)
        ids = random.choice(VOCAB, size=request.sampling.max_new_tokens, p=np.exp(logprobs) / np.exp(logprobs).sum())
        spans = (VersionSpan(version, 0, len(ids)),)
        tokens = Tokens(pack_i32(int(each) for each in ids), logprobs[ids].astype(np.float32).tobytes(), spans)
        return Completion(request.request_id, tokens, "length", "engine-1")


JOB = {
    "run": {"name": "tinker", "steps": 1},
    "actors": {
        "llm_proxy": {"class": "tests.tinker_job:ScriptedProxy"},
        "trainer": {"class": "tests.tinker_job:ScriptedTrainer", "restarts": 100},
        "tinker": {"class": "rubato.actors.gateway.tinker.server:TinkerServer", "restarts": 100},
    },
    "report": {"finish": ""},
}


def write_model(folder: Path) -> Path:
    """What a server reads of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {"model_type": "toy", "vocab_size": VOCAB, "max_position_embeddings": 512, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


@asynccontextmanager
async def serving(folder: Path, *overrides: str):
    """The job, and the address and the key of its server."""
    PUBLISHED.clear()
    SAMPLED.clear()
    NEEDED.clear()
    ScriptedTrainer.applied, ScriptedTrainer.hold, ScriptedTrainer.pace_s = {}, None, 0.0
    model = write_model(folder.parent / "model")
    config = from_mapping(JOB, [f"model.path={model}", f"tinker.models={{toy: {model}}}", *overrides])
    async with embed(config, folder) as job:
        address = folder / "tinker.json"
        while not address.exists():  # noqa: ASYNC110 - the server writes it
            await asyncio.sleep(0.02)
        told = json.loads(address.read_text())
        yield job, told["url"], told["api_key"]


class Client:
    """Asks as the SDK does, one request at a time, and without its retries."""

    def __init__(self, url: str, key: str):
        self.http = httpx.AsyncClient(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=60)
        self.seq = 0

    async def __aenter__(self):
        return self

    async def __aexit__(self, *why):
        await self.http.aclose()

    async def post(self, path, body, **more):
        given = {"content": body, "headers": {"Content-Type": PROTOBUF}} if isinstance(body, bytes) else {"json": body}
        return await self.http.post(path, **given, **more)

    async def asked(self, path, body):
        answer = await self.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def session(self):
        return (await self.asked("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}))["session_id"]

    async def model(self, session=None, number=0, **lora):
        session = session or await self.session()
        body = {"session_id": session, "model_seq_id": number, "base_model": "toy", "lora_config": {"rank": 8, **lora}}
        return (await self.result(await self.asked("create_model", body)))["model_id"]

    async def result(self, promise):
        """What retrieve_future tells at last: JSON, or the bytes of a message."""
        while True:
            answer = await self.post("retrieve_future", {"request_id": promise["request_id"], "allow_metadata_only": True})
            if answer.status_code != 408:
                break
        assert answer.status_code == 200, answer.text
        return answer.content if answer.headers["content-type"] == PROTOBUF else answer.json()

    def numbered(self, seq=None):
        if seq is None:
            self.seq += 1
        return self.seq if seq is None else seq

    async def learn(self, model, *data, seq=None, loss="cross_entropy", only=False, made_of=()):
        return await self.post("forward_backward", request_of(model, self.numbered(seq), data or (datum(),), loss, only, made_of))

    async def step(self, model, rate=0.5, seq=None):
        body = {"model_id": model, "seq_id": self.numbered(seq), "adam_params": {"learning_rate": rate}}
        return await self.post("optim_step", body)

    async def train(self, model, *data, loss="cross_entropy"):
        """One step, waited for; what it told."""
        learned, stepped = await self.learn(model, *data, loss=loss), await self.step(model)
        return output_of(await self.result(learned.json())), await self.result(stepped.json())

    async def numbered_post(self, route, model, seq=None, **body):
        return await self.post(route, {"model_id": model, "seq_id": self.numbered(seq), **body})

    async def sample(self, sampler, number=0, prompt=(1,), n=1, **more):
        params = {"max_tokens": more.pop("max_tokens", 4), "seed": more.pop("seed", 1), **more.pop("params", {})}
        body = {"sampling_session_id": sampler, "seq_id": number, "num_samples": n, "sampling_params": params, **more}
        return await self.post("asample", {**body, "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]}})


def datum(tokens=(1, 2, 3), targets=(2, 3, 4), **inputs):
    """The weights are 1 where nothing is said."""
    inputs = inputs or {"weights": [1.0] * len(targets)}
    return tokens, {"target_tokens": np.array(targets, np.int64), **{k: np.array(v, np.float32) for k, v in inputs.items()}}


def request_of(model, seq, data, loss="cross_entropy", only=False, made_of=()):
    """`made_of` are names of sampled sequences, of which each datum says it is made."""
    request = message("ForwardBackwardRequest")(model_id=model, seq_id=seq, loss_fn=loss, forward_only=only)
    for tokens, inputs in data:
        each = request.data.add()
        each.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
        for name in made_of:
            each.model_input_spans.add().sampled_tokens.sequence_id = name
        for name, values in inputs.items():
            dtype = INT64 if values.dtype == np.int64 else FLOAT32
            each.loss_fn_inputs.add(key=name).value.MergeFrom(message("Tensor")(dense=values.tobytes(), dtype=dtype, shape=values.shape))
    return request.SerializeToString()


def output_of(body):
    """Log-probabilities of each datum, and metrics."""
    assert isinstance(body, bytes), body
    told = message("ForwardBackwardOutput").FromString(body)
    found = []
    for record in told.loss_fn_outputs:
        value = next(each.value for each in record.fields if each.key == "logprobs")
        offsets = np.frombuffer(value.offsets, np.int64)
        found += [np.frombuffer(value.data[a:b], np.float32).tolist() for a, b in itertools.pairwise(offsets)]
    return found, {each.key: each.value for each in told.metrics}


def sampled_of(body):
    """(tokens, logprobs) of each sequence, and log-probabilities of the prompt."""
    assert isinstance(body, bytes), body
    told = message("SampleResponse").FromString(body)
    pairs = [(unpack_i32(each.tokens), np.frombuffer(each.logprobs, np.float32).tolist()) for each in told.sequences]
    return pairs, np.frombuffer(told.prompt_logprobs, np.float32).tolist()
