"""What the SampleBuffer reads of the configuration on its own."""

from pydantic import Field

from runtime.config import Section


class SamplesSection(Section):
    """Tickets: how long they last and how often they are handed out."""

    ticket_ttl_s: float = Field(default=30.0, gt=0)
    """A ticket that is neither renewed nor put within this time goes to another attempt."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts per rollout before it is `failed`; a drained environment manager costs none."""
    unbounded_batches: int = Field(default=8, ge=1)
    """Batches' worth of groups that may be under way where `staleness.bounded` is false."""
    unsettled_mb: int = Field(default=256, ge=1)
    """MiB of samples that are kept in memory for as long as the Store may forget them; beyond that a put waits."""
