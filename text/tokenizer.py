"""A model's tokenizer: text to ids, ids to text, and which ids end an output."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as Backend

from text.byte_table import special_ids, token_bytes
from text.chat_template import ChatTemplate
from text.detokeniser import Detokeniser, TextStream, TokenBytes, Utf8Policy
from text.errors import UnsupportedModel
from text.library_stream import LibraryStream

MAX_VOCABULARY_IDS = 1 << 21


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a Tokenizer is made of."""

    backend: Backend
    eos_ids: frozenset[int]
    bos_id: int | None
    chat: ChatTemplate | None


class Tokenizer:
    """Immutable after building; may be used from several threads.

    `vocabulary_size` counts ids from 0 to the highest one. A model's logits can have more columns; such ids show nothing.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        backend = parts.backend
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.vocabulary_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not 0 < self.vocabulary_size <= MAX_VOCABULARY_IDS:
            raise UnsupportedModel(f"The tokenizer has {self.vocabulary_size} ids; 1 to {MAX_VOCABULARY_IDS} are supported.")
        self.eos_ids = parts.eos_ids
        self.bos_id = parts.bos_id
        self.chat = parts.chat
        self.special_ids = special_ids(backend)
        self._table = token_bytes(backend, self.vocabulary_size)

    @property
    def token_bytes(self) -> TokenBytes:
        """The table id -> bytes. Raises UnsupportedModel where the decoder is none; `detokeniser` works for every model."""
        if self._table is None:
            raise UnsupportedModel("This tokenizer's decoder cannot be written as a table of bytes; use detokeniser().")
        return self._table

    @property
    def has_token_bytes(self) -> bool:
        """Whether `token_bytes` exists."""
        return self._table is not None

    def detokeniser(self, policy: Utf8Policy = Utf8Policy.ERROR) -> TextStream:
        """A fresh stream for one sequence's output."""
        return LibraryStream(self._backend, policy) if self._table is None else Detokeniser(self._table, policy)

    def piece(self, token_id: int) -> bytes:
        """The bytes that an id stands for in the middle of a text; none for special and unknown ids.

        Where the decoder is no table of bytes: the token as the vocabulary spells it.
        """
        if self._table is not None:
            return self._table[token_id]
        return b"" if token_id in self.special_ids else (self.token(token_id) or "").encode()

    def encode(self, text: str) -> list[int]:
        """Ids of a bare prompt, with the leading special token where the model has one."""
        return list(self._backend.encode(text, add_special_tokens=True).ids)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of the text alone; special tokens that are written in it become their ids (rendered chat templates)."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The library's decode, without special tokens. May hold U+FFFD; streams use `detokeniser`."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def save(self, path: Path) -> None:
        """Write it as a tokenizer.json of the tokenizers library."""
        self._backend.save(str(path))

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, for logs and tests; None for an unknown id."""
        found = self._backend.id_to_token(token_id) if token_id >= 0 else None
        return None if found is None else str(found)


def from_hf_directory(path: Path) -> Tokenizer:
    """From tokenizer.json and the files beside it. Raises UnsupportedModel, ChatTemplateError, OSError."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedModel(
            f"{path} has no tokenizer.json. Load the model's tokenizer with transformers once and save it there "
            "(save_pretrained writes the file)."
        )
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises no narrower class
        raise UnsupportedModel(f"{file} is no tokenizer that the tokenizers library can read: {error}") from error
    settings = _json(path / "tokenizer_config.json")
    named = _named_tokens([_json(path / "special_tokens_map.json"), settings])
    config = _json(path / "config.json")
    configs = [_json(path / "generation_config.json"), config]
    declared = {named[key] for key in ("eos_token", "eot_token") if key in named}
    eos = {token_id for token in declared if (token_id := backend.token_to_id(token)) is not None}
    for each in configs:
        eos |= _ids(each.get("eos_token_id"))
    bos = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
    if bos is None:
        bos = next(iter(_ids(config.get("bos_token_id"))), None)
    template = _template(path, settings)
    chat = None if template is None else ChatTemplate(template, named)
    return Tokenizer(TokenizerParts(backend, frozenset(eos), bos, chat))


def _json(path: Path) -> Mapping[str, object]:
    """A JSON object; empty when the file is not there."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path} must hold a JSON object.")
    return value


def _ids(value: object) -> set[int]:
    """Ids of a field that is one id, a list of them, or null."""
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0}


def _named_tokens(sources: Sequence[Mapping[str, object]]) -> dict[str, str]:
    """bos_token and the like: strings, or objects with `content`. Later sources win."""
    named: dict[str, str] = {}
    for source in sources:
        for key, value in source.items():
            content = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(content, str):
                named[key] = content
    return named


def _template(path: Path, settings: Mapping[str, object]) -> str | None:
    """The template file when there is one, else the setting; of several named ones the default."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
