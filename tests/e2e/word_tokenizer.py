"""A tokenizer for tiny models: 0 is the end, the last ids are letters, all others words of two of them."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.engine.tiny_models import VOCABULARY

END = "<|end|>"
FIRST, SECOND = "abcdefghijkl", "mnopqrstuvwx"
LETTERS = FIRST + SECOND


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json, beside a tiny model."""
    pairs = [(FIRST[number // 12], SECOND[number % 12]) for number in range(1, VOCABULARY - len(LETTERS))]
    known = [END, *("".join(pair) for pair in pairs), *LETTERS]
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(known)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
