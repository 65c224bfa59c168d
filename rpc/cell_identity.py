"""By what processes of a cell know one another: a name on a verified certificate, or a secret that they share."""

import hmac
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from rpc.security_settings import SecuritySettings
from rpc.watched_files import BadFile, WatchedFiles

#: Metadata key of a call's credentials, and what stands before a token there.
AUTHORIZATION = "authorization"
SCHEME = "Bearer "
#: A cell secret has at least so many characters: nobody guesses it.
SECRET_MIN_CHARACTERS = 32
#: Most secrets in a file: the one that is sent, and those that are still taken while it is replaced.
SECRETS_MAX = 8


class CellIdentity:
    """How this process proves that it is of the cell, and who else is."""

    def __init__(self, settings: SecuritySettings) -> None:
        """Reads the secrets. Raises BadFile."""
        self._names = settings.internal_identities
        self._secrets: WatchedFiles[tuple[str, ...]] | None = None
        if settings.cell_secret_file:
            self._secrets = WatchedFiles({"cell_secret_file": settings.cell_secret_file}, secrets_in)

    @property
    def required(self) -> bool:
        """Whether there are proofs at all; where there are none everybody is taken for a process of the cell."""
        return bool(self._names) or self._secrets is not None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What calls to other processes carry."""
        return () if self._secrets is None else ((AUTHORIZATION, SCHEME + self._secrets.current()[0]),)

    def proves(self, context: Any) -> bool:
        """Whether the caller has shown that it is a process of the cell."""
        # A call that came over HTTP has metadata, and no certificate that anybody verified.
        shown: Mapping[str, Sequence[bytes]] = getattr(context, "auth_context", dict)()
        return self.names(shown) or self.knows(bearer(context.invocation_metadata()))

    def names(self, shown: Mapping[str, Sequence[bytes]]) -> bool:
        """Whether a verified certificate carries a name of the cell. `shown`: gRPC's auth context."""
        if not self._names or shown.get("transport_security_type") != [b"ssl"]:
            return False
        found = shown.get("x509_subject_alternative_name") or shown.get("x509_common_name") or ()
        names = [name.decode("utf-8", "replace") for name in found]
        return any(fnmatchcase(name, pattern) for name in names for pattern in self._names)

    def knows(self, token: str) -> bool:
        """Whether `token` is a secret of the cell; it takes as long for any token of a length."""
        if self._secrets is None or not token:
            return False
        given = token.encode()
        same = [hmac.compare_digest(given, secret.encode()) for secret in self._secrets.current()]
        return any(same)


def bearer(metadata: Any) -> str:
    """The token of a call; empty when it has none, or several."""
    found = [value for key, value in metadata or () if key == AUTHORIZATION]
    if len(found) != 1 or not isinstance(found[0], str):
        return ""
    return token_of(found[0])


def token_of(header: str) -> str:
    """The token of an Authorization header; empty when it is of another scheme."""
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == SCHEME.strip().lower() else ""


def secrets_in(contents: Mapping[str, bytes]) -> tuple[str, ...]:
    """The secrets of a file. Raises BadFile."""
    try:
        lines = [line.strip() for line in contents["cell_secret_file"].decode("ascii").splitlines()]
    except UnicodeDecodeError:
        raise BadFile("cell_secret_file: secrets are ASCII, one a line") from None
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not found or len(found) > SECRETS_MAX:
        raise BadFile(f"cell_secret_file: it must hold 1 to {SECRETS_MAX} secrets, one a line; got {len(found)}")
    for number, secret in enumerate(found, 1):
        if len(secret) < SECRET_MIN_CHARACTERS or not secret.isprintable() or " " in secret:
            wanted = f"at least {SECRET_MIN_CHARACTERS} characters without spaces"
            raise BadFile(f"cell_secret_file: secret {number} must have {wanted}; it has {len(secret)}")
    return found
