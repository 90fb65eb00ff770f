"""Where samples lie until they train: small ones in the Store, with the journal; large ones each in a file of its own."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.samples.group import Group, Member
from actors.samples.journal import Journal
from actors.samples.sample import PayloadLost, file_payload, read_payload, sweep_payloads, trajectory_id

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


class Payloads:
    """The samples of groups, read back whole or known to be gone. `offload` runs a blocking function away from the event loop."""

    def __init__(
        self,
        folder: Path,
        journal: Journal,
        offload: Callable[..., Awaitable[Any]],
        tell_gone: Callable[[Sequence[str]], None],
        log: "FilteringBoundLogger",
    ) -> None:
        """`tell_gone` hears of the trajectories whose samples were looked for and are gone or damaged."""
        self._folder, self._journal, self._offload = folder, journal, offload
        self._tell_gone, self._log = tell_gone, log

    async def of(self, groups: Sequence[Group]) -> list[list[bytes | None]]:
        """Of each group's scored members, in order; None for one that is gone or damaged."""
        inline = [name for group in groups for name in group.inline]
        there = dict(zip(inline, await self._journal.payloads(inline), strict=True))
        found: list[list[bytes | None]] = []
        gone: list[str] = []
        for group in groups:
            found.append([])
            for index in group.scored:
                name = trajectory_id(group.id, index)
                found[-1].append(there[name] if name in there else await self._read(name, group.members[index]))
                if found[-1][-1] is None:
                    self._log.error("sample_gone", trajectory=name, cause="its payload is lost or damaged")
                    gone.append(name)
        if gone:
            self._tell_gone(gone)
        return found

    async def file(self, name: str, attempt: int, payload: bytes) -> str:
        """Write the payload of an attempt to its file, on disk when this returns; the digest. Raises OSError."""
        return await self._offload(file_payload, self._folder, f"{name}.{attempt}", payload)

    async def unlink(self, name: str, attempt: int) -> None:
        """Delete the file of an attempt, if it is there."""
        await self._offload((self._folder / f"{name}.{attempt}").unlink, True)

    async def sweep(self, groups: Iterable[Group]) -> None:
        """Delete the files that no member of `groups`, which are all that live, waits for."""
        wanted = {
            f"{trajectory_id(group.id, index)}.{member.attempt}"
            for group in groups
            for index, member in enumerate(group.members)
            if member.digest
        }
        await self._offload(sweep_payloads, self._folder, wanted)

    async def _read(self, name: str, member: Member) -> bytes | None:
        try:
            return await self._offload(read_payload, self._folder, f"{name}.{member.attempt}", member.digest)
        except PayloadLost as error:
            self._log.error("sample_unreadable", trajectory=name, error=str(error))
            return None
