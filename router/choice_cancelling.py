"""Cancel of one of several choices: the others go on."""

from collections.abc import Awaitable, Callable
from typing import Any

from router import endings
from router.cancelling import CancelAnswer
from router.client_messages import REASONS, STATES
from router.route import Route
from router.router_peers import RouterPeers
from router.routes import Routes
from router.store import StoreUnavailable
from rpc.details import Violation
from rpc.gate import Caller
from rpc.status import invalid_argument, unavailable
from tandem.v1 import inference_pb2 as pb

#: Ends a whole request: Canceller.cancel.
CancelWhole = Callable[..., Awaitable[CancelAnswer]]


class ChoiceCanceller:
    """Answers Cancel with a choice, wherever the request runs. `cancel`: for a request whose only output it is."""

    def __init__(self, routes: Routes, peers: RouterPeers, cancel: CancelWhole) -> None:
        self._routes = routes
        self._peers = peers
        self._cancel = cancel

    async def cancel(self, message: Any, caller: Caller, *, forwarded: bool, timeout_s: float | None) -> pb.CancelResponse:
        """Notes the end of one choice. `forwarded`: another router asks, and is not sent on. Raises StatusError."""
        route = self._routes.get(message.request_id)
        if route is not None and route.ledger.created:
            if not caller.may_touch(route.request.tenant):
                raise endings.unknown_request(message.request_id)
            return await self._here(route, message)
        cell = self._routes.cell
        try:
            record = cell.unwritten.get(message.request_id) or await cell.store.get(message.request_id)
            if record is None or not caller.may_touch(record.tenant):
                raise endings.unknown_request(message.request_id)
            if record.ended:
                return answer_message(CancelAnswer(True, record.state, record.ending.reason if record.ending else None))
            owner = await cell.store.owner(record.router)
        except StoreUnavailable as away:
            raise endings.store_away(away.retry_after_s) from None
        if forwarded or record.router == cell.store.router or not owner.alive or not owner.address:
            raise unavailable(f"request {message.request_id!r} changes routers; try again", "CHANGING_ROUTERS")
        answer = await self._peers.cancel(owner.address, message.SerializeToString(), timeout_s)
        return pb.CancelResponse.FromString(answer)

    async def _here(self, route: Route, message: Any) -> pb.CancelResponse:
        index, made = message.choice, route.request.choices.made
        if index >= made:
            words = f"must be at most {made - 1}, the request's last choice; got {index}"
            raise invalid_argument([Violation("choice", words, "OUT_OF_RANGE")])
        if made == 1:
            return answer_message(await self._cancel(message.request_id, message.reason, wait=message.wait))
        end = route.progress.choices[index].end
        if end is not None:
            return answer_message(CancelAnswer(True, route.standing.state, end.ending.reason))
        if not route.ended.is_set():
            route.cancel_choice(index)
        return answer_message(CancelAnswer(False, route.standing.state))


def answer_message(answer: CancelAnswer) -> pb.CancelResponse:
    """The wire form."""
    return pb.CancelResponse(
        outcome=pb.CANCEL_OUTCOME_ALREADY_ENDED if answer.already_ended else pb.CANCEL_OUTCOME_ACCEPTED,
        state=STATES[answer.state] if answer.state else pb.REQUEST_STATE_UNSPECIFIED,
        finish_reason=REASONS[answer.reason] if answer.reason else pb.FINISH_REASON_UNSPECIFIED,
    )
