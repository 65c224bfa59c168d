"""Every tokenizer kind: the stream of single tokens equals the library's decode of the whole."""

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from tests.model_files import default_tokenizer
from text import BadUtf8, LeadingSpace, Tokenizer, UnsupportedModel, Utf8Policy, from_gguf, from_hf_directory
from text.library_stream import LibraryStream
from text.tokenizer import TokenizerParts

TEXTS = [
    "Hello world, 12345 and  two spaces.\n\tTabbed",
    "Zażółć gęślą jaźń — naïve café",
    "Привет, мир! Как дела?",
    "你好，世界。今日は良い天気ですね",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "한국어 문장입니다",
    "🎉👩‍👩‍👧 emoji 🇯🇵",
    "def f(x):\n    return x ** 2  # ok",
]
CORPUS = TEXTS * 4 + ["a b c d e f g h i j k l m n o p q r s t u v w x y z", "the cat sat on the mat and the dog"] * 4
SPECIAL = AddedToken("<|end|>", special=True, normalized=False)
ADDED = AddedToken("<tool call>", special=False, normalized=False)


def wrap(backend: Backend) -> Tokenizer:
    backend.add_special_tokens([SPECIAL])
    backend.add_tokens([ADDED])
    return Tokenizer(TokenizerParts(backend, frozenset(), None, None))


def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return wrap(backend)


def sentencepiece_metadata(prefix: bool = True) -> dict[str, object]:
    """A Llama-2-like vocabulary: <unk>, <s>, </s>, 256 byte tokens, letters, and pieces with falling scores."""
    letters = sorted(set("".join(CORPUS[:3])) | set("▁абв世"))
    pieces = [
        "▁t",
        "he",
        "▁the",
        "▁▁",
        "▁a",
        "an",
        "and",
        "▁and",
        "ell",
        "▁H",
        "▁Hell",
        "world",
        "wor",
        "ld",
        "▁world",
        "lo",
        "or",
        "wo",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) + len(letters))]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) + len(letters))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def sentencepiece() -> Tokenizer:
    return from_gguf(sentencepiece_metadata())


def sentencepiece_without_prefix() -> Tokenizer:
    return from_gguf(sentencepiece_metadata(prefix=False))


def unigram() -> Tokenizer:
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return wrap(backend)


def word_pieces() -> Tokenizer:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return wrap(backend)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "smollm2": default_tokenizer,
    "byte-level": lru_cache(byte_level),
    "sentencepiece": lru_cache(sentencepiece),
    "sentencepiece, no prefix": lru_cache(sentencepiece_without_prefix),
    "unigram": lru_cache(unigram),
    "word pieces": lru_cache(word_pieces),
}
TABLES = {kind: make for kind, make in KINDS.items() if kind != "word pieces"}


def streamed(tokenizer: Tokenizer, ids: list[int], policy: Utf8Policy) -> bytes:
    stream = tokenizer.detokeniser(policy)
    return b"".join([*(stream.push(token_id) for token_id in ids), stream.finish()])


def raw_bytes(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    """The output's bytes before any rule about UTF-8, without the incremental code."""
    table = tokenizer.token_bytes
    shown = [token_id for token_id in ids if table[token_id]]
    if not shown:
        return b""
    if table.leading is LeadingSpace.FIRST_TOKEN:
        return table.first[shown[0]] + b"".join(table[token_id] for token_id in shown[1:])
    joined = b"".join(table[token_id] for token_id in shown)
    return joined.removeprefix(b" ") if table.leading is LeadingSpace.FIRST_BYTE else joined


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=500)
def test_stream_equals_the_librarys_decode(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    some_ids = st.lists(st.integers(0, tokenizer.vocabulary_size + 2), max_size=12)
    text_ids = st.sampled_from(TEXTS).map(tokenizer.encode_plain)
    ids = data.draw(
        st.lists(some_ids | text_ids, max_size=3).map(lambda parts: [token_id for part in parts for token_id in part])
    )
    expected = tokenizer.decode(ids)
    if kind not in TABLES:
        assert streamed(tokenizer, ids, Utf8Policy.ERROR).decode() == expected
        return
    raw = raw_bytes(tokenizer, ids)
    try:
        valid = raw.decode()
    except UnicodeDecodeError:
        # The library writes U+FFFD; we leave exactly the bad bytes out, or refuse.
        assert streamed(tokenizer, ids, Utf8Policy.DROP) == raw.decode("utf-8", "ignore").encode()
        with pytest.raises(BadUtf8):
            streamed(tokenizer, ids, Utf8Policy.ERROR)
        return
    assert valid == expected
    for policy in Utf8Policy:
        assert streamed(tokenizer, ids, policy).decode() == expected


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_in_several_scripts(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode_plain(text)
    if kind != "unigram":  # it has no byte fallback and a normaliser
        assert tokenizer.decode(ids) == text
    assert streamed(tokenizer, ids, Utf8Policy.ERROR).decode() == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_special_ids_show_nothing(kind: str) -> None:
    tokenizer = KINDS[kind]()
    stream = tokenizer.detokeniser()
    assert tokenizer.special_ids
    assert all(stream.push(token_id) == b"" for token_id in sorted(tokenizer.special_ids))
    assert stream.finish() == b""


def test_no_text_ever_has_a_replacement_mark() -> None:
    tokenizer = KINDS["byte-level"]()
    ids = tokenizer.encode_plain("🎉")
    assert len(ids) > 1
    assert "�" in tokenizer.decode(ids[:-1])
    assert streamed(tokenizer, ids[:-1], Utf8Policy.DROP) == b""


def test_kinds_take_the_road_they_should() -> None:
    leading = {kind: make().token_bytes.leading for kind, make in TABLES.items()}
    assert leading == {
        "smollm2": LeadingSpace.KEEP,
        "byte-level": LeadingSpace.KEEP,
        "sentencepiece": LeadingSpace.FIRST_BYTE,
        "sentencepiece, no prefix": LeadingSpace.KEEP,
        "unigram": LeadingSpace.FIRST_TOKEN,
    }
    pieces = word_pieces()
    assert not pieces.has_token_bytes
    with pytest.raises(UnsupportedModel, match="detokeniser"):
        _ = pieces.token_bytes


def test_library_stream_refuses_or_drops_half_a_character() -> None:
    """The fall-back road, on a tokenizer whose tokens can be half a character."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        ["a"], trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    )
    half = backend.encode("é").ids[0]
    strict = LibraryStream(backend)
    assert strict.push(half) == b""
    assert strict.pending
    with pytest.raises(BadUtf8):
        strict.finish()
    dropping = LibraryStream(backend, Utf8Policy.DROP)
    assert dropping.push(half) + dropping.finish() == b""
    dropping.push(half)
    dropping.drop()
    assert dropping.pending == b""


def hf_directory(path: Path, **settings_: object) -> Path:
    tokenizer = byte_level()
    backend = tokenizer._backend
    backend.add_special_tokens(["<s>", "</s>", "<turn>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    backend.enable_truncation(4)
    backend.save(str(path / "tokenizer.json"))
    ids = {name: backend.token_to_id(name) for name in ("<s>", "</s>", "<turn>")}
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>", **settings_}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids["</s>"], ids["<turn>"]]}))
    (path / "config.json").write_text(json.dumps({"eos_token_id": ids["</s>"], "bos_token_id": ids["<s>"]}))
    return path


def test_b30_hf_directory_knows_every_end_token(tmp_path: Path) -> None:
    tokenizer = from_hf_directory(hf_directory(tmp_path))
    assert {tokenizer.token(token_id) for token_id in tokenizer.eos_ids} == {"</s>", "<turn>"}
    assert tokenizer.bos_id is not None
    assert tokenizer.token(tokenizer.bos_id) == "<s>"
    assert tokenizer.chat is None


def test_hf_directory_adds_the_leading_token_and_cuts_nothing(tmp_path: Path) -> None:
    tokenizer = from_hf_directory(hf_directory(tmp_path))
    text = "a text of more than four tokens, far more"
    assert tokenizer.encode(text) == [tokenizer.bos_id, *tokenizer.encode_plain(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_plain("<turn>") == [
        token_id for token_id in tokenizer.eos_ids if tokenizer.token(token_id) == "<turn>"
    ]


def test_hf_directory_finds_the_chat_template(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}named"}]
    path = hf_directory(tmp_path, chat_template=named)
    assert chat_text(from_hf_directory(path)) == "<s>named"
    (path / "chat_template.jinja").write_text("{{ eos_token }}file")
    assert chat_text(from_hf_directory(path)) == "</s>file"


def chat_text(tokenizer: Tokenizer) -> str:
    from text import Message

    assert tokenizer.chat is not None
    return tokenizer.chat.render([Message("user", "hi")])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{}", "no tokenizer that the tokenizers library can read"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("generation_config.json", "[]", "must hold a JSON object"),
    ],
)
def test_broken_hf_files_are_named(tmp_path: Path, file: str, content: str, message: str) -> None:
    (hf_directory(tmp_path) / file).write_text(content)
    with pytest.raises(UnsupportedModel, match=message):
        from_hf_directory(tmp_path)


def test_a_directory_without_tokenizer_json_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="save_pretrained"):
        from_hf_directory(tmp_path)


@pytest.mark.parametrize("kind", ["byte-level", "unigram", "word pieces"])
def test_an_added_token_with_a_space_shows_as_written(kind: str) -> None:
    tokenizer = KINDS[kind]()
    ids = [token_id for token_id in range(tokenizer.vocabulary_size) if tokenizer.token(token_id) == ADDED.content]
    assert len(ids) == 1
    assert streamed(tokenizer, ids, Utf8Policy.ERROR).decode() == tokenizer.decode(ids) == ADDED.content
