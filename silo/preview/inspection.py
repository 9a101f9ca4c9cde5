"""``silo inspect``: what would leave in the first round, message by message, without sending anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NoReturn

import torch

from medsilo.algorithms.datasets import ImageDataset, largest_group, load_npz
from medsilo.algorithms.method import Method, local_metrics
from medsilo.algorithms.models import build, state_of
from medsilo.algorithms.protection import blind
from medsilo.algorithms.protection.masked import check_masks, encode_upload, masked_payload
from medsilo.algorithms.protection.private import DERIVED, NOISED, PUBLIC, RELEASED, mechanism, planned_averages
from medsilo.algorithms.registry import make
from medsilo.algorithms.tensors import MemoryWorkspace, Part, Payload
from medsilo.algorithms.tensors.transfer import CHUNK, chunk_message, manifest
from medsilo.privacy.budget.accounting import Guarantee, epsilon
from medsilo.privacy.budget.kept_releases import KeptReleases
from medsilo.privacy.budget.ledger import Ledger, Spending, Subject
from medsilo.privacy.consent.consent import Consent, ConsentFile, Missing
from medsilo.privacy.consent.helped import Help
from medsilo.privacy.consent.plan import RunPlan, SecureAggregationPlan
from medsilo.privacy.consent.tiers import learns
from medsilo.privacy.consent.withdrawal import History
from medsilo.privacy.exposure import BLIND_UPLINK, UNDER_ROSTER, Exposure, attribute, field_exposure
from medsilo.privacy.pages.wording import shown
from medsilo.privacy.secure_aggregation.blind_mixing import Sealer
from medsilo.privacy.secure_aggregation.masking import PairKey
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.nonces import NONCE_BYTES
from medsilo.protos.versions import PROTOCOL_VERSION
from medsilo.silo.run.account import budget_of, check_promise, metrics_budget_of
from medsilo.silo.run.run_state import has_ended
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.training.site import LocalSite
from medsilo.silo.uplink.uplink import WAIT_SECONDS

_HARMLESS = (Exposure.PROTOCOL, Exposure.IDENTITY, Exposure.INITIAL_MODEL)
PAID = "already paid for this data set: the same noised numbers are sent again"
COUNTED = "noisy counts of the test images, which have an account of their own"
_UPDATE = wire.SubmitUpdateRequest.DESCRIPTOR.full_name


@dataclass(frozen=True)
class PrivacyLoss:
    """What a class of content costs over the whole run; ``epsilon`` is infinite where there is no mechanism.

    Classes that are made from the same noised training share one cost, the whole run's, which holds that of noised
    averages.
    """

    epsilon: float
    mechanism: str

    def __str__(self) -> str:
        return f"{shown(self.epsilon)} ({self.mechanism})"


@dataclass(frozen=True)
class Leaving:
    """One kind of content of a round's update.

    ``agreed``: whether the consent names the class. ``leaves``: whether it would leave, which nothing does unless the
    consent covers the whole run. ``loss`` is of the whole run.
    """

    exposure: Exposure
    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    bytes: int
    fields: dict[str, int]
    agreed: bool
    leaves: bool
    loss: PrivacyLoss


@dataclass(frozen=True)
class Inspection:
    """What a silo would send in the first round, and whether its consent covers the run.

    ``asking``: bytes of one request for a task; a silo asks at least once a round, and again while it waits.
    ``other_rounds``: classes that do not leave in the first round but, as the method's phases have it, in another.
    ``guarantee``: what the plan's privacy promises for the run; ``spent`` and ``after``: what the image (patient) that
    has cost most has cost so far, and would have cost after a whole run more. ``own_promise``: the consent has no
    budget, so that the run's own charges alone are held to what it promises. ``largest_group``: the most training
    images of one patient. ``ended``: the run is over here, so that this is what did leave. ``withdrawn``: the consent
    is, so nothing leaves.
    ``not_agreed``: what the run takes from who wants to give it, and the consent does not name.
    ``masks_with_anyone``: the run is masked, and the consent does not name the audit keys of the other hospitals.
    """

    plan: RunPlan
    messages: int
    asking: int
    content: tuple[Leaving, ...]
    missing: Missing
    other_rounds: tuple[Exposure, ...]
    guarantee: Guarantee | None
    spent: Spending | None
    after: Spending | None
    own_promise: bool
    largest_group: int | None
    ended: bool
    withdrawn: bool
    not_agreed: tuple[Exposure, ...]
    masks_with_anyone: bool
    learns: tuple[str, ...]
    helped: str

    @property
    def besides(self) -> str:
        """What leaves beside one round's content, in words."""
        names = ", ".join(exposure.value for exposure in self.other_rounds)
        if not self.other_rounds:
            also = ""
        elif self.plan.is_blind and self.plan.secure_aggregation is not None:
            also = (
                f"A round of training takes two of the run's: first this, then {names}. With more than "
                f"{self.plan.secure_aggregation.minimum} hospitals both are larger. "
            )
        else:
            also = f"In another round, as the method's phases have it, also: {names}. "
        identifier = any(item.exposure is Exposure.DATA_IDENTIFIER and item.leaves for item in self.content)
        once = " (DATA_IDENTIFIER only once, until the images change)" if identifier else ""
        return (
            f"{also}{self.total} bytes in {self.messages} messages a round{once}, after the run is joined, and "
            f"{self.asking} bytes (PROTOCOL, IDENTITY) each time it asks for a task. Each also carries signed receipts "
            "for what was exchanged before (PROTOCOL, IDENTITY; some 1 to 4 kB)."
        )

    @property
    def total(self) -> int:
        """Bytes of one round's update, gRPC's own framing apart."""
        return sum(item.bytes for item in self.content if item.leaves)


def inspect(config: SiloConfig, plan: RunPlan) -> Inspection:
    """Builds a round's update exactly as training would, from the starting model, and attributes its bytes.

    What is left out are the signed receipts in its header, whose length depends on what there is to acknowledge.
    """
    consent = ConsentFile.read(config.consent)
    dataset = load_npz(config.shard)
    method = make(plan.method.name, plan.method.parameters)
    payload = _first_update(config, plan, method, dataset, consent.consent)
    history = History.read(config.journal)
    earlier = history.rounds_with(plan.coordinator_identity.uri, beside=plan.sha256.hex())
    missing = consent.missing_for(plan, images=len(dataset.train), earlier_rounds=earlier)
    withdrawn = config.withdrawal.exists()
    messages = [attribute(m.SerializeToString(), m.DESCRIPTOR) for m in _messages(config.name, plan, payload)]
    fields: Counter[str] = Counter()
    classes: Counter[Exposure] = Counter()
    for attribution in messages:
        fields.update(attribution.fields)
        classes.update(attribution.classes)
    allowed = consent.consent.classes
    ledger = None
    if plan.privacy is not None:
        ledger = Ledger(config.ledgers, Subject(dataset.fingerprint, plan.privacy.unit), dataset.contents)
    paid = _paid(plan, method, ledger)
    content = tuple(
        Leaving(
            exposure,
            tuple((s.name, s.shape, s.dtype) for s in payload[exposure].specs) if exposure in payload else (),
            count,
            {name: size for name, size in fields.items() if field_exposure(_UPDATE, name) == exposure},
            exposure in allowed,
            exposure in allowed and not missing and not withdrawn,
            privacy_loss(plan, method, exposure, paid),
        )
        for exposure, count in sorted(classes.items(), key=lambda item: list(Exposure).index(item[0]))
    )
    leaving = method.uploads | BLIND_UPLINK | {Exposure.MASKED_UPDATE}
    other_rounds = tuple(exposure for exposure in plan.required if exposure in leaving - set(classes))
    spent, after = _account(plan, consent.consent, ledger, paid)
    return Inspection(
        plan,
        len(messages),
        _asking(config.name, plan).ByteSize(),
        content,
        missing,
        other_rounds,
        guarantee=plan.privacy.guarantee if plan.privacy else None,
        spent=spent,
        after=after,
        own_promise=consent.consent.privacy is None,
        largest_group=largest_group(dataset),
        ended=has_ended(config.runs / plan.run, plan.sha256.hex()),
        withdrawn=withdrawn,
        not_agreed=tuple(exposure for exposure in plan.optional if exposure not in allowed),
        masks_with_anyone=plan.is_masked(0) and consent.consent.masks_with_anyone,
        learns=tuple(learns(plan.secure_aggregation, plan.rounds)),
        helped=history.helped.get(plan.sha256.hex(), Help()).words,
    )


def _first_update(
    config: SiloConfig, plan: RunPlan, method: Method, dataset: ImageDataset, consent: Consent
) -> Payload:
    model = build(plan.model, seed=plan.seed, trusted=config.trusted_models, weights=config.weights)
    site = LocalSite(config.name, dataset, model, plan, device=torch.device("cpu"), charge=_no_training)
    check_promise(plan, method)
    side = method.silo_side(site)
    side.begin(state_of(model))
    side.rehearse()
    payload = dict(side.blind_upload() if plan.is_blind else side.upload())
    if plan.secure_aggregation is not None and plan.is_masked(0):
        check_masks(plan, method)
        payload = dict(_covered(payload, plan, plan.secure_aggregation, method))
    if Exposure.LOCAL_METRICS in set(plan.optional) & consent.classes and (
        plan.privacy is None or metrics_budget_of(consent, plan.privacy) is not None
    ):
        payload[Exposure.LOCAL_METRICS] = Part.of({spec.name: torch.zeros(()) for spec in local_metrics(plan)})
    return payload


def _covered(payload: Payload, plan: RunPlan, masks: SecureAggregationPlan, method: Method) -> Payload:
    """An update as the fewest silos would mask, or seal, it."""
    if masks.mode == "sum":
        return masked_payload(payload, encode_upload(payload, masks, masks.minimum)[1])
    keys = {str(other): PairKey(bytes(32), adds=True) for other in range(masks.minimum - 1)}
    mixing = blind.mixing_of(plan, method, 0)
    return blind.encode_upload(payload, mixing, Sealer("", keys, b""), keys, masks, b"", MemoryWorkspace())


def privacy_loss(plan: RunPlan, method: Method, exposure: Exposure, paid: Collection[str] = frozenset()) -> PrivacyLoss:
    """What a class of content costs in a run of this plan; ``paid``: contents of releases that are kept."""
    if exposure in _HARMLESS:
        return PrivacyLoss(0.0, "nothing about patients")
    if plan.privacy is None:
        return PrivacyLoss(math.inf, "no noise")
    if exposure == Exposure.LOCAL_METRICS and (metrics := plan.privacy.metrics) is not None:
        return PrivacyLoss(epsilon([metrics.event(metrics.releases)], delta=plan.privacy.delta), COUNTED)
    if exposure in BLIND_UPLINK | UNDER_ROSTER:
        # Masks hide who sent what; what the sum tells is limited by what limits the updates.
        return max((privacy_loss(plan, method, e, paid) for e in method.uploads), key=lambda loss: loss.epsilon)
    by = mechanism(method, exposure)
    if by == PUBLIC:
        return PrivacyLoss(0.0, by)
    if by == RELEASED:
        (content,) = [one.content for one in planned_averages(method, plan.training_rounds) if one.exposure == exposure]
        if content in paid:
            return PrivacyLoss(0.0, PAID)
        release = plan.privacy.release(content)
        assert release is not None, "check_promise comes first"
        return PrivacyLoss(epsilon([release.event(release.times)], delta=plan.privacy.delta), by)
    return PrivacyLoss(plan.privacy.epsilon if by in (NOISED, DERIVED) else math.inf, by)


def _paid(plan: RunPlan, method: Method, ledger: Ledger | None) -> frozenset[str]:
    """The plan's releases that were drawn for these images before, and cost nothing when they are sent again."""
    if plan.privacy is None or ledger is None:
        return frozenset()
    kept = KeptReleases(ledger)
    lasting = {average.content for average in planned_averages(method, plan.training_rounds) if average.lasting}
    return frozenset(one.content for one in plan.privacy.releases if one.content in lasting and kept.find(one))


def _account(
    plan: RunPlan, consent: Consent, ledger: Ledger | None, paid: Collection[str]
) -> tuple[Spending | None, Spending | None]:
    if plan.privacy is None or ledger is None:
        return None, None
    delta = budget_of(consent, plan.privacy).delta
    unpaid = {one.content: one.times for one in plan.privacy.releases if one.content not in paid}
    extra = plan.privacy.cost(plan.privacy.steps, unpaid)
    return ledger.spending(delta), ledger.spending(delta, extra=extra)


def _no_training(*_: object) -> NoReturn:
    raise AssertionError("an inspection trains nothing")


def _asking(silo: str, plan: RunPlan) -> wire.GetTaskRequest:
    return wire.GetTaskRequest(
        nonce=bytes(NONCE_BYTES),
        silo=silo,
        plan_sha256=plan.sha256,
        wait_seconds=WAIT_SECONDS,
        holds_model=True,
        protocol_version=PROTOCOL_VERSION,
    )


def _messages(silo: str, plan: RunPlan, payload: Payload) -> Iterable[wire.SubmitUpdateRequest]:
    blank = bytes(NONCE_BYTES)
    yield wire.SubmitUpdateRequest(
        update=wire.Update(
            nonce=blank,
            silo=silo,
            plan_sha256=plan.sha256,
            parts=manifest(payload),
            roster_sha256=bytes(32) if UNDER_ROSTER & set(payload) else b"",
            protocol_version=PROTOCOL_VERSION,
        )
    )
    for exposure, part in payload.items():
        for data in part.chunks(CHUNK):
            yield chunk_message(wire.SubmitUpdateRequest, exposure, data, blank)
