"""Keys and certificates: what a certificate authority and a party turn away, with words that lead out."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from privacy.errors import IdentityError
from privacy.pki import (
    Credentials,
    Identity,
    create_authority,
    create_keys,
    identity_of_certificate,
    issue,
    load_audit_key,
    load_credentials,
)

HOSPITAL = Identity("test", "silo", "hospital1")
PEM = serialization.Encoding.PEM


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    create_authority(tmp_path / "ca", "test")
    return tmp_path / "ca"


@pytest.fixture
def keys(ca: Path, tmp_path: Path) -> Path:
    paths = create_keys(tmp_path / "keys", HOSPITAL)
    issue(ca, "hospital1", paths.request, tmp_path / "keys" / "tls.pem")
    return tmp_path / "keys"


def load(ca: Path, keys: Path) -> Credentials:
    return load_credentials(ca=ca / "ca.pem", certificate=keys / "tls.pem", key=keys / "tls.key", expected=HOSPITAL)


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def request(path: Path, key: object, *uris: str) -> Path:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    if uris:
        names = [x509.UniformResourceIdentifier(uri) for uri in uris]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    algorithm = None if isinstance(key, Ed25519PrivateKey) else hashes.SHA256()
    path.write_bytes(builder.sign(key, algorithm).public_bytes(PEM))  # type: ignore[arg-type]
    return path


def test_credentials_hold_what_was_issued(ca: Path, keys: Path) -> None:
    found = load(ca, keys)
    assert found.identity == HOSPITAL
    assert found.certificate_sha256 == certificate(keys / "tls.pem").fingerprint(hashes.SHA256()).hex()
    assert found.private_key_pem == (keys / "tls.key").read_bytes()
    assert found.not_after - datetime.now(UTC) == pytest.approx(timedelta(days=365), abs=timedelta(minutes=10))
    assert identity_of_certificate(found.certificate_pem, found.ca_pem) == HOSPITAL


def test_every_certificate_that_was_issued_stands_in_the_authoritys_log(ca: Path, keys: Path) -> None:
    (line,) = (ca / "issued.jsonl").read_text().splitlines()
    entry = json.loads(line)
    issued = certificate(keys / "tls.pem")
    assert entry["identity"] == HOSPITAL.uri
    assert entry["sha256"] == issued.fingerprint(hashes.SHA256()).hex()
    assert int(entry["serial"], 16) == issued.serial_number


def test_a_ca_signs_parties_only_and_no_other_ca(ca: Path) -> None:
    root = certificate(ca / "ca.pem")
    constraints = root.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)


def test_one_existing_key_is_enough_to_overwrite_none(tmp_path: Path) -> None:
    for name in ("tls.key", "audit.key"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_bytes(b"precious")
        with pytest.raises(IdentityError, match="not overwritten"):
            create_keys(folder, HOSPITAL)
        assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [(name, b"precious")]


def test_tls_and_audit_keys_are_apart(keys: Path) -> None:
    public = serialization.load_pem_public_key((keys / "audit.pub").read_bytes())
    assert public == load_audit_key(keys / "audit.key").public_key()
    with pytest.raises(IdentityError, match="not an Ed25519 key"):
        load_audit_key(keys / "tls.key")


def test_a_request_with_another_kind_of_key_is_not_signed(ca: Path, tmp_path: Path) -> None:
    for key in (rsa.generate_private_key(65537, 2048), Ed25519PrivateKey.generate()):
        asked = request(tmp_path / "r.csr", key, HOSPITAL.uri)
        with pytest.raises(IdentityError, match="not an elliptic curve key"):
            issue(ca, "hospital1", asked, tmp_path / "out.pem")
    assert not (tmp_path / "out.pem").exists()


def test_a_request_names_exactly_one_identity(ca: Path, tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    for uris, words in (
        ((), "names 0"),
        ((HOSPITAL.uri, Identity("test", "coordinator", "c").uri), "names 2"),
        (("https://hospital1",), "is not an identity"),
    ):
        asked = request(tmp_path / "r.csr", key, *uris)
        with pytest.raises(IdentityError, match=words):
            issue(ca, "hospital1", asked, tmp_path / "out.pem")


def test_a_request_that_was_changed_on_the_way_is_not_signed(ca: Path, keys: Path, tmp_path: Path) -> None:
    asked = x509.load_pem_x509_csr((keys / "tls.csr").read_bytes())
    changed = asked.public_bytes(serialization.Encoding.DER).replace(b"silo/hospital1", b"silo/hospital2")
    path = tmp_path / "changed.csr"
    path.write_bytes(x509.load_der_x509_csr(changed).public_bytes(PEM))
    with pytest.raises(IdentityError, match="not signed by its own key"):
        issue(ca, "hospital2", path, tmp_path / "out.pem")


@pytest.mark.parametrize("name", ["tls.csr", "."])
def test_a_request_that_cannot_be_read_is_an_identity_error(ca: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(IdentityError, match=r"tls\.csr|is not a certificate request"):
        issue(ca, "hospital1", tmp_path / name, tmp_path / "out.pem")


def test_a_certificate_of_an_expired_ca_is_not_loaded(tmp_path: Path) -> None:
    create_authority(tmp_path / "old", "test", days=0)
    paths = create_keys(tmp_path / "keys", HOSPITAL)
    issue(tmp_path / "old", "hospital1", paths.request, tmp_path / "keys" / "tls.pem")
    with pytest.raises(IdentityError, match="expired"):
        load(tmp_path / "old", tmp_path / "keys")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tls.pem", b"rubbish", "is not a certificate"),
        ("tls.key", b"rubbish", "is not a private key"),
        ("tls.pem", None, "there is no such file; send the request made by `silo keys`"),
        ("tls.key", None, "there is no such file; make keys with `silo keys`"),
    ],
)
def test_a_file_that_is_damaged_or_gone_is_named(
    ca: Path, keys: Path, file: str, content: bytes | None, words: str
) -> None:
    if content is None:
        (keys / file).unlink()
    else:
        (keys / file).write_bytes(content)
    with pytest.raises(IdentityError) as caught:
        load(ca, keys)
    assert str(keys / file) in str(caught.value)
    assert words in str(caught.value)


def test_a_key_behind_a_password_or_of_another_kind_is_an_identity_error(ca: Path, keys: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    locked = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret"))
    (keys / "tls.key").write_bytes(locked)
    with pytest.raises(IdentityError, match="not a private key"):
        load(ca, keys)
    (keys / "tls.key").write_bytes((keys / "audit.key").read_bytes())
    with pytest.raises(IdentityError, match="not an elliptic curve key"):
        load(ca, keys)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610])
def test_a_private_key_that_others_can_touch_is_not_used(ca: Path, keys: Path, mode: int) -> None:
    (keys / "tls.key").chmod(mode)
    with pytest.raises(IdentityError, match="chmod 600"):
        load(ca, keys)


def test_the_certificate_of_a_ca_that_only_has_the_same_name_is_not_loaded(
    ca: Path, keys: Path, tmp_path: Path
) -> None:
    create_authority(tmp_path / "twin", "test")
    assert certificate(tmp_path / "twin" / "ca.pem").subject == certificate(ca / "ca.pem").subject
    with pytest.raises(IdentityError, match="issued by another CA"):
        load(tmp_path / "twin", keys)
    with pytest.raises(IdentityError, match="issued by another CA"):
        identity_of_certificate((keys / "tls.pem").read_bytes(), (tmp_path / "twin" / "ca.pem").read_bytes())
    with pytest.raises(IdentityError, match="cannot be read"):
        identity_of_certificate(b"", (ca / "ca.pem").read_bytes())
