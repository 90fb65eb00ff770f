"""Tries an environment once before the job spends anything on it."""

from collections.abc import Callable

from actors.envs.failures import EnvFailure, Subject, sentence
from actors.envs.hosting import EnvHost
from actors.envs.section import EnvSection
from actors.messages.samples import Purpose


async def check_environment(
    section: EnvSection, seed: int, *, log: str = "", on_output: Callable[[str], None] | None = None
) -> str:
    """Build, reset and close one environment, with held-out arguments too where they differ.

    Returns "" when that works, else the sentence for the user. A reset gets `env.reset_tries` tries.
    """
    host = EnvHost(section, on_output=on_output)
    try:
        await host.start()
        return await try_environment(host, section, seed, log=log)
    except EnvFailure as failure:
        return sentence(Subject(section.target, log), failure, seed=seed)
    finally:
        await host.close()


async def try_environment(host: EnvHost, section: EnvSection, seed: int, *, log: str) -> str:
    """The same on a host that was started, which keeps the environment for the first rollout."""
    purposes: tuple[Purpose, ...] = ("train", "eval") if section.eval_kwargs else ("train",)
    for purpose in purposes:
        for num_failed in range(1, section.reset_tries + 1):
            failure = await _try_once(host, purpose, seed)
            if failure is None:
                break
            if num_failed == section.reset_tries:
                return sentence(Subject(section.target, log), failure, seed=seed, tries=num_failed)
    return ""


async def _try_once(host: EnvHost, purpose: Purpose, seed: int) -> EnvFailure | None:
    env = None
    try:
        env = await host.borrow(purpose)
        await env.reset(seed)
    except EnvFailure as failure:
        if env is not None:
            await env.close()
        return failure
    host.give_back(env, purpose)
    return None
