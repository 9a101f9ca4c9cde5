"""``coordinator doctor``: whether the coordinator could serve now, or does, and if not, what to mend."""

from __future__ import annotations

import socket
import sqlite3
import ssl
from pathlib import Path

from sqlalchemy import make_url, text
from sqlalchemy.exc import SQLAlchemyError

from medsilo.coordinator.config import CoordinatorConfig
from medsilo.coordinator.joining.invitations import Invitations
from medsilo.coordinator.store.engine import make_engine
from medsilo.privacy.errors import ConfigurationError, MedsiloError
from medsilo.privacy.identity.certificates import fingerprint
from medsilo.privacy.identity.endpoint import split_address
from medsilo.privacy.party.examination import (
    Finding,
    bad,
    check_certificate,
    check_disk,
    check_journal,
    check_keys,
    check_privacy,
    check_versions,
    good,
    notice,
)

_SECONDS = 5.0
_DAMAGED = "stop the daemon, keep a copy of the state folder, and check the disk; then put back the newest copy"


def examine(path: Path) -> tuple[str, list[Finding]]:
    """The coordinator's name and what was found, for the configuration in a file."""
    try:
        config = CoordinatorConfig.read(path)
    except ConfigurationError as error:
        return path.stem, [bad("configuration", error)]
    certificate, credentials = check_certificate(config)
    shown = "" if credentials is None else fingerprint(credentials.certificate_pem)
    findings = [
        good("configuration", f"{path}: {config.identity.uri}"),
        check_versions(),
        check_keys(config),
        certificate,
        check_disk(config.state),
        check_privacy(config.state),
        check_journal(config),
        _check_database(config),
        *_check_plan(config),
        _check_port("port", config.listen, shown),
    ]
    if config.enrolment is not None:
        findings += [_check_port("enrolment port", config.enrolment.listen, shown), _check_authority(config)]
    return config.name, [*findings, *_check_invitations(config)]


def _check_plan(config: CoordinatorConfig) -> list[Finding]:
    try:
        plan = config.plan()  # loads PyTorch, which takes seconds
        warnings = config.warnings()
        config.build_model()
    except MedsiloError as error:
        return [bad("run", error)]
    found = f"{plan.run}: {plan.method.name}, {plan.rounds} rounds, {len(config.silos)} hospitals"
    return [good("run", found), *(notice("run", warning) for warning in warnings)]


def _check_database(config: CoordinatorConfig) -> Finding:
    if config.store is None:
        path = config.state / "coordinator.db"
        if not path.exists():
            return good("database", "not begun yet")
        try:
            # Read-only: nothing is upgraded by looking.
            with sqlite3.connect(f"file:{path.absolute()}?mode=ro", uri=True, timeout=_SECONDS) as database:
                (word,) = database.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.Error as error:
            word = str(error)
        return good("database", f"{path} is sound") if word == "ok" else bad("database", f"{path}: {word}", _DAMAGED)
    try:
        engine = make_engine(make_url(config.store))
        with engine.connect() as connection:
            connection.execute(text("SELECT 1"))
        engine.dispose()
    except (SQLAlchemyError, ConfigurationError) as error:
        said = str(error).splitlines()[0]
        return bad("database", said, "start the server, or mend `store:` and PGPASSWORD (docs/postgresql.md)")
    return good("database", f"{engine.url.render_as_string()} answers")


def _check_port(what: str, address: str, shown: str) -> Finding:
    """Whether this coordinator answers there, nobody does (it is not running), or somebody else."""
    host, port = split_address(address)
    nearby = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 what it listens on, not where
    try:
        plain = socket.create_connection((nearby, port), timeout=_SECONDS)
    except OSError:
        return notice(what, f"nobody answers on {address}", "coordinator serve")
    try:
        with plain:
            der = _certificate_shown(plain)
    except OSError:
        der = None
    if not shown:
        return notice(what, f"something answers on {address}; without certificates it cannot be told who")
    if der is None or fingerprint(ssl.DER_cert_to_PEM_cert(der).encode()) != shown:
        return bad(
            what, f"another program, or an earlier certificate, answers on {address}", "end it, or restart serve"
        )
    return good(what, f"this coordinator answers on {address}")


def _certificate_shown(plain: socket.socket) -> bytes | None:
    """What a server shows in a TLS handshake (DER). The last step, in which this side would have to show one too, is
    left out, so that the server's log does not tell of a caller without certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    handshake = context.wrap_bio(received, sent)
    while True:
        try:
            handshake.do_handshake()
        except ssl.SSLWantReadError:
            plain.sendall(sent.read())
            if not (data := plain.recv(1 << 14)):
                return None
            received.write(data)
        else:
            return handshake.getpeercert(binary_form=True)


def _check_authority(config: CoordinatorConfig) -> Finding:
    assert config.enrolment is not None
    key = config.enrolment.ca / "ca.key"
    try:
        mode = key.stat().st_mode
        same = fingerprint((config.enrolment.ca / "ca.pem").read_bytes()) == fingerprint(
            config.tls_files.ca.read_bytes()
        )
    except (OSError, ValueError) as error:
        return bad("CA", f"{error}", "put the CA's folder there, or take `enrolment:` out (docs/joining.md)")
    if mode & 0o077:
        return bad("CA", f"others can read {key}", f"chmod 600 {key}")
    if not same:
        return bad("CA", f"{config.enrolment.ca} is another CA than that of the certificate", "name the right folder")
    return good("CA", f"{key}, and no one else can read it")


def _check_invitations(config: CoordinatorConfig) -> list[Finding]:
    try:
        kept = Invitations(config.invitations).all()
    except ConfigurationError as error:
        return [bad("invitations", error)]
    if not kept:
        return []
    last = {one.silo: one.state for one in kept}
    found = good("invitations", ", ".join(f"{silo}: {state}" for silo, state in last.items()))
    gone = [silo for silo, state in last.items() if state in ("expired", "taken back")]
    return (
        [found] if not gone else [found, notice("invitations", f"{', '.join(gone)} cannot enrol", "coordinator invite")]
    )
