"""``coordinator init``: a new federation, from nothing to a coordinator that can serve.

Each step leaves its result whole or not at all, and is left out where its result is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from medsilo.coordinator.config import CoordinatorConfig
from medsilo.coordinator.joining.invitations import Invitations
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.files.durable import write_atomically
from medsilo.privacy.identity.authority import create_authority, issue
from medsilo.privacy.identity.certificates import fingerprint
from medsilo.privacy.identity.endpoint import check_host, split_address
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.invitation import Invitation, new_code
from medsilo.privacy.party.installing import aligned, make_keys_once, make_whole, place_new, quoted

_CONFIGURATION = """\
# The coordinator of the federation {federation}. Written by `coordinator init`; yours to change.
#
#   coordinator serve  --config {file}           runs it
#   coordinator invite HOSPITAL --config {file}  prints the line with which a hospital enrols
#   coordinator status --config {file}           rounds, hospitals, who was late, who was refused
#   coordinator doctor --config {file}           looks whether all is well, and says what to do if not
#
# Relative paths are taken from this file's folder.

federation: {federation}
name: coordinator              # this coordinator's name in its certificate
listen: {listen}         # hospitals call here; they open no port of their own
state: state/coordinator       # keys, journal, database, tensors of the last rounds

silos: [{silos}]   # who may take part; the run starts when all have joined (or so many: start_with: {most})

enrolment:                     # where invited hospitals get their certificates; take it out when all have theirs
  listen: {enrolment}
  host: {host}   # the name or address by which hospitals reach this machine
  ca: {ca}                     # its key signs; whoever has it can be anybody (docs/joining.md: keeping it elsewhere)

run:
  name: {federation}-1         # a changed run needs a new name: hospitals have agreed to this one as it is
  method:
    name: {method}             # what each one sends: docs/methods.md
  model:
    name: {model}              # or mlp-64, torchvision:resnet18, your.module:factory
    input_shape: [{shape}]     # channels, height, width of the hospitals' images
    classes: {classes}
  training:
    epochs: 1                  # per round
    batch_size: 100
    optimizer: adam
    learning_rate: 0.001
  rounds: {rounds}
  quorum: all                  # a round waits for all; with `quorum: {most}` and `deadline_minutes: 60` not for ever
  ask_for: []                  # [LOCAL_METRICS]: hospitals that consent report their accuracy
  seed: 1
"""


@dataclass(frozen=True)
class Federation:
    """What `coordinator init` is told. ``shape``: channels, height, width."""

    name: str
    host: str
    silos: Sequence[str]
    method: str
    model: str
    shape: Sequence[int]
    classes: int
    rounds: int
    port: int
    enrolment_port: int


def set_up(wanted: Federation, path: Path) -> CoordinatorConfig:
    """Writes the configuration; makes the CA, the coordinator's keys and its certificate, as far as they are missing.

    Raises ``ConfigurationError`` for a configuration that is there and not the one that would be written.
    """
    for silo in wanted.silos:
        Identity(wanted.name, "silo", silo)
    try:
        host = check_host(wanted.host)
    except ValueError as error:
        raise ConfigurationError(f"--host: {error}") from None
    every = "[::]" if ":" in host else "0.0.0.0"  # noqa: S104 hospitals are to reach it
    text = _CONFIGURATION.format(
        federation=wanted.name,
        file=path.name,
        listen=quoted(f"{every}:{wanted.port}"),
        enrolment=quoted(f"{every}:{wanted.enrolment_port}"),
        silos=", ".join(wanted.silos),
        host=quoted(host),
        ca="ca",
        method=wanted.method,
        model=quoted(wanted.model),
        shape=", ".join(map(str, wanted.shape)),
        classes=wanted.classes,
        rounds=wanted.rounds,
        most=max(1, len(wanted.silos) - 1),
    )
    text = aligned(text)
    if not path.exists():
        config = place_new(path, text, CoordinatorConfig)
    elif path.read_text(encoding="utf-8") == text:
        config = CoordinatorConfig.read(path)
    else:
        raise ConfigurationError(
            f"{path}: exists already and is not overwritten. To change it, edit it; to invite a hospital: coordinator "
            f"invite HOSPITAL --config {path}; for another federation begin in another folder"
        )
    assert config.enrolment is not None
    authority = config.enrolment.ca
    make_whole(authority, lambda folder: create_authority(folder, config.federation))
    make_keys_once(config)
    files = config.tls_files
    if not files.certificate.exists():
        issue(authority, config.name, config.keys / "tls.csr", files.certificate, role="coordinator")
    if not files.ca.exists():
        write_atomically(files.ca, (authority / "ca.pem").read_bytes(), mode=0o644)
    config.open_credentials()
    return config


def invite(config: CoordinatorConfig, silo: str, *, days: float) -> Invitation:
    """Makes an invitation; the hospital's earlier ones, if they are still open, are taken back.

    Raises ``ConfigurationError`` for a hospital that is not under ``silos``, or where nobody can enrol.
    """
    enrolment = config.enrolment
    if enrolment is None:
        raise ConfigurationError(
            "the configuration has no `enrolment:`, where invited hospitals would get their certificates; add it, or "
            "sign their requests by hand (docs/joining.md)"
        )
    if silo not in config.silos:
        raise ConfigurationError(
            f"{silo} is not one of the hospitals under `silos:` ({', '.join(config.silos)}); add it there first, and "
            "start `coordinator serve` again"
        )
    credentials = config.open_credentials()
    assert credentials is not None  # the configuration does not take `enrolment` and `insecure` together
    made = Invitation(
        host=enrolment.host,
        port=split_address(config.listen)[1],
        enrolment_port=split_address(enrolment.listen)[1],
        federation=config.federation,
        coordinator=config.name,
        silo=silo,
        ca_sha256=fingerprint(credentials.current.ca_pem),
        code=new_code(),
        expires=(datetime.now(UTC) + timedelta(days=days)).replace(microsecond=0),
    )
    Invitations(config.invitations).add(silo, made.key.public_key().public_bytes_raw(), made.expires)
    return made
