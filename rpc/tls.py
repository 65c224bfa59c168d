"""TLS of a process: its certificates for gRPC and HTTP, and how it trusts those that it dials.

Certificates are read again when their files change: new connections see the new ones, streams that are open live on.
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from rpc.security_settings import SecuritySettings
from rpc.watched_files import BadFile, WatchedFiles

#: Oldest version of TLS that is spoken; gRPC's own is the same.
OLDEST = ssl.TLSVersion.TLSv1_2


@dataclass(frozen=True, slots=True)
class _Pair:
    """A certificate chain with its key, and who is trusted; empty: none. As PEM."""

    chain: bytes
    key: bytes
    trusted: bytes


class ServerTls:
    """The certificate of a server. With a client CA only clients with a certificate of it are let in (mTLS)."""

    def __init__(self, cert_file: str, key_file: str, client_ca_file: str = "") -> None:
        """Reads the files. Raises BadFile naming the setting."""
        self._cert_file, self._key_file, self._client_ca_file = cert_file, key_file, client_ca_file
        paths = {"tls_cert_file": cert_file, "tls_key_file": key_file}
        if client_ca_file:
            paths["tls_client_ca_file"] = client_ca_file
        self._files: WatchedFiles[_Pair] = WatchedFiles(paths, self._load)

    @property
    def asks_clients(self) -> bool:
        """Whether clients must show a certificate."""
        return bool(self._client_ca_file)

    def credentials(self) -> Any:
        """For `add_secure_port` of a grpc.aio server."""
        first = self._files.current()
        last = first

        def changed() -> Any:
            nonlocal last
            now = self._files.current()
            if now is last:
                return None
            last = now
            return _configuration(now)

        return grpc.dynamic_ssl_server_credentials(_configuration(first), changed, self.asks_clients)

    def ssl_context(self) -> ssl.SSLContext:
        """For an HTTP server, such as uvicorn: every handshake takes the certificate of its time."""
        made = {self._files.current(): self._context()}

        def handshake(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
            now = self._files.current()
            if now not in made:
                try:
                    fresh = self._context()
                except (ssl.SSLError, OSError):  # being written just now: the next one
                    return
                made.clear()
                made[now] = fresh
            connection.context = made[now]

        outer = self._context()
        # The callback is asked with or without a name from the client.
        outer.sni_callback = handshake
        return outer

    def _load(self, contents: Mapping[str, bytes]) -> _Pair:
        pair = _Pair(contents["tls_cert_file"], contents["tls_key_file"], contents.get("tls_client_ca_file", b""))
        if self._client_ca_file:
            check_ca("tls_client_ca_file", pair.trusted)
        try:
            self._context()
        except (ssl.SSLError, OSError) as error:
            raise BadFile(f"tls_cert_file, tls_key_file: {_why(error)}") from None
        return pair

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = OLDEST
        # A password would be asked for at the terminal; this one is wrong.
        context.load_cert_chain(self._cert_file, self._key_file, password=b"")
        if self._client_ca_file:
            context.load_verify_locations(self._client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def server_tls(settings: SecuritySettings) -> ServerTls | None:
    """The certificate of a process's servers; None: they speak plain text. Raises BadFile naming the setting."""
    if not settings.tls_cert_file:
        return None
    return ServerTls(settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file)


class ClientTls:
    """How a process trusts what it dials, and what it shows there. Without a CA file: the authorities that gRPC brings.

    `names`: the settings that give CA, certificate and key, for errors.
    """

    def __init__(
        self,
        ca_file: str,
        cert_file: str = "",
        key_file: str = "",
        names: tuple[str, str, str] = ("tls_ca_file", "tls_client_cert_file", "tls_client_key_file"),
    ) -> None:
        """Reads the files. Raises BadFile naming the setting."""
        self._names = names
        self._cert_file, self._key_file = cert_file, key_file
        paths = {name: path for name, path in zip(names, (ca_file, cert_file, key_file), strict=True) if path}
        self._files: WatchedFiles[Any] = WatchedFiles(paths, self._load)

    def credentials(self) -> Any:
        """For `grpc.aio.secure_channel`; another object when a file has changed."""
        return self._files.current()

    def _load(self, contents: Mapping[str, bytes]) -> Any:
        ca, cert, key = (contents.get(name) for name in self._names)
        if ca is not None:
            check_ca(self._names[0], ca)
        if cert is not None or key is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(self._cert_file, self._key_file, password=b"")
            except (ssl.SSLError, OSError) as error:
                raise BadFile(f"{self._names[1]}, {self._names[2]}: {_why(error)}") from None
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def check_ca(setting: str, pem: bytes) -> None:
    """Raises BadFile, naming the setting, for what holds no certificates."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise BadFile(f"{setting}: the file must hold certificates as PEM") from None


def _configuration(pair: _Pair) -> Any:
    trusted = pair.trusted or None
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)], root_certificates=trusted)


def _why(error: OSError) -> str:
    reason = getattr(error, "reason", None) or ""
    if "MISMATCH" in reason:
        return "the key does not belong to the certificate"
    return "a certificate and its key as PEM, the key without a password, are needed"
