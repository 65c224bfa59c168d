"""Stops over bytes and ids: the rule, what is held, and a dumb second version of the matcher."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from text import Detokeniser, InvalidStops, StopMatcher, StopRules, TokenStopMatcher, TokenStopRules, Utf8Policy
from text.detokeniser import plain_table
from text.stop_matcher import MAX_STOP_BYTES, MAX_STOPS, STOP_RULE_VERSION, Automaton


def run(stops: list[str], pieces: list[str], include_stop: bool = False) -> tuple[list[str], int | None]:
    """Texts sent, piece by piece and the flush at the end, and the hit."""
    matcher = StopMatcher(StopRules(tuple(stop.encode() for stop in stops), include_stop))
    sent = [matcher.push(piece.encode()).safe.decode() for piece in pieces]
    return [*sent, matcher.flush().decode()], matcher.hit


def dumb(stops: tuple[bytes, ...], text: bytes, armed_from: int, include_stop: bool) -> tuple[bytes, int | None]:
    """Tries every end from the left, then every stop: earliest end, longest, first given. Ends before armed_from do not count."""
    for end in range(armed_from, len(text) + 1):
        ending = [index for index, stop in enumerate(stops) if text[:end].endswith(stop)]
        if ending:
            best = max(ending, key=lambda index: (len(stops[index]), -index))
            return text[: end if include_stop else end - len(stops[best])], best
    return text, None


def longest_hold(stops: tuple[bytes, ...], text: bytes) -> int:
    """Length of the longest end of the text that is a beginning, but not all, of a stop."""
    return max(
        (size for size in range(len(text) + 1) for stop in stops if size < len(stop) and stop[:size] == text[len(text) - size :]),
        default=0,
    )


def test_conformance_a() -> None:
    matcher = StopMatcher(StopRules((b"BCD",)))
    first, second = matcher.push(b"AB"), matcher.push(b"CD")
    assert (first.safe, first.hit) == (b"A", None)
    assert (second.safe, second.hit) == (b"", 0)
    assert matcher.flush() == b""


@pytest.mark.parametrize(
    "tokens",
    [
        [b"\xe4\xbd", b"\xa0", b"\xe5", b"\xa5\xbd", b"E", b"N", b"D"],
        [b"\xe4\xbd", b"\xa0\xe5", b"\xa5\xbd", b"E", b"N", b"D"],
        [b"\xe4", b"\xbd\xa0", b"\xe5\xa5", b"\xbdE", b"ND"],
    ],
)
def test_conformance_c(tokens: list[bytes]) -> None:
    stream, matcher = Detokeniser(plain_table(tokens)), StopMatcher(StopRules((b"END",)))
    matches = [matcher.push(stream.push(token_id)) for token_id in range(len(tokens))]
    assert [match.safe.decode() for match in matches if match.safe] == ["你", "好"]
    assert matches[-1].hit == 0
    assert (stream.pending, matcher.held) == (b"", 0)


def test_b28_stop_over_four_tokens() -> None:
    assert run(["DEFGHIJ"], ["ABC", "DE", "FG", "HI", "JKL"]) == (["ABC", "", "", "", "", ""], 0)


def test_b28_stop_begins_and_ends_inside_tokens() -> None:
    assert run(["CDE"], ["ABC", "DEF"]) == (["AB", "", ""], 0)


def test_b28_one_stop_is_the_beginning_of_another() -> None:
    assert run(["ABC", "AB"], ["xA", "BC"]) == (["x", "", ""], 1)  # "AB" ends first


def test_b28_longest_at_the_same_end() -> None:
    assert run(["BC", "ABC"], ["xAB", "C"]) == (["x", "", ""], 1)


def test_b28_equal_stops_take_the_first() -> None:
    assert run(["end", "end"], ["the end"])[1] == 0


def test_b28_stop_inside_another_that_never_completes() -> None:
    assert run(["abcde", "cd"], ["xabc", "dx"]) == (["x", "ab", ""], 1)


def test_b28_held_text_is_flushed_at_another_end() -> None:
    assert run(["STOP"], ["go ", "ST", "O"]) == (["go ", "", "", "STO"], None)


def test_b28_unicode_stop_over_tokens() -> None:
    tokens = [b"a\xf0\x9f", b"\x8e", b"\x89b"]
    stream, matcher = Detokeniser(plain_table(tokens)), StopMatcher(StopRules(("🎉b".encode(),)))
    matches = [matcher.push(stream.push(token_id)) for token_id in range(3)]
    assert [match.safe for match in matches] == [b"a", b"", b""]
    assert matches[-1].hit == 0


def test_b28_include_stop() -> None:
    assert run(["END"], ["goE", "NDmore"], include_stop=True) == (["go", "END", ""], 0)


def test_b28_stop_in_the_prompt_does_not_count() -> None:
    # The matcher never sees the prompt; output that continues a stop of the prompt is no stop.
    assert run(["END"], ["ND of it"]) == (["ND of it", ""], None)


def test_b28_nothing_after_a_hit() -> None:
    matcher = StopMatcher(StopRules((b"x",)))
    assert matcher.push(b"ax").hit == 0
    again = matcher.push(b"more")
    assert (again.safe, again.hit, matcher.flush()) == (b"", 0, b"")


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ((b"a", b""), "Stop 1 is empty"),
        (tuple(b"x%d" % index for index in range(MAX_STOPS + 1)), "at most 16"),
        ((b"x" * (MAX_STOP_BYTES + 1),), "Stop 0 has 257 bytes; at most 256"),
        ((b"\xff",), "Stop 0 is not valid UTF-8"),
    ],
)
def test_b28_bad_stops_are_refused(stops: tuple[bytes, ...], message: str) -> None:
    with pytest.raises(InvalidStops, match=message):
        StopRules(stops)


def test_b30_unarmed_stop_is_text() -> None:
    matcher = StopMatcher(StopRules((b"END",)))
    first = matcher.push(b"END", armed=False)
    assert (first.safe, first.hit) == (b"END", None)  # a whole stop cannot grow, so it does not wait
    assert matcher.push(b"END").hit == 0


def test_b30_stop_that_begins_unarmed_and_ends_armed_counts() -> None:
    matcher = StopMatcher(StopRules((b"END",)))
    assert matcher.push(b"xEN", armed=False).safe == b"x"
    assert matcher.push(b"D", armed=True).hit == 0


def test_b30_ignored_stop_that_a_longer_one_extends_still_waits() -> None:
    matcher = StopMatcher(StopRules((b"AB", b"ABC")))
    assert matcher.push(b"AB", armed=False).safe == b""
    last = matcher.push(b"C")
    assert (last.safe, last.hit) == (b"", 1)


def test_no_stops_hold_nothing() -> None:
    matcher = StopMatcher(StopRules(()))
    assert (matcher.push(b"text").safe, matcher.held) == (b"text", 0)


SMALL = st.lists(st.text("abあ", min_size=1, max_size=4).map(str.encode), max_size=5).map(tuple)


@pytest.mark.slow
@given(
    stops=SMALL,
    characters=st.lists(st.sampled_from([b"a", b"b", "あ".encode(), "い".encode()]), max_size=40),
    cuts=st.lists(st.integers(0, 200), max_size=12),
    unarmed_pushes=st.integers(0, 4),
    include_stop=st.booleans(),
)
@settings(deadline=None, max_examples=400)
def test_any_chunks_equal_the_dumb_matcher(
    stops: tuple[bytes, ...], characters: list[bytes], cuts: list[int], unarmed_pushes: int, include_stop: bool
) -> None:
    text = b"".join(characters)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    chunks = [text[start:end] for start, end in pairwise(edges)]
    armed_from = len(b"".join(chunks[:unarmed_pushes])) + 1
    matcher = StopMatcher(StopRules(stops, include_stop))
    sent, seen = b"", b""
    for place, chunk in enumerate(chunks):
        match = matcher.push(chunk, armed=place >= unarmed_pushes)
        sent, seen = sent + match.safe, seen + chunk
        if match.hit is None:
            assert matcher.held == longest_hold(stops, seen)  # exactly that much waits, no more
            assert sent == seen[: len(seen) - matcher.held]
        else:
            break
    expected, hit = dumb(stops, text, armed_from, include_stop)
    assert (sent + matcher.flush(), matcher.hit) == (expected, hit)


@given(stops=SMALL, text=st.text("abあい", max_size=40).map(str.encode))
@settings(deadline=None)
def test_what_is_safe_is_whole_characters(stops: tuple[bytes, ...], text: bytes) -> None:
    matcher = StopMatcher(StopRules(stops))
    for character in text.decode():
        matcher.push(character.encode()).safe.decode()  # raises if it were cut
    matcher.flush().decode()


class CountingAutomaton(Automaton):
    """Counts look-ups, each made by one dictionary access or one failure link."""

    class Counted(dict[int, int]):
        looked = 0

        def get(self, key: int, default: int | None = None) -> int | None:  # type: ignore[override]
            self.looked += 1
            return super().get(key, default)

    def count(self) -> Counted:
        self._goto = self.Counted(self._goto)
        return self._goto


def test_cost_per_byte_is_constant() -> None:
    # The worst text for failure links: it nearly completes the longest stop again and again.
    automaton = CountingAutomaton([b"a" * 255 + b"b", b"a" * 128 + b"c"])
    counted = automaton.count()
    text = (b"a" * 255 + b"x") * 20
    state = 0
    for symbol in text:
        state = automaton.step(state, symbol)
    assert counted.looked <= 2 * len(text)


def test_largest_stops_build_quickly_enough_to_be_bounded() -> None:
    stops = tuple(bytes([65 + index]) * MAX_STOP_BYTES for index in range(MAX_STOPS))
    rules = StopRules(stops)
    assert len(rules.automaton.hold) == 1 + MAX_STOPS * MAX_STOP_BYTES


def test_token_sequences() -> None:
    matcher = TokenStopMatcher(TokenStopRules(((7, 8, 9), (8,)), include_stop=False))
    assert (matcher.push(5).safe, matcher.push(7).safe, matcher.held) == ((5,), (), 1)
    last = matcher.push(8)
    assert (last.safe, last.hit, matcher.flush()) == ((7,), 1, ())
    assert matcher.push(1).safe == ()


@given(
    stops=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(bytes), max_size=4).map(tuple),
    ids=st.lists(st.integers(0, 3), max_size=30),
    unarmed=st.integers(0, 5),
)
@settings(deadline=None)
def test_token_matcher_equals_the_dumb_matcher(stops: tuple[bytes, ...], ids: list[int], unarmed: int) -> None:
    matcher = TokenStopMatcher(TokenStopRules(tuple(tuple(stop) for stop in stops)))
    matches = [matcher.push(token_id, armed=place >= unarmed) for place, token_id in enumerate(ids)]
    sent = bytes(token_id for match in matches for token_id in match.safe) + bytes(matcher.flush())
    expected = dumb(stops, bytes(ids), unarmed + 1, False)
    assert (sent, matches[-1].hit if matches else None) == expected


@pytest.mark.parametrize(
    ("stops", "message"), [(((),), "has 0 tokens"), (((1 << 32,),), "outside"), (((1,),) * 17, "at most 16")]
)
def test_bad_token_sequences_are_refused(stops: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(InvalidStops, match=message):
        TokenStopRules(stops)


def test_rule_version() -> None:
    assert STOP_RULE_VERSION == 1


def test_end_of_output_goes_through_the_matcher() -> None:
    stream, matcher = Detokeniser(plain_table([b"E", b"N", b"D\xe4"])), StopMatcher(StopRules((b"END",)))
    assert [matcher.push(stream.push(token_id)).hit for token_id in range(3)] == [None, None, 0]
    assert stream.pending == b"\xe4"
    stream.drop()
    assert stream.finish(Utf8Policy.ERROR) == b""
