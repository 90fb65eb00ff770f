"""An environment of OpenEnv behind OpenEnv's own server, for two sessions at a time; it runs where openenv-core is installed."""

import socket

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Word(Action):
    text: str


class Echo(Observation):
    echo: str = ""


class EchoEnv(Environment[Word, Echo, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.turns = 0

    def reset(self, seed=None, episode_id=None, **more):
        self.turns = 0
        return Echo(echo=f"ready {seed}", reward=None, done=False)

    def step(self, action, timeout_s=None, **more):
        if action.text == "raise":
            raise RuntimeError("as it was told")
        self.turns += 1
        reward = None if action.text == "null" else float(len(action.text))
        return Echo(echo=action.text, reward=reward, done=self.turns >= 2)

    @property
    def state(self):
        return State(episode_id="e", step_count=self.turns)


with socket.create_server(("127.0.0.1", 0)) as listening:
    print("listening", listening.getsockname()[1], flush=True)
    app = create_fastapi_app(EchoEnv, Word, Echo, max_concurrent_envs=2)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
