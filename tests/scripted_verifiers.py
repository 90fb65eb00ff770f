"""As much of verifiers as its host script imports, with an EnvServer that does what its taskset says: `peer` puts it into a folder.

It needs pyzmq and nothing of Rubato's. Its episodes are played one after the other.
"""

import json
import os
import subprocess
import sys
import types
import urllib.error
import urllib.request

import msgspec
import zmq

TASKS = 10


class AgentConfig:
    """A role's."""


class Config:
    """Of an environment of one role."""

    model_fields = {"taskset": types.SimpleNamespace(default=None), "agent": types.SimpleNamespace(default=AgentConfig())}

    @classmethod
    def model_validate(cls, told):
        config = cls()
        config.told = told
        return config


class TwoRoles(Config):
    model_fields = {**Config.model_fields, "judge": types.SimpleNamespace(default=AgentConfig())}


def env_config_type(taskset):
    kinds = {"scripted": Config, "two": TwoRoles}
    if taskset not in kinds:
        raise ModuleNotFoundError(f"taskset {taskset!r} not found")
    return kinds[taskset]


class Row:
    def __init__(self, told):
        self.data = self
        self.told = told

    def model_dump_json(self):
        return json.dumps(self.told)


class EnvServer:
    def __init__(self, config, address):
        self.config = config
        rows = [Row({"do": config.told["taskset"].get("do", "well"), "row": row}) for row in range(TASKS)]
        self.env = types.SimpleNamespace(taskset=rows)
        self.socket = zmq.Context().socket(zmq.ROUTER)
        self.socket.bind(address)
        if config.told["taskset"].get("do") == "spawn":  # as a tool's server is, and by its path it is looked for
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", address], start_new_session=True)

    async def run(self):
        while True:
            who, name, method, payload = self.socket.recv_multipart()
            if method == b"run":
                self.play(who, name, msgspec.msgpack.decode(payload))

    def play(self, who, name, asked):
        do = asked["task_data"]["do"]
        if do == "die":
            os._exit(3)
        if do == "hang":
            return
        try:
            nodes = self.nodes(asked, do)
        except urllib.error.HTTPError as over:
            self.send(who, name, b"reply", {"success": False, "error": str(over)})
            return
        rewards = {"given": {"score": {"nan": float("nan"), "text": "much"}.get(do, 0.5), "weight": 2.0}, "skipped": None}
        state = {"rewards": rewards, "metrics": {"length": 3}, "ok": do != "fail", "stop_condition": None}
        errors = [{"type": "TaskError", "message": "the reward raised", "traceback": None}] if do == "fail" else []
        self.send(who, name, b"delta", {"trace": "t", "open": {"version": 1}, "nodes": nodes[:1], "links": {0: []}})
        self.send(who, name, b"delta", {"trace": "t", "nodes": nodes[1:], "errors": errors, "set": state})
        summary = {"id": "t", "nodes": len(nodes), "calls": 2}
        head = {"ok": do != "fail", "errors": [], "id": "e"}
        self.send(who, name, b"reply", {"success": True, "error": None, "head": head, "traces": [summary]})

    def nodes(self, asked, do):
        nodes, tokens = [], []
        for turn in range(2):
            prompt = [*map(ord, f"row {asked['task_data']['row']} turn {turn}?")]
            nodes.append({"parent": len(nodes) - 1 if nodes else None, "token_ids": prompt, "mask": [False] * len(prompt)})
            answer = self.generated(asked, tokens + prompt)
            ids, logprobs = answer["token_ids"], [one["logprob"] for one in answer["logprobs"]["content"]]
            assert [one["token"] for one in answer["logprobs"]["content"]] == [f"token_id:{each}" for each in ids]
            node = {"parent": len(nodes) - 1, "sampled": True, "token_ids": ids, "mask": [True] * len(ids), "logprobs": logprobs}
            tokens += prompt + ids
            nodes.append(node)
        last = nodes[-1]
        if do == "foreign":
            last["token_ids"] = [*last["token_ids"][:-1], last["token_ids"][-1] ^ 1]
        return nodes

    def generated(self, asked, prompt):
        client, sampling = asked["client"], asked["sampling"]
        body = {"model": asked["model"], "token_ids": prompt, "sampling_params": {"max_tokens": sampling["max_tokens"], "logprobs": 1}}
        url = client["base_url"].removesuffix("/v1") + "/inference/v1/generate"
        request = urllib.request.Request(url, json.dumps(body | {"cache_salt": sampling["cache_salt"]}).encode())
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]

    def send(self, who, name, kind, payload):
        self.socket.send_multipart([who, name, kind, msgspec.msgpack.encode(payload)])


def peer(folder, version="0.4.0"):
    """An interpreter that has this as verifiers, in `folder`."""
    package = folder / "verifiers"
    package.mkdir(parents=True)
    with open(__file__) as ours:
        (package / "__init__.py").write_text(ours.read())
    about = folder / f"verifiers-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


if __name__ == "verifiers":
    found = {
        "verifiers.v1": {},
        "verifiers.v1.utils": {},
        "verifiers.v1.configs": {},
        "verifiers.v1.serve": {},
        "verifiers.v1.utils.loaders": {"default_harness_id": lambda taskset: "bash", "env_config_type": env_config_type},
        "verifiers.v1.configs.agent": {"AgentConfig": AgentConfig},
        "verifiers.v1.serve.server": {"EnvServer": EnvServer},
    }
    for name, holds in found.items():
        module = sys.modules[name] = types.ModuleType(name)
        vars(module).update(holds)
