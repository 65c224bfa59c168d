"""How the command line trusts a router and shows who it is: options before the command's name, or variables."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import grpc.aio
import typer

from rpc.cell_identity import AUTHORIZATION, SCHEME
from rpc.channels import Options
from rpc.dialling import RenewedChannel
from rpc.tls import ClientTls
from tandem_cli.exits import Exit, Failure

Tls = Annotated[bool, typer.Option("--tls", envvar="TANDEM_TLS", help="Call routers with TLS, trusting the usual authorities.")]
TlsCa = Annotated[
    str,
    typer.Option("--tls-ca", envvar="TANDEM_TLS_CA", help="Call routers with TLS, trusting the authorities in this PEM file."),
]
TlsCert = Annotated[str, typer.Option("--tls-cert", envvar="TANDEM_TLS_CERT", help="PEM file of the certificate to show (mTLS).")]
TlsKey = Annotated[str, typer.Option("--tls-key", envvar="TANDEM_TLS_KEY", help="PEM file of its key.")]
TlsName = Annotated[
    str,
    typer.Option("--tls-name", envvar="TANDEM_TLS_NAME", help="Name on the router's certificate, where it is not its address."),
]
TokenFile = Annotated[
    str, typer.Option("--token-file", help="File with the token to show; the variable TANDEM_TOKEN may hold the token itself.")
]
#: Holds the token; there is no option for it, because everybody on a machine sees the options of a command.
TOKEN_VARIABLE = "TANDEM_TOKEN"


@dataclass(frozen=True, slots=True)
class Trust:
    """What was said about the connection; empty: plain text, without a token."""

    tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    name: str = ""
    token: str = ""

    def channel(self, address: str, options: Options) -> grpc.aio.Channel:
        """A channel to a router. Raises BadFile."""
        credentials = self._credentials()
        chosen: list[tuple[str, Any]] = [*options]
        if self.name:
            chosen.append(("grpc.ssl_target_name_override", self.name))
        if credentials is None:
            channel = grpc.aio.insecure_channel(address, options=chosen)
        else:
            channel = grpc.aio.secure_channel(address, credentials, options=chosen)
        if not self.token:
            return channel
        shown = ((AUTHORIZATION, SCHEME + self.token),)
        return RenewedChannel(lambda _: channel, lambda: None, lambda: shown)

    def _credentials(self) -> Any:
        if not (self.tls or self.ca_file or self.cert_file):
            return None
        return ClientTls(self.ca_file, self.cert_file, self.key_file, ("--tls-ca", "--tls-cert", "--tls-key")).credentials()


def trust(
    context: typer.Context,
    tls: Tls = False,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_name: TlsName = "",
    token_file: TokenFile = "",
) -> None:
    """Serve language models with separate prefill and decode pools, and call them."""
    for has, lacks, given, missing in (
        ("--tls-cert", "--tls-key", tls_cert, tls_key),
        ("--tls-key", "--tls-cert", tls_key, tls_cert),
    ):
        if given and not missing:
            raise Failure(Exit.BAD_INPUT, f"{lacks} is required, because {has} is given")
    context.obj = Trust(tls, tls_ca, tls_cert, tls_key, tls_name, _token(token_file))


class RouterAddress(str):
    """host:port of a router, with how it is trusted."""

    __slots__ = ("trust",)
    trust: Trust

    def __new__(cls, address: str, trust: Trust) -> "RouterAddress":
        made = super().__new__(cls, address)
        made.trust = trust
        return made


def trusted(context: typer.Context, address: str) -> RouterAddress:
    """The address that a command was given, with what was said before the command's name."""
    return RouterAddress(address, context.find_object(Trust) or Trust())


def trust_in(address: str) -> Trust:
    """How the router at an address is trusted: in plain text, without a token, where nothing was said."""
    return address.trust if isinstance(address, RouterAddress) else Trust()


def _token(file: str) -> str:
    """The token to show, without a word of it in errors. Raises Failure."""
    source = f"--token-file {file}" if file else TOKEN_VARIABLE
    try:
        token = (Path(file).read_text(encoding="utf-8") if file else os.environ.get(TOKEN_VARIABLE, "")).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(Exit.BAD_INPUT, f"{source} cannot be read: {getattr(error, 'strerror', 'it is not a text')}") from None
    if not token.isascii() or not token.isprintable():
        raise Failure(Exit.BAD_INPUT, f"{source}: a token is printable ASCII")
    return token
