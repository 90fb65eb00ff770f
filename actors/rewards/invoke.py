"""Reward functions behind a URL: batches of trajectories as JSON, with retries, deadlines, and a key for each trajectory.

    POST URL   {"keys": [str], "completions": [str], "columns": {name: [any]}, "deadline_s": float}
    200        {"scores": [number | {"reason": str, "detail": str}], "cold": bool}

Entry i of every list is trajectory i; `columns` and what a number means are as in actors/rewards/functions.py, and a score that is an object
says why there is none. A key is the same for the same trajectory with the same text, however often it is sent, and no other has it; the header
`Idempotency-Key` is that of the batch. A call lasts `deadline_s` at most. `cold` may be left out: whether something had to be started for
this call. A batch of none asks whether a server is there. What RUBATO_REWARD_TOKEN holds goes along as `Authorization: Bearer`.
"""

import asyncio
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec

from rubato.actors.messages.samples import NotScored, Score
from rubato.actors.rewards.backend import CallLimit, RewardRefused, Told, checked_number, columns_of
from rubato.runtime.observe.figures import Metrics

TRIES = 3
"""Tries of one call, while no server is reached, or it says that it can't now (status 429 or 5xx). What gives no answer in time is not
tried again as a whole: each of its trajectories is, alone."""

PAUSE_S = 0.5
"""Before the second try; it doubles each time, and a server's Retry-After lengthens it up to `reward.timeout_s`."""

COLD_START_S = 30.0
"""For the first answer of all: what starts there may load a model."""

MOST_BYTES = 10 * 1024 * 1024
"""Of an answer."""

TIMEOUT = "timeout"

TOKEN = "RUBATO_REWARD_TOKEN"


class _Again(Exception):
    """Worth another try; the message is half a sentence. `reason` as in NotScored."""

    def __init__(self, reason: str, text: str, pause_s: float = 0.0) -> None:
        super().__init__(text)
        self.reason, self.pause_s = reason, pause_s


class HttpBackend:
    """Asks each function's URL; a try lasts as long as `limit` says."""

    def __init__(self, metrics: Metrics, limit: CallLimit) -> None:
        self._metrics = metrics
        self._limit = limit
        self._client: httpx.AsyncClient | None = None

    async def load(self, function: str) -> str:
        """A batch of none, for which a cold start is waited."""
        try:
            await self._post(function, "", _body([], [], COLD_START_S), 0, COLD_START_S)
        except (RewardRefused, _Again) as error:
            said = error.detail if isinstance(error, RewardRefused) else str(error)
            return f"reward function {said}. Is this its URL, and does its server run?"
        return ""

    async def call(self, function: str, requests: Sequence[Score]) -> list[float | NotScored]:
        """Where no server is reached none is scored, and they are not tried one by one; one that is too slow may have scored some."""
        keys = [key_of(request) for request in requests]
        together = _together(keys)
        timeout_s = self._limit.of(function, requests)
        body = _body(requests, keys, timeout_s)
        try:
            found, seconds = await self._post(function, together, body, len(requests), timeout_s)
        except _Again as error:
            if error.reason == TIMEOUT:
                raise RewardRefused(error.reason, str(error)) from error
            return [NotScored(error.reason, str(error))] * len(requests)
        scores = [_score(function, score) for score in found]
        self._limit.took(function, requests, scores, seconds)
        return scores

    async def each(self, function: str, requests: Sequence[Score], told: Told) -> None:
        """With the same keys: what a server has found meanwhile it need not compute again."""
        limit_s = self._limit.of(function, requests)

        async def alone(at: int, request: Score) -> None:
            key = key_of(request)
            body = _body([request], [key], limit_s)
            outcome: float | NotScored = NotScored(TIMEOUT, f"{function} gave no answer within {limit_s:g} s, asked alone")
            try:
                async with asyncio.timeout(limit_s):
                    (found,), _ = await self._post(function, _together([key]), body, 1, limit_s)
                    outcome = _score(function, found)
            except RewardRefused as error:
                outcome = NotScored(error.reason, error.detail)
            except _Again as error:
                outcome = NotScored(error.reason, str(error))
            except TimeoutError:
                pass
            told(at, outcome)

        self._metrics.count("reward/retries")
        async with asyncio.TaskGroup() as tasks:
            for at, request in enumerate(requests):
                tasks.create_task(alone(at, request))

    def once(self, function: str) -> bool:
        """A server that must not compute a trajectory twice knows it by its key."""
        return False

    async def run(self) -> None:
        """Nothing."""

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _post(self, url: str, key: str, body: bytes, num: int, timeout_s: float) -> tuple[list[Any], float]:
        """The scores, `num` of them, and the seconds of the try that got them. Raises _Again where no try got an answer, and RewardRefused for one that is not what was asked for."""
        loop = asyncio.get_running_loop()
        for tries_left in reversed(range(TRIES)):
            began = loop.time()
            try:
                answer = await self._try(url, key, body, timeout_s)
            except _Again as error:
                if not tries_left or error.reason == TIMEOUT:
                    raise
                self._metrics.count("reward/retries")
                await asyncio.sleep(max(PAUSE_S * 2 ** (TRIES - 1 - tries_left), min(error.pause_s, timeout_s)))
            else:
                return self._read(url, answer, num), loop.time() - began
        raise AssertionError

    async def _try(self, url: str, key: str, body: bytes, timeout_s: float) -> bytes:
        client = self._client = self._client or httpx.AsyncClient(timeout=None, headers=_headers())
        try:
            async with asyncio.timeout(timeout_s), client.stream("POST", url, content=body, headers={"Idempotency-Key": key}) as response:
                answer = b""
                async for piece in response.aiter_bytes():
                    answer += piece
                    if len(answer) > MOST_BYTES:
                        raise RewardRefused("too_large", f"{url} answered more than {MOST_BYTES:,} bytes")
        except TimeoutError:
            raise _Again(TIMEOUT, f"{url} gave no answer within {timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            said = str(error) or type(error).__name__
            raise _Again("unreachable", f"{url} can't be reached: {said}") from error
        if response.status_code == 504:
            raise _Again(TIMEOUT, f"{url} answered {_status(response, answer)}")
        if response.status_code == 429 or response.status_code >= 500:
            self._metrics.count("reward/cold_starts", response.status_code == 503)
            raise _Again("unreachable", f"{url} answered {_status(response, answer)}", _retry_after(response))
        if response.status_code != 200:
            raise RewardRefused("refused", f"{url} answered {_status(response, answer)}")
        return answer

    def _read(self, url: str, answer: bytes, num: int) -> list[Any]:
        try:
            found = msgspec.json.decode(answer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise RewardRefused("wrong_type", f"{url} answered no JSON: {_short(answer)}") from None
        scores = found.get("scores") if isinstance(found, dict) else None
        if not isinstance(scores, list):
            raise RewardRefused("wrong_type", f'{url} answered no {{"scores": […]}}: {_short(answer)}')
        if len(scores) != num:
            raise RewardRefused("wrong_length", f"{url} answered {len(scores)} scores for {num} trajectories")
        self._metrics.count("reward/cold_starts", found.get("cold") is True)
        return scores


def key_of(request: Score) -> str:
    """Same trajectory, same text: same key, whichever try or attempt it is."""
    parts = (request.trajectory_id, request.task, request.completions, request.columns)
    return hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest()[:32]


def _together(keys: Sequence[str]) -> str:
    """The key of a batch."""
    return hashlib.sha256("".join(keys).encode()).hexdigest()[:32]


def _body(requests: Sequence[Score], keys: Sequence[str], deadline_s: float) -> bytes:
    rows = [columns_of(request) for request in requests]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    completions = ["\n".join(request.completions) for request in requests]
    return msgspec.json.encode({"keys": keys, "completions": completions, "columns": columns, "deadline_s": deadline_s})


def _score(function: str, score: Any) -> float | NotScored:
    if isinstance(score, dict):
        said: Mapping[str, Any] = score
        return NotScored(str(said.get("reason", "refused"))[:64], f"{function}: {str(said.get('detail', ''))[:1000]}")
    return checked_number(function, score)


def _headers() -> dict[str, str]:
    token = os.environ.get(TOKEN, "")
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})


def _retry_after(response: httpx.Response) -> float:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else 0.0


def _status(response: httpx.Response, answer: bytes) -> str:
    return f"{response.status_code} {response.reason_phrase}: {_short(answer)}"


def _short(answer: bytes) -> str:
    text = " ".join(answer[:200].decode(errors="replace").split())
    return text or "nothing"
