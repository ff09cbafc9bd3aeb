"""A certificate authority for one job, which forgets its key."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from asyncpar.config.secret import Secret
from asyncpar.security.identity import Identity, RoleKind

CLOCK_SKEW = timedelta(minutes=10)
"""How much the clocks of hosts may differ: certificates are valid that long before they are made."""

_USES = {
    RoleKind.RANK: (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH),
    RoleKind.AGENT: (ExtendedKeyUsageOID.CLIENT_AUTH,),
    RoleKind.COORDINATOR: (ExtendedKeyUsageOID.SERVER_AUTH,),
}


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its private key, in PEM."""

    certificate: bytes
    key: Secret = field(repr=False)


class Authority:
    """Signs the certificates of one job, all valid until ``expires``.

    Its private key lives in this object only and is written nowhere: once the object is gone, nobody can make another
    certificate that the job accepts.  Keys are ECDSA on P-256, which gRPC's TLS takes (it does not take Ed25519).
    """

    def __init__(self, job: str, *, now: datetime, days: int) -> None:
        self._job = job
        self._begins = now - CLOCK_SKEW
        self.expires = now + timedelta(days=days)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"asyncpar CA of job {job}"[:64])])
        self._certificate = (
            self._begin(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def certificate(self) -> bytes:
        """What everybody checks everybody's certificate against, in PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, identity: Identity) -> KeyPair:
        """Return a new key and a certificate that it belongs to ``identity``."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(identity.role))])
        names = [x509.DNSName(identity.dns_name), x509.UniformResourceIdentifier(identity.uri)]
        certificate = (
            self._begin(name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(_USES[identity.role.kind]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return KeyPair(
            certificate.public_bytes(serialization.Encoding.PEM),
            Secret(
                key.private_bytes(
                    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
                )
            ),
        )

    def _begin(self, name: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        """Return what all certificates of the job have in common."""
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._begins)
            .not_valid_after(self.expires)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(signer, critical=False)
        )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
