"""A process of your own that plays rollouts of a running job: Admit, Generate, Put. Usage: join_job.py RUN_DIR"""

import asyncio
import sys

from rubato.actors.envs.chat import Renderer, Transcript, renderer_of
from rubato.actors.envs.frozen_lake import FrozenLakeText
from rubato.actors.messages.generation import Generate, Sampling, WeightsNeed
from rubato.actors.messages.samples import Admit, Put, Ticket, Trajectory
from rubato.runtime.guest import Guest, join


async def play(me: Guest, chat: Renderer, ticket: Ticket) -> str:
    """One trajectory from its ticket to its acknowledged Put; returns its fate, "" while it may still train."""
    env, rollout, reward, done, turns = FrozenLakeText(), ticket.trajectory_id, 0.0, False, 0
    transcript = Transcript(chat.opening(env.reset(seed=ticket.seed)[0]))
    sampling = Sampling(2, stop_token_ids=chat.stop_token_ids, stop=chat.stop_strings)
    while not done and turns < 5:
        name, need = f"{rollout}.{ticket.attempt}.{turns}", WeightsNeed(ticket.version)
        reply = await me.ref("llm_proxy").ask(Generate(name, rollout, transcript.prompt, sampling, need), timeout=60)
        observation, gained, done, *_ = env.step(chat.decode(reply.tokens.ids))
        reward, turns = reward + gained, turns + 1
        transcript.sample(reply.tokens)
        transcript.show(chat.next_turn(observation, transcript))
    played = (transcript.segment(),), reward, turns, not done, 0.0
    return (await me.ref("sample_buffer").ask(Put(Trajectory(ticket, *played)), timeout=30)).fate


async def main(folder: str) -> None:
    async with join(folder) as me:
        chat = renderer_of(me.job.section("rollout"), me.run.folder / me.job.section("model").path)
        reply = await me.ref("sample_buffer").ask(Admit(4, me.name, me.incarnation), timeout=15)
        for ticket in reply.tickets:
            print(f"{ticket.trajectory_id}: {await play(me, chat, ticket) or 'handed over'}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
