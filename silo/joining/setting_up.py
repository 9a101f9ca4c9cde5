"""``silo init``: from an invitation to a hospital that is ready to train.

Each step leaves its result whole or not at all, and is left out where its result is there: after an interruption the
same command goes on, and nothing is overwritten.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from pydantic import ValidationError

from medsilo.privacy.consent.consent import Consent, TrainingConsent, today
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import ConfigurationError, IdentityError
from medsilo.privacy.exposure import MEANING, Exposure
from medsilo.privacy.files.configuration import explain, with_home
from medsilo.privacy.identity.certificates import fingerprint
from medsilo.privacy.identity.invitation import Invitation
from medsilo.privacy.identity.keys import load_audit_key
from medsilo.privacy.party.examination import SOON_DAYS
from medsilo.privacy.party.installing import aligned, make_keys_once, place_new, quoted
from medsilo.silo.joining.enrolment import enrol
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.state.plans import read_plan
from medsilo.silo.state.proxy import ProxyConfig

_CONFIGURATION = """\
# {name} in the federation {federation}. Written by `silo init`; yours to change.
#
#   silo train   --config {name}.yaml        takes part; the same command goes on after a crash
#   silo inspect --config {name}.yaml        shows what would leave; sends nothing
#   silo report  --config {name}.yaml        says what left
#   silo doctor  --config {name}.yaml        looks whether all is well, and says what to do if not
#   silo consent show --config {name}.yaml   what may leave (silo consent withdraw: nothing any more)
#
# Relative paths are taken from this file's folder.

federation: {federation}
name: {name}                       # must be the name in the certificate
coordinator:
  address: {address}    # where the coordinator listens
  name: {coordinator}                # whoever answers must show this name's certificate
state: {state}        # keys, journal, models: keep it on a disk that is backed up
shard: {shard}    # the hospital's own images, in MedMNIST's .npz form
consent: {name}.consent.yaml       # what may leave; without it, nothing
device: auto                       # auto | cpu | cuda | cuda:1 … | [cuda:0, cuda:1]
# precision: bfloat16              # mixed precision, for GPUs; not with differential privacy
# threads: 4                       # CPU threads of training; by default as PyTorch chooses
# keep_sent_days: 365              # keep what was sent, encrypted (silo audit open)
"""


_MORE_RUNS = 10
"""How many runs of the plan's rounds a consent that is written here holds."""


def proxy_of(url: str | None, credentials: Path | None) -> ProxyConfig | None:
    """The proxy that the command line names; raises ``ConfigurationError`` for one that cannot be used."""
    if url is None:
        if credentials is not None:
            raise ConfigurationError("--proxy-credentials needs --proxy http://host:port")
        return None
    try:
        return ProxyConfig(url=url, credentials=None if credentials is None else with_home(credentials).absolute())
    except ValidationError as error:
        raise ConfigurationError("; ".join(f"--proxy: {line}" for line in explain(error, ProxyConfig))) from None


def prepare(
    invitation: Invitation, shard: Path | None, folder: Path, *, proxy: ProxyConfig | None = None
) -> SiloConfig:
    """Writes the configuration and makes the keys, once what answers is seen to have the invitation's CA.

    Raises ``ConfigurationError`` if there is another configuration of that name, or none and no ``shard`` to write into
    one; ``IdentityError`` for another CA.
    """
    path = folder / f"{invitation.silo}.yaml"
    if path.exists():
        config = SiloConfig.read(path)
        _check_same(path, config, invitation, shard)
    elif shard is None:
        raise ConfigurationError("say where the hospital's images are: --data IMAGES.npz")
    else:
        text = _CONFIGURATION.format(
            name=invitation.silo,
            federation=invitation.federation,
            coordinator=invitation.coordinator,
            address=quoted(invitation.address),
            state=f"state/{invitation.silo}",
            shard=quoted(_from(folder, shard)),
        )
        if proxy is not None:
            text += "proxy:                             # the coordinator is reached through it\n"
            text += f"  url: {quoted(proxy.url)}\n"
            text += f"  credentials: {quoted(str(proxy.credentials))}\n" if proxy.credentials else ""
        config = place_new(path, aligned(text), SiloConfig)
    make_keys_once(config)
    return config


def is_enrolled(config: SiloConfig, invitation: Invitation) -> bool:
    """Whether there is a certificate of the invitation's CA that can be used and need not be renewed yet.

    Raises ``IdentityError`` if there is another CA's.
    """
    files = config.tls_files
    if files.ca.exists() and fingerprint(files.ca.read_bytes()) != invitation.ca_sha256:
        raise IdentityError(
            f"{files.ca}: is another CA than the invitation's ({invitation.ca_sha256[:16]}…); if the federation has a "
            f"new CA, move {files.ca} and {files.certificate} away first"
        )
    if not files.certificate.exists() or not config.last_plan.exists():
        return False
    try:
        own = config.open_credentials()
    except IdentityError:
        return False
    return own is not None and own.current.not_after - datetime.now(UTC) > timedelta(days=SOON_DAYS)


def obtain_certificate(config: SiloConfig, invitation: Invitation, ca: bytes) -> float:
    """Enrols; returns how many seconds the coordinator's clock is ahead."""
    return enrol(config, invitation, ca, load_audit_key(config.keys / "audit.key")).skew_seconds


def plan_of(config: SiloConfig) -> RunPlan:
    """The plan that came with the certificate."""
    return read_plan(config.last_plan)


def needed_by_method(plan: RunPlan) -> tuple[Exposure, ...]:
    """What the plan's method sends by itself, whatever the plan says that it asks for."""
    from medsilo.algorithms.protection.masked import required  # PyTorch takes seconds to load
    from medsilo.algorithms.registry import make

    method = make(plan.method.name, plan.method.parameters)
    return required(method, plan.secure_aggregation, plan.rounds)


def write_consent(
    config: SiloConfig, plan: RunPlan, agreed: Collection[Exposure], *, how: str, expires: date | None = None
) -> None:
    """Writes the consent file: the plan's method with the classes that were agreed to; or, if there are none, nothing,
    with what the run would need as comments. ``how``: in which words it was agreed to."""
    assert config.consent is not None
    training = TrainingConsent.of(plan)
    classes = [exposure for exposure in Exposure if exposure in agreed]
    lines = [
        f"coordinator: {config.coordinator_identity.uri}   # the only one that this silo speaks to",
        f"methods: [{plan.method.name}]   # methods that it takes part in",
        "exposures:   # what may leave",
    ]
    for exposure in classes or [one for one in Exposure if one in {*plan.required}]:
        meaning = textwrap.wrap(MEANING[exposure], 76)
        lines += [f"  - {exposure.value}", *(f"    # {line}" for line in meaning)]
    lines += [
        f"rounds: {plan.rounds}   # at most, in one run",
        f"total_rounds: {_MORE_RUNS * plan.rounds}   # at most, in all runs together",
        "training:   # the most that a round may train",
        f"  epochs: {training.epochs}   # passes over the images",
        f"  steps: {training.steps}   # of the optimiser",
        f"  learning_rate: {training.learning_rate}",
        f"expires: {expires or today() + timedelta(days=365)}   # nothing leaves after this day",
        "approval: changes   # a run with another plan waits for `silo approve`; required: each run; none: no run",
        f"plan_sha256: {plan.sha256.hex()}   # the plan that this was written for",
    ]
    if not classes:
        lines = [f"# {line}" for line in lines]
    head = textwrap.wrap(
        f"What {config.name} agrees to. Nobody but the hospital can change it; what is not listed does not leave. "
        f"{how}",
        110,
    )
    text = "\n".join([*(f"# {line}" for line in head), "", *lines, ""])
    place_new(config.consent, aligned(text), Consent)


def _check_same(path: Path, config: SiloConfig, invitation: Invitation, shard: Path | None) -> None:
    told = {
        "federation": (config.federation, invitation.federation),
        "name": (config.name, invitation.silo),
        "coordinator: name": (config.coordinator.name, invitation.coordinator),
        "coordinator: address": (config.coordinator.address, invitation.address),
    }
    if shard is not None:
        told["shard"] = (str(config.shard.absolute()), str(shard.absolute()))
    for key, (here, there) in told.items():
        if here != there:
            raise ConfigurationError(
                f"{path}: says `{key}: {here}`, and now it is {there}; the file is not overwritten. Correct it, or "
                "begin in another folder (--folder)"
            )
    if config.insecure:
        raise ConfigurationError(f"{path}: says `insecure: true`, with which there are no certificates; take it out")


def _from(folder: Path, shard: Path) -> Path:
    """A path as it is written into a file in ``folder``."""
    shard, folder = with_home(shard).absolute(), folder.absolute()
    return shard.relative_to(folder) if shard.is_relative_to(folder) else shard
