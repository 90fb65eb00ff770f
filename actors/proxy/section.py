"""The proxy's section of the config."""

from pydantic import Field

from runtime.config import Section


class ProxySection(Section):
    """The LLMProxy: how much it holds, and for how long."""

    request_timeout_s: float = Field(default=600.0, gt=0)
    """Longest life of one request, where its asker sets no shorter deadline."""
    max_waiting: int = Field(default=4096, ge=1)
    """Requests that may wait for an engine; more are answered Aborted."""
    max_deaths: int = Field(default=3, ge=1)
    """A request under which this many engines died is taken for the cause and answered Aborted."""
    results_kept: int = Field(default=4096, ge=0)
    """Results kept for askers that lost their reply; the oldest is forgotten first."""
    results_mb: int = Field(default=64, ge=0)
    """Size limit of those results, in MiB."""
    sessions_kept: int = Field(default=65536, ge=1)
    """Sessions whose engine is remembered; the least recently used is forgotten first."""
