"""What the proxy tells an orchestrator, and from which one it takes orders. Where there is none, it costs a look at `epoch` per answer."""

from collections import deque
from collections.abc import Mapping
from itertools import islice
from zlib import crc32

from actors.messages.generation import Aborted, Completion
from actors.messages.orchestration import EngineSeen, OutOfDate, RequestEnded, RequestSeen, Survey, Surveyed
from actors.proxy.placement import EngineSeat, ProxyRequest

ENDED_KEPT = 8192
"""Lengths that wait for the next survey; the oldest is forgotten first."""


class Outlook:
    """Of one proxy."""

    def __init__(self, running: Mapping[str, ProxyRequest], seats: Mapping[str, EngineSeat]) -> None:
        self._running = running
        self._seats = seats
        self.epoch = 0
        """Of the newest orchestrator that asked; 0: none ever did."""
        self._ended: deque[RequestEnded] = deque(maxlen=ENDED_KEPT)
        self._num_ended = 0

    def is_old(self, epoch: int) -> bool:
        """Whether an order of this epoch has no effect any more."""
        return 0 < epoch < self.epoch

    def ended(self, shared: ProxyRequest, outcome: Completion | Aborted | Exception) -> None:
        """A request has its answer. Told only once somebody asked."""
        request = shared.request
        if isinstance(outcome, Completion) and not request.rollout:  # of a rollout its manager tells, all turns of it
            sampled = len(outcome.tokens.ids) // 4
            self._ended.append(RequestEnded(request.task, crc32(request.prompt), sampled, request.min_version))
            self._num_ended += 1

    def look(self, survey: Survey) -> Surveyed | OutOfDate:
        """Everything as it is now."""
        if survey.epoch < self.epoch:
            return OutOfDate(self.epoch)
        self.epoch = survey.epoch
        known = survey.after if survey.after <= self._num_ended else 0  # a proxy that was restarted counts anew
        new = min(self._num_ended - known, len(self._ended))
        return Surveyed(
            tuple(map(_request, self._running.values())),
            tuple(_engine(seat) for _, seat in sorted(self._seats.items())),
            tuple(islice(self._ended, len(self._ended) - new, None)),
            self._num_ended,
        )


def _request(shared: ProxyRequest) -> RequestSeen:
    request = shared.request
    return RequestSeen(
        request.request_id,
        "" if shared.seat is None or shared.asking is None else shared.seat.name,
        request.task,
        crc32(request.prompt),
        len(request.prompt) // 4,
        shared.num_tokens,
        request.sampling.max_new_tokens,
        request.min_version,
        shared.behind is not None,
        request.session,
    )


def _engine(seat: EngineSeat) -> EngineSeen:
    takes = not (seat.suspended or seat.held or seat.gone)
    return EngineSeen(
        seat.name, seat.num_slots, takes, seat.asleep, seat.degree, seat.modelled, seat.serves, seat.restart_s
    )
