"""The sequence against a model that decodes everything again at each token and keeps nothing between tokens."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sequence import Step
from lifecycle.finish import Cause, Ending, FinishReason
from tests.unit.sequence_kit import Case, feed, ids_of
from text.detokeniser import Utf8Policy

EOS, STOP_ID = 0, 1
VOCABULARY = (
    *(b"", b"<", b"", b"a", b"b", b"ab", b"bab"),
    *(b"\xe4", b"\xbd", b"\xa0", b"\xe4\xbd", b"\xbd\xa0", b"b\xe4", b"\xa0a", "你b".encode(), "é".encode(), b"\xff"),
)
BAD_UTF8 = Ending(FinishReason.MODEL_ERROR, Cause.BAD_UTF8)
OUTSIDE = Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL)


class NeverText(Exception):
    """The bytes so far can never become text."""


def decoded(tokens: list[int], policy: Utf8Policy) -> tuple[bytes, int]:
    """Complete characters of the tokens' bytes, and where in the bytes the last, incomplete one begins."""
    data = b"".join(VOCABULARY[token] for token in tokens)
    text = data.decode("utf-8", "ignore" if policy is Utf8Policy.DROP else "replace")
    tail = len(data)
    for start in range(max(0, len(data) - 3), len(data)):
        try:
            data[start:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                tail = start
                break
    if policy is Utf8Policy.ERROR:
        try:
            text = data[:tail].decode()
        except UnicodeDecodeError:
            raise NeverText from None
    return text.encode(), tail


@dataclass(frozen=True)
class Whole:
    """What should have been released after some tokens, and how the output ended there."""

    text: bytes
    shown: tuple[int, ...]
    ending: Ending | None


class Model:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.policy = case.policy or Utf8Policy.ERROR

    def texts(self, tokens: list[int]) -> list[bytes]:
        return [decoded(tokens[:count], self.policy)[0] for count in range(len(tokens) + 1)]

    def hit(self, tokens: list[int]) -> tuple[int, int, int] | None:
        """(end, start, index) of the stop that ends first, of those the longest, of those the first given."""
        found = []
        texts = self.texts(tokens)
        for index, stop in enumerate(word.encode() for word in self.case.stops):
            for start in range(len(texts[-1]) - len(stop) + 1):
                end = start + len(stop)
                if texts[-1][start:end] != stop:
                    continue
                at_token = next(count for count, text in enumerate(texts) if len(text) >= end)
                if at_token >= self.case.least:
                    found.append((end, start, index))
        return min(found, default=None)

    def held(self, text: bytes) -> int:
        stops = [stop.encode() for stop in self.case.stops]
        return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)

    def shown(self, tokens: list[int], released: int) -> tuple[int, ...]:
        texts = self.texts(tokens)
        tails = [decoded(tokens[:count], self.policy)[1] for count in range(len(tokens) + 1)]
        sizes = [len(b"".join(VOCABULARY[token] for token in tokens[:count])) for count in range(len(tokens) + 1)]
        out = []
        for count, token in enumerate(tokens, 1):
            place: float = len(texts[count])
            if tails[count] < sizes[count]:
                place = float("inf")
                for later in range(count + 1, len(tokens) + 1):
                    if texts[later] != texts[later - 1] or tails[later] == sizes[later]:
                        place = min(len(texts[later - 1]) + 1, len(texts[later]))
                        break
            if place <= released:
                out.append(token)
        return tuple(out)

    def whole(self, tokens: list[int], outside: bool) -> Whole:
        """After all of `tokens`, none of which but the last may have ended the output."""
        case, last = self.case, tokens[-1] if tokens else None
        if outside:
            return self.flushed(tokens, OUTSIDE)
        ends = case.stop_ids | (frozenset() if case.ignore_eos else case.eos_ids)
        if last in ends and len(tokens) > case.least:
            reason = FinishReason.EOS if last == EOS and not case.ignore_eos else FinishReason.STOP_TOKEN
            return self.flushed(tokens[:-1], Ending(reason, matched_token_id=last))
        try:
            text, _ = decoded(tokens, self.policy)
        except NeverText:
            return self.flushed(tokens[:-1], BAD_UTF8)
        hit = self.hit(tokens)
        if hit is not None:
            end, start, index = hit
            cut = end if case.include_stop else start
            return Whole(text[:cut], self.shown(tokens, cut), Ending(FinishReason.STOP_SEQUENCE, matched_stop=case.stops[index]))
        if len(tokens) >= case.most:
            return self.flushed(tokens, Ending(FinishReason.MAX_OUTPUT_TOKENS))
        if len(case.prompt) + len(tokens) >= case.context:
            return self.flushed(tokens, Ending(FinishReason.CONTEXT_LIMIT))
        released = len(text) - self.held(text)
        return Whole(text[:released], self.shown(tokens, released), None)

    def flushed(self, tokens: list[int], ending: Ending) -> Whole:
        text, tail = decoded(tokens, self.policy)
        incomplete = tail < sum(len(VOCABULARY[token]) for token in tokens)
        by_model = ending.reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        by_limit = ending.reason in (FinishReason.MAX_OUTPUT_TOKENS, FinishReason.CONTEXT_LIMIT)
        strict = (by_model and self.case.policy is None) or ((by_model or by_limit) and self.case.policy is Utf8Policy.ERROR)
        return Whole(text, self.shown(tokens, len(text)), BAD_UTF8 if incomplete and strict else ending)


CASES = st.builds(
    Case,
    vocabulary=st.just(VOCABULARY),
    stops=st.lists(
        st.text("ab你é", min_size=1, max_size=4) | st.sampled_from(["abab", "aba", "ba", "你b", "b你"]), max_size=3
    ).map(tuple),
    include_stop=st.booleans(),
    stop_ids=st.sampled_from([frozenset(), frozenset({STOP_ID}), frozenset({STOP_ID, EOS})]),
    eos_ids=st.just(frozenset({EOS})),
    ignore_eos=st.booleans(),
    least=st.sampled_from([0, 0, 1, 3, 8]),
    most=st.sampled_from([25, 25, 25, 12, 7, 1]),
    context=st.sampled_from([100, 100, 100, 100, 15, 9, 4, 3]),
    policy=st.sampled_from([None, Utf8Policy.ERROR, Utf8Policy.DROP, Utf8Policy.DROP]),
)
#: Mostly letters and whole characters, so that outputs get long enough to meet stops.
TOKENS = st.lists(
    st.sampled_from([3, 4, 5, 6] * 5 + [14, 15, 2] * 3 + [EOS, STOP_ID] * 2 + list(range(len(VOCABULARY)))),
    min_size=10,
    max_size=25,
)
PAIRED = TOKENS | st.lists(
    st.sampled_from([(3,), (4,), (5,), (10, 9), (7, 11), (12, 8, 9), (7, 8, 13), (3, 4, EOS), (10, STOP_ID)]), max_size=10
).map(lambda groups: [token for group in groups for token in group])


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(case=CASES, tokens=PAIRED, outside_at=st.none() | st.integers(0, 25))
def test_every_step_equals_decoding_everything_again(case: Case, tokens: list[int], outside_at: int | None) -> None:
    sequence, model = case.start(), Model(case)
    steps: list[Step] = []
    before = Whole(b"", (), None)
    for count, token in enumerate(tokens):
        outside = count == outside_at
        steps.append(feed(sequence, token, float(count), OUTSIDE if outside else None))
        taken = tokens[:count] if outside else tokens[: count + 1]
        now = model.whole(taken, outside)
        assert steps[-1].ending == now.ending == sequence.ending
        assert now.text == before.text + steps[-1].text
        assert sorted(now.shown) == sorted(ids_of(steps))
        assert list(sequence.output_token_ids) == taken
        usage = sequence.usage()
        assert usage.selected_tokens == len(taken)
        assert usage.returned_tokens == len(now.shown)
        assert usage.returned_tokens <= usage.billed_tokens <= usage.selected_tokens
        assert usage.processed_tokens <= sequence.spec.most_cache_tokens
        b"".join(step.text for step in steps).decode()
        before = now
        if now.ending is not None:
            break
        # A token is shown after all tokens before it.
        assert ids_of(steps) == taken[: len(ids_of(steps))]
