"""Tokenizers out of GGUF metadata: the default model's, and small ones made here."""

import pytest

from tests.model_files import default_tokenizer
from text import Message, Tokenizer, UnsupportedModel, from_gguf
from text.byte_table import byte_alphabet
from text.gguf_pre import PRE_TYPES

SPELLING = {byte: character for character, byte in byte_alphabet().items()}


def spelled(text: str) -> str:
    return "".join(SPELLING[byte] for byte in text.encode())


def byte_level(pre: str | None, words: tuple[str, ...] = (), **more: object) -> Tokenizer:
    """Single bytes, then each word as a chain of merges from its left end, then three control tokens."""
    tokens, merges = list(SPELLING.values()), []
    for word in map(spelled, words):
        for cut in range(1, len(word)):
            if word[: cut + 1] not in tokens:
                tokens.append(word[: cut + 1])
                merges.append(f"{word[:cut]} {word[cut]}")
    tokens += ["<|bos|>", "<|eos|>", "<|eot_id|>", "[PAD1]", "<tool>"]
    count = len(tokens)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (count - 5) + [3, 3, 3, 5, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": count - 5,
        "tokenizer.ggml.eos_token_id": count - 4,
        **({} if pre is None else {"tokenizer.ggml.pre": pre}),
        **more,
    }
    return from_gguf(metadata)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token_id]) for token_id in tokenizer.encode_plain(text)]


def test_each_digit_of_smollm2_is_a_token() -> None:
    tokenizer = default_tokenizer()
    for text in ("1234567890", "In 2024, 3.14159 and x86", "٣٤٥", "１２３"):
        digits = sum(character.isnumeric() for character in text)
        shown = [tokenizer.token_bytes[token_id] for token_id in tokenizer.encode(text)]
        assert not any(sum(character.isnumeric() for character in data.decode("utf-8", "ignore")) > 1 for data in shown)
        assert digits <= len(shown)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.token(token_id) for token_id in tokenizer.encode("a 12 b")] == ["a", "Ġ", "1", "2", "Ġb"]


def test_smollm2_special_tokens() -> None:
    tokenizer = default_tokenizer()
    assert (tokenizer.vocabulary_size, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, {2})
    assert tokenizer.special_ids == set(range(17))
    assert tokenizer.encode("Hi") == tokenizer.encode_plain("Hi")  # the file says: no BOS
    assert tokenizer.encode_plain("<|im_start|>user")[0] == 1
    assert tokenizer.decode([1, *tokenizer.encode_plain("user"), 2]) == "user"


def test_smollm2_chat() -> None:
    tokenizer = default_tokenizer()
    assert tokenizer.chat is not None
    text = tokenizer.chat.render([Message("system", "Be brief."), Message("user", "2+2?")])
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode_plain(text)
    assert (ids.count(1), ids.count(2)) == (3, 2)


@pytest.mark.slow
def test_smollm2_agrees_with_the_general_converter_except_in_digits() -> None:
    """transformers' converter reads the same file; without digits both must cut alike."""
    from tests.model_files import default_model

    transformers = pytest.importorskip("transformers")
    path = default_model().path
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer = default_tokenizer()
    for text in ("Hello  world's\n\n\tend.", "naïve 你好 мир 🎉 <|im_end|>", " lead and trail ", "I'll we've\r\n..."):
        assert tokenizer.encode(text) == theirs(text)["input_ids"]


@pytest.mark.parametrize(
    ("pre", "words", "text", "expected"),
    [
        ("smollm", (" 12", "12", " ab", "ab"), "ab 12 ab", ["ab", " ", "1", "2", " ab"]),
        ("gpt-2", (" 12", "12", " ab", "ab"), "ab 12 ab", ["ab", " 12", " ab"]),
        ("gpt-2", ("1234",), "1234", ["1234"]),
        ("default", ("1234", "a.b"), "1234a.b", ["123", "4", "a", ".", "b"]),
        (None, ("1234",), "1234", ["123", "4"]),
        ("llama-bpe", ("1234", "...\n"), "1234...\n", ["123", "4", "...\n"]),
        ("qwen2", ("12",), "12", ["1", "2"]),
        ("qwen2", ("'S",), "IT'S", ["I", "T", "'S"]),  # contractions in any case
        ("gpt-2", ("'S",), "IT'S", ["I", "T", "'", "S"]),
    ],
)
def test_pre_tokenizers_cut_where_the_models_were_trained(
    pre: str | None, words: tuple[str, ...], text: str, expected: list[str]
) -> None:
    assert pieces(byte_level(pre, words), text) == expected


@pytest.mark.parametrize("pre", PRE_TYPES)
@pytest.mark.parametrize("text", ["naïve café 12 你好\n\n  мир 🎉", " x", "\t\n ", "e\u0301"])
def test_byte_level_round_trips(pre: str, text: str) -> None:
    import unicodedata

    tokenizer = byte_level(pre, ("caf", " 12"))
    expected = unicodedata.normalize("NFC", text) if PRE_TYPES[pre].compose else text
    assert tokenizer.decode(tokenizer.encode(text)) == expected


def test_llama_bpe_takes_a_whole_word_without_its_merges() -> None:
    tokens = [*SPELLING.values(), "zzz"]
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": []}
    whole = from_gguf({**metadata, "tokenizer.ggml.pre": "llama-bpe"})
    assert pieces(whole, "zzz") == ["zzz"]
    assert pieces(from_gguf({**metadata, "tokenizer.ggml.pre": "gpt-2"}), "zzz") == ["z", "z", "z"]


def test_bos_follows_the_file_then_the_kind() -> None:
    assert byte_level("gpt-2").encode("a") == byte_level("gpt-2").encode_plain("a")
    for tokenizer in (byte_level("llama-bpe"), byte_level("gpt-2", **{"tokenizer.ggml.add_bos_token": True})):
        assert tokenizer.encode("a") == [tokenizer.bos_id, *tokenizer.encode_plain("a")]
    silent = byte_level("llama-bpe", **{"tokenizer.ggml.add_bos_token": False})
    assert silent.encode("a") == silent.encode_plain("a")


def test_b30_ends_are_those_declared_and_the_known_ends_of_turn() -> None:
    tokenizer = byte_level("gpt-2")
    assert {tokenizer.token(token_id) for token_id in tokenizer.eos_ids} == {"<|eos|>", "<|eot_id|>"}
    tool = len(SPELLING) + 4
    declared = byte_level("gpt-2", **{"tokenizer.ggml.eom_token_id": tool})
    assert tool in declared.eos_ids


def test_unused_ids_have_no_text_and_added_ones_do() -> None:
    tokenizer = byte_level("gpt-2")
    pad, tool = len(SPELLING) + 3, len(SPELLING) + 4
    assert (tokenizer.token(pad), tokenizer.token_bytes[pad], tokenizer.decode([pad])) == (None, b"", "")
    assert tokenizer.encode_plain("x<tool>") == [*tokenizer.encode_plain("x"), tool]
    assert tokenizer.token_bytes[tool] == b"<tool>"
    assert pad not in tokenizer.encode_plain("[PAD1]")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken'.*tokenizer.json"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer model is 't5'.*gpt2 and llama"),
        ({"tokenizer.ggml.tokens": None}, "no field tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "same token twice"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type must give"),
        ({"tokenizer.ggml.merges": ["ab"]}, "two parts"),
        ({"tokenizer.ggml.merges": ["nope nada"]}, "merges do not fit"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id is 1000000"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "eos_token_id is '2'; it must be an integer"),
        ({"tokenizer.ggml.add_bos_token": 1}, "must be true or false"),
    ],
)
def test_bad_metadata_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        byte_level("gpt-2", **change)


SCORED = {"▁": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "ab": -0.5, "bc": -0.25, "abc": -0.75, "▁a": -0.6}


def scored(**more: object) -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SCORED]
    return from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(SCORED)],
            "tokenizer.ggml.scores": [0.0] * 259 + list(SCORED.values()),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            **more,
        }
    )


def named(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.token(token_id) for token_id in tokenizer.encode_plain(text)]


def test_scores_decide_sentencepiece_merges() -> None:
    tokenizer = scored()
    assert named(tokenizer, "abc") == ["▁a", "bc"]  # "bc" first (-0.25), then "▁a"; "ab" is gone by then
    assert named(tokenizer, "b c") == ["▁", "b", "▁", "c"]
    assert named(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("a") == [1, *tokenizer.encode_plain("a")]  # SentencePiece models begin with <s>
    assert tokenizer.decode(tokenizer.encode("ab é c")) == "ab é c"


def test_sentencepiece_with_listed_merges_and_without_prefix() -> None:
    tokenizer = scored(**{"tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.add_space_prefix": False})
    assert named(tokenizer, "abc") == ["ab", "c"]
    assert tokenizer.decode(tokenizer.encode_plain(" ab")) == " ab"


def test_sentencepiece_scores_must_fit() -> None:
    with pytest.raises(UnsupportedModel, match="scores has 1 entries"):
        scored(**{"tokenizer.ggml.scores": [0.0]})


def test_the_byte_alphabet_is_the_librarys() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(byte_alphabet()) == set(ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))
