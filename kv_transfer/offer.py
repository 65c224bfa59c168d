"""What a decode member offers a prefill member: pages to fill, as values, and their form on the wire.

A `Grant` cannot be built wrong: each field is checked when it is made, so code behind the servicer never checks again.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lifecycle.record import AttemptKey
from tandem.pools.v1 import grant_pb2

GRANT_ID_BYTES = 16
FINGERPRINT_BYTES = 16
NAME_CHARACTERS_MAX = 256
METADATA_BYTES_MAX = 64 * 1024
GROUPS_MAX = 32
PAGES_PER_GROUP_MAX = 1 << 20
TOKEN_COUNT_MAX = 1 << 24
EXPIRES_AFTER_S_MAX = 3600.0
ADDRESS_SPACE_BYTES = 1 << 64
# Page 0 of a slab is never handed out. In a grant it marks a page that the reader does not need (it left a sliding window).
NULL_PAGE = 0


class HandoverError(Exception):
    """Root of everything that this package raises about what a peer or a caller asked for."""


class BadGrant(HandoverError):
    """A grant that cannot be served. `field` names what is wrong, `problem` says what is right."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"grant.{field}: {problem}")
        self.field = field
        self.problem = problem


class LayoutMismatch(HandoverError):
    """The two members hold their KV differently, so no byte may move between them."""

    def __init__(self, theirs: str, ours: str, weight_quantisations: Mapping[str, str]) -> None:
        """weight_quantisations: by fingerprint, see LayoutView."""
        differs = ""
        if theirs in weight_quantisations and ours in weight_quantisations:
            differs = f" (weight_quantisation {weight_quantisations[theirs]!r} there and {weight_quantisations[ours]!r} here)"
        super().__init__(
            f"the grant's layout is {theirs!r}, this member's is {ours!r}{differs}: start both pools with one model, dtype, "
            "weight_quantisation and page size"
        )
        self.theirs = theirs
        self.ours = ours


def _require(condition: bool, field: str, problem: str) -> None:
    if not condition:
        raise BadGrant(field, problem)


def _name(value: str, field: str) -> None:
    ok = 0 < len(value) <= NAME_CHARACTERS_MAX and value.isprintable()
    _require(ok, field, f"must be 1 to {NAME_CHARACTERS_MAX} printable characters, got {len(value)}")


def _hex(value: str, size_bytes: int, field: str) -> None:
    ok = len(value) == 2 * size_bytes and all(c in "0123456789abcdef" for c in value)
    _require(ok, field, f"must be {2 * size_bytes} lower-case hexadecimal digits, got {value[:80]!r}")


@dataclass(frozen=True, slots=True)
class Peer:
    """A member, as others address it: its name, the incarnation that is meant, host:port of its gRPC server."""

    member: str
    incarnation: str
    address: str

    def __post_init__(self) -> None:
        _name(self.member, "peer.member")
        _name(self.incarnation, "peer.incarnation")
        _name(self.address, "peer.address")


@dataclass(frozen=True, slots=True)
class Slab:
    """One range of registered memory, as its owner addresses it, cut into units (pages, or landing rows) of equal size."""

    base_address: int
    size_bytes: int
    unit_bytes: int

    def __post_init__(self) -> None:
        _require(self.base_address > 0, "endpoint.slabs.base_address", "must be above 0")
        _require(self.unit_bytes > 0, "endpoint.slabs.unit_bytes", "must be above 0")
        whole = self.size_bytes > 0 and self.size_bytes % self.unit_bytes == 0
        _require(
            whole,
            "endpoint.slabs.size_bytes",
            f"must be a whole number of units of {self.unit_bytes} bytes, got {self.size_bytes}",
        )
        end = self.base_address + self.size_bytes
        _require(end <= ADDRESS_SPACE_BYTES, "endpoint.slabs.base_address", "the range leaves the 64-bit address space")

    @property
    def units(self) -> int:
        """How many pages or rows the slab has."""
        return self.size_bytes // self.unit_bytes

    def address(self, unit: int) -> int:
        """First byte of one page or row. Raises IndexError outside the slab."""
        if not 0 <= unit < self.units:
            raise IndexError(f"unit {unit} is not in a slab of {self.units}")
        return self.base_address + unit * self.unit_bytes


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The memory of one receiving agent: name, connection metadata with CRC-32, a slab per KV group, then the landing slab."""

    agent: str
    metadata: bytes
    metadata_crc32: int
    slabs: tuple[Slab, ...]

    def __post_init__(self) -> None:
        _name(self.agent, "endpoint.agent")
        size = len(self.metadata)
        _require(0 < size <= METADATA_BYTES_MAX, "endpoint.metadata", f"must be 1 to {METADATA_BYTES_MAX} bytes, got {size}")
        found = zlib.crc32(self.metadata)
        said = self.metadata_crc32
        _require(
            found == said,
            "endpoint.metadata_crc32",
            f"says {said:#010x} and the bytes have {found:#010x}: they were damaged on the way",
        )
        _require(
            1 < len(self.slabs) <= GROUPS_MAX + 1, "endpoint.slabs", f"must be 2 to {GROUPS_MAX + 1} slabs, got {len(self.slabs)}"
        )

    @property
    def landing(self) -> Slab:
        """The slab of landing rows for logits."""
        return self.slabs[-1]


@dataclass(frozen=True, slots=True)
class GrantPages:
    """Pages of one KV group in token order from the page of first_position, and the generation of each.

    A page id of NULL_PAGE (with generation 0) is a page that the reader does not need; it is not sent.
    """

    page_ids: tuple[int, ...]
    generations: tuple[int, ...]

    def __post_init__(self) -> None:
        count = len(self.page_ids)
        _require(count <= PAGES_PER_GROUP_MAX, "groups.page_ids", f"must be at most {PAGES_PER_GROUP_MAX} pages, got {count}")
        same = count == len(self.generations)
        _require(same, "groups.generations", f"must be as many as page_ids ({count}), got {len(self.generations)}")
        sent = [page for page in self.page_ids if page != NULL_PAGE]
        _require(len(set(sent)) == len(sent), "groups.page_ids", "names a page twice")
        _require(min(sent, default=0) >= 0, "groups.page_ids", "must not be negative")
        for page, generation in zip(self.page_ids, self.generations, strict=True):
            _require(generation >= 0, "groups.generations", f"must not be negative, page {page} has {generation}")
            _require(page != NULL_PAGE or generation == 0, "groups.page_ids", "page 0 is the null page and is never granted")


@dataclass(frozen=True, slots=True)
class Grant:
    """Pages that one attempt may fill, and a landing row for the last logits; None when the sequence's next token is chosen.

    grant_id: 32 hexadecimal digits, never used twice. first_position..token_count are the token positions to send (in tokens).
    expires_after_s: seconds without a sign of life after which decode asks for the grant back.
    """

    grant_id: str
    key: AttemptKey
    decode: Peer
    layout_fingerprint: str
    first_position: int
    token_count: int
    groups: tuple[GrantPages, ...]
    landing_row: int | None
    endpoint: Endpoint
    expires_after_s: float

    def __post_init__(self) -> None:
        _hex(self.grant_id, GRANT_ID_BYTES, "grant_id")
        _name(self.key.request_id, "key.request_id")
        _require(self.key.attempt >= 1, "key.attempt", f"must be at least 1, got {self.key.attempt}")
        _hex(self.layout_fingerprint, FINGERPRINT_BYTES, "layout_fingerprint")
        tokens = self.token_count
        _require(0 < tokens <= TOKEN_COUNT_MAX, "token_count", f"must be 1 to {TOKEN_COUNT_MAX}, got {tokens}")
        _require(
            0 <= self.first_position <= tokens,
            "first_position",
            f"must be 0 to token_count ({tokens}), got {self.first_position}",
        )
        slabs = len(self.endpoint.slabs)
        _require(
            slabs == len(self.groups) + 1,
            "endpoint.slabs",
            f"must be one per group and the landing slab, got {slabs} for {len(self.groups)}",
        )
        for group, slab in zip(self.groups, self.endpoint.slabs, strict=False):
            last = max(group.page_ids, default=0)
            _require(last < slab.units, "groups.page_ids", f"page {last} is outside the slab of {slab.units} pages")
        rows, row = self.endpoint.landing.units, self.landing_row
        if row is None:
            sent = any(page != NULL_PAGE for group in self.groups for page in group.page_ids)
            _require(sent, "landing_row", "is missing, and there are no pages: nothing would be sent")
        else:
            _require(0 <= row < rows, "landing_row", f"must be below {rows}, got {row}")
        expires = self.expires_after_s
        ok = math.isfinite(expires) and 0 < expires <= EXPIRES_AFTER_S_MAX
        _require(ok, "expires_after_s", f"must be above 0 and at most {EXPIRES_AFTER_S_MAX} s, got {expires}")


@dataclass(frozen=True, slots=True)
class LayoutView:
    """What this package needs to know of the engine's layout: its fingerprint and the tokens in a page of each KV group.

    windows: tokens that a query sees in each group, itself included, None where it sees all; empty when it does in every group.
    weight_quantisations: the fingerprints that this layout has with each value of that setting, and the value.
    """

    fingerprint: str
    page_tokens: tuple[int, ...]
    windows: tuple[int | None, ...] = ()
    weight_quantisations: tuple[tuple[str, str], ...] = ()

    def check_fingerprint(self, theirs: str) -> None:
        """Raises LayoutMismatch where another layout has it."""
        if theirs != self.fingerprint:
            raise LayoutMismatch(theirs, self.fingerprint, dict(self.weight_quantisations))

    def first_page(self, group: int, tokens: int) -> int:
        """Number of the first page of a group that a sequence of so many tokens still needs."""
        window = self.windows[group] if self.windows else None
        return 0 if window is None else max(0, tokens + 1 - window) // self.page_tokens[group]


def check_layout(grant: Grant, layout: LayoutView) -> None:
    """Compare a grant with this member's layout: fingerprint, groups, page borders, page counts (never a silent minimum). It must
    not want a page that has left its window: nobody has that any more.

    Raises LayoutMismatch or BadGrant.
    """
    layout.check_fingerprint(grant.layout_fingerprint)
    groups = len(layout.page_tokens)
    _require(len(grant.groups) == groups, "groups", f"must be the {groups} KV groups of the layout, got {len(grant.groups)}")
    for index, (pages, size) in enumerate(zip(grant.groups, layout.page_tokens, strict=True)):
        aligned = grant.first_position % size == 0 or grant.first_position == grant.token_count
        _require(aligned, "first_position", f"must be a multiple of the page of {size} tokens, got {grant.first_position}")
        wanted = -(-grant.token_count // size) - -(-grant.first_position // size)
        found = len(pages.page_ids)
        _require(
            found == wanted,
            f"groups[{index}].page_ids",
            f"positions {grant.first_position} to {grant.token_count} need {wanted} pages of {size} tokens, got {found}",
        )
        first, gone = grant.first_position // size, layout.first_page(index, grant.token_count)
        late = [number for number, page in enumerate(pages.page_ids, first) if page != NULL_PAGE and number < gone]
        _require(
            not late,
            f"groups[{index}].page_ids",
            f"must be 0 for pages that have left the window: the first that {grant.token_count} tokens need is number {gone}, "
            f"number {min(late, default=0)} is asked for",
        )


def grant_to_proto(grant: Grant) -> grant_pb2.Grant:
    """The wire form of a grant."""
    endpoint = grant.endpoint
    return grant_pb2.Grant(
        grant_id=bytes.fromhex(grant.grant_id),
        key=grant_pb2.AttemptKey(request_id=grant.key.request_id, attempt=grant.key.attempt),
        decode=peer_to_proto(grant.decode),
        layout_fingerprint=grant.layout_fingerprint,
        first_position=grant.first_position,
        token_count=grant.token_count,
        groups=[grant_pb2.GroupPages(page_ids=g.page_ids, generations=g.generations) for g in grant.groups],
        landing_row=grant.landing_row,
        endpoint=grant_pb2.Endpoint(
            agent=endpoint.agent,
            metadata=endpoint.metadata,
            metadata_crc32=endpoint.metadata_crc32,
            slabs=[
                grant_pb2.Slab(base_address=s.base_address, size_bytes=s.size_bytes, unit_bytes=s.unit_bytes)
                for s in endpoint.slabs
            ],
        ),
        expires_after_s=grant.expires_after_s,
    )


def grant_from_proto(message: grant_pb2.Grant, layout: LayoutView) -> Grant:
    """A checked grant. Raises LayoutMismatch (before anything else is looked at) or BadGrant naming the field."""
    layout.check_fingerprint(message.layout_fingerprint[:NAME_CHARACTERS_MAX])
    _require(len(message.groups) <= GROUPS_MAX, "groups", f"must be at most {GROUPS_MAX}, got {len(message.groups)}")
    for name in ("key", "decode", "endpoint"):
        _require(message.HasField(name), name, "is missing")
    endpoint = message.endpoint
    grant = Grant(
        grant_id=bytes(message.grant_id).hex(),
        key=AttemptKey(message.key.request_id, message.key.attempt),
        decode=peer_from_proto(message.decode),
        layout_fingerprint=message.layout_fingerprint,
        first_position=message.first_position,
        token_count=message.token_count,
        groups=tuple(GrantPages(tuple(g.page_ids), tuple(g.generations)) for g in message.groups),
        landing_row=message.landing_row if message.HasField("landing_row") else None,
        endpoint=Endpoint(
            agent=endpoint.agent,
            metadata=endpoint.metadata,
            metadata_crc32=endpoint.metadata_crc32,
            slabs=tuple(Slab(s.base_address, s.size_bytes, s.unit_bytes) for s in endpoint.slabs),
        ),
        expires_after_s=message.expires_after_s,
    )
    check_layout(grant, layout)
    return grant


def peer_to_proto(peer: Peer) -> grant_pb2.Peer:
    """The wire form of a peer."""
    return grant_pb2.Peer(member=peer.member, incarnation=peer.incarnation, address=peer.address)


def peer_from_proto(message: grant_pb2.Peer) -> Peer:
    """A checked peer. Raises BadGrant naming the field."""
    return Peer(message.member, message.incarnation, message.address)


def endpoint_of(agent: str, metadata: bytes, slabs: Sequence[Slab]) -> Endpoint:
    """An endpoint with the checksum of its metadata filled in."""
    return Endpoint(agent, metadata, zlib.crc32(metadata), tuple(slabs))
