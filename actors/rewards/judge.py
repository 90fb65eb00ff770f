"""A reward function that asks a language model behind any OpenAI-compatible URL what each trajectory is worth.

In a file of yours, named in the config as `reward.functions: [my_judge.py:score]`:

    from rubato.actors.rewards.judge import judge

    score = judge("http://127.0.0.1:8000/v1", "Qwen/Qwen2.5-7B-Instruct", prompt="…{question}…{completion}…")
"""

import asyncio
import os
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx

PROMPT = (
    "Rate the following answer from 0 (useless) to 10 (perfect). "
    "Explain in one sentence, then write the number alone on the last line.\n\nAnswer:\n{completion}"
)

VERDICTS_KEPT = 256
"""By process; the oldest is forgotten first."""

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

Judge = Callable[..., Awaitable[list[float]]]


def last_number(verdict: str, *, scale: float = 10.0) -> float:
    """The last number of a verdict ÷ `scale`, at most 1 in size. Raises ValueError where there is none."""
    numbers = NUMBER.findall(verdict)
    if not numbers:
        raise ValueError(f"the judge gave no number: {verdict[:200]!r}")
    return min(1.0, max(-1.0, float(numbers[-1]) / scale))


def judge(
    url: str,
    model: str,
    *,
    prompt: str = PROMPT,
    system: str = "",
    read: Callable[[str], float] = last_number,
    at_once: int = 16,
    tries: int = 3,
    timeout_s: float = 60.0,
    key_variable: str = "OPENAI_API_KEY",
    **parameters: Any,
) -> Judge:
    """A reward function. `reward.timeout_s` must leave it the time of a whole batch.

    `url` is the API's base, such as http://host:8000/v1. `prompt` may name `{completion}` and every column, as `str.format` does; `read` makes
    a reward of the model's verdict, or raises. Up to `at_once` trajectories of a batch are asked for together, each up to
    `tries` times for `timeout_s`: where no server answers, or it says that it can't now (status 429 or 5xx). `key_variable` is the
    environment variable with the API's key; it may be unset. `parameters` go into the request: `max_tokens`, `temperature` (0 where not given).
    """
    endpoint = url.rstrip("/") + "/chat/completions"
    verdicts: OrderedDict[str, str] = OrderedDict()  # a batch in which one verdict can't be read is asked for again, one by one

    async def score(completions: list[str], **columns: list[Any]) -> list[float]:
        key = os.environ.get(key_variable, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        places = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(timeout=timeout_s, headers=headers) as client:

            async def one(at: int) -> float:
                row = {name: column[at] for name, column in columns.items()}
                asked = prompt.format(**{**row, "completion": completions[at]})
                messages = [{"role": "user", "content": asked}]
                if system:
                    messages.insert(0, {"role": "system", "content": system})
                if asked in verdicts:
                    return read(verdicts[asked])
                body = {"model": model, "messages": messages, "temperature": 0.0, **parameters}
                async with places:
                    verdict = verdicts[asked] = await _verdict(client, endpoint, body, tries)
                while len(verdicts) > VERDICTS_KEPT:
                    verdicts.popitem(last=False)
                return read(verdict)

            found = await asyncio.gather(*(one(at) for at in range(len(completions))), return_exceptions=True)
        for number in found:
            if isinstance(number, BaseException):
                raise number
        return [number for number in found if not isinstance(number, BaseException)]

    return score


async def _verdict(client: httpx.AsyncClient, endpoint: str, body: Mapping[str, Any], tries: int) -> str:
    problem = "was never asked"
    for left in reversed(range(tries)):
        try:
            response = await client.post(endpoint, json=body)
            if response.status_code != 429 and response.status_code < 500:
                return _content(endpoint, response)
            problem = f"answered {response.status_code}"
        except httpx.HTTPError as error:
            problem = f"can't be reached: {str(error) or type(error).__name__}"
        if left:
            await asyncio.sleep(0.5 * 2 ** (tries - 1 - left))
    raise RuntimeError(f"the judge at {endpoint} {problem}, {tries} times")


def _content(endpoint: str, response: httpx.Response) -> str:
    try:
        return str(response.json()["choices"][0]["message"]["content"])
    except (ValueError, LookupError, TypeError):
        said = " ".join(response.text[:200].split())
        raise RuntimeError(f"the judge at {endpoint} answered {response.status_code}, no completion: {said}") from None
