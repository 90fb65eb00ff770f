"""Jobs of a cluster: what a user asks of its scheduler, with the cluster's token, and what the actors of one job tell each other of its turns."""

from typing import ClassVar

from rubato.bus.message import Ack, Message, Request


class JobNeeds(Message, frozen=True):
    """What a job takes of the cluster, as far as its config says. Seconds and bytes; 0 where it doesn't."""

    rollout_gpus: int
    train_gpus: int
    rollout_bytes: float
    """Of host memory, for what its engines leave there while others generate."""
    train_bytes: float
    """The same for its trainer."""
    rollout_s: float
    """One rollout with every response at max_tokens."""
    train_s: float
    """The step after it."""
    engines: int = 1
    """Whose places on the pool are by their numbers."""
    max_tokens: int = 0
    """That one trajectory may sample."""
    steps: int = 0
    """Of the whole job."""
    cores: float = 0.0
    """CPU cores that its environments may keep busy."""


class JobAccepted(Message, frozen=True):
    """It is on record: nothing that ends from here on loses it. `why` says where it goes, or what it waits for."""

    why: str


class JobRefused(Message, frozen=True):
    """Nothing was changed; `why` is one sentence."""

    why: str


class SubmitJob(Request[JobAccepted | JobRefused], frozen=True):
    """Run this job, now or when there is room. Asked again with the same `id` it is the same submission."""

    idempotent: ClassVar[bool] = True
    token: str
    id: str
    name: str
    config: str
    """Resolved, as YAML."""
    cwd: str
    """Where its relative paths start."""
    slo: float
    """Its time may be so many times its time alone; 0 takes the cluster's."""
    needs: JobNeeds


class CancelJob(Request[JobAccepted | JobRefused], frozen=True):
    """Drain and save the job, if it runs, and do not start it again. Answered once that is on record."""

    idempotent: ClassVar[bool] = True
    token: str
    name: str


class StopJobs(Request[JobAccepted | JobRefused], frozen=True):
    """Drain and save all that run, and start nothing more; answered when they have ended. The cluster's next start goes on with them."""

    idempotent: ClassVar[bool] = True
    token: str


class Generating(Request[Ack], frozen=True):
    """Environment manager → proxies: so many rollouts of mine are between their first and their last turn."""

    idempotent: ClassVar[bool] = True
    manager: str
    num: int
