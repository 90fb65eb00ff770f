"""The start-up check: do trainer and engine give the same tokens the same log-probabilities?"""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from actors.messages.generation import Aborted, Completion, Generate, Sampling
from actors.training.engine import TrainError
from actors.training.section import CheckSection
from bus.message import pack_i32, unpack_f32, unpack_i32
from runtime.ref import Ref

PROMPT_TOKENS = 8
WORST_SHOWN = 5


class Difference(NamedTuple):
    """One sampled token as both sides see it (log-probabilities, nats)."""

    prompt: int
    position: int
    token: int
    engine: float
    trainer: float


class Agreement(NamedTuple):
    """Mean |Δ log-prob| over `num_tokens` sampled tokens, and the tokens that differ most."""

    mean_abs: float
    num_tokens: int
    worst: list[Difference]


async def sample(
    proxy: Ref, section: CheckSection, *, vocab_size: int, version: int, key: str, seed: int
) -> list[tuple[list[int], Completion]]:
    """Completions of random prompts under weights no older than `version`: off any task, so every weight matters."""
    chance = random.Random(seed)
    found: list[tuple[list[int], Completion]] = []
    for index in range(section.num_prompts):
        prompt = [chance.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]
        name = f"check.{key}.{index}"
        sampling = Sampling(section.num_tokens, seed=chance.randrange(2**31))
        request = Generate(name, name, pack_i32(prompt), sampling, min_version=version)
        reply = await proxy.ask(request, timeout=section.timeout_s)
        if isinstance(reply, Aborted):
            raise TrainError(f"the engine aborted the start-up check ({reply.reason})")
        found.append((prompt, reply))
    return found


def compare(
    sampled: Sequence[tuple[list[int], Completion]], logprobs: Callable[[list[list[int]]], list[list[float]]]
) -> Agreement:
    """Recompute what the engine reported. Blocks: offload it."""
    completions = [unpack_i32(reply.tokens.ids) for _, reply in sampled]
    recomputed = logprobs([prompt + ids for (prompt, _), ids in zip(sampled, completions, strict=True)])
    differences: list[Difference] = []
    for index, ((prompt, reply), ids) in enumerate(zip(sampled, completions, strict=True)):
        reported = unpack_f32(reply.tokens.logprobs)
        for position, (token, engine) in enumerate(zip(ids, reported, strict=True)):
            differences.append(Difference(index, position, token, engine, recomputed[index][len(prompt) + position]))
    gaps = [abs(d.engine - d.trainer) for d in differences]
    worst = sorted(differences, key=lambda d: -abs(d.engine - d.trainer))[:WORST_SHOWN]
    return Agreement(sum(gaps) / max(1, len(gaps)), len(gaps), worst)


def require(found: Agreement, section: CheckSection, dtype: str) -> str:
    """A sentence for the user. Raises TrainError, with the tokens that differ most, where the two do not see the same policy."""
    limit = section.limit_float32 if dtype == "float32" else section.limit_bfloat16
    measured = f"mean |Δlogp| {found.mean_abs:.1e} over {found.num_tokens} tokens"
    if not found.mean_abs <= limit:
        raise TrainError(
            f"trainer and engine disagree: {measured}, limit {limit:.0e} ({dtype}). "
            f"Check that both load the same model folder and dtype.\n{table(found)}"
        )
    return f"trainer and engine agree: {measured}"


def table(agreement: Agreement) -> str:
    """The worst tokens, one per line."""
    lines = ["prompt  position  token   engine      trainer     |Δ|"]
    lines += [
        f"{d.prompt:6d}  {d.position:8d}  {d.token:5d}  {d.engine:10.5f}  {d.trainer:10.5f}  {abs(d.engine - d.trainer):.2e}"
        for d in agreement.worst
    ]
    return "\n".join(lines)
