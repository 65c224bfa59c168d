"""One output of one attempt, token by token: what is fed next, what may be shown, when and how it ends. Pure.

The order for a chosen token is fixed: an ending seen meanwhile (the token is thrown away), the token is recorded, end and
stop ids, the grammar takes it, text, stop texts, max_output_tokens, the context's limit, the grammar's end; otherwise the token
waits to be fed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

from engine.grammar_state import GrammarState, NextIds
from engine.output_text import OutputText, Released
from engine.sample_row import SampleRow, TokenHistory
from engine.sequence_spec import Earlier, SequenceSpec, StopSpec
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.usage import Usage
from text.detokeniser import TextStream, Utf8Policy
from text.errors import BadUtf8

__all__ = ["CanNotGoOn", "Earlier", "OutOfOrder", "Sequence", "SequenceSpec", "Step", "StopSpec", "TextStreams"]

#: Makes the text stream of one sequence, such as `partial(Detokeniser, table)`.
TextStreams = Callable[[Utf8Policy], TextStream]

#: Endings at which the model itself closed the output: half a character is then its mistake.
_CLOSED_BY_MODEL = frozenset({FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.GRAMMAR_COMPLETE})

#: Endings at which a limit cut the output: half a character is dropped, unless the request wants an error.
_CUT_BY_LIMIT = frozenset({FinishReason.MAX_OUTPUT_TOKENS, FinishReason.CONTEXT_LIMIT})


class OutOfOrder(Exception):
    """A call that does not fit where the sequence is. A mistake of the caller; nothing was changed."""


class CanNotGoOn(ValueError):
    """What is said of earlier attempts can not be: their tokens end the output, or bring out less than was delivered.

    `field` names what is wrong, as in Earlier.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Step:
    """What one call brought out: text (whole characters, UTF-8), the ids shown with it, and the ending, if it is the last.

    With neither text nor ids there is nothing to send but the ending.
    """

    text: bytes
    token_ids: tuple[int, ...]
    ending: Ending | None = None


class Sequence:
    """Step state of one output. `choose` and `completed` alternate, after `completed` has covered what is given.

    While a token waits to be fed, `cache_tokens == prompt + selected - 1`; while none waits and the output has not
    ended, `cache_tokens == prompt + selected`.

    Made for a spec with tokens of earlier attempts it stands where it stood after choosing them, but for the cache;
    what they bring out and was not delivered comes with the next step. Raises CanNotGoOn when they can not be gone on with.
    `now`: text that they leave held for a possible stop counts as held since then.
    """

    def __init__(self, spec: SequenceSpec, streams: TextStreams, now: float = 0.0) -> None:
        self.spec = spec
        #: What must be in the cache before a token is chosen: the prompt and the tokens of earlier attempts.
        self.given_token_ids = spec.prompt_token_ids + spec.earlier.token_ids
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
        self._grammar = GrammarState(spec.grammar) if spec.grammar is not None else None
        self._drafts_masked = True
        self._undelivered = self._replay(spec.earlier, now)

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
        return self._banned_at(len(self._output))

    @property
    def tokens(self) -> int:
        """Ids of prompt and output."""
        return self._prompt + len(self._output)

    @property
    def draft_room(self) -> int:
        """Drafts that may be fed behind the token that waits: no more than could be chosen and fed in the end."""
        if not self.waiting or not self._drafts_masked:
            return 0
        return max(0, self.spec.most_cache_tokens - self.cache_tokens - 1)

    def fit_drafts(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Drafts up to the first that the grammar refuses. Their masks are filled with that of the next token."""
        return drafts if self._grammar is None else drafts[: self._grammar.follow(drafts)]

    def tokens_from(self, place: int, most: int) -> tuple[int, ...]:
        """At most `most` ids of prompt and output, from place `place` of both together. A copy of these alone."""
        end = place + most
        prompt = self.spec.prompt_token_ids[place:end] if place < self._prompt else ()
        return prompt + tuple(self._output[max(0, place - self._prompt) : max(0, end - self._prompt)])

    @property
    def grammar(self) -> GrammarState | None:
        """Where the output stands in its grammar; None without one. Who fills its mask ahead gives it back before `choose`."""
        return self._grammar

    @property
    def stuck(self) -> bool:
        """Whether the grammar allows no token here although the output is not whole."""
        return self._grammar is not None and not self._grammar.may_end and not self._grammar.allows_any()

    def drop_grammar(self) -> None:
        """The grammar's mask could not be filled: the output has to end, and what is sampled until then is thrown away."""
        self._grammar = None

    def renew_grammar(self) -> bool:
        """The masks after drafts could not be filled and may be under way still: go on with another state, and draft no more.

        False when the mask of the next token is missing too.
        """
        if self._grammar is None or not self._grammar.filled:
            return False
        self._grammar = self._grammar.again(self._output)
        self._drafts_masked = False
        return True

    @property
    def drawn_ahead(self) -> bool:
        """Whether a draft was chosen and the next token may be what was drawn in the same step: there was a mask for it, and not
        one that allows nothing."""
        return self._grammar is None or (self._grammar.from_draft and not self.stuck)

    def sample_row(self) -> SampleRow:
        """What the sampler needs to choose the next token."""
        return self.sample_rows(())[0]

    def sample_rows(self, drafts: tuple[int, ...]) -> list[SampleRow]:
        """The same for the next token and for those after each draft, as if the drafts up to there had been chosen. Rows that
        there is no mask for (see `drawn_ahead`) have none."""
        masks = [] if self._grammar is None else [self._grammar.next, *self._grammar.ahead]
        places = zip_longest(range(len(drafts) + 1), masks[: len(drafts) + 1])
        return [self.row_after(drafts[:place], next_ids) for place, next_ids in places]

    def row_after(self, drafts: tuple[int, ...], next_ids: NextIds | None) -> SampleRow:
        """What the sampler needs for the token after some drafts, with a mask or without."""
        sampling, index, position = self.spec.sampling, self.spec.index, len(self._output) + len(drafts)
        history = self._history.after(drafts) if self._history is not None and drafts else self._history
        banned = self._banned_at(position)
        if next_ids is None:
            return SampleRow(sampling, index, position, history, banned)
        endings = tuple(token for token in self._ending_ids if next_ids.hides(token))
        if banned and not next_ids.allows_any(but=banned):
            # Text that would be a stop later on is all that can follow: until min_output_tokens it is text like any other.
            banned = endings
        ending_ids = endings if next_ids.may_end and position >= self.spec.stop.min_output_tokens else ()
        return SampleRow(sampling, index, position, history, banned, next_ids.mask, ending_ids)

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
        """A step has run and put `n_tokens` more tokens into the cache: part of what is given, or the one that waited.

        May also be called after the end, for a step that was running when it came.
        """
        room = len(self.given_token_ids) - self.cache_tokens if self._waiting is None else 1
        if not 0 < n_tokens <= room or (self._waiting is not None and n_tokens != 1):
            raise OutOfOrder(f"{n_tokens} tokens completed, where at most {room} were to be fed")
        self.cache_tokens += n_tokens
        self._waiting = None

    def moved_here(self) -> None:
        """The cache came from a member where the output stood still: what is given is in it but the last token; that waits."""
        if self.cache_tokens or not self.spec.earlier.token_ids or self._ending is not None:
            raise OutOfOrder("only an output that an earlier attempt began, with an empty cache, can move here")
        self.cache_tokens = len(self.given_token_ids) - 1
        self._waiting = self.given_token_ids[-1]

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
        if self._grammar is not None and not self._grammar.advance(token):
            return self._finish(Ending(FinishReason.MODEL_ERROR, Cause.GRAMMAR_FAILED), now)
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
        return self._step((released,), None)

    def end(self, ending: Ending, now: float) -> Step:
        """End the output for a reason from outside, at a step's border. Held text is shown, half a character is not."""
        self._require_running()
        return self._finish(ending, now)

    def leave(self, ending: Ending) -> Step:
        """End here although the output may go on elsewhere: text that is held for a possible stop stays held."""
        self._require_running()
        self._held_at_end = self._text.held_bytes
        self._ending = ending
        return self._step((), ending)

    # Inside ----------------------------------------------------------------------------------------------------------

    @property
    def _armed(self) -> bool:
        return len(self._output) >= self.spec.stop.min_output_tokens

    def _banned_at(self, position: int) -> tuple[int, ...]:
        return self._banned if position < self.spec.stop.min_output_tokens else ()

    def _require_running(self) -> None:
        if self._ending is not None:
            raise OutOfOrder(f"the output has ended: {self._ending.reason.value}")

    def _is_eos(self, token: int) -> bool:
        return token in self.spec.stop.eos_ids and not self.spec.stop.ignore_eos

    def _select(self, token: int, now: float | None) -> None:
        self._output.append(token)
        self.last_selected_at = now
        if self._history is not None:
            self._history.add(token)

    def _limit(self) -> FinishReason | None:
        if len(self._output) >= self.spec.max_output_tokens:
            return FinishReason.MAX_OUTPUT_TOKENS
        if self.cache_tokens + 1 >= self.spec.context_tokens:
            return FinishReason.CONTEXT_LIMIT
        if self._grammar is not None and self._grammar.complete:
            return FinishReason.GRAMMAR_COMPLETE
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
        return self._step(parts, ending)

    def _step(self, parts: tuple[Released, ...], ending: Ending | None) -> Step:
        before, self._undelivered = self._undelivered, None
        if before is not None:
            parts = (before, *parts)
        return Step(b"".join(part.text for part in parts), tuple(token for part in parts for token in part.token_ids), ending)

    def _replay(self, earlier: Earlier, now: float) -> Released | None:
        """Take the tokens of earlier attempts as `choose` took them; returns what they bring out and was not delivered."""
        count = len(earlier.token_ids)
        if count and (count >= self.spec.max_output_tokens or self._prompt + count >= self.spec.context_tokens):
            raise CanNotGoOn("token_ids", f"has {count} ids, as many as the output can have")
        text, shown = bytearray(), list[int]()
        for token in earlier.token_ids:
            released = self._take_again(token, now)
            text += released.text
            shown += released.token_ids
        if count and self._grammar is not None and self._grammar.complete:
            raise CanNotGoOn("token_ids", "completes the grammar")
        rest = bytes(text[earlier.text_bytes :])
        if earlier.text_bytes > len(text):
            raise CanNotGoOn("text_bytes", f"is {earlier.text_bytes}, the tokens bring out {len(text)}")
        if rest and rest[0] & 0xC0 == 0x80:
            raise CanNotGoOn("text_bytes", f"is {earlier.text_bytes}, which is inside a character")
        if earlier.returned_tokens > len(shown):
            raise CanNotGoOn("returned_tokens", f"is {earlier.returned_tokens}, the tokens show {len(shown)}")
        ids = tuple(shown[earlier.returned_tokens :])
        return Released(rest, ids) if rest or ids else None

    def _take_again(self, token: int, now: float) -> Released:
        place = len(self._output)
        if self._armed and token in self._ending_ids:
            raise CanNotGoOn("token_ids", f"has the ending id {token} at {place}")
        self._select(token, None)
        if self._grammar is not None and not self._grammar.advance(token):
            raise CanNotGoOn("token_ids", f"breaks the grammar at {place}")
        try:
            released = self._text.push(token, now, self._armed)
        except BadUtf8:
            raise CanNotGoOn("token_ids", f"brings out bytes that are no text at {place}") from None
        if released.hit is not None:
            raise CanNotGoOn("token_ids", f"brings out a stop text at {place}")
        return released
