"""Settings that say how the connections of a process are secured, and who is a process of its cell. All off by default."""

from typing import Annotated

import msgspec

from rpc.settings import setting


class SecuritySettings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """TLS of the server, TLS of what it dials, and the proofs by which processes of a cell know one another."""

    tls_cert_file: Annotated[
        str, setting("Certificate chain of the servers of gRPC and HTTP, PEM; read again when it changes. Unset: plain text.")
    ] = ""
    tls_key_file: Annotated[str, setting("Its key, PEM without a password.")] = ""
    tls_client_ca_file: Annotated[
        str, setting("Clients need a certificate of these authorities, PEM (mTLS). Unset: no certificate is asked for.")
    ] = ""
    tls_ca_file: Annotated[
        str, setting("Authorities of the other processes of the cell, PEM. Set: they are dialled with TLS; unset: in plain text.")
    ] = ""
    tls_client_cert_file: Annotated[
        str, setting("Certificate that is shown to the other processes, PEM; unset: the server's, where there is one.")
    ] = ""
    tls_client_key_file: Annotated[str, setting("Its key, PEM without a password.")] = ""
    tls_server_name: Annotated[
        str, setting("Name that the certificates of the other processes carry; unset: their addresses.", max_length=253)
    ] = ""
    internal_identities: Annotated[
        tuple[str, ...],
        setting(
            "Names on certificates (SAN, or CN where there is none) of processes of this cell; * stands for anything.",
            max_length=64,
        ),
    ] = ()
    cell_secret_file: Annotated[
        str,
        setting(
            "Secrets that processes of the cell show one another, one a line; the first is sent, all are taken. "
            "Read again when it changes."
        ),
    ] = ""
    health_listen: Annotated[
        str,
        setting(
            "Address of a second server, in plain text, that answers health checks and nothing else; unset: none.",
            form="host:port",
            pattern=r"^(\S+:\d{1,5})?$",
        ),
    ] = ""
    max_metadata_bytes: Annotated[int, setting("Most bytes of a call's metadata.", "bytes", ge=4096, le=1024 * 1024)] = 16_384
    max_connection_streams: Annotated[
        int, setting("Calls at a time on one connection; more wait at the client.", "calls", ge=1, le=1_000_000)
    ] = 10_000
    max_connection_age_s: (
        Annotated[
            float,
            setting(
                "After that long clients are asked to connect anew; calls that run, run on. None: never.",
                "seconds",
                ge=1,
                le=86_400,
            ),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        """Raises ValueError for half a configuration."""
        for one, other in (
            ("tls_cert_file", "tls_key_file"),
            ("tls_client_cert_file", "tls_client_key_file"),
        ):
            for has, lacks in ((one, other), (other, one)):
                if getattr(self, has) and not getattr(self, lacks):
                    raise ValueError(f"{lacks} is required, because {has} is set")
        needs = (
            ("tls_client_ca_file", "tls_cert_file"),
            ("tls_client_cert_file", "tls_ca_file"),
            ("tls_server_name", "tls_ca_file"),
            ("internal_identities", "tls_client_ca_file"),
        )
        for has, lacks in needs:
            if getattr(self, has) and not getattr(self, lacks):
                raise ValueError(f"{lacks} is required, because {has} is set")

    @property
    def knows_its_cell(self) -> bool:
        """Whether processes of the cell prove who they are."""
        return bool(self.internal_identities or self.cell_secret_file)
