"""The engine of a vLLM that others started: `vllm serve` behind the Engine seam, tokens in and tokens out over HTTP.

It is a client in the worker's process. A request is asked anew under each version of the weights, with all that was sampled before, so each
HTTP request is under one version: what the server tells of it at its end is compared with that.
"""

import asyncio
from collections import abc
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import msgspec

from rubato.actors.checkpoints import model_folder
from rubato.actors.checkpoints.model_folder import Slice
from rubato.actors.config import ModelSection
from rubato.actors.engines.engine import CACHE, EXPORT, Chunk, Engine, EngineDead, EngineError, EngineHook, EngineLoad, Work, require
from rubato.actors.engines.scheduler import Sequence, bits, check
from rubato.actors.engines.section import EngineSection
from rubato.actors.engines.vllm_http import LOAD_S, Missing, VllmClient, flaw_of_url, key_in
from rubato.actors.engines.vllm_weights import (
    BACKEND,
    DIGESTS,
    PROBE,
    PROTOCOL,
    READS,
    ImagePlace,
    check_tensors,
    digest_in,
    lent,
    shapes_of,
    update_of,
)
from rubato.actors.gateway.token_api import GeneratedTokens, GenerateTokens, SamplingParams, TokensChoice, TokensRefused
from rubato.actors.messages.weights import WeightsDigest

LOGPROBS = "processed_logprobs"

TRIES = 3
"""Of one request that the server ends, or whose answer breaks off, without a single token meanwhile."""

BEAT_S = 10.0
"""Between two looks at whether the server still answers."""

COMMAND = "start it with the line that `rubato vllm-command CONFIG` prints"


class ServerTold(msgspec.Struct, frozen=True):
    """What our extension tells in each of the server's workers, see vllm_weights.py."""

    protocol: int
    vllm: str
    logprobs_mode: str
    weight_transfer: str
    max_len: int
    num_slots: int
    vocab_size: int
    dtype: str
    degree: int
    updating: bool


class ServedSequence(Sequence):
    """One that the server samples. What it waits for from there can be cut, which ends an HTTP request and not the sequence."""

    def __init__(self, work: Work, max_len: int) -> None:
        super().__init__(work, max_len)
        self.version = 0
        """Of the HTTP request under way."""
        self.first_version = -1
        """Of the first one."""
        self.aborted = False
        self.export: asyncio.Future[Work] | None = None
        self.num_asked = 0
        self.num_vain = 0
        """HTTP requests in a row that brought no token."""
        self._is_cut = False
        self._wait: asyncio.Timeout | None = None

    def cut(self) -> None:
        self._is_cut = True
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(0)

    def whole(self) -> None:
        """The next HTTP request begins, under weights that are in place."""
        self._is_cut = False

    async def next_of(self, events: AsyncGenerator[GeneratedTokens, None]) -> GeneratedTokens | None:
        """The next event; None once it was cut, or there is no more."""
        if self._is_cut:
            return None
        try:
            async with asyncio.timeout(None) as self._wait:
                return await anext(events, None)
        except TimeoutError:
            return None
        finally:
            self._wait = None

    @property
    def how_taken_out(self) -> str:
        return "aborted" if self.export is None else "exported"


class VllmServerEngine:
    """Lives on one event loop. The server is left as it is where this ends: its processes are not ours."""

    capabilities = frozenset({EXPORT})

    def __init__(self, folder: Path, model: ModelSection, section: EngineSection) -> None:
        self._folder = folder
        self._model = model
        self._section = section
        self._client: VllmClient | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._told = ServerTold(0, "", "", "", 0, 0, 0, "", 1, updating=False)
        self._sequences: dict[str, ServedSequence] = {}
        self._version = 0
        self._suspended = False
        self._why_dead = ""
        self._boundary = asyncio.Lock()
        """Held while the weights change, and while a request is asked."""

    async def start(self) -> None:
        """Connect, look at all that is needed of the server, and bring it the base model: it may hold what another run left."""
        if flaw := flaw_of_url(self._section.url):
            raise EngineError(f"engine.url {self._section.url} {flaw}")
        self._shapes = await asyncio.to_thread(shapes_of, self._folder)
        self._client = client = VllmClient(self._section.url, key_in(self._section.api_key_env))
        self._told = await self._probed(client)
        files = [ImagePlace(str(file.resolve())) for file in model_folder.weight_files(self._folder)]
        await self._readable(client, files[0].path)
        await client.post("/pause?mode=keep")
        if self._told.updating:
            await client.post("/finish_weight_update", {})
        await self._bring(client, 0, files)
        await client.post("/resume")
        await self._samples(client)

    async def generate(self, work: Work) -> AsyncGenerator[Chunk, None]:
        self._started()
        check(work, self._section.max_len, self._told.vocab_size, self._sequences)
        sequence = ServedSequence(work, self._section.max_len)
        if sequence.finish_reason:
            yield sequence.chunk()
            return
        self._sequences[work.request_id] = sequence
        try:
            while not sequence.finish_reason:
                if sequence.aborted:
                    sequence.finish_reason = sequence.how_taken_out
                    break
                async with aclosing(await self._asked(sequence)) as events:
                    while not sequence.finish_reason and (event := await sequence.next_of(events)) is not None:
                        if self._take(sequence, event) and not sequence.finish_reason:
                            yield sequence.chunk()
            yield sequence.chunk()
        except TokensRefused as error:
            raise await self._failed(work.request_id, error) from error
        finally:
            del self._sequences[work.request_id]
            self._exported(sequence)

    async def abort(self, request_id: str) -> None:
        self._started()
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.aborted = True
            sequence.cut()

    async def export(self, request_id: str, *, with_cache: bool = False) -> Work:
        if with_cache:
            require(self, CACHE)
        self._started()
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.aborted:
            raise _not_here(request_id)
        sequence.aborted, sequence.export = True, asyncio.get_running_loop().create_future()
        sequence.cut()
        return await sequence.export

    async def suspend(self) -> None:
        async with self._boundary:
            await self._started().post("/pause?mode=keep")
            self._suspended = True

    async def resume(self) -> None:
        async with self._boundary:
            client = self._started()
            if self._suspended:
                await client.post("/resume")
            self._suspended = False

    async def update(self, version: int, weights: memoryview) -> float:
        """The image is checked while the server goes on. Then it pauses, every request under way is cut, and asked anew afterwards."""
        self._started()
        await asyncio.to_thread(check_tensors, self._shapes, weights, f"weights version {version}")
        with ExitStack() as stack:
            place = await asyncio.to_thread(stack.enter_context, lent(weights))
            async with self._boundary:
                client, loop = self._started(), asyncio.get_running_loop()
                began = loop.time()
                await self._alone(client)
                if not self._suspended:
                    await client.post("/pause?mode=keep")
                for sequence in self._sequences.values():
                    sequence.cut()
                try:
                    await self._bring(client, version, [place])
                    if not self._suspended:
                        await client.post("/resume")
                except EngineError as error:
                    self._why_dead = f"the server broke while it loaded weights version {version}, and can't go on: {error}"
                    raise EngineDead(self._why_dead) from error
                self._version = version
                return loop.time() - began

    async def digest(self, slices: abc.Sequence[Slice]) -> WeightsDigest | None:
        """By the server's layers, between two steps; None where several ranks share them out."""
        return digest_in(await self._started().rpc(DIGESTS, [list(cut) for cut in slices]))

    def load(self) -> EngineLoad:
        self._started()
        num_slots = min(self._section.num_slots, self._told.num_slots)
        running = min(len(self._sequences), num_slots)
        return EngineLoad(num_slots, len(self._sequences) - running, running, self._version, self._suspended, degree=self._told.degree)

    async def stop(self) -> None:
        """The server goes on, for others; what was asked of it here is over."""
        client, self._client = self._client, None
        for sequence in self._sequences.values():
            sequence.aborted = True
            sequence.cut()
        if client is not None:
            await client.close()

    async def watch(self) -> None:
        """Ends with `stop`. Raises EngineDead once the server, or the process of its model, is gone or does not answer for ANSWER_S."""
        while (client := self._client) is not None:
            try:
                async with self._boundary:  # its model's process has no time to answer while it loads weights
                    await self._answers(client)
            except Exception:
                if self._client is None:  # `stop` closed it meanwhile
                    return
                raise
            await asyncio.sleep(BEAT_S)

    # -- requests ---------------------------------------------------------------------------------------------------

    async def _asked(self, sequence: ServedSequence) -> AsyncGenerator[GeneratedTokens, None]:
        """A new HTTP request for what is left of it."""
        async with self._boundary:
            client = self._started()
            sequence.whole()
            sequence.version, sequence.num_asked = self._version, sequence.num_asked + 1
            sequence.first_version = sequence.version if sequence.first_version < 0 else sequence.first_version
            sequence.num_vain += 1
            if sequence.num_vain > TRIES:
                raise TokensRefused(f"it ended the request {TRIES} times without a token: is it paused or aborted from elsewhere?")
            return client.generate(self._body(sequence))

    def _body(self, sequence: ServedSequence) -> GenerateTokens:
        work, sampling = sequence.work, sequence.work.sampling
        return GenerateTokens(
            token_ids=sequence.tokens.copy(),
            sampling_params=SamplingParams(
                max_tokens=sequence.max_tokens - len(sequence.tokens),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=bits(sequence.key, len(sequence.tokens)) >> 2,
                stop_token_ids=sorted(sequence.stop_ids),
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            ),
            request_id=f"{work.request_id}.{sequence.num_asked}",
            # Only "keep" has caches of older weights at the server: of requests that began under those, and for them alone.
            cache_salt=str(sequence.first_version) if self._section.kv_on_update == "keep" else None,
            stream=True,
        )

    def _take(self, sequence: ServedSequence, event: GeneratedTokens) -> bool:
        """Add what is new; whether there is any. Raises TokensRefused for an answer that can't be."""
        for choice in event.choices:
            tokens, logprobs = choice.token_ids or [], (choice.logprobs and choice.logprobs.content) or []
            if len(logprobs) != len(tokens) or any(one.token_id != token for one, token in zip(logprobs, tokens, strict=True)):
                raise TokensRefused(f"it told {len(logprobs)} log-probabilities of {len(tokens)} tokens")
            if choice.finish_reason == "error":
                raise TokensRefused("it failed there; its log says why")
            for one in logprobs:
                if sequence.finish_reason:
                    raise TokensRefused("it sampled more than was asked for")
                sequence.sampled(one.token_id, one.logprob, sequence.version)
            sequence.num_vain = 0 if tokens else sequence.num_vain
            self._check_versions(sequence, choice)
            return bool(tokens)
        return False

    def _check_versions(self, sequence: ServedSequence, choice: TokensChoice) -> None:
        """Raises EngineDead where the server tells of other weights than were brought to it: what was sampled belongs to no version."""
        told = {span.version for span in choice.weight_versions or ()}
        if told and told != {str(sequence.version)}:
            self._why_dead = (
                f"the server at {self._section.url} sampled under the weights {', '.join(sorted(told))}, but was brought version "
                f"{sequence.version}: something else updates it, give this engine a server of its own"
            )
            raise EngineDead(self._why_dead)

    def _exported(self, sequence: ServedSequence) -> None:
        if sequence.export is not None and not sequence.export.done():
            if sequence.finish_reason == "exported":
                sequence.export.set_result(sequence.moved(None))
            else:
                sequence.export.set_exception(_not_here(sequence.work.request_id))

    async def _failed(self, request_id: str, error: Exception) -> EngineError:
        client = self._started()
        try:
            await client.get("/health")
        except EngineError as dead:
            self._why_dead = str(dead)
            return EngineDead(f"request {request_id}: {dead}")
        return EngineError(f"request {request_id} was refused by the server at {client.url}: {error}")

    # -- the server -------------------------------------------------------------------------------------------------

    async def _probed(self, client: VllmClient) -> ServerTold:
        """What the server is. Raises EngineError, one sentence that names what it lacks."""
        lacks = f"the vLLM server at {client.url} lacks"
        await client.get("/v1/models")
        try:
            await client.get("/weight_info")
        except Missing:
            raise EngineError(f"{lacks} the routes for new weights: it runs without VLLM_SERVER_DEV_MODE=1, {COMMAND}") from None
        try:
            results = await client.rpc(PROBE)
        except EngineError as error:
            if isinstance(error, EngineDead):
                raise
            raise EngineError(f"{lacks} our worker extension ({error}): {COMMAND}") from None
        try:
            told = msgspec.convert(results[0], ServerTold)
        except (IndexError, msgspec.ValidationError) as error:
            raise EngineError(f"{lacks} a worker extension of this version of Rubato ({error}): {COMMAND}") from None
        if told.protocol != PROTOCOL:
            raise EngineError(f"{lacks} a worker extension of this version of Rubato: install the same one where it runs")
        if told.logprobs_mode != LOGPROBS:
            raise EngineError(f"{lacks} --logprobs-mode {LOGPROBS} (it has {told.logprobs_mode}): {COMMAND}")
        if told.weight_transfer != BACKEND:
            given = told.weight_transfer or "none"
            raise EngineError(f"{lacks} --weight-transfer-config with the backend {BACKEND} (it has {given}): {COMMAND}")
        if told.max_len < self._section.max_len:
            raise EngineError(f"{lacks} room for engine.max_len={self._section.max_len}: its --max-model-len is {told.max_len}")
        if told.dtype != self._model.dtype:
            raise EngineError(f"{lacks} --dtype {self._model.dtype}, which model.dtype says: it computes in {told.dtype}")
        return told

    async def _readable(self, client: VllmClient, path: str) -> None:
        found = await client.rpc(READS, path)
        if why := next((str(each.get("why")) for each in found if isinstance(each, dict) and each.get("why")), ""):
            raise EngineError(
                f"the vLLM server at {client.url} can't read {path} ({why}), and weights reach it by files: run it on the engine's host, as "
                "the same user"
            )

    async def _samples(self, client: VllmClient) -> None:
        """One token, in and out."""
        asked = GenerateTokens([1], SamplingParams(1, ignore_eos=True, logprobs=0, detokenize=False), "probe", stream=True)
        found: list[Any] = []
        try:
            async with aclosing(client.generate(asked)) as events:
                found = [choice async for event in events for choice in event.choices]
        except TokensRefused as error:
            raise EngineError(f"the vLLM server at {client.url} lacks tokens in, tokens out (/inference/v1/generate): {error}") from None
        if not found or found[-1].logprobs is None or found[-1].weight_versions is None:
            raise EngineError(
                f"the vLLM server at {client.url} lacks versions of weights, or log-probabilities, in /inference/v1/generate: it is older than "
                "vLLM 0.32"
            )

    async def _answers(self, client: VllmClient) -> None:
        """Raises EngineDead where it does not: /health is of the process that listens, which asks the model's for the version."""
        try:
            await client.get("/health")
            await self._alone(client)
        except EngineError as error:
            self._why_dead = self._why_dead or str(error)
            raise EngineDead(self._why_dead) from error

    async def _alone(self, client: VllmClient) -> None:
        """Raises EngineDead where other weights were brought to the server than ours."""
        found = await client.get("/weight_info")
        told = found.get("weight_version") if isinstance(found, dict) else None
        if told != str(self._version):
            self._why_dead = (
                f"the server at {client.url} says that it has the weights {told}, but was brought version {self._version}: something else "
                "updates it, or it was started anew"
            )
            raise EngineDead(self._why_dead)

    async def _bring(self, client: VllmClient, version: int, places: list[ImagePlace]) -> None:
        """Swap in what is there; the server is paused."""
        await client.post("/start_weight_update")
        update = {"update_info": update_of(places, self._shapes)}
        await client.post("/update_weights", update, limit_s=LOAD_S)
        await client.post("/finish_weight_update", {"weight_version": str(version)})
        if self._section.kv_on_update == "recompute" or not version:
            found = await client.post("/reset_prefix_cache?reset_running_requests=true")
            if not (isinstance(found, dict) and found.get("success")):
                raise EngineError(f"the server at {client.url} refused to reset its prefix cache")

    def _started(self) -> VllmClient:
        """Raises EngineDead where there is no server any more."""
        if self._client is None:
            raise EngineDead("the engine is not running: start it first")
        if self._why_dead:
            raise EngineDead(self._why_dead)
        return self._client


class ServerWatch(EngineHook):
    """Ends an engine whose server hangs, as one ends whose process is gone."""

    async def begin(self, engine: Engine) -> None:
        if isinstance(engine, VllmServerEngine):
            self.worker.spawn(engine.watch(), name=f"{self.worker.name}.server")


def _not_here(request_id: str) -> EngineError:
    return EngineError(f"request {request_id} does not run here: there is nothing to export")
