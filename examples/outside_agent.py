"""A program of its own that trains a running job: python outside_agent.py RUN, where the config has a gateway (docs/agents.md)."""

import asyncio
import json
import sys
from pathlib import Path

import httpx
import openai


async def reward_of(prompt: str, base_url: str, key: str) -> float:
    """One trajectory by OpenAI's client, and what it is worth: here an answer of an even number of characters."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as agent:
        answer = await agent.chat.completions.create(model="any", messages=[{"role": "user", "content": prompt}])
    return float(len(answer.choices[0].message.content or "") % 2 == 0)


async def play_on(admin: httpx.AsyncClient) -> None:
    while (reply := await admin.post("/sessions", json={})).status_code != httpx.codes.GONE:  # 410: the run takes no more
        if reply.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # no place came free, or another gateway takes this one's place
            await asyncio.sleep(1)
            continue
        told = reply.raise_for_status().json()
        try:
            ending = {"reward": await reward_of(told["prompt"] or f"task {told['row']}", told["base_url"], told["api_key"])}
        except openai.APIStatusError as error:  # such as 410: it began under weights that are too old by now
            ending = {"error": str(error)}
        await admin.post(f"/sessions/{told['session_id']}/complete", json=ending)


async def main(run: Path) -> None:
    told = json.loads((run / "gateway.json").read_text())
    headers, patient = {"Authorization": f"Bearer {told['admin_key']}"}, httpx.AsyncHTTPTransport(retries=6)
    async with httpx.AsyncClient(base_url=told["url"], headers=headers, timeout=None, transport=patient) as admin:
        await asyncio.gather(*(play_on(admin) for _ in range(16)))  # sixteen sessions at once


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
