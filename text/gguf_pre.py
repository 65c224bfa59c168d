"""How GGUF's byte-level tokenizers cut text before merging, by the name in `tokenizer.ggml.pre`.

GGUF stores the vocabulary and the merges but only a name for the pre-tokenizer. The splits here are those of the models'
own tokenizer files; "default" is llama.cpp's meaning of that name. Without them text is cut elsewhere than in training: a
"smollm" model, for one, has never seen two digits in one token.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from text.errors import UnsupportedModel

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION_OR_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS_OR_BLANKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreType:
    """Splits are applied one after another, each to the pieces that the one before left."""

    splits: tuple[str, ...]
    single_digits: bool = False  # each digit is a piece of its own, cut before the splits
    compose: bool = False  # Unicode NFC first
    ignore_merges: bool = False  # a piece that is a token as a whole is taken as it is
    add_bos: bool = False  # when the file does not say

    def normalizer(self) -> normalizers.Normalizer | None:
        """What happens to the text before it is cut."""
        return normalizers.NFC() if self.compose else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The cutting, then the change to the byte alphabet. Byte-level models put no space in front of a text."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(split), "isolated") for split in self.splits]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


_LLAMA3 = PreType(
    (rf"{_CONTRACTION_OR_WORD}|\p{{N}}{{1,3}}|{_MARKS_OR_BLANKS}",),
    ignore_merges=True,
    add_bos=True,
)

PRE_TYPES: dict[str, PreType] = {
    "smollm": PreType((_GPT2,), single_digits=True),
    "gpt-2": PreType((_GPT2,)),
    "default": PreType((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": PreType((rf"{_CONTRACTION_OR_WORD}|\p{{N}}|{_MARKS_OR_BLANKS}",), compose=True),
}


def pre_type(name: str) -> PreType:
    """The pre-tokenizer of that name. Raises UnsupportedModel for one we do not know, rather than cut text wrongly."""
    found = PRE_TYPES.get(name)
    if found is None:
        raise UnsupportedModel(
            f"The GGUF file names the pre-tokenizer {name!r} (tokenizer.ggml.pre); known are {', '.join(PRE_TYPES)}. "
            "Use the model's Hugging Face directory with its tokenizer.json instead."
        )
    return found
