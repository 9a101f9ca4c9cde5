"""A consent lives on while a run goes on: the gate looks before every message."""

from __future__ import annotations

import os
import threading
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.consent import gate as gate_module
from medsilo.privacy.consent.consent import ConsentFile
from medsilo.privacy.consent.early_end import Cause
from medsilo.privacy.consent.gate import ConsentGate, FarewellGate
from medsilo.privacy.consent.withdrawal import WITHDRAWAL, EndedError, History, SignedWithdrawal
from medsilo.privacy.door.door import Call, Door
from medsilo.privacy.errors import ConsentError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.envelope import from_json, seal, to_json
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.journal.journal import Journal
from medsilo.privacy.journal.records import ConsentRecord, read
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.nonces import nonce
from tests.support.evidence.planning import make_plan

COORDINATOR = Identity("test", "coordinator", "c")
CLASSES = ["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "PEER_DERIVED", "LOCAL_METRICS"]
MODEL = Exposure.MODEL_PARAMETERS_EXTRACTOR
TODAY = date(2030, 6, 30)


class Living:
    """A gate over a consent file that the test changes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "consent.yaml"
        self.withdrawal = folder / "withdrawal.json"
        self.today = TODAY
        self.changes: list[tuple[str, str | None]] = []
        self.write()
        self.gate = self.start()

    def write(self, **changes: Any) -> None:
        content = {
            "coordinator": COORDINATOR.uri,
            "methods": ["diversifed"],
            "exposures": CLASSES,
            "rounds": 5,
            "expires": TODAY,
        }
        self.path.write_text(yaml.safe_dump({**content, **changes}))

    def start(self, rounds: Any = ()) -> ConsentGate:
        return ConsentGate(
            ConsentFile.read(self.path),
            COORDINATOR,
            make_plan(),
            withdrawal=self.withdrawal,
            changed=lambda file, problem: self.changes.append((file.sha256, problem)),
            rounds=rounds,
            day=lambda: self.today,
        )

    def ended(self, *classes: Exposure) -> tuple[Cause, str]:
        with pytest.raises(EndedError) as caught:
            self.gate.check(classes or [Exposure.PROTOCOL])
        return caught.value.cause, str(caught.value)


@pytest.fixture
def living(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Living:
    monkeypatch.setattr(gate_module, "_SETTLING_SECONDS", 0.01)
    found = Living(tmp_path)
    found.gate.check([Exposure.PROTOCOL, MODEL, Exposure.LOCAL_METRICS])
    return found


def test_nothing_passes_while_the_withdrawal_is_there_whatever_it_holds(living: Living) -> None:
    living.withdrawal.touch()
    assert living.ended()[0] == Cause.WITHDRAWN
    assert living.ended(MODEL)[0] == Cause.WITHDRAWN
    living.withdrawal.unlink()
    living.gate.check([MODEL])


def test_nothing_passes_after_midnight_of_the_last_day(living: Living) -> None:
    living.today = date(2030, 7, 1)
    cause, text = living.ended()
    assert cause == Cause.EXPIRED
    assert "ended with 2030-06-30" in text


def test_a_narrower_file_takes_effect_at_the_next_message(living: Living) -> None:
    living.write(exposures=[name for name in CLASSES if name != "PEER_DERIVED"])
    cause, text = living.ended()
    assert cause == Cause.NARROWED
    assert "PEER_DERIVED" in text
    assert living.changes == [(ConsentFile.read(living.path).sha256, None)], "it is told once"


def test_an_optional_class_taken_out_stays_and_the_rest_goes_on(living: Living) -> None:
    living.write(exposures=CLASSES[:-1])
    living.gate.check([MODEL])
    assert Exposure.LOCAL_METRICS not in living.gate.allowed()
    with pytest.raises(ConsentError, match="LOCAL_METRICS"):
        living.gate.check([Exposure.LOCAL_METRICS])


@pytest.mark.parametrize(
    "change",
    [
        {"coordinator": "spiffe://test/coordinator/other"},
        {"methods": []},
        {"exposures": []},
        {"expires": date(2030, 6, 29)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_the_run_needs_and_the_file_no_longer_gives_ends_it(living: Living, change: Any) -> None:
    living.write(**change)
    assert living.ended()[0] in (Cause.NARROWED, Cause.EXPIRED)


def test_a_wider_file_takes_effect_at_the_next_start_only(living: Living) -> None:
    living.write(expires=date(2031, 1, 1), rounds=9)
    living.gate.check([MODEL])
    living.today = date(2030, 7, 1)
    assert living.ended()[0] == Cause.EXPIRED
    living.start().check([MODEL])


@pytest.mark.parametrize("content", ["exposures: [", "exposure: []", None])
def test_a_file_that_cannot_be_used_any_more_lets_nothing_pass(living: Living, content: str | None) -> None:
    if content is None:
        living.path.unlink()
    else:
        living.path.write_text(content)
    cause, text = living.ended()
    assert cause == Cause.NARROWED
    assert str(living.path) in text
    assert len(living.changes) == 1
    assert living.changes[0][1] is not None


def test_a_file_that_is_only_touched_has_not_changed(living: Living) -> None:
    os.utime(living.path, ns=(1, 1))
    living.gate.check([MODEL])
    assert living.changes == []


def test_a_file_changed_between_reading_and_the_first_message_is_read_again(living: Living) -> None:
    file = ConsentFile.read(living.path)
    living.write(methods=[])
    gate = ConsentGate(file, COORDINATOR, make_plan(), day=lambda: TODAY)
    with pytest.raises(EndedError, match="method diversifed"):
        gate.check([MODEL])


def test_the_round_cap_counts_a_round_once_and_over_restarts(living: Living) -> None:
    living.write(rounds=3)
    for number in (0, 1, 1, 0):
        living.gate.begin_round(number)
    living.gate = living.start(rounds=[0, 1])
    living.gate.begin_round(1)
    living.gate.begin_round(3)
    with pytest.raises(EndedError, match="allows 3 rounds") as caught:
        living.gate.begin_round(4)
    assert caught.value.cause == Cause.ROUNDS
    living.gate.begin_round(5)  # the end of a run of five rounds is not a round


def test_a_cap_lowered_on_the_way_ends_the_run_when_it_is_reached(living: Living) -> None:
    living.gate.begin_round(0)
    living.write(rounds=2)
    living.gate.check([MODEL])
    living.gate.begin_round(1)
    with pytest.raises(EndedError, match="allows 2 rounds"):
        living.gate.begin_round(2)


def test_the_last_word_holds_nothing_but_protocol_and_identity() -> None:
    gate = FarewellGate()
    gate.check([Exposure.PROTOCOL, Exposure.IDENTITY])
    for exposure in set(Exposure) - {Exposure.PROTOCOL, Exposure.IDENTITY}:
        with pytest.raises(EndedError):
            gate.check([exposure])


def signed(**changes: Any) -> SignedWithdrawal:
    fields: dict[str, Any] = {
        "federation": "test",
        "silo": "spiffe://test/silo/a",
        "coordinator": COORDINATOR.uri,
        "run": "r",
        "plan_sha256": "ab",
        "rounds_acknowledged": (0, 1),
        "reason": Cause.EXPIRED,
        "at": "2030-07-01T00:00:00Z",
    }
    return SignedWithdrawal(**{**fields, **changes})


def test_a_tombstone_says_what_was_signed_and_to_the_key_that_signed_it() -> None:
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw()
    envelope = from_json(to_json(signed().sign(key)))
    assert SignedWithdrawal.open(envelope, public) == signed()
    with pytest.raises(RefusedError, match="signature"):
        SignedWithdrawal.open(envelope, Ed25519PrivateKey.generate().public_key().public_bytes_raw())
    envelope.payload = envelope.payload.replace(b"[0,1]", b"[0]")
    with pytest.raises(RefusedError, match="signature"):
        SignedWithdrawal.open(envelope, public)


@pytest.mark.parametrize(
    "change",
    [
        {"models_unlearned": True},
        {"reason": "the patients asked"},
        {"rounds_acknowledged": [-1]},
        {"rounds_acknowledged": ["0"]},
        {"extra": 1},
        {"at": "x" * 1000},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_signed_document_that_is_no_tombstone_is_refused(change: Any) -> None:
    key = Ed25519PrivateKey.generate()
    envelope = seal({**signed().model_dump(mode="json"), **change}, WITHDRAWAL, key)
    with pytest.raises(RefusedError, match="cannot be used"):
        SignedWithdrawal.open(envelope, key.public_key().public_bytes_raw())


def message(rpc: str, direction: str, number: int | None = None, plan: str | None = "p") -> dict[str, Any]:
    return {"kind": "message", "rpc": rpc, "direction": direction, "round": number, "plan_sha256": plan}


RUN = {"kind": "run", "run": "r", "plan_sha256": "p", "plan": {"rounds": 3}}
WITHDRAWN = {
    "kind": "withdrawal",
    "run": "r",
    "plan_sha256": "p",
    "cause": Cause.WITHDRAWN.value,
    "rounds_acknowledged": [0],
}


def taken(*records: dict[str, Any]) -> History:
    return History.of(read(dict(record)) for record in records)


def test_rounds_count_as_used_when_the_coordinator_has_acknowledged_them() -> None:
    sent = [message("SubmitUpdate", "sent", number) for number in (0, 0, 1, 2)]
    history = taken(message("GetPlan", "sent", plan=None), RUN, *sent, message("SubmitUpdate", "received", 0))
    part = history.last
    assert part is not None
    assert (part.sent, part.acknowledged, part.is_open) == ({0, 1, 2}, {0}, True)
    ended = taken(RUN, message("SubmitUpdate", "received", 3)).last
    assert ended is not None
    assert (ended.acknowledged, ended.is_open) == (set(), False)


@pytest.mark.parametrize(
    ("later", "withdrawn", "told"),
    [
        ([], True, False),
        ([message("Withdraw", "sent")], True, False),
        ([message("Withdraw", "sent"), message("Withdraw", "received")], True, True),
        ([{"kind": "consent", "consent": {}}], True, False),
        ([{"kind": "consent", "consent": {}, "given": True}], False, False),
    ],
    ids=["recorded", "sent", "told", "an edited file", "given anew"],
)
def test_a_withdrawal_is_in_force_until_the_consent_is_given_anew(later: Any, withdrawn: bool, told: bool) -> None:
    history = taken(RUN, WITHDRAWN, *later)
    part = history.last
    assert part is not None
    assert (history.withdrawal is not None, part.told, part.is_open) == (withdrawn, told, False)


def test_taking_part_again_opens_the_part_and_keeps_its_rounds() -> None:
    sent = message("SubmitUpdate", "received", 0)
    part = taken(
        RUN, sent, WITHDRAWN, message("Withdraw", "received"), {"kind": "consent", "consent": {}, "given": True}, RUN
    ).last
    assert part is not None
    assert (part.is_open, part.told, part.acknowledged) == (True, False, {0})


def test_an_approval_does_not_outlive_a_withdrawal() -> None:
    approval = {"kind": "approval", "plan_sha256": "p"}
    assert taken(approval, RUN).approved == {"p"}
    assert taken(approval, RUN, WITHDRAWN).approved == set()
    expired = {**WITHDRAWN, "cause": Cause.EXPIRED.value}
    assert taken(approval, RUN, expired).approved == {"p"}
    assert taken(approval, RUN, expired).withdrawal is None


def test_the_total_of_rounds_counts_the_runs_before(living: Living) -> None:
    living.write(total_rounds=6)
    living.gate = living.start().joining(make_plan(), rounds=[0], earlier_rounds=4)
    living.gate.begin_round(0)
    living.gate.begin_round(1)
    with pytest.raises(EndedError, match=r"allows 6 rounds of all runs together.*taken part in 6") as caught:
        living.gate.begin_round(2)
    assert caught.value.cause == Cause.ROUNDS
    living.write(total_rounds=100)
    with pytest.raises(EndedError, match="allows 6 rounds"):  # more than was read at the start never passes
        living.gate.begin_round(2)


def test_steps_of_training_are_counted_by_round_and_end_the_part_before_they_are_taken(living: Living) -> None:
    living.write(training={"steps": 100})
    living.gate = living.start()
    for number in (0, 1):
        living.gate.begin_steps(number, 60)
        living.gate.begin_steps(number, 40)
    with pytest.raises(EndedError, match=r"allows 100 steps of training in a round.*round 2 goes on to 101") as caught:
        living.gate.begin_steps(1, 1)
    assert caught.value.cause == Cause.NARROWED
    living.write(training={"steps": 50})
    with pytest.raises(EndedError, match="allows 50 steps"):
        living.gate.begin_steps(2, 51)


def test_a_consent_that_lowers_what_may_be_trained_on_the_way_ends_the_part(living: Living) -> None:
    living.gate.check([MODEL])
    living.write(training={"epochs": 1})
    cause, text = living.ended()
    assert (cause, "10 epochs a round (`training: epochs: 10`)" in text) == (Cause.NARROWED, True)


def joined(run: str, plan: str, coordinator: str = "c") -> dict[str, Any]:
    content = {"rounds": 3, "federation": "test", "coordinator": coordinator}
    return {"kind": "run", "run": run, "plan_sha256": plan, "plan": content}


def sent(plan: str, *rounds: int) -> list[dict[str, Any]]:
    return [
        {"kind": "message", "rpc": "SubmitUpdate", "direction": "sent", "plan_sha256": plan, "round": number}
        for number in rounds
    ]


def test_the_journal_tells_how_many_rounds_of_other_runs_there_were_with_a_coordinator() -> None:
    history = taken(
        *(joined("r", "p"), *sent("p", 0, 0, 1)),
        *(joined("elsewhere", "q", "other"), *sent("q", 0)),
        *(joined("s", "o"), *sent("o", 0, 1, 2, 3)),
    )
    assert history.rounds_with(COORDINATOR.uri, beside="none") == 5, "the end of a run of three rounds is not a round"
    assert history.rounds_with(COORDINATOR.uri, beside="o") == 2


def test_the_journal_tells_which_plan_a_consent_was_joined_with_first() -> None:
    given = {"kind": "consent", "consent": {"sha256": "a"}}
    again = {"kind": "consent", "consent": {"sha256": "b"}}
    history = taken(given, joined("r", "p"), joined("s", "q"), again, joined("t", "o"))
    assert history.first_plans == {"a": "p", "b": "o"}


PROMISE = {
    **{"epsilon": 4, "delta": 1e-5, "clipping_norm": 1, "noise_multiplier": 2, "sampling_rate": 0.1, "steps": 40},
    "releases": [{"content": "identifier", "bound": 1, "noise_multiplier": 20, "times": 1}],
    "metrics": {"epsilon": 0.1, "releases": 6},
}
BUDGET = {"epsilon": 8, "delta": 1e-4, "least_units": 20, "metrics_epsilon": 2}


@pytest.fixture
def private(living: Living) -> Living:
    """The plan alone would fit all that the file says on the way: other runs have been paid for as well."""
    living.write(privacy=BUDGET)
    plan = make_plan(privacy=PrivacyPlan.model_validate(PROMISE))
    living.gate = living.start().joining(plan, rounds=[])
    living.gate.check([MODEL, Exposure.LOCAL_METRICS])
    return living


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epsilon": 6}, "the epsilon that the run began with (`privacy: epsilon: 8`)"),
        ({"delta": 1e-5}, "the delta that the run began with (`privacy: delta: 0.0001`)"),
        ({"least_units": 30}, "averages of 20 units (`privacy: least_units: 20`)"),
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_privacy_budget_that_is_lowered_on_the_way_ends_the_part(private: Living, change: Any, words: str) -> None:
    private.write(privacy={**BUDGET, **change})
    cause, text = private.ended()
    assert (cause, words in text) == (Cause.NARROWED, True), text


def test_a_privacy_budget_that_is_new_on_the_way_ends_the_part(private: Living) -> None:
    private.write()
    private.gate = private.start().joining(make_plan(privacy=PrivacyPlan.model_validate(PROMISE)), rounds=[])
    private.gate.check([MODEL])
    private.write(privacy=BUDGET)
    assert private.ended()[0] == Cause.NARROWED


@pytest.mark.parametrize("change", [{"metrics_epsilon": 1}, {"metrics_epsilon": None}])
def test_accuracies_whose_budget_is_lowered_on_the_way_stay_and_the_rest_goes_on(private: Living, change: Any) -> None:
    private.write(privacy={**BUDGET, **change})
    private.gate.check([MODEL])
    with pytest.raises(ConsentError, match="LOCAL_METRICS"):
        private.gate.check([Exposure.LOCAL_METRICS])


def test_a_privacy_budget_that_is_raised_on_the_way_changes_nothing(private: Living) -> None:
    private.write(privacy={**BUDGET, "epsilon": 9, "least_units": 10, "metrics_epsilon": 3})
    private.gate.check([MODEL, Exposure.LOCAL_METRICS])


def test_a_message_that_passed_stands_in_the_journal_before_the_file_that_would_have_held_it_back(
    living: Living, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread looks at the consent all the time; whoever reads the journal goes by the consent last told of."""
    with Journal(tmp_path / "journal", key=Ed25519PrivateKey.generate(), origin="medsilo/test/silo/a") as journal:
        door = Door(journal, identity="spiffe://test/silo/a", federation="test", gate=living.gate)
        living.gate._changed = lambda file, _: door.note(ConsentRecord(consent=file.describe()))
        watch = threading.Thread(target=living.gate.check, args=((),))
        record = door._record

        def slowly(*arguments: Any) -> Any:
            """It has passed, and is not recorded yet, when the file is changed and the other thread looks."""
            living.write(exposures=CLASSES[:-1])
            watch.start()
            watch.join(1)
            return record(*arguments)

        monkeypatch.setattr(door, "_record", slowly)
        door.release([wire.AttestRequest(nonce=nonce())], Call("Attest", COORDINATOR.uri, "ab" * 32, "test"))
        watch.join()
        kinds = [record["kind"] for record in journal.records()]
    assert kinds[-2:] == ["message", "consent"]
