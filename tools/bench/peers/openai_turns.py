"""Turns over HTTP, as most peers play them: one keep-alive `openai` client, and a starlette server that answers at once.

`serve` answers on the listening socket that it inherits; `play` starts it on a Unix socket, plays FrozenLake with `--concurrency` episodes at once for `--seconds`, and prints
{"turns", "client_us", "server_us"}: turns played, and CPU µs of either process for each.
"""

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from rubato.actors.envs.frozen_lake import ACTIONS, FrozenLakeText
from rubato.runtime.observe.figures import cpu_seconds

MAX_TURNS = 14
WORDS = tuple(ACTIONS)


def serve(fd: int) -> None:
    """Answer each chat completion with a random direction and its log-probability."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def complete(request: Request) -> JSONResponse:
        asked = await request.json()
        word = random.choice(WORDS)
        logprob = {"token": word, "logprob": -1.386, "bytes": None, "top_logprobs": []}
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": word},
            "logprobs": {"content": [logprob], "refusal": None},
        }
        usage = {"prompt_tokens": 7 * len(asked["messages"]), "completion_tokens": 1, "total_tokens": 8}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": asked["model"]}
        return JSONResponse({**answer, "choices": [choice], "usage": usage})

    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    uvicorn.run(app, fd=fd, log_level="critical", access_log=False)


class Player:
    """Plays episodes one after the other; `turns` counts those of all."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.turns = 0

    async def play(self, seed: int) -> None:
        """One episode after the other, until cancelled."""
        env = FrozenLakeText()
        while True:
            seed += 1000
            observation, _ = env.reset(seed=seed)
            messages = [{"role": "user", "content": observation}]
            for _ in range(MAX_TURNS):
                reply = await self._client.chat.completions.create(
                    model="m", messages=messages, max_tokens=1, temperature=1.0, seed=seed, logprobs=True
                )
                text = reply.choices[0].message.content
                observation, _, terminated, truncated, _ = env.step(text)
                self.turns += 1
                if terminated or truncated:
                    break
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": observation}]


async def play(socket_path: str, server: int, concurrency: int, seconds: float) -> dict[str, float]:
    """Warm up for a quarter of `seconds`, and measure; `server` is the process id of who answers."""
    import httpx2 as httpx  # which openai is built on
    import openai

    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    http = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=socket_path, limits=limits), timeout=60.0)
    async with openai.AsyncOpenAI(base_url="http://bench/v1", api_key="none", http_client=http) as client:
        player = Player(client)
        tasks = [asyncio.ensure_future(player.play(i)) for i in range(concurrency)]  # noqa: TID251
        await asyncio.sleep(seconds / 4)
        turns, ours, theirs = player.turns, time.process_time(), cpu_seconds({"server": server})["server"]
        await asyncio.sleep(seconds)
        turns = player.turns - turns
        ours, theirs = time.process_time() - ours, cpu_seconds({"server": server})["server"] - theirs
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {"turns": turns, "client_us": 1e6 * ours / turns, "server_us": 1e6 * theirs / turns}


def measure(concurrency: int, seconds: float) -> dict[str, float]:
    """Start a server, and play. Who connects before it accepts waits in the backlog."""
    import uvloop

    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/http.sock")
        listener.listen(concurrency)
        fd = listener.fileno()
        server = subprocess.Popen([sys.executable, __file__, "serve", str(fd)], pass_fds=[fd])
        try:
            return uvloop.run(play(f"{folder}/http.sock", server.pid, concurrency, seconds))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("serve", "play"))
    parser.add_argument("fd", type=int, nargs="?")
    parser.add_argument("--concurrency", type=int, default=192)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    if given.part == "serve":
        serve(given.fd)
    else:
        print(json.dumps(measure(given.concurrency, given.seconds)))
