"""The geometry of KV pages as a value: what two members must agree on before a byte moves between them."""

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import StrEnum

from engine.quantisation import WeightQuantisation
from lifecycle.prefix_keys import PrefixIdentity, PrefixKeys

MAX_PAGE_TOKENS = 1024
FINGERPRINT_CHARACTERS = 32
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


class GroupKind(StrEnum):
    """How long a page of the group lives and what a token stores in it."""

    FULL = "full"
    SLIDING = "sliding"
    LATENT = "latent"


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Layers whose pages live and die together.

    A page holds `page_tokens` tokens of all `layers` as one contiguous range, in the order
    [layer, token, key then value, head, head_dim]. A latent group stores one vector a token, with no value beside it.
    `window`, in tokens: how many a query sees, itself included, in a sliding group; None in the others.
    """

    kind: GroupKind
    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: str
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "page_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.page_tokens > MAX_PAGE_TOKENS:
            raise ValueError(f"page_tokens is {self.page_tokens}; the limit is {MAX_PAGE_TOKENS} tokens")
        if (self.window is not None) != (self.kind is GroupKind.SLIDING):
            raise ValueError(
                f"window is {self.window} in a group of kind {self.kind.value}; a sliding group has one, others none"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1 token")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype is {self.dtype!r}; choose one of {', '.join(sorted(DTYPE_BYTES))}")

    @property
    def row_elements(self) -> int:
        """Elements that one token stores in one layer."""
        vectors = 1 if self.kind is GroupKind.LATENT else 2
        return vectors * self.kv_heads * self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes that one token stores in one layer."""
        return self.row_elements * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes that one token stores in all layers of the group."""
        return self.layers * self.row_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: the unit of allocation, transfer and hashing."""
        return self.page_tokens * self.token_bytes

    def first_page(self, cached_tokens: int) -> int:
        """Number of the first page that a sequence with so many tokens in the cache still needs; none reads those before it."""
        return first_visible_page(cached_tokens, self.window, self.page_tokens)

    def most_pages(self, tokens: int, step_tokens: int) -> int:
        """Most pages that a sequence holds at once on its way to `tokens` tokens, with at most `step_tokens` in one step."""
        whole = pages_for(tokens, self.page_tokens)
        if self.window is None:
            return whole
        # What a step touches, wherever its first token lies in a page.
        touched = self.window - 1 + step_tokens
        return min(whole, 1 + pages_for(touched - 1, self.page_tokens))


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything that decides what the bytes of a page mean. Unlike layouts never exchange pages.

    positions: how positions enter the KV, as a canonical text. weight_quantisation: of the weights that computed it.
    """

    model_snapshot: str
    groups: tuple[GroupLayout, ...]
    positions: str = ""
    weight_quantisation: str = WeightQuantisation.OFF.value

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("groups is empty; a layout has at least one KV group")
        if not self.model_snapshot:
            raise ValueError("model_snapshot is empty; give the hash of the model's files")

    @property
    def fingerprint(self) -> str:
        """32 hex characters that differ whenever any field differs."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:FINGERPRINT_CHARACTERS]

    @property
    def prefix_keys(self) -> PrefixKeys | None:
        """Makes the keys of full pages; None where groups have pages of unlike lengths, so that no key names one of each."""
        sizes = {group.page_tokens for group in self.groups}
        if len(sizes) != 1:
            return None
        dtypes = ",".join(group.dtype for group in self.groups)
        identity = PrefixIdentity(self.model_snapshot, self.fingerprint, self.positions, dtypes, min(sizes))
        return PrefixKeys(identity.digest, min(sizes))

    @property
    def token_bytes(self) -> int:
        """Bytes that one token stores in all groups."""
        return sum(group.token_bytes for group in self.groups)


def first_visible_page(cached_tokens: int, window: int | None, page_tokens: int) -> int:
    """Number of the first page that the token at position `cached_tokens` sees, through a window of so many tokens."""
    return 0 if window is None else max(0, cached_tokens + 1 - window) // page_tokens


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that `tokens` tokens need; 0 for none."""
    if tokens < 0 or page_tokens < 1:
        raise ValueError(f"tokens is {tokens} and page_tokens is {page_tokens}; tokens must be >= 0 and page_tokens >= 1")
    return -(-tokens // page_tokens)
