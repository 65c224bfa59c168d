"""Several outputs of one request: what the router keeps of each, and how that is said to members and heard from them."""

from dataclasses import dataclass, field
from typing import Any

from lifecycle.finish import Ending, of_choices
from lifecycle.usage import Usage, together
from router.client_messages import REASONS, usage_message
from router.pool_messages import ChoiceEnd, Output, choice_end, held_after
from tandem.pools.v1 import decode_pb2


@dataclass(slots=True)
class ChoiceProgress:
    """One output: every token that was told, how many of them were returned with how much text, log-probabilities of the last
    ones, which were not. `end`: its end, when that was told. `cancelled`: a client has asked for it. `returned`: with CUMULATIVE,
    what went before this router's log, as serialised Deltas in order."""

    index: int
    output_token_ids: list[int] = field(default_factory=list)
    returned_tokens: int = 0
    text_bytes: int = 0
    held_log_probs: tuple[bytes, ...] = ()
    end: ChoiceEnd | None = None
    cancelled: bool = False
    returned: tuple[bytes, ...] = ()

    def take(self, one: Output) -> None:
        """One of its Outputs was read."""
        self.output_token_ids += one.selected
        self.text_bytes += one.text_bytes
        self.returned_tokens += one.returned_tokens
        self.held_log_probs = held_after(
            self.held_log_probs, one.held_log_probs, len(self.output_token_ids) - self.returned_tokens
        )
        self.end = one.ended

    def usage(self, prompt_tokens: int, *, committed: bool) -> Usage:
        """Counts now, as Progress.usage has them."""
        if self.end is not None:
            return self.end.usage
        chosen = len(self.output_token_ids)
        return Usage(
            prompt_tokens=prompt_tokens,
            selected_tokens=chosen,
            processed_tokens=prompt_tokens + max(0, chosen - 1) if committed else 0,
            returned_tokens=self.returned_tokens,
            billed_tokens=self.returned_tokens,
        )

    def message(self, returned: bytes) -> Any:
        """For an Open. `returned`: with CUMULATIVE, all that the client's stream has got of it, as a serialised Delta."""
        return decode_pb2.Choice(
            index=self.index,
            output_token_ids=self.output_token_ids,
            sent_text_bytes=self.text_bytes,
            returned_tokens=self.returned_tokens,
            held_log_probabilities=self.held_log_probs,
            returned=returned,
            ended=None if self.end is None else _end_message(self.end),
        )


def choices_now(choices: list[ChoiceProgress], prompt_tokens: int, *, committed: bool) -> Usage:
    """Counts of all."""
    return together([one.usage(prompt_tokens, committed=committed) for one in choices])


def ending_of(choices: list[ChoiceProgress]) -> Ending | None:
    """How the request ended by itself: by those that the client was told of; None while one of them goes on."""
    ends = [one.end for one in choices if one.end is not None]
    if len(ends) < len(choices):
        return None
    return of_choices([end.ending for end in ends if not end.untold])


def adopted_choices(opening: Any, adopted: Any) -> list[ChoiceProgress]:
    """All outputs of a request that another router had, from the Open of its seat and what the seat's member told in the Adopted
    that answers: before the first event that comes again."""
    here = {one.index: one for one in adopted.choices}
    return [_read(before, here.get(before.index, before)) for before in opening.choices]


def _read(before: Any, now: Any) -> ChoiceProgress:
    """`before`: as in the Open; `now`: the same, or as the member has it."""
    returned = (before.returned,) if now is before else (before.returned, now.returned)
    return ChoiceProgress(
        index=now.index,
        output_token_ids=list(now.output_token_ids),
        returned_tokens=now.returned_tokens,
        text_bytes=now.sent_text_bytes,
        held_log_probs=tuple(now.held_log_probabilities),
        end=choice_end(now.ended) if now.HasField("ended") else None,
        returned=returned,
    )


def _end_message(end: ChoiceEnd) -> Any:
    ending = end.ending
    return decode_pb2.ChoiceEnd(
        finish_reason=REASONS[ending.reason],
        cause=ending.cause.value,
        matched_stop=ending.matched_stop,
        matched_token_id=ending.matched_token_id,
        usage=usage_message(end.usage),
        untold=end.untold,
    )
