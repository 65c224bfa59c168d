"""A sequence without its text: what the scheduler asks of engine.sequence.Sequence, for outputs that only have a length."""

from engine.sequence import Step
from engine.sequence_spec import SequenceSpec
from lifecycle.finish import Ending, FinishReason
from lifecycle.usage import Usage

_ONE = Step(b"", ())
_EOS = Ending(FinishReason.EOS)
_MAX = Ending(FinishReason.MAX_OUTPUT_TOKENS)
#: The token that every step chooses, and the one that ends an output.
TOKEN, EOS = 1, 0


class Output:
    """Counts as engine.sequence.Sequence does; the invariant between cache and chosen tokens is asserted as there."""

    __slots__ = ("_most", "_prompt", "cache_tokens", "ending", "given_token_ids", "selected_tokens", "spec", "waiting")

    stop_hold_s = 0.0
    held_bytes = 0

    def __init__(self, spec: SequenceSpec) -> None:
        self.spec = spec
        self.given_token_ids = spec.prompt_token_ids
        self.cache_tokens = 0
        self.selected_tokens = 0
        self.waiting = False
        self.ending: Ending | None = None
        self._prompt = len(spec.prompt_token_ids)
        self._most = spec.max_output_tokens

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """All chosen ids."""
        return (TOKEN,) * self.selected_tokens

    def next_input(self) -> tuple[int, int]:
        """The token to feed and its position."""
        assert self.waiting
        return TOKEN, self._prompt + self.selected_tokens - 1

    def completed(self, n_tokens: int) -> None:
        """So many tokens more are in the cache."""
        self.cache_tokens += n_tokens
        self.waiting = False

    def choose(self, token: int, now: float) -> Step:
        """Take the token that was chosen."""
        assert self.cache_tokens == self._prompt + self.selected_tokens and not self.waiting
        self.selected_tokens += 1
        if token == EOS:
            return self.end(_EOS, now)
        if self.selected_tokens >= self._most:
            return self.end(_MAX, now)
        self.waiting = True
        return _ONE

    def end(self, ending: Ending, now: float) -> Step:
        """The output is over."""
        self.ending, self.waiting = ending, False
        return Step(b"", (), ending)

    def leave(self, ending: Ending) -> Step:
        """The same: there is no text to hold."""
        return self.end(ending, 0.0)

    def usage(self, cached_prompt_tokens: int = 0) -> Usage:
        """What was counted."""
        count = self.selected_tokens
        return Usage(self._prompt, cached_prompt_tokens, count, self.cache_tokens, count, count)
