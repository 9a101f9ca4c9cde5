"""What a silo masks for, what it refuses to mask for, and what its journal says before anything leaves."""

from __future__ import annotations

import base64
import contextlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rfc8785
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from medsilo.algorithms.protection.masked import check_participation
from medsilo.algorithms.registry import make
from medsilo.algorithms.tensors import Part, Payload
from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.consent.consent import Consent
from medsilo.privacy.consent.plan import RunPlan, SecureAggregationPlan
from medsilo.privacy.consent.withdrawal import History
from medsilo.privacy.door.door import Door
from medsilo.privacy.errors import ConfigurationError, RefusedError, TrainingError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.authority import create_authority, issue
from medsilo.privacy.identity.certificates import load_credentials
from medsilo.privacy.identity.envelope import from_json, key_id, to_json, to_message
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import create_keys, load_audit_key
from medsilo.privacy.journal.journal import Journal, read_records
from medsilo.privacy.journal.records import RosterRecord, RunRecord, read
from medsilo.privacy.secure_aggregation.mask_keys import CertifiedKey, Occasion, Roster, certify, read_certified, vouch
from medsilo.protos.medsilo.v1 import journal_pb2
from medsilo.silo.preview.inspection import privacy_loss
from medsilo.silo.run.masking import Masking

PLAN = RunPlan.model_validate(
    {
        "federation": "test",
        "coordinator": "coordinator",
        "run": "r",
        "method": {"name": "fedavg", "parameters": {}},
        "model": {"name": "mlp-64", "input_shape": (1, 16, 16), "classes": 3},
        "training": {},
        "rounds": 4,
        "seed": 1,
        "required": ["MASKED_UPDATE"],
        "secure_aggregation": {"minimum": 3, "rounds": 4},
    }
)
RECEIVED = b"m" * 32
UPLOAD: Payload = {Exposure.MODEL_PARAMETERS_CLASSIFIER: Part.of({"w": torch.ones(4)})}


@dataclass
class Others:
    """The other hospitals of the federation, with certificates and audit keys."""

    folder: Path

    def key(self, name: str, number: int, received: bytes = RECEIVED, plan: RunPlan = PLAN) -> CertifiedKey:
        identity = Identity("test", "silo", name)
        place = self.folder / name
        if not place.exists():
            request = create_keys(place, identity).request
            issue(self.folder / "ca", name, request, place / "tls.pem")
        credentials = load_credentials(
            ca=self.folder / "ca" / "ca.pem", certificate=place / "tls.pem", key=place / "tls.key", expected=identity
        )
        occasion = Occasion("test", plan.run, plan.sha256, number)
        return certify(
            X25519PrivateKey.generate(),
            occasion,
            received,
            identity=identity,
            audit_key=(audit_key := load_audit_key(place / "audit.key")),
            voucher=vouch(credentials, audit_key),
        )

    def statements(self, *names: str, number: int = 0, received: bytes = RECEIVED, plan: RunPlan = PLAN) -> list[Any]:
        return [self.key(name, number, received, plan).to_message() for name in names]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Others:
    folder = tmp_path_factory.mktemp("federation")
    create_authority(folder / "ca", "test")
    found = Others(folder)
    found.key("a", 0)
    return found


class Everything:
    def check(self, classes: Any) -> None: ...

    held = nullcontext


@pytest.fixture
def begin(others: Others, tmp_path: Path) -> Iterator[Callable[..., Masking]]:
    """Starts hospital ``a``, again after an earlier one has ended."""
    open_journals: list[Journal] = []
    keys = others.folder / "a"

    def make(plan: RunPlan = PLAN, **consent: Any) -> Masking:
        while open_journals:
            open_journals.pop().close()
        audit_key = load_audit_key(keys / "audit.key")
        history = History.read(tmp_path)
        journal = Journal(tmp_path, key=audit_key, origin="medsilo/test/silo/a")
        open_journals.append(journal)
        door = Door(journal, identity="spiffe://test/silo/a", federation="test", gate=Everything())
        door.note(RunRecord(run=plan.run, plan_sha256=plan.sha256.hex(), plan=plan.model_dump(mode="json")))
        assert isinstance(plan.secure_aggregation, SecureAggregationPlan)
        return Masking(
            plan,
            plan.secure_aggregation,
            credentials=load_credentials(
                ca=others.folder / "ca" / "ca.pem",
                certificate=keys / "tls.pem",
                key=keys / "tls.key",
                expected=Identity("test", "silo", "a"),
            ),
            audit_key=audit_key,
            consents=lambda: [Consent.model_validate(consent)],
            door=door,
            earlier=history.masked,
        )

    yield make
    while open_journals:
        open_journals.pop().close()


def mask(
    masking: Masking,
    others: Others,
    *names: str,
    number: int = 0,
    upload: Payload = UPLOAD,
    received: bytes = RECEIVED,
    plan: RunPlan = PLAN,
) -> bytes:
    """What the silo sends for a roster of itself and these."""
    own = masking.statement(number, received).to_message()
    statements = others.statements(*names, number=number, received=received, plan=plan)
    _, payload = masking.mask(number, [own, *statements], upload)
    part = payload[Exposure.MASKED_UPDATE]
    return bytes(part.source.read(0, part.nbytes))


def notes(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_records(tmp_path) if record["kind"] == kind]


def test_the_roster_with_everyones_signed_statement_is_on_record_before_anything_leaves(
    begin: Callable[..., Masking], others: Others, tmp_path: Path
) -> None:
    mask(begin(), others, "b", "c", number=2)
    (note,) = notes(tmp_path, "roster")
    assert (note["run"], note["round"], note["silos"]) == ("r", 2, ["a", "b", "c"])
    occasion = Occasion("test", "r", PLAN.sha256, 2)
    ca_pem = (others.folder / "ca" / "ca.pem").read_bytes()
    keys = [
        journal_pb2.MaskKey(**{part: to_message(from_json(envelope)) for part, envelope in one.items()})
        for one in note["statements"]
    ]
    read = [read_certified(key, occasion, ca_pem=ca_pem) for key in keys]
    assert [key.silo for key in read] == ["a", "b", "c"]


def test_the_same_update_is_never_masked_for_two_rosters(
    begin: Callable[..., Masking], others: Others, tmp_path: Path
) -> None:
    masking = begin()
    first = mask(masking, others, "b", "c", "d")
    # Done again with the same silos, it leaves under masks that have nothing to do with the first.
    second = mask(masking, others, "b", "c", "d")
    same = np.frombuffer(first, np.uint64) == np.frombuffer(second, np.uint64)
    assert not same.any()
    for names in (("b", "c"), ("b", "c", "e"), ("b", "c", "d", "e")):
        with pytest.raises(RefusedError, match="the difference of the two sums would give away single updates"):
            mask(masking, others, *names)
    # Nor by a silo that was started anew, which knows it from its journal.
    with pytest.raises(RefusedError, match="the difference of the two sums"):
        mask(begin(), others, "b", "c")
    assert len(notes(tmp_path, "refusal")) == 4
    assert {tuple(note["silos"]) for note in notes(tmp_path, "roster")} == {("a", "b", "c", "d")}
    # Another round is another update, of the same silos.
    mask(begin(), others, "b", "c", "d", number=1)


SETS = [("b", "c"), ("b", "c", "e"), ("b", "c", "d", "e"), ("e", "f", "g")]
"""Sets of silos that are not {a, b, c, d}: one fewer, one exchanged, one more, and three for three."""


@pytest.mark.parametrize("received", [RECEIVED, b"n" * 32], ids=["same models", "other models"])
@pytest.mark.parametrize("started_anew", [False, True])
def test_in_one_run_a_silo_masks_for_one_set_of_silos_alone(
    begin: Callable[..., Masking], others: Others, tmp_path: Path, received: bytes, started_anew: bool
) -> None:
    masking = begin()
    mask(masking, others, "b", "c", "d")
    if started_anew:
        masking = begin()
    for names in SETS:
        with pytest.raises(RefusedError, match=r"update of round 1 .*a, b, c, d before.*give away single") as caught:
            mask(masking, others, *names, number=1, received=received)
        assert ("which began with the same models" in str(caught.value)) == (received == RECEIVED)
    assert len(notes(tmp_path, "roster")) == 1
    mask(masking, others, "b", "c", "d", number=1, received=received)


def test_what_a_silo_masked_for_is_known_from_journals_of_before_too(
    begin: Callable[..., Masking], others: Others, tmp_path: Path
) -> None:
    mask(begin(), others, "b", "c", "d")
    (note,) = notes(tmp_path, "roster")
    (found,) = History.of([read(dict(note))]).masked
    assert (found.run, found.round, found.silos) == ("r", 0, {"a", "b", "c", "d"})
    assert found.received_sha256 == RECEIVED.hex()
    del note["received_sha256"]
    assert list(History.of([read(note)]).masked) == [found]


def test_from_the_same_models_a_silo_masks_for_one_set_in_any_run(
    begin: Callable[..., Masking], others: Others
) -> None:
    mask(begin(), others, "b", "c", "d")
    later = PLAN.model_copy(update={"run": "later"})
    with pytest.raises(RefusedError, match=r"run r, which began with the same models.*another `seed`"):
        mask(begin(later), others, "b", "c", plan=later)
    mask(begin(later), others, "b", "c", "d", plan=later)
    last = PLAN.model_copy(update={"run": "last"})
    assert mask(begin(last), others, "b", "c", plan=last, received=b"n" * 32)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_silos_of_sums_change_where_privacy_bounds_single_updates_and_no_number_of_images_is_in_them(
    begin: Callable[..., Masking], others: Others, weighting: str
) -> None:
    promise = PrivacyPlan(epsilon=4, delta=1e-5, clipping_norm=1, noise_multiplier=2, sampling_rate=0.1, steps=40)
    method = {"name": "fedavg", "parameters": {"weighting": weighting}}
    plan = RunPlan.model_validate({**PLAN.model_dump(), "method": method, "privacy": promise})
    masking = begin(plan)
    mask(masking, others, "b", "c", "d", plan=plan)
    if weighting == "uniform":
        mask(masking, others, "b", "c", number=1, plan=plan)
    else:
        with pytest.raises(RefusedError, match="numbers of images"):
            mask(masking, others, "b", "c", number=1, plan=plan)
    with pytest.raises(RefusedError, match="masked the same update"):
        mask(masking, others, "b", "c", "e", plan=plan)


@pytest.mark.parametrize(("epsilon", "delta"), [(1000, 1e-5), (4, 0.5)])
def test_a_promise_that_bounds_nothing_does_not_let_silos_of_sums_change(
    begin: Callable[..., Masking], others: Others, epsilon: float, delta: float
) -> None:
    promise = PrivacyPlan(epsilon=epsilon, delta=delta, clipping_norm=1, noise_multiplier=0.1, sampling_rate=1, steps=9)
    method = {"name": "fedavg", "parameters": {"weighting": "uniform"}}
    plan = RunPlan.model_validate({**PLAN.model_dump(), "method": method, "privacy": promise})
    mask(begin(plan), others, "b", "c", "d", plan=plan)
    with pytest.raises(RefusedError, match="One run has masked sums of one set of silos"):
        mask(begin(plan), others, "b", "c", number=1, received=b"n" * 32, plan=plan)
    with pytest.raises(ConfigurationError, match="epsilon of at most 8"):
        check_participation(plan.model_copy(update={"participation": 0.5}), make("fedavg", {"weighting": "uniform"}))


def test_a_private_run_masks_for_no_other_set_from_the_models_of_a_run_without_privacy(
    begin: Callable[..., Masking], others: Others
) -> None:
    """What the missing silo sent there has no bound: masks are all that it has."""
    mask(begin(), others, "b", "c", "d")
    promise = PrivacyPlan(epsilon=4, delta=1e-5, clipping_norm=1, noise_multiplier=2, sampling_rate=0.1, steps=40)
    method = {"name": "fedavg", "parameters": {"weighting": "uniform"}}
    later = {**PLAN.model_dump(), "run": "later", "method": method, "privacy": promise}
    plan = RunPlan.model_validate(later)
    with pytest.raises(RefusedError, match=r"run r, which began with the same models"):
        mask(begin(plan), others, "b", "c", plan=plan)
    assert mask(begin(plan), others, "b", "c", plan=plan, received=b"n" * 32)


def test_a_key_masks_one_update_and_is_then_forgotten(begin: Callable[..., Masking], others: Others) -> None:
    masking = begin()
    stated = masking.statement(0, RECEIVED)
    assert masking.statement(0, RECEIVED) == stated, "until it was used"
    masking.used()
    assert masking.statement(0, RECEIVED).mask_key != stated.mask_key
    with pytest.raises(RefusedError, match="mask key that a gave last"):
        masking.mask(0, [stated.to_message(), *others.statements("b", "c")], UPLOAD)


@pytest.mark.parametrize(
    ("consent", "names", "why"),
    [
        ({}, ("b",), "3 are the least"),
        ({"secure_aggregation": {"minimum": 5}}, ("b", "c", "d"), "5 are the least"),
        ({"secure_aggregation": {"audit_keys": {"b": "00" * 32}}}, ("b", "c"), "does not name"),
    ],
)
def test_the_consent_has_its_say_in_who_may_be_in_the_sum(
    begin: Callable[..., Masking],
    others: Others,
    tmp_path: Path,
    consent: dict[str, Any],
    names: tuple[str, ...],
    why: str,
) -> None:
    with pytest.raises(RefusedError, match=why):
        mask(begin(**consent), others, *names)
    assert not notes(tmp_path, "roster")
    (refusal,) = notes(tmp_path, "refusal")
    assert "round 1 is not masked for the coordinator's roster" in refusal["reason"]


def test_named_audit_keys_let_those_hospitals_in(begin: Callable[..., Masking], others: Others) -> None:
    known = {name: key_id(others.key(name, 0).audit_key) for name in ("b", "c")}
    assert mask(begin(secure_aggregation={"audit_keys": known}), others, "b", "c")


def test_audit_keys_that_the_consent_names_on_the_way_count_from_then_on(
    begin: Callable[..., Masking], others: Others
) -> None:
    demanded: dict[str, Any] = {"minimum": 3}
    masking = begin(secure_aggregation=demanded)
    assert mask(masking, others, "b", "c")
    masking.used()
    demanded["audit_keys"] = {"b": "00" * 32}
    with pytest.raises(RefusedError, match="which the consent does not name"):
        mask(masking, others, "b", "c", number=1)


def test_an_update_that_does_not_fit_leaves_no_trace_of_a_roster(
    begin: Callable[..., Masking], others: Others, tmp_path: Path
) -> None:
    huge: Payload = {Exposure.MODEL_PARAMETERS_CLASSIFIER: Part.of({"w": torch.full((4,), 1e30)})}
    with pytest.raises(TrainingError, match="tensor w holds 1e\\+30"):
        mask(begin(), others, "b", "c", upload=huge)
    assert not notes(tmp_path, "roster")


def test_masks_leave_what_a_private_run_costs_as_it_is() -> None:
    method = make("fedavg", {})
    assert privacy_loss(PLAN, method, Exposure.MASKED_UPDATE).epsilon == math.inf, "masks are no noise"
    promise = PrivacyPlan(epsilon=4, delta=1e-5, clipping_norm=1, noise_multiplier=2, sampling_rate=0.1, steps=40)
    private = PLAN.model_copy(update={"privacy": promise})
    assert privacy_loss(private, method, Exposure.MASKED_UPDATE).epsilon == 4


def _first(note: dict[str, Any], silo: str) -> dict[str, Any]:
    found: dict[str, Any] = note["statements"][note["silos"].index(silo)]
    return found


def _another_mask_key(note: dict[str, Any], _: Others) -> None:
    envelope = _first(note, "b")["statement"]
    document = json.loads(base64.b64decode(envelope["payload"]))
    document["mask_key"] = "ab" * 32
    envelope["payload"] = base64.b64encode(rfc8785.dumps(document)).decode()


def _another_signature(note: dict[str, Any], others: Others) -> None:
    _first(note, "b")["statement"]["signatures"] = to_json(others.key("b", 0).statement)["signatures"]


def _another_silos_voucher(note: dict[str, Any], _: Others) -> None:
    _first(note, "b")["voucher"] = _first(note, "c")["voucher"]


def _a_voucher_that_was_touched(note: dict[str, Any], _: Others) -> None:
    signature = _first(note, "b")["voucher"]["signatures"][0]
    raw = bytearray(base64.b64decode(signature["sig"]))
    raw[-1] ^= 1
    signature["sig"] = base64.b64encode(raw).decode()


def _a_statement_of_another_round(note: dict[str, Any], others: Others) -> None:
    _first(note, "b")["statement"] = to_json(others.key("b", 1).statement)


def _a_fresh_key_under_the_old_hash(note: dict[str, Any], others: Others) -> None:
    _first(note, "b")["statement"] = to_json(others.key("b", 0).statement)


def _a_name_without_a_statement(note: dict[str, Any], _: Others) -> None:
    note["silos"].append("d")


def _one_silo_twice(note: dict[str, Any], _: Others) -> None:
    note["statements"].append(_first(note, "b"))


def _no_statements(note: dict[str, Any], _: Others) -> None:
    del note["statements"]


def _not_for_the_owner(note: dict[str, Any], others: Others) -> None:
    keys = [others.key(name, 0) for name in ("b", "c", "d")]
    note.update(Roster(keys).describe(), statements=Roster(keys).statements())


def _other_models(note: dict[str, Any], others: Others) -> None:
    keys = [read_certified_json(_first(note, name)) for name in ("a", "b")]
    keys.append(others.key("c", 0, received=b"n" * 32))
    note.update(Roster(keys).describe(), statements=Roster(keys).statements())


def read_certified_json(one: dict[str, Any]) -> CertifiedKey:
    message = journal_pb2.MaskKey(**{part: to_message(from_json(envelope)) for part, envelope in one.items()})
    return read_certified(message, Occasion("test", "r", PLAN.sha256, 0), ca_pem=None)


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (None, None),
        (_another_mask_key, "the signature does not hold"),
        (_another_signature, "the signature does not hold"),
        (_another_silos_voucher, "the signature does not hold"),
        (_a_voucher_that_was_touched, "voucher is not signed with the key of its certificate"),
        (_a_statement_of_another_round, "is for another run or round"),
        (_a_fresh_key_under_the_old_hash, "names or hash are not those of its signed statements"),
        (_a_name_without_a_statement, "names or hash are not those of its signed statements"),
        (_one_silo_twice, "a silo stands in the roster twice"),
        (_no_statements, "statements"),
        (_not_for_the_owner, "no statement that the journal's owner signed"),
        (_other_models, "different models to train from"),
    ],
)
def test_a_roster_on_record_holds_for_others_who_check_it_and_a_changed_one_is_found(
    begin: Callable[..., Masking],
    others: Others,
    tmp_path: Path,
    tamper: Callable[[dict[str, Any], Others], None] | None,
    said: str | None,
) -> None:
    """Its owner has changed it, and signed his journal as it then was."""
    mask(begin(), others, "b", "c")
    (note,) = notes(tmp_path, "roster")
    if tamper is not None:
        tamper(note, others)
    key = load_audit_key(others.folder / "a" / "audit.key")
    with contextlib.closing(Journal(tmp_path / "laid", key=key, origin="medsilo/test/silo/a")) as journal:
        door = Door(journal, identity="spiffe://test/silo/a", federation="test", gate=Everything())
        content = {k: v for k, v in note.items() if k in ("run", "plan_sha256", "round", *Roster([]).describe())}
        door.note(RosterRecord(**content, **({"statements": note["statements"]} if "statements" in note else {})))
        journal.checkpoint()
    found = verify_evidence(tmp_path / "laid")
    if said is None:
        assert found.sound, found.problem
    else:
        assert not found.sound
        assert said in str(found.problem)
        assert found.index == next(r["index"] for r in read_records(tmp_path / "laid") if r["kind"] == "roster")
