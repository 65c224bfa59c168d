"""One output of one attempt, token by token: what is fed next, what may be shown, when and how it ends. Pure.

The order for a chosen token is fixed: an ending seen meanwhile (the token is thrown away), the token is recorded, end and
stop ids, text, stop texts, max_output_tokens, the context's limit; otherwise the token waits to be fed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.output_text import OutputText, Released
from engine.sample_row import SampleRow, TokenHistory
from engine.sequence_spec import SequenceSpec, StopSpec
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.usage import Usage
from text.detokeniser import TextStream, Utf8Policy
from text.errors import BadUtf8

__all__ = ["OutOfOrder", "Sequence", "SequenceSpec", "Step", "StopSpec", "TextStreams"]

#: Makes the text stream of one sequence, such as `partial(Detokeniser, table)`.
TextStreams = Callable[[Utf8Policy], TextStream]

#: Endings at which the model itself closed the output: half a character is then its mistake.
_CLOSED_BY_MODEL = frozenset({FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.GRAMMAR_COMPLETE})

#: Endings at which a limit cut the output: half a character is dropped, unless the request wants an error.
_CUT_BY_LIMIT = frozenset({FinishReason.MAX_OUTPUT_TOKENS, FinishReason.CONTEXT_LIMIT})


class OutOfOrder(Exception):
    """A call that does not fit where the sequence is. A mistake of the caller; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one call brought out: text (whole characters, UTF-8), the ids shown with it, and the ending, if it is the last.

    With neither text nor ids there is nothing to send but the ending.
    """

    text: bytes
    token_ids: tuple[int, ...]
    ending: Ending | None = None


class Sequence:
    """Step state of one output. `choose` and `completed` alternate, after `completed` has covered the prompt.

    While a token waits to be fed, `cache_tokens == prompt + selected - 1`; while none waits and the output has not
    ended, `cache_tokens == prompt + selected`.
    """

    def __init__(self, spec: SequenceSpec, streams: TextStreams) -> None:
        self.spec = spec
        #: Tokens whose KV is in the cache.
        self.cache_tokens = 0
        #: When the last token was selected, in seconds of the caller's clock.
        self.last_selected_at: float | None = None
        self._prompt = len(spec.prompt_token_ids)
        self._output: list[int] = []
        self._waiting: int | None = None
        self._ending: Ending | None = None
        self._held_at_end = 0
        self._ending_ids = spec.stop.ending_ids
        self._banned = tuple(sorted(self._ending_ids))
        self._text = OutputText(streams(spec.utf8_policy or Utf8Policy.ERROR), spec.stop.rules)
        self._history = TokenHistory(spec.prompt_token_ids) if spec.sampling.penalised else None

    # Reading ---------------------------------------------------------------------------------------------------------

    @property
    def ending(self) -> Ending | None:
        """How the output ended; None while it goes on."""
        return self._ending

    @property
    def selected_tokens(self) -> int:
        """Tokens chosen so far; the index of the next one."""
        return len(self._output)

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """All chosen ids, shown or not. Copies: for records and recovery, not for every step."""
        return tuple(self._output)

    @property
    def waiting(self) -> bool:
        """Whether a chosen token is to be fed."""
        return self._waiting is not None and self._ending is None

    @property
    def held_bytes(self) -> int:
        """Bytes of text held back for a possible stop: now, or when the end was decided (then with a matched stop's own)."""
        return self._text.held_bytes if self._ending is None else self._held_at_end

    @property
    def stop_hold_s(self) -> float:
        """Longest time, in seconds, that text later shown was held back for a possible stop."""
        return self._text.longest_hold_s

    def next_input(self) -> tuple[int, int]:
        """The token to feed and its position in the sequence, from 0."""
        if self._waiting is None or self._ending is not None:
            raise OutOfOrder("no token waits to be fed")
        return self._waiting, self._prompt + len(self._output) - 1

    def banned_ids(self) -> tuple[int, ...]:
        """Ids that the next token cannot be: end and stop ids until min_output_tokens were chosen."""
        return self._banned if len(self._output) < self.spec.stop.min_output_tokens else ()

    def sample_row(self) -> SampleRow:
        """What the sampler needs to choose the next token."""
        return SampleRow(self.spec.sampling, self.spec.index, len(self._output), self._history, self.banned_ids())

    def usage(self, cached_prompt_tokens: int = 0) -> Usage:
        """Token counts so far. A token is returned when the character that holds its last byte was released.

        Billed are the returned tokens and a final end or stop token. `cached_prompt_tokens` is what the caller knows
        about where the prompt's KV came from.
        """
        closed = self._ending is not None and self._ending.reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        return Usage(
            prompt_tokens=self._prompt,
            cached_prompt_tokens=cached_prompt_tokens,
            selected_tokens=len(self._output),
            processed_tokens=self.cache_tokens,
            returned_tokens=self._text.shown_tokens,
            billed_tokens=self._text.shown_tokens + closed,
        )

    # Going on --------------------------------------------------------------------------------------------------------

    def completed(self, n_tokens: int) -> None:
        """A step has run and put `n_tokens` more tokens into the cache: part of the prompt, or the one that waited.

        May also be called after the end, for a step that was running when it came.
        """
        room = self._prompt - self.cache_tokens if self._waiting is None else 1
        if not 0 < n_tokens <= room or (self._waiting is not None and n_tokens != 1):
            raise OutOfOrder(f"{n_tokens} tokens completed, where at most {room} were to be fed")
        self.cache_tokens += n_tokens
        self._waiting = None

    def choose(self, token: int, now: float, ended: Ending | None = None) -> Step:
        """Take the sampler's token, or throw it away because of an ending that the caller saw first.

        `ended` is a cancel, an expired deadline, a failure. `now` is in seconds of a monotonic clock.
        """
        if ended is not None:
            return self.end(ended, now)
        self._require_running()
        if self._waiting is not None or self.cache_tokens != self._prompt + len(self._output):
            needed = self._prompt + len(self._output)
            raise OutOfOrder(f"{self.cache_tokens} tokens are in the cache, {needed} must be before the next is chosen")
        allowed = len(self._output) >= self.spec.stop.min_output_tokens
        self._select(token, now)
        if allowed and token in self._ending_ids:
            reason = FinishReason.EOS if self._is_eos(token) else FinishReason.STOP_TOKEN
            return self._finish(Ending(reason, matched_token_id=token), now)
        try:
            released = self._text.push(token, now, self._armed)
        except BadUtf8:
            return self._finish(Ending(FinishReason.MODEL_ERROR, Cause.BAD_UTF8), now)
        if released.hit is not None:
            return self._close(self._stopped_by(released.hit), (released,))
        limit = self._limit()
        if limit is not None:
            return self._finish(Ending(limit), now, released)
        self._waiting = token
        assert self.cache_tokens == self._prompt + len(self._output) - 1
        return Step(released.text, released.token_ids)

    def end(self, ending: Ending, now: float) -> Step:
        """End the output for a reason from outside, at a step's border. Held text is shown, half a character is not."""
        self._require_running()
        return self._finish(ending, now)

    # Inside ----------------------------------------------------------------------------------------------------------

    @property
    def _armed(self) -> bool:
        return len(self._output) >= self.spec.stop.min_output_tokens

    def _require_running(self) -> None:
        if self._ending is not None:
            raise OutOfOrder(f"the output has ended: {self._ending.reason.value}")

    def _is_eos(self, token: int) -> bool:
        return token in self.spec.stop.eos_ids and not self.spec.stop.ignore_eos

    def _select(self, token: int, now: float) -> None:
        self._output.append(token)
        self.last_selected_at = now
        if self._history is not None:
            self._history.add(token)

    def _limit(self) -> FinishReason | None:
        if len(self._output) >= self.spec.max_output_tokens:
            return FinishReason.MAX_OUTPUT_TOKENS
        if self.cache_tokens + 1 >= self.spec.context_tokens:
            return FinishReason.CONTEXT_LIMIT
        return None

    def _stopped_by(self, hit: int) -> Ending:
        return Ending(FinishReason.STOP_SEQUENCE, matched_stop=self.spec.stop.rules.stops[hit].decode())

    def _policy_at(self, reason: FinishReason) -> Utf8Policy:
        """An ending from outside is never turned into another one by half a character."""
        if reason in _CLOSED_BY_MODEL:
            return self.spec.utf8_policy or Utf8Policy.ERROR
        if reason in _CUT_BY_LIMIT:
            return self.spec.utf8_policy or Utf8Policy.DROP
        return Utf8Policy.DROP

    def _finish(self, ending: Ending, now: float, *before: Released) -> Step:
        """Every end but a stop hit: what waits is decoded, matched (it may still hit), and held text is shown."""
        try:
            tail = self._text.finish(now, self._policy_at(ending.reason), self._armed)
        except BadUtf8:
            self._text.drop_half()
            return self._flush(Ending(FinishReason.MODEL_ERROR, Cause.BAD_UTF8), now, *before)
        if tail.hit is None:
            return self._flush(ending, now, *before, tail)
        own = ending.reason in _CLOSED_BY_MODEL or ending.reason in _CUT_BY_LIMIT
        return self._close(self._stopped_by(tail.hit) if own else ending, (*before, tail))

    def _flush(self, ending: Ending, now: float, *before: Released) -> Step:
        self._held_at_end = self._text.held_bytes
        return self._join(ending, (*before, self._text.flush(now)))

    def _close(self, ending: Ending, parts: tuple[Released, ...]) -> Step:
        self._held_at_end = self._text.held_bytes
        return self._join(ending, parts)

    def _join(self, ending: Ending, parts: tuple[Released, ...]) -> Step:
        self._ending = ending
        return Step(b"".join(part.text for part in parts), tuple(token for part in parts for token in part.token_ids), ending)
