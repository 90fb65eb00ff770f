"""As much of `vllm serve` as an engine asks of it, without a model: its tokens count up from the last one of the prompt."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager, suppress

import uvicorn

from rubato.actors.engines.vllm_weights import BACKEND, PROTOCOL
from rubato.actors.gateway import token_api
from rubato.actors.gateway.token_api import GeneratedTokens, TokenLogprob, TokenLogprobs, TokensChoice, WeightVersion
from rubato.runtime.http_server import HttpServer

TOLD = {
    "protocol": PROTOCOL, "vllm": "0.32.0", "logprobs_mode": "processed_logprobs", "weight_transfer": BACKEND, "max_len": 256, "num_slots": 4,
    "vocab_size": 1000, "dtype": "float32", "degree": 1, "updating": False,
}  # fmt: skip


class ScriptedServe:
    """What a test sets, it lacks or does."""

    def __init__(self):
        self.key = ""
        self.missing = set()
        """Paths that it has not."""
        self.told = dict(TOLD)
        self.unread = ""
        self.version = "default"
        self.says = None
        """The version that it tells of what it sampled, where that is another than it was brought."""
        self.asked = []
        """Every GenerateTokens."""
        self.posted = []
        """Path of every command, and what is in its body."""
        self.breaks_after = -1
        """Tokens of a request, after which its stream ends without a word."""
        self.ends_at_once = False
        self.dead = False
        self.answers = asyncio.Event()
        """While it is not set, the server takes requests and says nothing."""
        self.answers.set()
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.url = ""

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        path, query = scope["path"], scope["query_string"].decode()
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        await self.answers.wait()
        headers = dict(scope["headers"])
        if path in self.missing:
            await self._whole(send, 404, {"detail": "Not Found"})
        elif path.startswith(("/v1", "/inference")) and headers.get(b"authorization", b"").decode() != (self.key and f"Bearer {self.key}"):
            await self._whole(send, 401, {"error": "Unauthorized"})
        elif path == token_api.PATH:
            await self._generate(token_api.asked(body), send)
        else:
            self.posted.append((f"{path}?{query}" if query else path, json.loads(body or b"null")))
            await self._whole(send, *self._command(path, json.loads(body or b"null")))

    def _command(self, path, body):
        if path == "/health" and self.dead:
            return 503, None
        if path == "/weight_info":
            return 200, {"weight_version": self.version}
        if path == "/collective_rpc":
            if body["method"] not in ("rubato_told", "rubato_reads") or self.told is None:
                return 500, {"error": {"message": f"no attribute '{body['method']}'"}}
            return 200, {"results": [self.told if body["method"] == "rubato_told" else {"why": self.unread}]}
        if path == "/pause":
            self.goes_on.clear()
        elif path == "/resume":
            self.goes_on.set()
        elif path == "/finish_weight_update":
            self.version = body.get("weight_version", self.version)
        return 200, {"success": True}

    async def _generate(self, asked, send):
        self.asked.append(asked)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        params, version = asked.sampling_params, self.version
        for number in range(params.max_tokens):
            await self.goes_on.wait()
            await asyncio.sleep(0.001)
            if number == self.breaks_after:
                break
            token = asked.token_ids[-1] + number + 1
            last = number + 1 == params.max_tokens or self.ends_at_once
            spans = [WeightVersion(self.says or version, 0, number + 1)] if last else None
            reason = ("abort" if self.ends_at_once else "length") if last else None
            tokens = [] if self.ends_at_once else [token]
            logprobs = TokenLogprobs([TokenLogprob(token, -0.5) for token in tokens])
            choice = TokensChoice(0, tokens, logprobs, reason, spans)
            await send({"type": "http.response.body", "body": token_api.event(GeneratedTokens([choice])), "more_body": True})
            if last:
                break
        end = b"" if self.breaks_after >= 0 else token_api.event(None)
        await send({"type": "http.response.body", "body": end})

    async def _whole(self, send, status, body):
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


@asynccontextmanager
async def serving(**given):
    """One that listens."""
    serve = ScriptedServe()
    for name, value in given.items():
        setattr(serve, name, value)
    listener = socket.create_server(("127.0.0.1", 0))
    serve.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = HttpServer(uvicorn.Config(serve, log_config=None, lifespan="off"))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(server.serve([listener]))
        try:
            yield serve
        finally:
            serve.goes_on.set()
            serve.answers.set()
            server.end()
            server.end()
            with suppress(asyncio.CancelledError):
                await running
