"""Settings of a router, beside those of every process with a server."""

from typing import Annotated, Literal

from lifecycle.deadlines import Limits
from router import budget, redis_address
from router.access_settings import AccessSettings
from router.admission import AdmissionSettings
from router.adoption import AdoptionLimits
from router.cell import RouteLimits
from router.discovery import BadTarget, check_target
from router.kept_streams import KeepLimits
from router.limits import RequestLimits
from router.member_link import LinkSettings, Role
from router.members import MembersSettings
from router.placement import LocalLimits
from router.queue import QueueLimits
from router.redis_link import RedisSettings
from router.seat import SeatLimits
from router.stream_log import LogBounds
from rpc.settings import setting

#: The one value of `prefill` that means: no prefill pool, decode members compute prompts.
NONE = "none"

_DAY_S = 86_400
_MOST = 1_000_000_000


class RouterSettings(AccessSettings, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Every setting of `python -m router`."""

    decode: Annotated[tuple[str, ...], setting("Decode members, host:port or dns:///host:port.", min_length=1, max_length=1024)]
    prefill: Annotated[
        tuple[str, ...],
        setting("Prefill members, host:port or dns:///host:port; none: decode computes prompts.", min_length=1, max_length=1024),
    ]
    redis_url: Annotated[
        str,
        setting("Address of the request store.", form=redis_address.FORM, secret=redis_address.holds_password, min_length=1),
    ]
    cell: Annotated[
        str,
        setting("Name of the cell: the hash tag of its keys.", form="[A-Za-z0-9_.-]", pattern="^[A-Za-z0-9_.-]{1,64}$"),
    ] = "default"
    redis_sentinel_username: Annotated[str, setting("User at the Sentinels, if they ask for one.", max_length=256)] = ""
    redis_sentinel_password: Annotated[
        str, setting("Password of the Sentinels; as a variable or in a settings file.", secret=bool, max_length=1024)
    ] = ""
    redis_outage: Annotated[
        Literal["refuse", "serve"],
        setting("New requests while the store is away: refused, or served without idempotency and without common budgets."),
    ] = "refuse"
    model: Annotated[str, setting("Model to serve: a name, a GGUF file or a folder.", min_length=1)] = "smollm2-135m-instruct"
    served_model_name: Annotated[str, setting("Name that clients use; unset: the model's own.", max_length=256)] = ""
    trust_tenant_header: Annotated[
        bool, setting("Take the tenant from the metadata key tandem-tenant. Only behind something that sets it.")
    ] = False
    # the HTTP door
    http_listen: (
        Annotated[
            str,
            setting(
                "Address of the HTTP door, host:port; port 0 takes a free one, none is off.",
                form="host:port",
                pattern=r"^\S+:\d{1,5}$",
            ),
        ]
        | None
    ) = None
    http_connections: Annotated[int, setting("HTTP connections that are served at once.", ge=1, le=1_000_000)] = 4096
    http_read_s: Annotated[
        float,
        setting(
            "For a handshake of TLS, for the headers of an HTTP request to arrive, and for its body.", "seconds", gt=0, le=3600
        ),
    ] = 30.0
    ui: Annotated[bool, setting("Serve the live page at /ui of the HTTP door.")] = False
    # one request
    default_max_output_tokens: Annotated[int, setting("For requests that name no limit.", "tokens", ge=1, le=_MOST)] = 256
    max_choices: Annotated[int, setting("Outputs of one prompt that a request may ask for.", ge=1, le=128)] = 8
    max_log_probabilities: Annotated[
        int, setting("Most likely tokens whose log-probabilities are told beside a returned one's own.", "tokens", ge=0, le=1000)
    ] = 20
    max_whole_log_probabilities: Annotated[
        int, setting("Log-probabilities of one request whose output is in a single event.", ge=1, le=_MOST)
    ] = 131_072
    queue_clock_s: Annotated[float, setting("Default of the queue clock.", "seconds", gt=0, le=_DAY_S)] = 30.0
    queue_share: Annotated[
        float,
        setting("Share of its queue clock that a request may have to wait, as far as can be told, to be let in.", gt=0, le=1),
    ] = 0.33
    first_token_clock_s: Annotated[float, setting("Default of the first-token clock.", "seconds", gt=0, le=_DAY_S)] = 60.0
    inter_token_clock_s: Annotated[float, setting("Default of the inter-token clock.", "seconds", gt=0, le=_DAY_S)] = 30.0
    overall_clock_s: Annotated[float, setting("Default of the overall clock.", "seconds", gt=0, le=_DAY_S)] = 600.0
    max_queue_clock_s: Annotated[float, setting("Longest queue clock to ask for.", "seconds", gt=0, le=_DAY_S)] = 300.0
    max_first_token_clock_s: Annotated[float, setting("Longest first-token clock.", "seconds", gt=0, le=_DAY_S)] = 600.0
    max_inter_token_clock_s: Annotated[float, setting("Longest inter-token clock.", "seconds", gt=0, le=_DAY_S)] = 300.0
    max_overall_clock_s: Annotated[float, setting("Longest overall clock.", "seconds", gt=0, le=_DAY_S)] = 3600.0
    max_attempts: Annotated[int, setting("Tries of one request when members are lost.", ge=1, le=20)] = 3
    retry_share: Annotated[float, setting("Retries allowed for each request, over all requests.", ge=0, le=1)] = 0.2
    retry_burst: Annotated[int, setting("Retries saved up for a member lost with all it runs.", ge=1, le=_MOST)] = 256
    failover_wait_s: Annotated[
        float, setting("How long a request whose decode member is lost waits for another one.", "seconds", gt=0, le=_DAY_S)
    ] = 15.0
    buffer_bytes: Annotated[
        int, setting("Unsent bytes of a stream at which its sequence pauses.", "bytes", ge=1024, le=16 * 1024 * 1024)
    ] = 65_536
    replay_bytes: Annotated[
        int, setting("Bytes of a stream kept for readers that come back.", "bytes", ge=2048, le=1024 * 1024 * 1024)
    ] = 1_048_576
    replay_keep_s: Annotated[float, setting("How long a stream is kept after its end.", "seconds", gt=0, le=_DAY_S)] = 60.0
    replay_keep_requests: Annotated[int, setting("Ended streams that are kept.", ge=0, le=_MOST)] = 1024
    replay_keep_bytes: Annotated[int, setting("Bytes of ended streams that are kept.", "bytes", ge=0, le=1024**4)] = (
        64 * 1024 * 1024
    )
    attach_wait_s: Annotated[float, setting("For a request that changes routers to be found again.", "seconds", gt=0, le=600)] = (
        10.0
    )
    attach_readers: Annotated[int, setting("Connections that may read one request.", ge=1, le=1024)] = 8
    detach_timeout_s: Annotated[
        float, setting("For a detached request without a reader, when it names no time.", "seconds", gt=0, le=_DAY_S)
    ] = 60.0
    max_detach_timeout_s: Annotated[float, setting("Longest such time to ask for.", "seconds", gt=0, le=_DAY_S)] = 3600.0
    send_timeout_s: Annotated[
        float, setting("For a connected client to take what is left after the end.", "seconds", gt=0, le=_DAY_S)
    ] = 10.0
    # admission
    queue_requests: Annotated[int, setting("Requests that may wait.", ge=1, le=_MOST)] = 1024
    queue_tokens: Annotated[int, setting("Prompt tokens that may wait.", "tokens", ge=1, le=_MOST)] = 4_194_304
    queue_tenant_requests: Annotated[int, setting("Requests of one tenant that may wait.", ge=1, le=_MOST)] = 1024
    tenant_tokens: (
        Annotated[int, setting("Prompt tokens of one tenant in work; the token file has others.", "tokens", ge=1, le=_MOST)]
        | None
    ) = None
    tenant_pages: (
        Annotated[int, setting("Decode pages of one tenant; the token file has others.", "pages", ge=1, le=_MOST)] | None
    ) = None
    total_tokens: Annotated[int, setting("Prompt tokens of all in work.", "tokens", ge=1, le=_MOST)] | None = None
    total_pages: Annotated[int, setting("Decode pages of all.", "pages", ge=1, le=_MOST)] | None = None
    exclude_s: Annotated[float, setting("How long a request avoids a member that refused it.", "seconds", gt=0, le=60)] = 0.25
    local_tokens: Annotated[
        int,
        setting(
            "A decode member that is thought to lack at most so many tokens of a prompt computes them itself; 0: never.",
            "tokens",
            ge=0,
            le=_MOST,
        ),
    ] = 128
    local_s: Annotated[
        float, setting("The same, when that is predicted to take no longer, with what waits there.", "seconds", ge=0, le=600)
    ] = 0.25
    # members
    prefix_hints: Annotated[
        int, setting("What is remembered of each member's prefix cache, for placement.", "pages", ge=0, le=1_000_000)
    ] = 16_384
    resolve_every_s: Annotated[float, setting("Between two look-ups of dns:/// targets.", "seconds", gt=0, le=600)] = 2.0
    stale_after_s: Annotated[float, setting("News of a member older than this are stale.", "seconds", gt=0, le=600)] = 3.0
    lost_after_s: Annotated[float, setting("A member without news for that long is lost.", "seconds", gt=0, le=600)] = 10.0
    seat_timeout_s: Annotated[float, setting("For a decode member to grant or refuse a seat.", "seconds", gt=0, le=600)] = 5.0
    cancel_grace_s: Annotated[
        float, setting("For a member to carry out a cancel before its stream is cut.", "seconds", gt=0, le=600)
    ] = 5.0
    seat_hold_s: Annotated[
        float, setting("A seat outlives the stream of a router that went so long, to be adopted.", "seconds", ge=0, le=600)
    ] = 20.0
    attach_grace_s: Annotated[
        float, setting("For the client of a request whose router died to come back.", "seconds", gt=0, le=_DAY_S)
    ] = 10.0
    cancel_wait_s: Annotated[float, setting("Longest wait of Cancel with wait.", "seconds", gt=0, le=600)] = 30.0
    # tokenising
    tokenise_threads: Annotated[int, setting("Threads for long prompts.", ge=1, le=64)] = 2
    tokenise_waiting: Annotated[int, setting("Long prompts that may wait for a thread.", ge=1, le=100_000)] = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            redis_address.parse_address(self.redis_url)
        except ValueError as bad:
            raise ValueError(f"redis_url: {bad}") from None
        for name in ("prefill", "decode"):
            for target in getattr(self, name):
                if name == "prefill" and self.prefill == (NONE,):
                    continue
                try:
                    check_target(target)
                except BadTarget as bad:
                    raise ValueError(f"{name}: {bad}") from None
        if self.ui and self.http_listen is None:
            raise ValueError("ui: the live page is a part of the HTTP door; http_listen must be set too")
        if self.replay_bytes < 2 * self.buffer_bytes:
            raise ValueError(f"replay_bytes is {self.replay_bytes}; it must be at least twice buffer_bytes, {self.buffer_bytes}")
        if self.detach_timeout_s > self.max_detach_timeout_s:
            raise ValueError(
                f"detach_timeout_s is {self.detach_timeout_s:g}; it must be at most max_detach_timeout_s, "
                f"{self.max_detach_timeout_s:g}"
            )
        for clock in ("queue", "first_token", "inter_token", "overall"):
            default, most = getattr(self, f"{clock}_clock_s"), getattr(self, f"max_{clock}_clock_s")
            if default > most:
                raise ValueError(f"{clock}_clock_s is {default:g}; it must be at most max_{clock}_clock_s, {most:g}")

    @property
    def prefill_targets(self) -> tuple[str, ...]:
        """Where prefill members are; empty when there is no such pool."""
        return () if self.prefill == (NONE,) else self.prefill

    def request_limits(self) -> RequestLimits:
        """Defaults and maxima for requests."""
        return RequestLimits(
            default_max_output_tokens=self.default_max_output_tokens,
            clock_defaults=Limits(self.queue_clock_s, self.first_token_clock_s, self.inter_token_clock_s, self.overall_clock_s),
            clock_maxima=Limits(
                self.max_queue_clock_s, self.max_first_token_clock_s, self.max_inter_token_clock_s, self.max_overall_clock_s
            ),
            default_detach_s=self.detach_timeout_s,
            max_detach_s=self.max_detach_timeout_s,
            max_choices=self.max_choices,
            max_log_probs=self.max_log_probabilities,
            max_whole_log_probs=self.max_whole_log_probabilities,
        )

    def route_limits(self) -> RouteLimits:
        """Bounds of one request's way."""
        return RouteLimits(
            max_attempts=self.max_attempts,
            log=LogBounds(self.buffer_bytes, self.replay_bytes),
            failover_wait_s=self.failover_wait_s,
            send_timeout_s=self.send_timeout_s,
            most_readers=self.attach_readers,
            seat=SeatLimits(self.seat_timeout_s, self.cancel_grace_s, self.seat_hold_s),
        )

    def adoption_limits(self) -> AdoptionLimits:
        """Bounds of taking over requests of dead routers."""
        return AdoptionLimits(grace_s=self.attach_grace_s)

    def keep_limits(self) -> KeepLimits:
        """What is kept of streams that have ended."""
        return KeepLimits(self.replay_keep_s, self.replay_keep_requests, self.replay_keep_bytes)

    def admission_settings(self) -> AdmissionSettings:
        """Bounds of waiting and of what may be held."""
        return AdmissionSettings(
            queue=QueueLimits(
                max_requests=self.queue_requests,
                max_tokens=self.queue_tokens,
                max_tenant_requests=self.queue_tenant_requests,
            ),
            budgets=budget.Limits(self.tenant_tokens, self.tenant_pages, self.total_tokens, self.total_pages),
            queue_share=self.queue_share,
            exclude_s=self.exclude_s,
            local=LocalLimits(self.local_tokens, self.local_s),
        )

    def members_settings(self, router: str) -> MembersSettings:
        """Where members are and when they are stale or lost."""
        return MembersSettings(
            targets={Role.PREFILL: self.prefill_targets, Role.DECODE: self.decode},
            link=LinkSettings(router, self.stale_after_s, self.lost_after_s),
            resolve_every_s=self.resolve_every_s,
            prefix_hints=self.prefix_hints,
        )

    def redis_settings(self) -> RedisSettings:
        """Where the store is."""
        return RedisSettings(
            url=self.redis_url,
            cell=self.cell,
            sentinel_username=self.redis_sentinel_username,
            sentinel_password=self.redis_sentinel_password,
        )
