"""Keys and certificates: whose they are, and what is not signed, loaded or overwritten, with words that lead out."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID

from medsilo.privacy.errors import IdentityError
from medsilo.privacy.identity.authority import create_authority, issue
from medsilo.privacy.identity.certificates import Credentials, identity_of_certificate, load_credentials
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import create_keys, load_audit_key

HOSPITAL = Identity("test", "silo", "hospital1")
PEM = serialization.Encoding.PEM


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    create_authority(tmp_path / "ca", "test")
    return tmp_path / "ca"


def enrol(ca: Path, folder: Path, identity: Identity, *, days: int = 365) -> None:
    paths = create_keys(folder, identity)
    issue(ca, identity.name, paths.request, folder / "tls.pem", role=identity.role, days=days)


@pytest.fixture
def keys(ca: Path, tmp_path: Path) -> Path:
    enrol(ca, tmp_path / "keys", HOSPITAL)
    return tmp_path / "keys"


def load(ca: Path, folder: Path, identity: Identity = HOSPITAL) -> Credentials:
    return load_credentials(ca=ca / "ca.pem", certificate=folder / "tls.pem", key=folder / "tls.key", expected=identity)


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


@pytest.mark.parametrize(
    "uri",
    ["", "hospital1", "spiffe://test/silo", "spiffe://test/admin/a", "spiffe://test/silo/A", "spiffe://test/silo/a/b",
     "spiffe://test/silo/../a", "https://test/silo/a"],
)  # fmt: skip
def test_only_identities_are_identities(uri: str) -> None:
    with pytest.raises(IdentityError):
        Identity.parse(uri)


def test_a_ca_signs_parties_only_and_no_other_ca(ca: Path) -> None:
    root = certificate(ca / "ca.pem")
    constraints = root.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)


def test_every_certificate_that_was_issued_stands_in_the_authoritys_log(ca: Path, keys: Path) -> None:
    (line,) = (ca / "issued.jsonl").read_text().splitlines()
    entry = json.loads(line)
    issued = certificate(keys / "tls.pem")
    assert entry["identity"] == HOSPITAL.uri
    assert entry["sha256"] == issued.fingerprint(hashes.SHA256()).hex()
    assert int(entry["serial"], 16) == issued.serial_number


def test_the_longest_federation_name_has_a_ca(tmp_path: Path) -> None:
    create_authority(tmp_path / "long", "f" * 63)
    assert certificate(tmp_path / "long" / "ca.pem").subject.rfc4514_string().startswith("CN=" + "f" * 63)


def test_a_ca_whose_key_is_kept_elsewhere_is_not_overwritten(ca: Path, tmp_path: Path) -> None:
    before = (ca / "ca.pem").read_bytes()
    (ca / "ca.key").rename(tmp_path / "offline.key")
    with pytest.raises(IdentityError, match=r"ca\.pem: exists already and is not overwritten"):
        create_authority(ca, "test")
    assert (ca / "ca.pem").read_bytes() == before
    assert not (ca / "ca.key").exists()


def test_a_ca_signs_only_with_the_key_of_its_certificate(ca: Path, tmp_path: Path) -> None:
    paths = create_keys(tmp_path / "keys", HOSPITAL)
    create_authority(tmp_path / "twin", "test")
    (ca / "ca.pem").write_bytes((tmp_path / "twin" / "ca.pem").read_bytes())
    with pytest.raises(IdentityError, match=r"ca\.key: is not the key of"):
        issue(ca, "hospital1", paths.request, tmp_path / "out.pem")


def test_private_keys_are_the_owners_alone_and_are_never_overwritten(ca: Path, tmp_path: Path) -> None:
    paths = create_keys(tmp_path / "keys", HOSPITAL)
    for path in (paths.tls_key, paths.audit_key, ca / "ca.key"):
        assert path.stat().st_mode & 0o777 == 0o600
    before = paths.tls_key.read_bytes(), paths.audit_key.read_bytes()
    with pytest.raises(IdentityError, match="not overwritten"):
        create_keys(tmp_path / "keys", HOSPITAL)
    with pytest.raises(IdentityError, match="not overwritten"):
        create_authority(ca, "test")
    paths.request.unlink()
    create_keys(tmp_path / "keys", HOSPITAL)
    assert paths.request.exists()
    assert (paths.tls_key.read_bytes(), paths.audit_key.read_bytes()) == before


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


def test_what_cannot_be_written_or_dated_is_an_identity_error(ca: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(IdentityError, match="its folder is a file"):
        create_keys(tmp_path / "file", HOSPITAL)
    with pytest.raises(IdentityError, match="cannot be written"):
        create_keys(tmp_path / "file" / "below", HOSPITAL)
    paths = create_keys(tmp_path / "keys", HOSPITAL)
    with pytest.raises(IdentityError, match="choose fewer with --days"):
        issue(ca, "hospital1", paths.request, tmp_path / "out.pem", days=10_000_000)


def test_a_request_is_signed_for_its_own_name_and_federation_only(ca: Path, tmp_path: Path) -> None:
    paths = create_keys(tmp_path / "keys", HOSPITAL)
    with pytest.raises(IdentityError, match="for hospital1, not hospital3"):
        issue(ca, "hospital3", paths.request, tmp_path / "out.pem")
    create_authority(tmp_path / "other", "other")
    with pytest.raises(IdentityError, match="federation test; this CA is other's"):
        issue(tmp_path / "other", "hospital1", paths.request, tmp_path / "out.pem")
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


def test_a_request_cannot_make_itself_a_ca_or_a_coordinator(ca: Path, tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([
                x509.UniformResourceIdentifier(HOSPITAL.uri), x509.DNSName("c.coordinator.test"),
            ]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    (tmp_path / "request.csr").write_bytes(request.public_bytes(PEM))
    issue(ca, "hospital1", tmp_path / "request.csr", tmp_path / "out.pem")
    extensions = certificate(tmp_path / "out.pem").extensions
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName) == []


def test_only_requests_with_p256_keys_are_signed(ca: Path, tmp_path: Path) -> None:
    made = x509.load_pem_x509_csr(create_keys(tmp_path / "keys", HOSPITAL).request.read_bytes())
    p256, unknown = bytes.fromhex("06082a8648ce3d030107"), bytes.fromhex("06082a8648ce3d030163")
    strange = x509.load_der_x509_csr(made.public_bytes(serialization.Encoding.DER).replace(p256, unknown))
    (tmp_path / "strange.csr").write_bytes(strange.public_bytes(PEM))
    for asked, words in (
        (
            request(tmp_path / "rsa.csr", rsa.generate_private_key(65537, 2048), HOSPITAL.uri),
            "not an elliptic curve key",
        ),
        (request(tmp_path / "ed.csr", Ed25519PrivateKey.generate(), HOSPITAL.uri), "not an elliptic curve key"),
        (tmp_path / "strange.csr", r"its key .*make it with `silo keys`"),
        (
            request(tmp_path / "larger.csr", ec.generate_private_key(ec.SECP384R1()), HOSPITAL.uri),
            r"its key .*make it with `silo keys`",
        ),
    ):
        with pytest.raises(IdentityError, match=words):
            issue(ca, "hospital1", asked, tmp_path / "out.pem")
    assert not (tmp_path / "out.pem").exists()


def test_a_request_that_was_changed_on_the_way_is_not_signed(ca: Path, keys: Path, tmp_path: Path) -> None:
    asked = x509.load_pem_x509_csr((keys / "tls.csr").read_bytes())
    changed = asked.public_bytes(serialization.Encoding.DER).replace(b"silo/hospital1", b"silo/hospital2")
    path = tmp_path / "changed.csr"
    path.write_bytes(x509.load_der_x509_csr(changed).public_bytes(PEM))
    with pytest.raises(IdentityError, match="not signed by its own key"):
        issue(ca, "hospital2", path, tmp_path / "out.pem")


@pytest.mark.parametrize(
    ("name", "words"),
    [("gone.csr", r"gone\.csr"), (".", "is not a certificate request"), ("rubbish.csr", "not a certificate request")],
)
def test_a_request_that_cannot_be_read_is_an_identity_error(ca: Path, tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "rubbish.csr").write_bytes(b"rubbish")
    with pytest.raises(IdentityError, match=words):
        issue(ca, "hospital1", tmp_path / name, tmp_path / "out.pem")
    assert not (tmp_path / "out.pem").exists()


def test_a_party_gets_a_certificate_with_its_identity_and_its_use_alone(ca: Path, tmp_path: Path) -> None:
    enrol(ca, tmp_path / "silo", HOSPITAL)
    coordinator = Identity("test", "coordinator", "c")
    enrol(ca, tmp_path / "coordinator", coordinator)
    assert load(ca, tmp_path / "silo").identity == HOSPITAL
    assert load(ca, tmp_path / "coordinator", coordinator).identity == coordinator
    for folder, names, use in (
        ("silo", [], ExtendedKeyUsageOID.CLIENT_AUTH),
        ("coordinator", ["c.coordinator.test"], ExtendedKeyUsageOID.SERVER_AUTH),
    ):
        extensions = certificate(tmp_path / folder / "tls.pem").extensions
        alternative = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert alternative.get_values_for_type(x509.DNSName) == names
        assert list(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [use]
        assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_certificate_replaces_only_the_same_partys(ca: Path, tmp_path: Path) -> None:
    enrol(ca, tmp_path / "keys", HOSPITAL)
    request = tmp_path / "keys" / "tls.csr"
    enrol(ca, tmp_path / "other", Identity("test", "silo", "hospital2"))
    for out in (tmp_path / "keys" / "audit.key", ca / "ca.key", ca / "ca.pem", tmp_path / "other" / "tls.pem"):
        before = out.read_bytes()
        with pytest.raises(IdentityError, match="choose another file with --out"):
            issue(ca, "hospital1", request, out)
        assert out.read_bytes() == before
    serial = certificate(tmp_path / "keys" / "tls.pem").serial_number
    issue(ca, "hospital1", request, tmp_path / "keys" / "tls.pem")
    assert certificate(tmp_path / "keys" / "tls.pem").serial_number != serial


def test_a_certificate_is_readable_by_its_party_whatever_the_umask(ca: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        enrol(ca, tmp_path / "keys", HOSPITAL)
    finally:
        os.umask(before)
    assert (tmp_path / "keys" / "tls.pem").stat().st_mode & 0o777 == 0o644


def test_credentials_hold_what_was_issued(ca: Path, keys: Path) -> None:
    found = load(ca, keys)
    assert found.identity == HOSPITAL
    assert found.certificate_sha256 == certificate(keys / "tls.pem").fingerprint(hashes.SHA256()).hex()
    assert found.private_key_pem == (keys / "tls.key").read_bytes()
    assert found.not_after - datetime.now(UTC) == pytest.approx(timedelta(days=365), abs=timedelta(minutes=10))
    assert identity_of_certificate(found.certificate_pem, found.ca_pem) == HOSPITAL


def test_what_does_not_fit_together_is_not_loaded(ca: Path, tmp_path: Path) -> None:
    enrol(ca, tmp_path / "one", HOSPITAL)
    enrol(ca, tmp_path / "two", Identity("test", "silo", "hospital2"))
    with pytest.raises(IdentityError, match="certificate says spiffe://test/silo/hospital2"):
        load(ca, tmp_path / "two")
    with pytest.raises(IdentityError, match="not the key of"):
        load_credentials(
            ca=ca / "ca.pem",
            certificate=tmp_path / "one" / "tls.pem",
            key=tmp_path / "two" / "tls.key",
            expected=HOSPITAL,
        )


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


def test_an_expired_certificate_says_so(ca: Path, tmp_path: Path) -> None:
    enrol(ca, tmp_path / "keys", HOSPITAL, days=0)
    with pytest.raises(IdentityError, match=r"expired on .*coordinator ca issue"):
        load(ca, tmp_path / "keys")
    pem, root = (tmp_path / "keys" / "tls.pem").read_bytes(), (ca / "ca.pem").read_bytes()
    with pytest.raises(IdentityError, match="expired"):
        identity_of_certificate(pem, root)


def test_a_certificate_of_an_expired_ca_is_not_loaded(tmp_path: Path) -> None:
    create_authority(tmp_path / "old", "test", days=0)
    paths = create_keys(tmp_path / "keys", HOSPITAL)
    issue(tmp_path / "old", "hospital1", paths.request, tmp_path / "keys" / "tls.pem")
    with pytest.raises(IdentityError, match="expired"):
        load(tmp_path / "old", tmp_path / "keys")


def test_a_certificate_made_for_another_use_is_not_loaded(ca: Path, tmp_path: Path) -> None:
    enrol(ca, tmp_path / "keys", HOSPITAL)
    path = tmp_path / "keys" / "tls.pem"
    root, own = certificate(ca / "ca.pem"), certificate(path)
    signer = serialization.load_pem_private_key((ca / "ca.key").read_bytes(), password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    for usages in (
        [],
        [ExtendedKeyUsageOID.SERVER_AUTH],
        [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH],
    ):
        builder = x509.CertificateBuilder(
            root.subject, own.subject, own.public_key(), 1, own.not_valid_before_utc, own.not_valid_after_utc
        ).add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(HOSPITAL.uri)]), critical=False)
        if usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        path.write_bytes(builder.sign(signer, hashes.SHA256()).public_bytes(PEM))
        with pytest.raises(IdentityError, match=r"not made for a silo's use.*coordinator ca issue hospital1"):
            load(ca, tmp_path / "keys")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tls.pem", b"rubbish", "is not a certificate"),
        ("tls.key", b"rubbish", "is not a private key"),
        ("tls.pem", None, "there is no such file; ask the coordinator's operator for an invitation (`silo init`)"),
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
    with pytest.raises(IdentityError, match=r"there is no such file.*silo keys"):
        load(ca, keys / "nowhere")


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
    (keys / "audit.key").chmod(mode)
    with pytest.raises(IdentityError, match="chmod 600"):
        load(ca, keys)
    with pytest.raises(IdentityError, match="chmod 600"):
        load_audit_key(keys / "audit.key")
