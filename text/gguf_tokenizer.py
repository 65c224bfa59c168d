"""A tokenizer out of a GGUF file's metadata.

The general converters keep the vocabulary and the merges but not every rule of the original: for SmolLM2 they lose that each
digit is a token of its own. So the tokenizer is put together here, step by step, from what the file declares
(fields `tokenizer.ggml.*`, documented in the GGUF specification and by llama.cpp's converter).
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum

from tokenizers import AddedToken, decoders, normalizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from text.chat_template import ChatTemplate
from text.errors import UnsupportedModel
from text.gguf_fields import GgufFields
from text.gguf_pre import pre_type
from text.tokenizer import MAX_VOCABULARY_IDS, Tokenizer, TokenizerParts

WORD_MARK = "▁"

# Tokens that end a turn in well-known chat formats. Older files declare only the end of a document as eos, and a chat
# would run past the end of its turn.
END_OF_TURN = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"})
_END_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


class TokenType(IntEnum):
    """GGUF's token types."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer that the metadata describes. Raises UnsupportedModel, ChatTemplateError."""
    fields = GgufFields(metadata)
    tokens = fields.texts(_key("tokens"))
    if len(tokens) > MAX_VOCABULARY_IDS:
        raise UnsupportedModel(f"The GGUF file has {len(tokens)} tokens; at most {MAX_VOCABULARY_IDS} are supported.")
    types = _types(fields, len(tokens))
    model = fields.text(_key("model"))
    if model == "gpt2":
        backend, add_bos = _byte_level(fields, tokens, types)
    elif model == "llama":
        backend, add_bos = _sentencepiece(fields, tokens, types)
    else:
        raise UnsupportedModel(
            f"The GGUF file's tokenizer model is {model!r} (tokenizer.ggml.model); gpt2 and llama are supported."
        )
    backend.add_special_tokens(_added(tokens, types, (TokenType.CONTROL, TokenType.UNKNOWN), special=True))
    backend.add_tokens(_added(tokens, types, (TokenType.USER_DEFINED,), special=False))
    bos = _token_id(fields, "bos_token_id", len(tokens))
    if bos is not None and fields.flag(_key("add_bos_token"), add_bos):
        name = tokens[bos]
        backend.post_processor = processors.TemplateProcessing(
            single=[name, "$A"], pair=[name, "$A", "$B"], special_tokens=[(name, bos)]
        )
    return Tokenizer(TokenizerParts(backend, _end_ids(fields, tokens, types), bos, _chat(fields, tokens)))


def _key(name: str) -> str:
    return f"tokenizer.ggml.{name}"


def _types(fields: GgufFields, count: int) -> list[TokenType]:
    if not fields.has(_key("token_type")):
        return [TokenType.NORMAL] * count
    numbers = fields.numbers(_key("token_type"))
    known = {int(kind) for kind in TokenType}
    if len(numbers) != count or not known.issuperset(numbers):
        raise UnsupportedModel(f"tokenizer.ggml.token_type must give one of the types 1 to 6 for each of the {count} tokens.")
    return [TokenType(int(number)) for number in numbers]


def _vocabulary(tokens: Sequence[str], types: Sequence[TokenType]) -> dict[str, int]:
    """Text -> id, without the ids that the model never learned: they have no text."""
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] is not TokenType.UNUSED}
    if len(vocabulary) != sum(kind is not TokenType.UNUSED for kind in types):
        raise UnsupportedModel("The GGUF file lists the same token twice (tokenizer.ggml.tokens).")
    return vocabulary


def _added(tokens: Sequence[str], types: Sequence[TokenType], kinds: tuple[TokenType, ...], special: bool) -> list[AddedToken]:
    return [
        AddedToken(token, special=special, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in kinds and token
    ]


def _byte_level(fields: GgufFields, tokens: Sequence[str], types: Sequence[TokenType]) -> tuple[Backend, bool]:
    """Byte-level BPE (GPT-2's alphabet); also whether it adds a BOS when the file does not say."""
    kind = pre_type(fields.text(_key("pre"), "default"))
    merges = _merges(fields.texts(_key("merges")))
    backend = Backend(_bpe(_vocabulary(tokens, types), merges, ignore_merges=kind.ignore_merges))
    normalizer = kind.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = kind.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, kind.add_bos


def _sentencepiece(fields: GgufFields, tokens: Sequence[str], types: Sequence[TokenType]) -> tuple[Backend, bool]:
    """SentencePiece BPE with byte fallback. Its merges are implied by the scores; some files list them too."""
    vocabulary = _vocabulary(tokens, types)
    if fields.has(_key("merges")):
        merges = _merges(fields.texts(_key("merges")))
    else:
        merges = _merges_from_scores(tokens, types, fields.numbers(_key("scores")))
    unknown = _token_id(fields, "unknown_token_id", len(tokens))
    if unknown is None and TokenType.UNKNOWN in types:
        unknown = types.index(TokenType.UNKNOWN)
    unknown_token = None if unknown is None else tokens[unknown]
    backend = Backend(_bpe(vocabulary, merges, unk_token=unknown_token, fuse_unk=True, byte_fallback=True))
    marks: list[normalizers.Normalizer] = [normalizers.Replace(" ", WORD_MARK)]
    steps: list[decoders.Decoder] = [decoders.Replace(WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.flag(_key("add_space_prefix"), True):
        marks.insert(0, normalizers.Prepend(WORD_MARK))
        steps.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(marks)
    backend.decoder = decoders.Sequence(steps)
    return backend, True


def _bpe(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> BPE:
    try:
        return BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=unk_token,
            fuse_unk=fuse_unk,
            byte_fallback=byte_fallback,
            ignore_merges=ignore_merges,
        )
    except Exception as error:  # the library raises no narrower class
        raise UnsupportedModel(f"The GGUF file's merges do not fit its tokens: {error}") from error


def _merges(lines: Sequence[str]) -> list[tuple[str, str]]:
    """ "left right" pairs; the first space after the first character separates, because a part may begin with one."""
    pairs = []
    for line in lines:
        cut = line.find(" ", 1)
        if cut < 0:
            raise UnsupportedModel(f"tokenizer.ggml.merges has {line!r:.60}; each entry must be two parts with a space between.")
        pairs.append((line[:cut], line[cut + 1 :]))
    return pairs


def _merges_from_scores(tokens: Sequence[str], types: Sequence[TokenType], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result scores best; so pairs in falling order of that score are BPE merges."""
    if len(scores) != len(tokens):
        raise UnsupportedModel(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens; they must be equal.")
    pieces = {token: index for index, token in enumerate(tokens) if types[index] in (TokenType.NORMAL, TokenType.USER_DEFINED)}
    ranked: list[tuple[float, int, str, str]] = []
    for token, index in pieces.items():
        if types[index] is not TokenType.NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                ranked.append((-scores[index], index, left, right))
    ranked.sort(key=lambda entry: entry[:2])
    return [(left, right) for _, _, left, right in ranked]


def _token_id(fields: GgufFields, name: str, count: int) -> int | None:
    if not fields.has(_key(name)):
        return None
    token_id = fields.integer(_key(name))
    if not 0 <= token_id < count:
        raise UnsupportedModel(f"tokenizer.ggml.{name} is {token_id}; the file has ids 0 to {count - 1}.")
    return token_id


def _end_ids(fields: GgufFields, tokens: Sequence[str], types: Sequence[TokenType]) -> frozenset[int]:
    declared = {found for name in _END_FIELDS if (found := _token_id(fields, name, len(tokens))) is not None}
    control = (index for index, kind in enumerate(types) if kind is TokenType.CONTROL)
    return frozenset(declared | {index for index in control if tokens[index] in END_OF_TURN})


def _chat(fields: GgufFields, tokens: Sequence[str]) -> ChatTemplate | None:
    if not fields.has("tokenizer.chat_template"):
        return None
    ids = {name: _token_id(fields, field, len(tokens)) for name, field in _NAMED.items()}
    named = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    return ChatTemplate(fields.text("tokenizer.chat_template"), named)
