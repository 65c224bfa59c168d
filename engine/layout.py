"""The geometry of KV pages as a value: what two members must agree on before a byte moves between them."""

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import StrEnum

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
    """

    kind: GroupKind
    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "page_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.page_tokens > MAX_PAGE_TOKENS:
            raise ValueError(f"page_tokens is {self.page_tokens}; the limit is {MAX_PAGE_TOKENS} tokens")
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


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything that decides what the bytes of a page mean. Unlike layouts never exchange pages."""

    model_snapshot: str
    groups: tuple[GroupLayout, ...]

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
    def token_bytes(self) -> int:
        """Bytes that one token stores in all groups."""
        return sum(group.token_bytes for group in self.groups)


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that `tokens` tokens need; 0 for none."""
    if tokens < 0 or page_tokens < 1:
        raise ValueError(f"tokens is {tokens} and page_tokens is {page_tokens}; tokens must be >= 0 and page_tokens >= 1")
    return -(-tokens // page_tokens)
