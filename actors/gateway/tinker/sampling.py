"""Sampling clients and their requests: under the base model, what was saved, or a model as it is trained."""

import asyncio
import secrets
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rubato.actors.checkpoints.model_folder import most_positions, read_description, vocab_size_of
from rubato.actors.envs.chat import TextTokenizer
from rubato.actors.envs.templates import ids_in_configs
from rubato.actors.gateway.session import Refused
from rubato.actors.gateway.tinker.ages import Under
from rubato.actors.gateway.tinker.journal import Book, Entry, Owned, Told
from rubato.actors.gateway.tinker.models import TRAINER, Model
from rubato.actors.gateway.tinker.requests import LEAST_TOP_P, SampleRequest
from rubato.actors.gateway.tinker.wire import PromptScores, Sampled, sampled
from rubato.actors.messages.generation import Completion, Generate, Sampling, why_early
from rubato.actors.messages.tinker import Follow, PrepareSampler, SamplerRefused, Score, Scored, WithdrawSampler
from rubato.bus.errors import AskFailed, Failed, Unknown
from rubato.bus.message import pack_i32
from rubato.planning.engine_info import WeightsNeed

if TYPE_CHECKING:
    from rubato.actors.gateway.tinker.server import TinkerServer

PROXY = "llm_proxy"

ASK_S = 600.0
"""Longest that one completion may take, waiting for an engine and its tokens together."""

SCORE_S = 300.0

MOST_TRIES = 4
"""Of one completion whose engine ended it early."""

PAUSE_S = 0.5

KEPT_SAMPLERS = 65_536


class Sampler(msgspec.Struct, frozen=True):
    """A sampling session: under the base model where it has no `model`, under what `seq` of it saved, or, where it saved none, under the model
    as it is trained, from `least` on."""

    id: str
    tenant: str
    session: str
    base: str
    path: str = ""
    model: str = ""
    seq: int = -1
    version: int = 0
    over: bool = False

    @property
    def follows(self) -> bool:
        return bool(self.model) and self.seq < 0

    @property
    def adapter(self) -> str:
        return f"{self.model}@{self.seq}" if self.seq >= 0 else self.model


class Future:
    """What is to come of one request."""

    def __init__(self, tenant: str, session: str, digest: bytes, n: int) -> None:
        self.tenant, self.session, self.digest, self.n = tenant, session, digest, n
        self.done = asyncio.Event()
        self.told: Told | None = None
        self.task: asyncio.Task[None] | None = None

    def settle(self, told: Told) -> None:
        self.told = told
        self.done.set()


class Ready(NamedTuple):
    """A saved adapter that engines can have."""

    version: int
    users: set[str]


class Limits(NamedTuple):
    """Of the base model, and of what engines take."""

    most_tokens: int
    """Prompt and completion together."""
    vocab_size: int
    """0: not known."""
    ends: tuple[int, ...]
    """Tokens that end a completion whose client names none."""


class Samplings:
    """Requests are kept in memory alone: a client asks again for one that isn't known any more."""

    def __init__(self, server: "TinkerServer", book: Book) -> None:
        self._server, self._book = server, book
        self._section = server.config.tinker
        self.samplers: OrderedDict[str, Sampler] = OrderedDict()
        self.limits = Limits(2, 0, ())
        self._futures: OrderedDict[str, Future] = OrderedDict()
        self._ready: OrderedDict[str, Ready] = OrderedDict()
        self._turn = asyncio.Lock()
        self._under_way = 0

    # -- sampling sessions -------------------------------------------------------------------------------------------

    def load(self) -> None:
        """What a server of before left. Blocks."""
        for each in self._book.read():
            if each.over:
                self.samplers.pop(each.id, None)
            else:
                self.samplers[each.id] = each
        self._book.rewrite(self.samplers.values())

    def is_another(self, sampler: Sampler) -> bool:
        """There is one of its name, of something else. What a path names may have changed."""
        there = self.samplers.get(sampler.id, sampler)
        return (there.base, there.path) != (sampler.base, sampler.path) or (not there.path and there.adapter != sampler.adapter)

    async def open(self, sampler: Sampler) -> str:
        """It may be asked from now on, also by a server that is started again. Opened twice, it stays as it was."""
        if sampler.id not in self.samplers:
            await self._server.on_disk(self._server.folder, self._book.add, sampler)
            self.samplers[sampler.id] = sampler
            while len(self.samplers) > KEPT_SAMPLERS:
                self.samplers.popitem(last=False)
        return sampler.id

    @staticmethod
    def made_of(owned: Owned, entry: Entry, seq: int, version: int) -> Sampler:
        """What is to come of a model's operation."""
        saved = -1 if isinstance(entry.operation, Follow) else seq
        return Sampler(entry.sampler, owned.tenant, owned.session, owned.base, "", owned.id, saved, version)

    async def open_of(self, owned: Owned, entry: Entry, seq: int, version: int) -> None:
        """Open what comes of a model's operation."""
        sampler = self.made_of(owned, entry, seq, version)
        await self.open(sampler)
        if sampler.seq >= 0:
            await self._let_go_of_snapshots(owned.id)

    async def _let_go_of_snapshots(self, model: str) -> None:
        own = [each for each in self.samplers.values() if each.model == model and each.seq >= 0 and not each.path]
        for each in own[: -self._section.snapshots_kept]:
            await self._close(each)
            if (found := self._server.models.get(model)) is not None:
                await self._server.offload(found.journal.drop_save, each.seq)

    async def close_session(self, session: str) -> None:
        for each in [each for each in self.samplers.values() if each.session == session]:
            await self._close(each)
        for name, future in list(self._futures.items()):
            if future.session == session:
                self._end(name, future)

    async def _close(self, sampler: Sampler) -> None:
        self.samplers.pop(sampler.id, None)
        await self._server.on_disk(self._server.folder, self._book.add, msgspec.structs.replace(sampler, over=True))
        if sampler.seq >= 0 and not any(each.adapter == sampler.adapter for each in self.samplers.values()):
            async with self._turn:
                await self._withdraw(sampler.adapter)

    def found(self, tenant: str, name: str) -> Sampler:
        """Raises Refused."""
        sampler = self.samplers.get(name)
        if sampler is None or sampler.tenant != tenant:
            raise Refused(404, "unknown_sampler", f"there is no sampling session {name[:128]!r}")
        return sampler

    # -- requests ----------------------------------------------------------------------------------------------------

    def ask(self, sampler: Sampler, asked: SampleRequest, body: bytes) -> tuple[str, list[str]]:
        """Begin it, or find it where it is under way: id of the request, and of each sequence. Raises Refused."""
        name = f"{sampler.id}:{asked.seq_id}" if asked.seq_id is not None else f"sample-{secrets.token_hex(12)}"
        digest = blake2b(body, digest_size=12).digest()
        future = self._futures.get(name)
        if future is not None and future.digest != digest:
            raise Refused(400, "seq_id_taken", f"seq_id {asked.seq_id} was another request before; requests have numbers of their own")
        if future is None:
            prompt, sampling = self._checked(asked)
            if asked.num_samples > self._section.max_samples:
                raise Refused(
                    400, "too_many_samples", f"num_samples is {asked.num_samples}; tinker.max_samples={self._section.max_samples}"
                )
            if self._under_way + asked.num_samples > self._section.max_samples:
                raise Refused(429, "too_many_samples", f"tinker.max_samples={self._section.max_samples} completions are under way already")
            future = self._futures[name] = Future(sampler.tenant, sampler.session, digest, asked.num_samples)
            future.task = self._server.spawn(
                self._answer(name, future, sampler, asked, prompt, sampling), name=f"{self._server.name}.sample"
            )
        return name, [f"{name}:{number}" for number in range(future.n)]

    def _checked(self, asked: SampleRequest) -> tuple[list[int], Sampling]:
        """Raises Refused for what can't be sampled."""
        asked.check()
        prompt, limits, wanted = asked.tokens(), self.limits, asked.sampling_params
        room = limits.most_tokens - len(prompt)
        if not prompt or room < 1:
            why = f"the prompt has {len(prompt):,} tokens; it needs one at least, and with a completion there may be {limits.most_tokens:,}"
            raise Refused(400, "context_length_exceeded", why)
        most = limits.vocab_size or 2**31
        if strange := next((each for each in prompt if not 0 <= each < most), None):
            raise Refused(400, "invalid_request_error", f"the prompt has the token {strange}; the model's are 0 to {most - 1}")
        ids, texts = wanted.ends()
        return prompt, Sampling(
            max_new_tokens=min(wanted.max_tokens or room, room),
            temperature=wanted.temperature,
            top_p=max(wanted.top_p, LEAST_TOP_P),
            stop_token_ids=limits.ends if ids is None and texts is None else ids or (),
            seed=(secrets.randbits(31) if wanted.seed is None else wanted.seed) % 2**31,
            stop=texts or (),
        )

    def future(self, tenant: str, name: str) -> Future | None:
        """None: it is none of the tenant's."""
        future = self._futures.get(name)
        return future if future is not None and future.tenant == tenant else None

    async def told(self, name: str, future: Future, wait_s: float) -> Told | None:
        """What came of it; None where that is not there yet."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await future.done.wait()
        return future.told

    def cancel(self, tenant: str, name: str) -> None:
        """No request waits for it any more."""
        if (future := self.future(tenant, name)) is not None:
            self._end(name, future)

    def _end(self, name: str, future: Future) -> None:
        self._futures.pop(name, None)
        if future.task is not None:
            future.task.cancel()

    async def _answer(
        self, name: str, future: Future, sampler: Sampler, asked: SampleRequest, prompt: list[int], sampling: Sampling
    ) -> None:
        self._under_way += asked.num_samples
        try:
            body = await self._sampled(name, sampler, asked, pack_i32(prompt), sampling)
            await self._server.on_disk(self._server.folder, self._server.ages.keep)  # before a client can train on them
            future.settle(Told(body, "pb"))
        except* Refused as group:
            why: Any = group.exceptions[0]
            while isinstance(why, BaseExceptionGroup):
                why = why.exceptions[0]
            category = "user" if why.status < 500 else "server"
            future.settle(Told(msgspec.json.encode({"error": str(why), "category": category}), "failed"))
        finally:
            self._under_way -= asked.num_samples
            self._let_go()

    async def _sampled(self, name: str, sampler: Sampler, asked: SampleRequest, prompt: bytes, sampling: Sampling) -> bytes:
        seeded = asked.sampling_params.seed is not None
        drawn = f"tinker:{blake2b(prompt, digest_size=12).hexdigest()}"  # a seed draws the same again for the same prompt
        async with asyncio.TaskGroup() as tasks:
            scored = tasks.create_task(self._scored(sampler, asked, prompt)) if asked.prompt_logprobs else None
            parts = [
                tasks.create_task(self._completed(f"{name}:{number}", sampler, prompt, each, f"{drawn}:{number}" if seeded else ""))
                for number, each in enumerate(map(partial(_of, sampling), range(asked.num_samples)))
            ]
        return sampled([part.result() for part in parts], None if scored is None else scored.result())

    async def _completed(self, name: str, sampler: Sampler, prompt: bytes, sampling: Sampling, session: str) -> Sampled:
        why = ""
        for attempt in range(MOST_TRIES):
            need = await self._need(sampler, name)
            request_id = f"tinker:{name}" + (f":{attempt}" if attempt else "")
            try:
                with self._server.waits.on(name, stage="generate", holder=PROXY):
                    request = Generate(request_id, session or request_id, prompt, sampling, need)
                    reply = await self._server.ref(PROXY).ask(request, timeout=ASK_S)
            except Failed as error:
                raise Refused(400, "generation_failed", f"the engine refuses the request: {error}") from error
            except AskFailed as error:
                if isinstance(error, Unknown) and attempt + 1 < MOST_TRIES:
                    continue
                raise Refused(503, "generation_failed", f"no engine answered: {error}") from error
            finally:
                self._leave(sampler, name)
            if isinstance(reply, Completion):
                spans = reply.tokens.spans
                versions = [span.version for span in spans] or [sampler.version]
                under = (
                    Under(sampler.model, min(versions), max(versions))
                    if sampler.follows
                    else Under(sampler.model, sampler.version, sampler.version)
                )
                self._server.ages.note(prompt, reply.tokens.ids, name, under)
                return Sampled(reply.tokens.ids, reply.tokens.logprobs, reply.finish_reason == "stop")
            why = why_early(reply)
            if sampler.seq >= 0:
                self._ready.pop(sampler.adapter, None)  # it may have been withdrawn: it is published anew
            elif sampler.follows and (model := self._server.models.get(sampler.model)) is not None:
                model.doubt()
            await asyncio.sleep(PAUSE_S)
        raise Refused(503, "generation_failed", f"the completion was ended early {MOST_TRIES} times: {why}")

    async def _scored(self, sampler: Sampler, asked: SampleRequest, prompt: bytes) -> PromptScores:
        folder = str(self._server.save_folder(sampler.model, sampler.seq)) if sampler.seq >= 0 else ""
        until, tries = self._server.loop.time() + SCORE_S, 0
        while True:
            model = self._followed(sampler)
            name, version = ("", 0) if model is None else (sampler.model, model.version)
            try:
                request = Score(prompt, folder, name, asked.topk_prompt_logprobs, version)
                reply = await self._server.ref(TRAINER).ask(request, timeout=SCORE_S)
            except Failed as error:
                raise Refused(400, "scoring_failed", f"the prompt can't be scored: {error}") from error
            except AskFailed as error:
                tries += 1
                if tries == MOST_TRIES:
                    raise Refused(503, "scoring_failed", f"the trainer did not answer: {error}") from error
                await asyncio.sleep(PAUSE_S)
                continue
            if isinstance(reply, Scored):
                top = asked.topk_prompt_logprobs
                return PromptScores(reply.logprobs, asked.prompt_logprobs_last_n, top, reply.top_ids, reply.top_logprobs)
            if model is None or not reply.behind or self._server.loop.time() > until:
                raise Refused(503 if reply.behind else 400, "scoring_failed", f"the prompt can't be scored: {reply.reason}")
            model.doubt()
            await asyncio.sleep(PAUSE_S)

    # -- adapters ----------------------------------------------------------------------------------------------------

    def _followed(self, sampler: Sampler) -> Model | None:
        """The model that it follows; None: it follows none. Raises Refused where that is there no more."""
        if not sampler.follows:
            return None
        model = self._server.models.get(sampler.model)
        if model is None:
            raise Refused(404, "unknown_model", "the model that the sampling client follows is unloaded")
        return model

    async def _need(self, sampler: Sampler, user: str) -> WeightsNeed:
        """What an engine must hold for it. Raises Refused."""
        if not sampler.model:
            return WeightsNeed()
        if (model := self._followed(sampler)) is not None:
            alpha = self._section.alpha
            return WeightsNeed(max(sampler.version, 0 if alpha is None else model.version - alpha), adapter=sampler.adapter)
        async with self._turn:
            ready = self._ready.get(sampler.adapter)
            if ready is None:
                await self._make_room()
                ready = self._ready[sampler.adapter] = Ready(await self._publish(sampler), set())
            self._ready.move_to_end(sampler.adapter)
            ready.users.add(user)
            return WeightsNeed(ready.version, adapter=sampler.adapter)

    def _leave(self, sampler: Sampler, user: str) -> None:
        ready = self._ready.get(sampler.adapter)
        if ready is not None:
            ready.users.discard(user)

    async def _publish(self, sampler: Sampler) -> int:
        folder = self._server.save_folder(sampler.model, sampler.seq)
        if not await self._server.offload(folder.is_dir):
            raise Refused(404, "unknown_path", "what the sampling session samples under is there no more")
        for attempt in range(MOST_TRIES):
            try:
                reply = await self._server.ref(TRAINER).ask(PrepareSampler(sampler.adapter, str(folder)), timeout=SCORE_S)
            except AskFailed as error:
                if isinstance(error, Failed) or attempt + 1 == MOST_TRIES:
                    raise Refused(503, "generation_failed", f"the weights can't be published: {error}") from error
                await asyncio.sleep(PAUSE_S)
                continue
            if isinstance(reply, SamplerRefused):
                raise Refused(400, "generation_failed", f"the weights can't be published: {reply.reason}")
            return reply.version
        raise AssertionError("unreachable")

    async def _make_room(self) -> None:
        while len(self._ready) >= self._section.samplers:
            idle = next((name for name, ready in self._ready.items() if not ready.users), None)
            if idle is None:
                return  # all are in use: engines have room for 64
            await self._withdraw(idle)

    async def _withdraw(self, adapter: str) -> None:
        if self._ready.pop(adapter, None) is not None:
            with suppress(AskFailed):
                await self._server.ref(TRAINER).ask(WithdrawSampler(adapter), timeout=SCORE_S)

    def forget_ready(self) -> None:
        """The trainer began anew: nothing that it published is there."""
        self._ready.clear()

    def _let_go(self) -> None:
        """Of the oldest results beyond what is kept."""
        done = [(name, future) for name, future in self._futures.items() if future.told is not None]
        size = sum(len(future.told.body) for _, future in done if future.told is not None)
        for name, future in done[:-1]:
            if len(done) <= self._section.results_kept + self._section.max_samples and size <= self._section.results_mb * 2**20:
                return
            assert future.told is not None
            size -= len(future.told.body)
            del self._futures[name]
            done = done[1:]


def _of(sampling: Sampling, number: int) -> Sampling:
    """That of one of several completions, which differ by their seeds."""
    return msgspec.structs.replace(sampling, seed=(sampling.seed + number) % 2**31)


def limits_of(folder: Path, longest: int) -> Limits:
    """Of a model folder, for engines that take sequences of up to `longest` tokens. Blocks."""
    try:
        ends = tuple(TextTokenizer(folder).stop_ids)
    except ValueError:  # its clients bring theirs
        ends = tuple(ids_in_configs(folder, "eos_token_id"))
    return Limits(min(longest, most_positions(read_description(folder), longest)), vocab_size_of(folder) or 0, ends)
