"""Half characters, bad bytes and the start of an output, on tables made by hand."""

from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from text import BadUtf8, Detokeniser, LeadingSpace, TokenBytes, Utf8Policy
from text.detokeniser import plain_table

# Continuation bytes at the borders of every range in the Unicode standard's table of well-formed sequences.
BORDERS = [0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF]
TAILS = [bytes(tail) for size in range(4) for tail in product(BORDERS, repeat=size)]


def repairable(data: bytes) -> bool:
    """Whether some bytes after these make it valid UTF-8. Deliberately dumb: tries them."""
    return any(is_text(data + tail) for tail in TAILS)


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_b29_four_byte_emoji_of_byte_tokens() -> None:
    stream = Detokeniser(plain_table([bytes([byte]) for byte in "🎉".encode()]))
    assert [stream.push(token_id) for token_id in range(4)] == [b"", b"", b"", "🎉".encode()]
    assert stream.pending == b""


def test_b29_cjk_over_token_edges_then_ascii() -> None:
    stream = Detokeniser(plain_table([b"\xe4\xbd", b"\xa0\xe5\xa5", b"\xbd!", b"?"]))
    assert [stream.push(token_id).decode() for token_id in range(4)] == ["", "你", "好!", "?"]


def test_b29_output_cut_inside_a_character() -> None:
    table = plain_table([b"a\xf0\x9f"])
    stream = Detokeniser(table)
    assert (stream.push(0), stream.pending) == (b"a", b"\xf0\x9f")
    with pytest.raises(BadUtf8, match="0xf09f"):
        stream.finish()
    assert stream.finish(Utf8Policy.DROP) == b""  # the policy of an end that cuts, such as max_output_tokens
    assert stream.pending == b""


def test_b29_invalid_bytes_in_the_middle() -> None:
    tokens = [b"ok ", b"\xe4\xbd", b"x", b"\xff", b"\x80y"]
    dropped = Detokeniser(plain_table(tokens), Utf8Policy.DROP)
    assert b"".join(dropped.push(token_id) for token_id in range(5)) + dropped.finish() == b"ok xy"
    strict = Detokeniser(plain_table(tokens))
    assert strict.push(0) + strict.push(1) == b"ok "
    with pytest.raises(BadUtf8, match="utf8_policy to drop") as caught:
        strict.push(2)
    assert caught.value.data == b"\xe4\xbd"
    assert strict.pending == b"\xe4\xbd"  # nothing changed


@pytest.mark.parametrize("second", [b"\xa0", b"\xbf"])
def test_b29_half_a_surrogate_is_bad_at_once(second: bytes) -> None:
    tokens = [b"\xed", second, b"\x80", b"a"]
    strict = Detokeniser(plain_table(tokens))
    strict.push(0)
    with pytest.raises(BadUtf8, match="surrogates"):
        strict.push(1)
    assert strict.pending == b"\xed"
    dropping = Detokeniser(plain_table(tokens), Utf8Policy.DROP)
    assert [dropping.push(token_id) for token_id in (0, 1)] == [b"", b""]
    assert dropping.pending == b""
    assert dropping.push(2) + dropping.push(3) == b"a"


def test_the_last_character_before_the_surrogates_is_text() -> None:
    stream = Detokeniser(plain_table([b"\xed\x9f", b"\xbf"]))
    assert stream.push(0) + stream.push(1) == "\ud7ff".encode()


def test_replacement_character_of_the_model_passes() -> None:
    """U+FFFD as the model's own valid bytes is text like any other."""
    stream = Detokeniser(plain_table(["�".encode()]))
    assert stream.push(0).decode() == "�"


def test_drop_forgets_half_a_character() -> None:
    stream = Detokeniser(plain_table([b"\xe4", b"a"]))
    stream.push(0)
    stream.drop()
    assert stream.push(1) == b"a"


def test_ids_without_bytes_show_nothing() -> None:
    stream = Detokeniser(plain_table([b"\xe4\xbd", b"", b"\xa0"]))
    assert [stream.push(0), stream.push(1), stream.push(99), stream.push(2).decode()] == [b"", b"", b"", "你"]


def test_leading_space_of_the_output_goes_once() -> None:
    table = plain_table([b" a", b"", b" "], LeadingSpace.FIRST_BYTE)
    stream = Detokeniser(table)
    assert [stream.push(token_id) for token_id in (1, 0, 0)] == [b"", b"a", b" a"]
    stream = Detokeniser(table)
    assert [stream.push(token_id) for token_id in (2, 0)] == [b"", b" a"]


def test_marks_of_the_first_token_go() -> None:
    stream = Detokeniser(TokenBytes((b"  a", b""), LeadingSpace.FIRST_TOKEN, (b"a", b"")))
    assert [stream.push(token_id) for token_id in (1, 0, 0)] == [b"", b"a", b"  a"]


@pytest.mark.slow
@given(st.lists(st.binary(max_size=5) | st.text(max_size=3).map(str.encode), max_size=20))
@settings(deadline=None, max_examples=300)
def test_drop_equals_ignoring_decode_of_the_whole(tokens: list[bytes]) -> None:
    stream = Detokeniser(plain_table(tokens), Utf8Policy.DROP)
    pieces = [stream.push(token_id) for token_id in range(len(tokens))]
    assert len(stream.pending) <= 3
    for piece in pieces:
        piece.decode()  # complete characters only
    assert b"".join(pieces) + stream.finish() == b"".join(tokens).decode("utf-8", "ignore").encode()


@pytest.mark.slow
@given(
    st.lists(st.binary(min_size=1, max_size=1) | st.sampled_from([bytes([byte]) for byte in "é你🎉\ud7ff".encode()]), max_size=12)
)
@example([b"\xed", b"\xa0"])
@settings(deadline=None, max_examples=1000)
def test_error_is_raised_exactly_when_it_is_certain(tokens: list[bytes]) -> None:
    stream, seen, sent = Detokeniser(plain_table(tokens)), b"", b""
    for token_id, data in enumerate(tokens):
        seen += data
        if not repairable(seen):
            with pytest.raises(BadUtf8):
                stream.push(token_id)
            return
        sent += stream.push(token_id)
        assert sent + stream.pending == seen
    if is_text(seen):
        assert stream.finish() == b""
    else:
        with pytest.raises(BadUtf8):
            stream.finish()


def test_a_first_token_table_must_bring_its_own_entries() -> None:
    with pytest.raises(ValueError, match="build TokenBytes directly"):
        plain_table([b" "], LeadingSpace.FIRST_TOKEN)
    with pytest.raises(ValueError, match="must be equal"):
        TokenBytes((b"a",), LeadingSpace.FIRST_TOKEN, ())
