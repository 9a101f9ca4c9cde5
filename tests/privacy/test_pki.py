"""Keys and certificates: whose they are, and what is not signed, loaded or overwritten."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from privacy.errors import IdentityError
from privacy.pki import (
    Identity,
    create_authority,
    create_keys,
    identity_of_certificate,
    issue,
    load_audit_key,
    load_credentials,
)

HOSPITAL = Identity("test", "silo", "hospital1")


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    create_authority(tmp_path / "ca", "test")
    return tmp_path / "ca"


def enrol(ca: Path, folder: Path, identity: Identity, *, days: int = 365) -> None:
    paths = create_keys(folder, identity)
    issue(ca, identity.name, paths.request, folder / "tls.pem", role=identity.role, days=days)


def load(ca: Path, folder: Path, identity: Identity = HOSPITAL) -> Identity:
    found = load_credentials(
        ca=ca / "ca.pem", certificate=folder / "tls.pem", key=folder / "tls.key", expected=identity
    )
    return found.identity


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_a_party_gets_a_certificate_with_its_identity_and_its_use_alone(ca: Path, tmp_path: Path) -> None:
    enrol(ca, tmp_path / "silo", HOSPITAL)
    coordinator = Identity("test", "coordinator", "c")
    enrol(ca, tmp_path / "coordinator", coordinator)
    assert load(ca, tmp_path / "silo") == HOSPITAL
    assert load(ca, tmp_path / "coordinator", coordinator) == coordinator
    for folder, names, use in (
        ("silo", [], ExtendedKeyUsageOID.CLIENT_AUTH),
        ("coordinator", ["c.coordinator.test"], ExtendedKeyUsageOID.SERVER_AUTH),
    ):
        extensions = certificate(tmp_path / folder / "tls.pem").extensions
        alternative = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert alternative.get_values_for_type(x509.DNSName) == names
        assert list(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [use]
        assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca


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


def test_a_request_is_signed_for_its_own_name_and_federation_only(ca: Path, tmp_path: Path) -> None:
    paths = create_keys(tmp_path / "keys", HOSPITAL)
    with pytest.raises(IdentityError, match="for hospital1, not hospital3"):
        issue(ca, "hospital3", paths.request, tmp_path / "out.pem")
    create_authority(tmp_path / "other", "other")
    with pytest.raises(IdentityError, match="federation test; this CA is other's"):
        issue(tmp_path / "other", "hospital1", paths.request, tmp_path / "out.pem")
    paths.request.write_bytes(b"rubbish")
    with pytest.raises(IdentityError, match="not a certificate request"):
        issue(ca, "hospital1", paths.request, tmp_path / "out.pem")
    assert not (tmp_path / "out.pem").exists()


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
    (tmp_path / "request.csr").write_bytes(request.public_bytes(serialization.Encoding.PEM))
    issue(ca, "hospital1", tmp_path / "request.csr", tmp_path / "out.pem")
    extensions = certificate(tmp_path / "out.pem").extensions
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName) == []


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
    create_authority(tmp_path / "other", "test")
    with pytest.raises(IdentityError, match="issued by another CA"):
        load(tmp_path / "other", tmp_path / "one")
    (tmp_path / "one" / "tls.key").chmod(0o640)
    with pytest.raises(IdentityError, match="chmod 600"):
        load(ca, tmp_path / "one")
    (tmp_path / "one" / "audit.key").chmod(0o604)
    with pytest.raises(IdentityError, match="chmod 600"):
        load_audit_key(tmp_path / "one" / "audit.key")
    with pytest.raises(IdentityError, match=r"there is no such file.*silo keys"):
        load(ca, tmp_path / "nowhere")


def test_an_expired_certificate_says_so(ca: Path, tmp_path: Path) -> None:
    enrol(ca, tmp_path / "keys", HOSPITAL, days=0)
    with pytest.raises(IdentityError, match=r"expired on .*coordinator ca issue"):
        load(ca, tmp_path / "keys")
    pem, root = (tmp_path / "keys" / "tls.pem").read_bytes(), (ca / "ca.pem").read_bytes()
    with pytest.raises(IdentityError, match="expired"):
        identity_of_certificate(pem, root)


@pytest.mark.parametrize(
    "uri",
    ["", "hospital1", "spiffe://test/silo", "spiffe://test/admin/a", "spiffe://test/silo/A", "spiffe://test/silo/a/b",
     "spiffe://test/silo/../a", "https://test/silo/a"],
)  # fmt: skip
def test_only_identities_are_identities(uri: str) -> None:
    with pytest.raises(IdentityError):
        Identity.parse(uri)


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
        path.write_bytes(builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        with pytest.raises(IdentityError, match=r"not made for a silo's use.*coordinator ca issue hospital1"):
            load(ca, tmp_path / "keys")


def test_a_ca_whose_key_is_kept_elsewhere_is_not_overwritten(ca: Path, tmp_path: Path) -> None:
    before = (ca / "ca.pem").read_bytes()
    (ca / "ca.key").rename(tmp_path / "offline.key")
    with pytest.raises(IdentityError, match=r"ca\.pem: exists already and is not overwritten"):
        create_authority(ca, "test")
    assert (ca / "ca.pem").read_bytes() == before
    assert not (ca / "ca.key").exists()


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


def test_a_ca_signs_only_with_the_key_of_its_certificate(ca: Path, tmp_path: Path) -> None:
    paths = create_keys(tmp_path / "keys", HOSPITAL)
    create_authority(tmp_path / "twin", "test")
    (ca / "ca.pem").write_bytes((tmp_path / "twin" / "ca.pem").read_bytes())
    with pytest.raises(IdentityError, match=r"ca\.key: is not the key of"):
        issue(ca, "hospital1", paths.request, tmp_path / "out.pem")


def test_only_p256_requests_are_signed(ca: Path, tmp_path: Path) -> None:
    p256, unknown = bytes.fromhex("06082a8648ce3d030107"), bytes.fromhex("06082a8648ce3d030163")
    made = x509.load_pem_x509_csr(create_keys(tmp_path / "keys", HOSPITAL).request.read_bytes())
    strange = x509.load_der_x509_csr(made.public_bytes(serialization.Encoding.DER).replace(p256, unknown))
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(HOSPITAL.uri)])
    builder = x509.CertificateSigningRequestBuilder(x509.Name([])).add_extension(names, critical=False)
    larger = builder.sign(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256())
    for asked in (strange, larger):
        (tmp_path / "r.csr").write_bytes(asked.public_bytes(serialization.Encoding.PEM))
        with pytest.raises(IdentityError, match=r"its key .*make it with `silo keys`"):
            issue(ca, "hospital1", tmp_path / "r.csr", tmp_path / "out.pem")


def test_the_longest_federation_name_has_a_ca(tmp_path: Path) -> None:
    create_authority(tmp_path / "long", "f" * 63)
    assert certificate(tmp_path / "long" / "ca.pem").subject.rfc4514_string().startswith("CN=" + "f" * 63)


def test_a_certificate_is_readable_by_its_party_whatever_the_umask(ca: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        enrol(ca, tmp_path / "keys", HOSPITAL)
    finally:
        os.umask(before)
    assert (tmp_path / "keys" / "tls.pem").stat().st_mode & 0o777 == 0o644


def test_what_cannot_be_written_or_dated_is_an_identity_error(ca: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(IdentityError, match="its folder is a file"):
        create_keys(tmp_path / "file", HOSPITAL)
    with pytest.raises(IdentityError, match="cannot be written"):
        create_keys(tmp_path / "file" / "below", HOSPITAL)
    paths = create_keys(tmp_path / "keys", HOSPITAL)
    with pytest.raises(IdentityError, match="choose fewer with --days"):
        issue(ca, "hospital1", paths.request, tmp_path / "out.pem", days=10_000_000)
