"""``silo doctor``: whether this hospital could train now, and if not, what to mend.

Nothing about patients leaves: a TLS handshake is made, and, if the consent lets the coordinator be asked at all, its
plan is asked for, through the door.
"""

from __future__ import annotations

import difflib
import ssl
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy as np

from medsilo.algorithms.datasets import ImageDataset, largest_group, load_npz
from medsilo.algorithms.models.given_weights import find_weights
from medsilo.algorithms.registry import METHODS
from medsilo.privacy.consent.consent import INVENTED_HOSPITALS, ConsentFile, today
from medsilo.privacy.consent.gate import ConsentGate
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.consent.withdrawal import History
from medsilo.privacy.door.door import Call, Door
from medsilo.privacy.door.protocol import agreed, newer, spoken_instead
from medsilo.privacy.errors import (
    ConfigurationError,
    DataError,
    IdentityError,
    JournalInUseError,
    MedsiloError,
    UnreachableError,
)
from medsilo.privacy.identity.certificates import Credentials, identity_of_certificate
from medsilo.privacy.identity.keys import load_audit_key
from medsilo.privacy.journal.journal import Journal
from medsilo.privacy.journal.records import ConsentRecord
from medsilo.privacy.party.examination import (
    SOON_DAYS,
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
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.nonces import nonce
from medsilo.protos.versions import PROTOCOL_VERSION
from medsilo.silo.run.approval import waits
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.state.plans import keep_plan, known_plan
from medsilo.silo.uplink.channel import channel_credentials, connect, open_channel, said

ANSWER_SECONDS = 20
LARGEST_SKEW_SECONDS = 60.0
"""Certificates are valid from five minutes before they are made; records' times are to be believed to a minute."""


def examine(path: Path) -> tuple[str, list[Finding]]:
    """The hospital's name and what was found, for the configuration in a file."""
    try:
        config = SiloConfig.read(path)
    except ConfigurationError as error:
        return path.stem, [bad("configuration", error)]
    keys, private, journal = check_keys(config), check_privacy(config.state), check_journal(config)
    certificate, credentials = check_certificate(config)
    consent, may_ask = _check_consent(config)
    way = check_way(config, credentials)
    asked: list[Finding] = []
    plan = None
    if all(finding.state != "bad" for finding in (keys, journal, certificate, *way)):
        asked, plan = _ask(config, credentials, may_ask=may_ask)
    plan = plan or _last_plan(config)
    return config.name, [
        good("configuration", f"{path}: {config.identity.uri}"),
        check_versions(),
        keys,
        certificate,
        check_disk(config.state),
        private,
        journal,
        *way,
        *asked,
        *check_data(config.shard, plan),
        *check_weights(config.weights, plan),
        consent,
        *_check_methods(config),
        *_check_masks(config),
        *_check_plan(config, plan),
        *_check_ledgers(config),
    ]


def check_data(shard: Path, plan: RunPlan | None) -> list[Finding]:
    """That the images can be read, and fit the plan; how many there are."""
    try:
        dataset = load_npz(shard)
    except DataError as error:
        return [bad("images", error)]
    found = [good("images", _describe(dataset))]
    if dataset.synthetic:
        found.append(notice("images", "they are synthetic: results on them say nothing about patients"))
    missing = []
    for split in (dataset.train, dataset.test):
        counts = split.counts(dataset.num_classes)
        missing.append([dataset.class_names[label] for label in np.flatnonzero(counts == 0)])
    if missing[0]:
        found.append(notice("images", f"no training images of: {', '.join(missing[0])}"))
    if untested := [name for name in missing[1] if name not in missing[0]]:
        found.append(
            notice(
                "images",
                f"no test images of: {', '.join(untested)}",
                "accuracies will say nothing about them; add a patient's, or say in a column `split` who is tested on",
            )
        )
    if plan is not None:
        if dataset.image_shape != tuple(plan.model.input_shape):
            found.append(
                bad(
                    "images",
                    f"they are {_times(dataset.image_shape)}, and run {plan.run} trains on "
                    f"{_times(plan.model.input_shape)}",
                    "prepare the images in that size, or agree on another with the coordinator's operator",
                )
            )
        highest = max(int(split.labels.max()) for split in (dataset.train, dataset.test))
        if highest >= plan.model.classes:
            found.append(
                bad(
                    "images",
                    f"a label is {highest}, and run {plan.run} has {plan.model.classes} classes, from 0",
                    "number the classes as the group agreed to",
                )
            )
    return found


def check_weights(places: Sequence[Path], plan: RunPlan | None) -> list[Finding]:
    """That the weights are here which the run wants this hospital to bring."""
    given = plan.model.weights if plan is not None else None
    if given is None or not given.brought:
        return []
    try:
        return [good("weights", f"{find_weights(given, places)} is what the run starts from: {given.source}")]
    except ConfigurationError as error:
        return [bad("weights", error)]


def check_way(config: SiloConfig, credentials: Credentials | None) -> list[Finding]:
    """That the coordinator's address is reached, and the coordinator itself answers there (a TLS handshake)."""
    address = config.coordinator.address
    try:
        plain = connect(address, proxy=config.proxy)
    except (UnreachableError, IdentityError) as error:
        return [bad("address", error)]
    with plain:
        found = [good("address", f"{address} is reached")]
        if credentials is None:
            return found
        context = ssl.create_default_context(cadata=credentials.ca_pem.decode())
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(["h2"])
        files = config.tls_files
        try:
            context.load_cert_chain(files.certificate, files.key)
            with context.wrap_socket(plain, server_hostname=config.coordinator_identity.server_name) as wrapped:
                return [*found, good("coordinator", f"{config.coordinator_identity.uri} answers, {wrapped.version()}")]
        except ssl.SSLCertVerificationError as error:
            return [
                *found,
                bad(
                    "coordinator",
                    f"what answers at {address} has no valid certificate of {config.coordinator_identity.uri}: "
                    f"{error.verify_message}",
                    "check the address, `coordinator: name` and ca.pem; ask the operator whether its certificate "
                    "expired",
                ),
            ]
        except OSError as error:
            return [
                *found,
                bad("coordinator", f"no TLS 1.3 handshake with {address}: {error}", "check address and port"),
            ]


def skew_finding(seconds: float) -> Finding:
    """What the difference of two clocks means; positive if the coordinator's is ahead."""
    found = f"the coordinator's is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} this machine's"
    if abs(seconds) <= LARGEST_SKEW_SECONDS:
        return good("clock", found)
    return bad("clock", found, "set this machine's clock (NTP); if it is right, tell the coordinator's operator")


def _check_consent(config: SiloConfig) -> tuple[Finding, bool]:
    """The consent, and whether it lets the coordinator be asked for its plan."""
    try:
        file = ConsentFile.read(config.consent)
    except (ConfigurationError, OSError) as error:
        return bad("consent", error), False
    if config.withdrawal.exists():
        remedy = "silo consent give, if the hospital wants to"
        return notice("consent", "withdrawn: nothing leaves", remedy, declines=True), False
    consent = file.consent
    missing = file.missing_to_ask(config.coordinator_identity)
    if missing.expired:
        return bad(
            "consent", f"it expired on {missing.expired}", f"renew `expires:` in {file.path}, or leave it"
        ), False
    if missing:
        where = file.path or "`consent:` names no file, so it"
        return bad(
            "consent", f"{where} agrees to nothing yet", "write down what the hospital agrees to, or leave it"
        ), False
    found = f"{', '.join(consent.methods) or 'no method'}; {len(consent.classes)} exposure classes; silo consent show"
    if consent.expires is not None and (left := (consent.expires - today()).days) < SOON_DAYS:
        return notice("consent", f"{found}; ends in {left} days", "renew `expires:` if the hospital agrees"), True
    if consent.expires is None:
        return notice("consent", f"{found}; without an end", "add `expires: DAY` if it is to end by itself"), True
    return good("consent", found), True


def _check_methods(config: SiloConfig) -> list[Finding]:
    """Names in the consent that no method has."""
    try:
        file = ConsentFile.read(config.consent)
    except (ConfigurationError, OSError):
        return []  # the consent's own finding tells
    found = []
    for name in file.consent.methods:
        if name not in METHODS:
            near = difflib.get_close_matches(name, METHODS, n=1)
            remedy = f"did you mean {near[0]}?" if near else "docs/methods.md has their names"
            found.append(notice("consent", f"`methods:` in {file.path} names {name}, which is no method", remedy))
    return found


def _check_masks(config: SiloConfig) -> list[Finding]:
    """Who could stand among those that this hospital masks with."""
    try:
        consent = ConsentFile.read(config.consent).consent
    except (ConfigurationError, OSError):
        return []  # the consent's own finding tells
    if not consent.masks_with_anyone:
        return []
    remedy = "ask the other hospitals themselves for their keys' fingerprints (each one's own `silo report` has it)"
    return [notice("masks", INVENTED_HOSPITALS, remedy)]


def _ask(config: SiloConfig, credentials: Credentials | None, *, may_ask: bool) -> tuple[list[Finding], RunPlan | None]:
    """Asks for the plan, as `silo train` does first."""
    if not may_ask:
        return [notice("asking", "not asked: the consent lets nothing leave, so only a TLS handshake was made")], None
    file = ConsentFile.read(config.consent)
    try:
        with Journal(
            config.journal, key=load_audit_key(config.keys / "audit.key"), origin=config.journal_origin
        ) as journal:
            gate = ConsentGate(file, config.coordinator_identity, withdrawal=config.withdrawal)
            door = Door(journal, identity=config.identity.uri, federation=config.federation, gate=gate)
            door.note(ConsentRecord(consent=file.describe()))
            return _get_plan(config, credentials, door, PROTOCOL_VERSION)
    except JournalInUseError:
        return [good("asking", "not asked: `silo train` seems to run, and speaks to the coordinator itself")], None
    except MedsiloError as error:
        return [bad("asking", error)], None


def _get_plan(
    config: SiloConfig, credentials: Credentials | None, door: Door, version: int
) -> tuple[list[Finding], RunPlan | None]:
    peer = config.coordinator_identity
    call = Call(rpc="GetPlan", peer=peer.uri, peer_certificate_sha256="", purpose="silo doctor: asking for the plan")
    own = None if credentials is None else channel_credentials(credentials.ca_pem, credentials)
    request = wire.GetPlanRequest(nonce=nonce(), silo=config.name, protocol_version=version)
    method = f"/{wire.DESCRIPTOR.services_by_name['CoordinatorService'].full_name}/GetPlan"
    try:
        with open_channel(config.coordinator.address, peer, own, proxy=config.proxy) as channel:
            (data,) = door.release([request], call)
            sent = time.time()
            try:
                answer = channel.unary_unary(method).future(data).result(timeout=ANSWER_SECONDS)
            except grpc.FutureTimeoutError:
                return [bad("asking", f"no answer within {ANSWER_SECONDS} s", "ask the coordinator's operator")], None
            except grpc.RpcError as error:
                words = said(error) or error.code().name
                if (older := spoken_instead(words)) is not None and older < version:
                    return _get_plan(config, credentials, door, older)
                if error.code() == grpc.StatusCode.UNAVAILABLE:
                    words += "; it may not accept this hospital's certificate (revoked?), or be restarting"
                return [bad("asking", f"the coordinator answers: {words}", "ask the coordinator's operator")], None
            now = (sent + time.time()) / 2
            response = door.admit(answer, wire.GetPlanResponse, call)
            agreed(response.protocol_version, "the coordinator", "this silo")
    finally:
        door.ended(call)
    shown = response.coordinator_certificate
    if credentials is not None and identity_of_certificate(shown, credentials.ca_pem) != peer:
        raise IdentityError(f"the coordinator shows the certificate of another party than {peer.uri}")
    plan = RunPlan.from_message(response.plan)
    keep_plan(config, plan)
    found = [good("asking", f"the coordinator leads run {plan.run}"), skew_finding(response.time_ms / 1000 - now)]
    theirs = response.protocol_version or 1
    if (hint := newer(theirs, "the coordinator", "this silo")) is not None:
        found.append(notice("protocol", hint))
    elif theirs < PROTOCOL_VERSION:
        found.append(notice("protocol", f"the coordinator speaks version {theirs}, this silo {PROTOCOL_VERSION} too"))
    return found, plan


def _check_plan(config: SiloConfig, plan: RunPlan | None) -> list[Finding]:
    if plan is None or config.withdrawal.exists():
        return []
    what = f"run {plan.run} ({plan.method.name}, {plan.rounds} rounds)"
    try:
        file, history = ConsentFile.read(config.consent), History.read(config.journal)
    except (MedsiloError, OSError):
        return []  # the consent's and the journal's own findings tell
    earlier = history.rounds_with(plan.coordinator_identity.uri, beside=plan.sha256.hex())
    missing = file.missing_for(plan, earlier_rounds=earlier)
    if missing:
        return [
            notice(
                "run",
                f"the consent does not cover {what}; missing: {'; '.join(missing.lines())}",
                "add the lines to the consent if the hospital agrees; if not, it does not take part",
                declines=True,
            )
        ]
    if waits(file, plan, history):
        remedy = "look at it (`silo inspect`), and let it begin if the hospital agrees (`silo approve`)"
        return [notice("run", f"the consent covers {what}, which waits for approval", remedy)]
    return [good("run", f"the consent covers {what}")]


def _check_ledgers(config: SiloConfig) -> list[Finding]:
    if not config.ledgers.exists():
        return []
    from medsilo.silo.oversight.budget import read_accounts

    try:
        accounts = read_accounts(config)
    except MedsiloError as error:
        return [bad("privacy budget", error)]
    found = []
    for account in accounts:
        what = f"{account.subject.split} images: spent {account.spent}"
        if account.left is None:
            found.append(notice("privacy budget", f"{what}; the consent has no budget for it"))
        elif account.left <= 0:
            found.append(bad("privacy budget", f"{what}; nothing is left", "silo budget; see differential-privacy.md"))
        else:
            found.append(good("privacy budget", f"{what}; ε = {account.left:.3g} is left"))
    return found


def _last_plan(config: SiloConfig) -> RunPlan | None:
    try:
        return known_plan(config)
    except ConfigurationError:
        return None


def _describe(dataset: ImageDataset) -> str:
    held = np.count_nonzero(dataset.train.counts(dataset.num_classes))
    group = largest_group(dataset)
    patients = (
        "no patient ids"
        if dataset.train.patients is None
        else f"{len(np.unique(dataset.train.patients))} patients, at most {group} images of one"
    )
    return (
        f"{len(dataset.train)} to train on, {len(dataset.test)} to test on, {_times(dataset.image_shape)}, {held} of "
        f"{dataset.num_classes} classes, {patients}"
    )


def _times(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
