"""A chat server that knows one answer: starlette on uvicorn, which decodes each request's body and answers with the line that it read at its start.

It prints its port once it listens. The argument is how many connections may wait to be accepted.
"""

import json
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

ANSWER = json.loads(sys.stdin.buffer.readline())


async def complete(request: Request) -> JSONResponse:
    """The answer, to the model that was asked."""
    asked = await request.json()
    return JSONResponse({**ANSWER, "model": asked["model"]})


async def serve(backlog: int) -> None:
    """Until it is terminated."""
    app = Starlette(routes=[Route("/sessions/{id}/v1/chat/completions", complete, methods=["POST"])])
    listening = socket.create_server(("127.0.0.1", 0), backlog=backlog)
    print(listening.getsockname()[1], flush=True)
    await uvicorn.Server(uvicorn.Config(app, lifespan="off", ws="none", log_config=None)).serve(sockets=[listening])


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(int(sys.argv[1])))
