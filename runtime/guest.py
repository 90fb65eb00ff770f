"""A user's own process inside a running job: typed asks to its actors, without being supervised by it."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar, TypeVar

from rubato.bus.errors import AskFailed, BadAddress
from rubato.bus.message import Request
from rubato.runtime.actor import Actor
from rubato.runtime.config import ActorConfig, Config
from rubato.runtime.errors import LaunchError, first_cause
from rubato.runtime.launch.agent_messages import NotAdded
from rubato.runtime.launch.connection import RunAccess, connect
from rubato.runtime.monitor.source import silent_store
from rubato.runtime.registry import NODE, list_actors
from rubato.runtime.store.store import StoreUnavailable

ReplyT = TypeVar("ReplyT")

ASK_S = 40.0
"""Longer than a drain takes, so that a guest that asks for one gets its outcome."""


class Guest(Actor):
    """Has no handlers of its own: it asks. `job` is the running job's resolved config."""

    role: ClassVar[str] = "guest"
    job: Config


@asynccontextmanager
async def join(folder: str | Path, *, name: str = "", types: bool = True) -> AsyncGenerator[Guest]:
    """Join the run in `folder` from its own host: `async with join("runs/a") as me: await me.ref("llm_proxy").ask(…)`.

    The guest appears in the monitor under `name` (`guest-PID` unless given) and leaves when the block ends; tickets it still
    held are then issued again. Without `types` it knows no message of the user's, and joins whatever became of them. Raises
    LaunchError when no run is up there, or the name is taken.
    """
    async with connect(Path(folder), types=types) as connection:
        name = name or f"{Guest.role}-{os.getpid()}"
        await _check_up(connection, name)
        kernel = await connection.kernel(Guest, ActorConfig(), name)
        guest: Guest = kernel.build()
        guest.job = connection.config
        raised: Exception | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(kernel.serve(), name=f"serve.{name}")
                await kernel.ready.wait()
                try:
                    yield guest
                except Exception as error:  # noqa: BLE001 - the caller's own; handed on below, as itself
                    raised = error
                kernel.stop()
        except ExceptionGroup as group:
            error = raised or first_cause(group)
            if isinstance(error, BadAddress):
                told = f"{connection.card.host}, the address of {connection.card.node} in the run, can't be used here"
                raise LaunchError(f"{told} ({error}). Run this in the network of that host.") from None
            raise error from None
        if raised is not None:
            raise raised


async def ask_node(folder: Path, request: Request[ReplyT], *, node: str = NODE, name: str = "") -> ReplyT:
    """Ask a node agent, the first host's unless another is named, knowing no type of the user's.

    Raises LaunchError where there is no such host, it does not answer, or does not do it.
    """
    async with join(folder, name=name, types=False) as me:
        hosts = [record.name for record in await list_actors(me.store) if record.role == "node"]
        if node not in hosts:
            raise LaunchError(f"{node} is no host of the run in {folder}. Its hosts: {', '.join(hosts)}.")
        try:
            reply = await me.ref(node).ask(request, timeout=ASK_S)
        except AskFailed as error:
            raise LaunchError(f"{node} of the run in {folder} did not answer: {error}") from error
    if isinstance(reply, NotAdded):
        raise LaunchError(reply.why)
    return reply


async def _check_up(connection: RunAccess, name: str) -> None:
    """A name may be taken over only by the supervisor of its holder: a guest that did so would end an actor of the job."""
    folder = connection.run.folder
    try:
        records = await list_actors(connection.store)
    except StoreUnavailable as error:
        card = connection.card
        raise LaunchError(silent_store(card.url, folder, card.launcher_pid)) from error
    if any(record.name == name for record in records):
        raise LaunchError(f"{name} is taken in the run in {folder}. Join it under another name.")
