"""What a seat's stream has sent, kept for a router that takes the seat over: bounded, numbered, byte for byte. Pure.

What is not kept any more, or not wanted, is told as sums: the tokens chosen by then, how many of them were returned, how much
text was sent. Tokens are kept as 4 bytes each for as long as the seat lives.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from decode_svc.messages import SeatEnded
from decode_svc.stream_log import Published
from engine.log_probs import TokenLogProb
from engine.sequence_spec import Earlier

#: Counted for each output beside its bytes.
ENTRY_BYTES = 128


@dataclass(frozen=True, slots=True)
class Sent:
    """One output as it was sent. `number` is None when it took none. `published`: when what was returned is to be told whole.

    choice, ended: as in Published.
    """

    number: int | None
    data: bytes
    selected: int
    returned: int
    text_bytes: int
    held_log_probs: tuple[TokenLogProb, ...] = ()
    published: Published | None = None
    choice: int = 0
    ended: SeatEnded | None = None

    @property
    def cost_bytes(self) -> int:
        """What it takes from the bound."""
        return len(self.data) + ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class Told:
    """What was told of one output before a replay: tokens, how many of them were returned, with how much text.

    held_log_probs: of the last of token_ids, beyond returned_tokens, when the request wants any. ended: its end, when that was
    told too; untold: to the router alone.
    """

    token_ids: tuple[int, ...]
    returned_tokens: int
    text_bytes: int
    held_log_probs: tuple[TokenLogProb, ...] = ()
    ended: SeatEnded | None = None
    untold: bool = False


@dataclass(frozen=True, slots=True)
class Replay:
    """What comes again: `outputs`, the first of which has `next_sequence_no`, after what was `told` before it, by choice.

    returned: what the outputs before brought, when it is to be told whole.
    """

    next_sequence_no: int
    told: Mapping[int, Told]
    outputs: tuple[bytes, ...]
    returned: tuple[Published, ...] = ()


class ReplayLog:
    """`limit_bytes` of outputs; the oldest go first. `earlier`: what attempts before this seat had told; `choices`: the same of
    each, when there are several outputs.

    whole: what outputs returned is kept, once, when they are dropped; it is as long as the output.
    """

    def __init__(
        self,
        limit_bytes: int,
        earlier: Earlier,
        choices: Iterable[tuple[int, Earlier]] = (),
        *,
        whole: bool = False,
    ) -> None:
        self.whole = whole
        self._dropped: list[Published] = []
        self._limit_bytes = limit_bytes
        self._kept: deque[Sent] = deque()
        self.kept_bytes = 0
        before = dict(choices) or {0: earlier}
        self._tokens = {choice: array("I", one.token_ids) for choice, one in before.items()}
        self._before = {
            choice: _Sums(len(one.token_ids), one.returned_tokens, one.text_bytes, one.held_log_probs)
            for choice, one in before.items()
        }

    def add(self, sent: Sent, selected_ids: tuple[int, ...]) -> None:
        """One output is being sent; `selected_ids` are the tokens that it tells."""
        self._tokens[sent.choice].extend(selected_ids)
        self._kept.append(sent)
        self.kept_bytes += sent.cost_bytes
        self.shrink(self._limit_bytes)

    def shrink(self, limit_bytes: int) -> None:
        """Keep at most `limit_bytes`."""
        while self.kept_bytes > limit_bytes:
            oldest = self._kept.popleft()
            self.kept_bytes -= oldest.cost_bytes
            self._before[oldest.choice] = self._before[oldest.choice].plus(oldest)
            if oldest.published is not None:
                self._dropped.append(oldest.published)

    def replay(self, wanted: int, next_sequence_no: int) -> Replay:
        """Everything from the event `wanted` on, or from the oldest that is kept. `next_sequence_no`: of what is not sent yet.

        Outputs without a number come again only after one that has one.
        """
        before, skipped = dict(self._before), 0
        for sent in self._kept:
            if sent.number is not None and sent.number >= wanted:
                break
            before[sent.choice] = before[sent.choice].plus(sent)
            skipped += 1
        outputs = list(self._kept)[skipped:]
        first = outputs[0].number if outputs else None
        return Replay(
            next_sequence_no=next_sequence_no if first is None else first,
            told={choice: sums.told(self._tokens[choice]) for choice, sums in before.items()},
            outputs=tuple(sent.data for sent in outputs),
            returned=(*self._dropped, *(sent.published for sent in list(self._kept)[:skipped] if sent.published is not None)),
        )


@dataclass(frozen=True, slots=True)
class _Sums:
    selected: int
    returned: int
    text_bytes: int
    held_log_probs: tuple[TokenLogProb, ...]
    ended: SeatEnded | None = None
    untold: bool = False

    def plus(self, sent: Sent) -> "_Sums":
        selected, returned = self.selected + sent.selected, self.returned + sent.returned
        held = self.held_log_probs
        if held or sent.held_log_probs:
            held = still_held(held + sent.held_log_probs, selected - returned)
        return _Sums(selected, returned, self.text_bytes + sent.text_bytes, held, sent.ended, sent.number is None)

    def told(self, tokens: Sequence[int]) -> Told:
        token_ids = tuple(tokens[: self.selected])
        return Told(
            token_ids, self.returned, self.text_bytes, self.held_log_probs, self.ended, self.ended is not None and self.untold
        )


def still_held(log_probs: tuple[TokenLogProb, ...], unreturned: int) -> tuple[TokenLogProb, ...]:
    """Those of the last tokens, of which so many are not returned: tokens are returned in the order of choosing."""
    return log_probs[max(0, len(log_probs) - unreturned) :] if unreturned else ()
