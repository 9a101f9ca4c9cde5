"""A door for Flower apps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

RECORDS_OF_THE_APP = {
    "arrays": {"bias": "MODEL_PARAMETERS_CLASSIFIER", "*": "MODEL_PARAMETERS_EXTRACTOR"},
    "metrics": {"num-examples": "SAMPLE_COUNT", "train_loss": "LOCAL_METRICS", "eval_acc": "LOCAL_METRICS"},
}


CONSENT = {
    "coordinator": "spiffe://test/coordinator/superlink",
    "methods": ["flower"],
    "exposures": ["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "SAMPLE_COUNT", "LOCAL_METRICS", "PEER_DERIVED"],
    "rounds": 9,
}


def make_certificate(folder: Path) -> None:
    """A certificate for this machine, which is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "server.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "server.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
