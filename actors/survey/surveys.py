"""What the proxy tells an orchestrator, and from which one it takes orders."""

from zlib import crc32

from rubato.actors.messages.generation import Aborted, Completion
from rubato.actors.messages.orchestration import OutOfDate, RequestEnded, RequestSeen, Survey, Surveyed
from rubato.actors.proxy.picker import ProxyHook
from rubato.actors.proxy.placement import ProxyRequest
from rubato.actors.proxy.proxy import LLMProxy
from rubato.actors.survey.ended import EndedLog
from rubato.runtime.actor import handler


class Surveys(ProxyHook):
    """Of one proxy, from the first survey on."""

    def __init__(self, proxy: LLMProxy) -> None:
        super().__init__(proxy)
        self.term = 0
        """Of the newest orchestrator that asked; 0: none ever did."""
        self._ended = EndedLog()

    @handler
    async def survey(self, request: Survey) -> Surveyed | OutOfDate:
        """Everything as it is now."""
        if request.term < self.term:
            return OutOfDate(self.term)
        self.term = request.term
        return Surveyed(
            tuple(map(_request, self.proxy.requests.running.values())),
            tuple(seat.info for _, seat in sorted(self.proxy.placement.seats.items())),
            self._ended.since(request.after),
            self._ended.num,
        )

    def is_old(self, term: int) -> bool:
        """Whether an order of this term has no effect any more."""
        return 0 < term < self.term

    def ended(self, request: ProxyRequest, outcome: Completion | Aborted | Exception) -> None:
        """Of a rollout its manager tells, all turns of it."""
        asked = request.request
        if isinstance(outcome, Completion) and not asked.route.rollout:
            sampled = len(outcome.tokens.ids) // 4
            self._ended.add(RequestEnded(asked.route.task, crc32(asked.prompt), sampled, asked.weights.version))


def _request(shared: ProxyRequest) -> RequestSeen:
    request = shared.request
    return RequestSeen(
        request.request_id,
        "" if shared.asked is None else shared.engine,
        request.route.task,
        crc32(request.prompt),
        len(request.prompt) // 4,
        shared.num_tokens,
        request.sampling.max_new_tokens,
        request.weights.version,
        shared.second is not None,
        request.session,
    )
