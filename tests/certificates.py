"""Certificates for tests: an authority of its own, and what it signs."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """Paths of a certificate and its key."""

    cert: str
    key: str


class Authority:
    """A CA whose files are in `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(f"test {name}")
        self._cert = (
            _builder(subject, subject, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.path = str(folder / f"{name}.pem")
        Path(self.path).write_bytes(self._cert.public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, *, uri: str = "", days: float = 1.0, file: str = "") -> Pair:
        """A certificate for this machine with the common name `name`, and `uri` among its alternative names."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [
            x509.DNSName("localhost"),
            x509.DNSName(name),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        ]
        if uri:
            names.append(x509.UniformResourceIdentifier(uri))
        cert = (
            _builder(_name(name), self._cert.subject, key.public_key(), days)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        pair = Pair(str(self._folder / f"{file or name}.pem"), str(self._folder / f"{file or name}.key"))
        Path(pair.key).write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        Path(pair.cert).write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        return pair

    def locked(self, pair: Pair) -> str:
        """The path of the pair's key under a password."""
        key = serialization.load_pem_private_key(Path(pair.key).read_bytes(), None)
        lock = serialization.BestAvailableEncryption(b"secret")
        path = Path(f"{pair.key}.locked")
        path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock))
        return str(path)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float = 1.0) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + days * _DAY)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
