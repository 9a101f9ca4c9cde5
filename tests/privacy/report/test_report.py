"""What a report says: what the records add up to, no more and no less."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from medsilo.privacy.audit.findings import Verification
from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.budget.accounting import SampledGaussian, describe
from medsilo.privacy.budget.ledger import Subject
from medsilo.privacy.consent.early_end import Cause
from medsilo.privacy.errors import ConfigurationError, DataError, JournalError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.journal.journal import RECORDS, read_checkpoints, read_records
from medsilo.privacy.journal.records import (
    ApprovalRecord,
    ConsentRecord,
    LedgerRecord,
    MessageRecord,
    RefusalRecord,
    WithdrawalRecord,
    read,
)
from medsilo.privacy.pages.wording import minute
from medsilo.privacy.report import builder as report_builder
from medsilo.privacy.report.as_json import as_json
from medsilo.privacy.report.builder import LISTED_REFUSALS
from medsilo.privacy.report.model import Answer, Attendance, Flow, Report, Run, SharedAccuracy
from medsilo.privacy.report.rehearsed import read_rehearsals
from medsilo.privacy.report.words import GLOSSARY, NAME, RISK, TELLING, classify, glossary_of
from medsilo.privacy.report.writing import make_document
from tests.support.evidence.recorded import (
    COORDINATOR,
    MIXED_BODIES,
    MIXTURE,
    MODELS,
    OTHER,
    SILO,
    Content,
    Recorded,
    ordinary,
)

PROMISE = {
    "epsilon": 8.0,
    "delta": 1e-5,
    "clipping_norm": 1.0,
    "noise_multiplier": 2.0,
    "sampling_rate": 0.1,
    "steps": 20,
    "releases": [{"content": "identifier", "bound": 3.0, "noise_multiplier": 10.0, "times": 1}],
}

EXTRACTOR, CLASSIFIER = Exposure.MODEL_PARAMETERS_EXTRACTOR, Exposure.MODEL_PARAMETERS_CLASSIFIER
STATISTICS: Content = {Exposure.RUNNING_STATISTICS: {"norm.running_mean": 40}}


def answered(report: Report, question: str) -> str:
    """A page-one answer as one text."""
    (found,) = [answer for answer in make_document(report).answers if answer.question == question]
    return " ".join([found.verdict, *found.points, *found.sentences])


class TestWhatLeft:
    @pytest.mark.parametrize(
        ("left", "back", "statement"),
        [
            (MODELS, MIXTURE, "models only"),
            (MODELS, MIXED_BODIES, "models only, last layers included, but not mixed with others'"),
            (
                {**MODELS, Exposure.SAMPLE_COUNT: {"samples": 8}},
                MIXTURE,
                "models and the number of training images",
            ),
            (
                {**MODELS, **STATISTICS},
                MIXTURE,
                "models and running statistics (averages of images' features): more than models only",
            ),
            (
                {
                    EXTRACTOR: {"body.weight": 4000},
                    Exposure.CLASSIFIER_GRADIENT: {"head.weight": 400},
                    Exposure.DATA_IDENTIFIER: {"identifier": 112},
                },
                MIXED_BODIES,
                "models (without their last layer), an identifier of the data and gradients of the last layer",
            ),
            (
                MODELS,
                {**MIXTURE, Exposure.DERIVED_ACCURACY: {"accuracy": 4}},
                "models and accuracies on public images",
            ),
            ({**MODELS, Exposure.LOCAL_METRICS: {"accuracy": 4}}, MIXTURE, "models and accuracies on own test images"),
            ({Exposure.PROTOTYPES: {"mean": 400}}, {}, "prototypes (average features of each class)"),
            ({}, {}, "nothing about patients"),
        ],
    )
    def test_is_said_from_the_bytes_whatever_the_method_is_called(
        self, tmp_path: Path, left: Content, back: Content, statement: str
    ) -> None:
        for party in (SILO, COORDINATOR):
            with Recorded(tmp_path / party.role, party) as recorded:
                recorded.run("spring", method="innocent")
                for number in range(2):
                    recorded.task("spring", number, back)
                    recorded.upload("spring", number, left)
                (run,) = recorded.report().runs
                assert run.statement == statement

    def test_a_last_layer_that_was_mixed_only_at_first_is_apart_in_the_end(self, tmp_path: Path) -> None:
        with Recorded(tmp_path) as recorded:
            recorded.run("spring")
            for number, back in enumerate((MIXTURE, MIXTURE, MIXED_BODIES)):
                recorded.task("spring", number, back)
                recorded.upload("spring", number, MODELS)
            assert recorded.report().runs[0].last_layer_apart

    def test_nothing_but_models_is_ever_called_models_only(self) -> None:
        others = [exposure for exposure in TELLING if exposure not in (EXTRACTOR, CLASSIFIER)]
        # What comes back from others is a matter of its own; it does not leave a hospital.
        for chosen in itertools.chain(((one,) for one in others), itertools.combinations(others, 2)):
            said = classify([EXTRACTOR, CLASSIFIER, *chosen], [], last_layer_apart=False)
            assert not said.startswith("models only"), chosen

    def test_bytes_add_up_by_class_round_field_and_party(self, tmp_path: Path) -> None:
        with ordinary(tmp_path) as recorded:
            report = recorded.report()
        sent = [r for r in read_records(tmp_path) if r["kind"] == "message" and r["direction"] == "sent"]
        assert report.bytes_left == sum(record["length"] for record in sent)
        for flow in report.left:
            own = [r for r in sent if (r["run"] or "") == flow.run and flow.exposure in r["classes"]]
            assert flow.bytes == sum(record["classes"][flow.exposure] for record in own) == sum(flow.fields.values())
            assert flow.messages == len(own)
            by_round = {n: sum(r["classes"][flow.exposure] for r in own if r["round"] == n) for n in flow.rounds}
            assert flow.rounds == by_round
        assert report.peers[COORDINATOR.uri].bytes_left == report.bytes_left

    def test_a_repeated_upload_counts_again_for_it_left_again(self, tmp_path: Path) -> None:
        with Recorded(tmp_path) as recorded:
            recorded.run("spring")
            recorded.upload("spring", 0, MODELS)
            once = recorded.report().bytes_left
            recorded.upload("spring", 0, MODELS, attempt=2)
            assert recorded.report().bytes_left == 2 * once

    def test_both_parties_place_the_same_bytes_in_the_same_rounds(self, tmp_path: Path) -> None:
        reports = []
        for party in (SILO, COORDINATOR):
            with Recorded(tmp_path / party.role, party) as recorded:
                recorded.run("spring")
                for number in range(3):
                    recorded.task("spring", number, MIXTURE)
                    recorded.upload("spring", number, MODELS)
                reports.append(recorded.report())
        silo, coordinator = reports
        for way in ("left", "came_back"):
            told = [
                {flow.exposure: (flow.bytes, flow.rounds, flow.tensors) for flow in getattr(report, way)}
                for report in reports
            ]
            assert told[0] == told[1]
        assert set(coordinator.peers) == {SILO.uri}
        assert set(silo.peers) == {COORDINATOR.uri}

    def test_left_in_the_rounds_in_which_something_about_patients_left(self, tmp_path: Path) -> None:
        with Recorded(tmp_path) as recorded:
            recorded.run("spring", rounds=9)
            for number in (0, 1, 2, 4):
                recorded.upload("spring", number, MODELS)
            recorded.upload("spring", 6, {})  # it was asked for and brought nothing
            (run,) = recorded.report().runs
        assert run.during == " in 4 of 9 rounds"
        assert run.spoken_rounds(run.left[EXTRACTOR].rounds) == "1–3, 5"
        assert run.spoken_rounds([0, 9]) == "1, end"


class TestConsent:
    def test_each_change_is_listed_once_however_often_the_daemon_started(self, tmp_path: Path) -> None:
        with Recorded(tmp_path) as recorded:
            recorded.run("spring")
            for classes in (("MODEL_PARAMETERS",), ("MODEL_PARAMETERS",), (), ("MODEL_PARAMETERS",)):
                recorded.consent(*classes)
                recorded.join("spring", synthetic=True)
            report = recorded.report()
        assert [len(record["consent"]["exposures"]) for record in report.consents] == [3, 2, 3]
        assert "changed 2 times" in answered(report, "On which consent?")

    def test_what_was_never_in_force_for_a_run_does_not_count_as_a_version(self, tmp_path: Path) -> None:
        with Recorded(tmp_path) as recorded:
            recorded.consent()
            recorded.ask()
            recorded.consent("MODEL_PARAMETERS")
            recorded.run("spring")
            recorded.upload("spring", 0, MODELS)
            report = recorded.report()
        assert [record["runs"] for record in report.consents] == [[], ["spring"]]
        assert "It was changed" not in answered(report, "On which consent?")

    def test_a_withdrawn_consent_is_no_longer_said_to_be_in_force(self, tmp_path: Path) -> None:
        with ordinary(tmp_path) as recorded:
            recorded.door.note(WithdrawalRecord(run="spring", rounds_acknowledged=[0, 1], cause=Cause.WITHDRAWN.value))
            recorded.consent("MODEL_PARAMETERS")  # a daemon that is started all the same gives nothing anew
            report = recorded.report()
            told = answered(report, "On which consent?")
            since, until = (time[:16].replace("T", " ") for time in report.withdrawn or ("", ""))
            assert told.startswith(f"Withdrawn on {until} UTC; all that left before was covered by it")
            assert f"was in force from {since} to {until} UTC" in told
            assert "It allowed" in told
            assert "In force since" not in told
            recorded.door.note(ConsentRecord(consent=dict(report.consents[-1]["consent"]), given=True))
            given = recorded.report()
            told = answered(given, "On which consent?")
            assert f"It was withdrawn on {until} UTC and given anew on {minute(given.consents[-1]['time'])} UTC" in told
            assert "Withdrawn on" not in told
            recorded.upload("spring", 2, MODELS)
            told = answered(recorded.report(), "On which consent?")
            assert f"In force since {minute(given.consents[-1]['time'])} UTC, given anew after it had been" in told

    def test_a_run_is_told_with_its_own_consent_and_not_with_the_one_in_force_now(self, tmp_path: Path) -> None:
        with Recorded(tmp_path) as recorded:
            recorded.consent("MODEL_PARAMETERS", "SAMPLE_COUNT", rounds=7)
            recorded.run("spring")
            recorded.upload("spring", 0, MODELS)
            recorded.consent("MODEL_PARAMETERS", rounds=3)
            recorded.run("summer")
            recorded.upload("summer", 0, MODELS)
            recorded.door.note(WithdrawalRecord(run="summer", rounds_acknowledged=[0], cause=Cause.WITHDRAWN.value))
            withdrawn = answered(recorded.report(run="spring"), "On which consent?")
            anew = {**recorded.report().consents[-1]["consent"], "rounds": 1}
            recorded.door.note(ConsentRecord(consent=anew, given=True))
            spring, summer = (recorded.report(run=run) for run in ("spring", "summer"))
        assert [one["runs"] for one in spring.consents] == [["spring"], ["summer"], []]
        first, second, third = (minute(one["time"]) for one in spring.consents)
        told = answered(spring, "On which consent?")
        assert f"What left in run spring was covered by the consent that was in force from {first} to {second}" in told
        assert "It allowed" in told
        assert "at most 7 rounds a run" in told
        assert "number of training images" in told
        assert "at most 3 rounds" not in told
        assert f"given anew on {third} UTC" in told
        assert "Withdrawn from run summer" not in told
        assert "consent is withdrawn" in withdrawn
        assert "at most 7 rounds a run" in withdrawn
        told = answered(summer, "On which consent?")
        assert "at most 3 rounds a run" in told
        assert "at most 1 round a run" not in told
        shown = json.loads(as_json(spring))["runs"]
        assert [run["consents_sha256"] for run in shown] == [["cd" * 32]]

    def test_what_left_without_consent_is_shouted(self, tmp_path: Path) -> None:
        with Recorded(tmp_path) as recorded:
            recorded.consent("MODEL_PARAMETERS")
            recorded.run("spring")
            recorded.upload("spring", 0, MODELS)
            assert recorded.report().outside_consent == {}
            recorded.consent()
            recorded.upload("spring", 1, MODELS)
            report = recorded.report()
        assert set(report.outside_consent) == {EXTRACTOR, CLASSIFIER}
        assert "NOT all that left was covered" in answered(report, "On which consent?")

    def test_the_farewell_of_a_consent_that_lists_nothing_any_more_is_not_shouted(self, tmp_path: Path) -> None:
        with Recorded(tmp_path) as recorded:
            recorded.consent("MODEL_PARAMETERS")
            recorded.run("spring")
            recorded.upload("spring", 0, MODELS)
            recorded.consent(exposures=[])
            recorded.door.note(
                WithdrawalRecord(
                    run="spring", plan_sha256="12" * 32, cause=Cause.NARROWED.value, rounds_acknowledged=[0]
                )
            )
            recorded.farewell("spring")
            assert recorded.report().outside_consent == {}
            recorded.upload("spring", 1, MODELS)
            assert set(recorded.report().outside_consent) >= {EXTRACTOR, CLASSIFIER, Exposure.PROTOCOL}

    def test_approvals_and_withdrawals_are_told_and_unknown_kinds_do_no_harm(self, tmp_path: Path) -> None:
        with ordinary(tmp_path) as recorded:
            recorded.door.note(ApprovalRecord(run="spring", plan_sha256="12" * 32))
            recorded.door.note(
                WithdrawalRecord(
                    run="spring",
                    rounds_acknowledged=[0, 1],
                    reason="as the board decided",
                    statement={"payload": "eyJh", "signatures": []},
                )
            )
            recorded.door.note(read({"kind": "something new", "run": "spring", "whatever": 1}))
            report = recorded.report()
        assert [decision.kind for decision in report.decisions] == ["approval", "withdrawal"]
        assert "Withdrawn from run spring" in answered(report, "On which consent?")
        text = json.dumps(make_document(report).to_data(), ensure_ascii=False)
        assert "as the board decided" in text
        assert "eyJh" not in text
        assert "Its updates of rounds 1–2 had arrived; one of a round that was still open is used for nothing." in text


class TestRefusals:
    def test_are_counted_by_reason(self, tmp_path: Path) -> None:
        with ordinary(tmp_path) as recorded:
            for number in range(5):
                recorded.door.note(RefusalRecord(run="spring", rpc="SubmitUpdate", reason=f"reason {number % 2}"))
            report = recorded.report()
        assert {refusal.reason: refusal.times for refusal in report.refusals} == {"reason 0": 3, "reason 1": 2}
        assert "Yes, 5 times" in answered(report, "Was anything refused?")

    def test_of_a_hostile_party_do_not_fill_the_report(self, tmp_path: Path) -> None:
        with ordinary(tmp_path) as recorded:
            for number in range(LISTED_REFUSALS + 50):
                recorded.door.note(RefusalRecord(peer=OTHER.uri, rpc="Join", reason=f"{number}" + "x" * 10_000))
            report = recorded.report()
        assert len(report.refusals) == LISTED_REFUSALS
        assert report.refusals_unlisted == 50
        assert len(as_json(report)) < 200_000
        assert f"Yes, {LISTED_REFUSALS + 50} times" in answered(report, "Was anything refused?")


class TestSoundness:
    def test_is_said_of_what_is_signed_and_of_nothing_newer(self, tmp_path: Path) -> None:
        with ordinary(tmp_path) as recorded:
            signed = recorded.report().records
            assert answered(recorded.report(), "Is the record sound?").startswith("Yes: nothing in it was changed")
            recorded.door.note(read({"kind": "something new"}))
            told = answered(recorded.report(signed=False), "Is the record sound?")
        assert told.startswith(f"Yes: nothing in its first {signed} entries was changed or removed; for the newest 1,")
        assert f"The first {signed} of {signed + 1} records are in place" in told

    def test_what_a_daemon_writes_while_the_report_is_made_is_not_half_in_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is told is what was verified: one snapshot."""

        def verify_then_write(*arguments: Any, **options: Any) -> Any:
            found = verify_evidence(*arguments, **options)
            recorded.consent()
            recorded.upload("spring", 2, MODELS)
            return found

        with ordinary(tmp_path) as recorded:
            before = recorded.report()
            monkeypatch.setattr(report_builder, "verify_evidence", verify_then_write)
            report = recorded.report()
        assert (report.records, report.root_sha256) == (before.records, before.root_sha256)
        assert (report.bytes_left, report.outside_consent) == (before.bytes_left, {})
        told = answered(report, "Is the record sound?")
        assert told.startswith("Yes: nothing in it was changed or removed")
        assert f"All {before.records} records are in place" in told

    def test_a_changed_record_is_told_on_page_one(self, tmp_path: Path) -> None:
        with ordinary(tmp_path) as recorded:
            recorded.journal.checkpoint()
            path = tmp_path / RECORDS
            path.write_bytes(path.read_bytes().replace(b'"synthetic":true', b'"synthetic":null', 1))
            report = recorded.report()
        assert not report.verification.sound
        assert answered(report, "Is the record sound?").startswith("NO")
        assert "NOT sound" in make_document(report).warnings[0]
        assert f"number {report.verification.first_bad_record}" in json.dumps(make_document(report).to_data())

    def test_the_hash_is_the_journals_own_as_its_checkpoint_has_it(self, tmp_path: Path) -> None:
        import base64

        with ordinary(tmp_path) as recorded:
            report = recorded.report()
            _, size, root = list(read_checkpoints(tmp_path))[-1].split("\n")[:3]
        assert (report.records, report.root_sha256) == (int(size), base64.b64decode(root).hex())
        assert report.root_sha256 in make_document(report).evidence

    def test_a_record_that_is_none_ends_in_an_error_that_names_it(self, tmp_path: Path) -> None:
        with ordinary(tmp_path) as recorded:
            index = recorded.door.note(MessageRecord(direction="sent"))
            with pytest.raises(JournalError, match=f"record {index} "):
                recorded.report()

    def test_no_journal_is_an_error_that_says_what_begins_one(self, tmp_path: Path) -> None:
        with Recorded(tmp_path / "one") as recorded:
            recorded.folder = tmp_path / "none"
            with pytest.raises(JournalError, match="silo train"):
                recorded.report()


class TestPageOne:
    def test_answers_every_question_in_plain_words(self, tmp_path: Path) -> None:
        with ordinary(tmp_path) as recorded:
            report = recorded.report()
        assert "Models only" in answered(report, "What left?")
        assert (
            "Directly to the coordinator “hub” only; parts, mixed with others', reach the other hospitals"
            in answered(report, "To whom?")
        )
        assert "all that left was covered by it" in answered(report, "On which consent?")
        assert "ε = ∞" in answered(report, "What risk remains?")
        assert "whether a given image was used" in answered(report, "What risk remains?")
        assert answered(report, "Was anything refused?").startswith("No ")

    def test_calls_synthetic_data_synthetic(self, tmp_path: Path) -> None:
        with ordinary(tmp_path) as recorded:
            report = recorded.report()
        assert make_document(report).warnings[0].startswith("Synthetic data.")
        with Recorded(tmp_path / "real") as recorded:
            recorded.consent("MODEL_PARAMETERS", synthetic=False)
            assert make_document(recorded.report()).warnings == []

    def test_says_that_nothing_left_where_nothing_did(self, tmp_path: Path) -> None:
        with Recorded(tmp_path) as recorded:
            recorded.consent()
            report = recorded.report()
        assert answered(report, "What left?").startswith("Nothing")
        assert answered(report, "To whom?").startswith("Nobody")
        assert answered(report, "What risk remains?").startswith("None")

    def test_every_class_has_a_name_and_every_telling_one_a_risk(self) -> None:
        assert set(NAME) == set(Exposure)
        assert set(RISK) == set(TELLING)

    def test_noised_content_is_told_from_plain_with_the_limit_that_it_has(self, tmp_path: Path) -> None:
        """One run with noise and one without: each kind of content by itself, and no limit where there is none."""
        content = {**MODELS, Exposure.DATA_IDENTIFIER: {"profile": 112}, Exposure.SAMPLE_COUNT: {"samples": 8}}
        conditions = "(unit image, adjacency zero-out, accountant PLD)"
        with Recorded(tmp_path) as recorded:
            recorded.run("noised", method="feddfq", privacy=PROMISE)
            recorded.upload("noised", 0, {**content, Exposure.LOCAL_METRICS: {"accuracy": 4}})
            alone = recorded.report()
            first = answered(alone, "What risk remains?")
            recorded.run("plain", method="feddfq")
            recorded.upload("plain", 0, content)
            both = recorded.report()
        identifier, model = alone.risk(Exposure.DATA_IDENTIFIER), alone.risk(CLASSIFIER)
        # One Gaussian release of noise multiplier 10 at δ = 1e-5, by the closed form of Balle and Wang (2018).
        assert f"ε = 0.341 at δ = 1e-05 {conditions}, and with all else of the run 8" in identifier
        assert f"ε = 8.000 at δ = 1e-05 {conditions}" in model
        for told in (identifier, model):
            assert "Without noise" not in told
        assert "give away that patient's part" not in identifier
        assert alone.risk(Exposure.SAMPLE_COUNT) == RISK[Exposure.SAMPLE_COUNT]
        # The plan does not noise accuracies: what has no mechanism is called plain, whatever the run promises.
        assert alone.risk(Exposure.LOCAL_METRICS) == RISK[Exposure.LOCAL_METRICS]
        assert "with noise: it describes them as a whole" in first
        assert "sometimes find out whether a given image was used" not in first
        assert "(run noised" in both.risk(CLASSIFIER)
        assert f"Without noise (run plain): {RISK[CLASSIFIER]}" in both.risk(CLASSIFIER)
        assert "sometimes find out whether a given image was used" in answered(both, "What risk remains?")
        assert json.loads(as_json(both))["risks"]["DATA_IDENTIFIER"] == both.risk(Exposure.DATA_IDENTIFIER)

    def test_no_limit_is_claimed_for_a_run_while_other_runs_sent_content_of_the_same_images_without_noise(
        self, tmp_path: Path
    ) -> None:
        charge = {
            **Subject("ef" * 32, "image").describe(),
            "index": 1,
            "event": describe(SampledGaussian(sampling_rate=0.1, noise_multiplier=2.0, steps=20)),
        }
        with Recorded(tmp_path) as recorded:
            recorded.consent("MODEL_PARAMETERS")
            recorded.run("noised", privacy=PROMISE)
            recorded.door.note(LedgerRecord(charge=charge))
            recorded.upload("noised", 0, MODELS)
            alone = recorded.report(run="noised")
            recorded.run("plain")
            recorded.task("plain", 0, MIXTURE)  # joined, and sent nothing yet
            joined = recorded.report(run="noised")
            recorded.upload("plain", 0, MODELS)
            report = recorded.report(run="noised")
            recorded.consent("MODEL_PARAMETERS", data_sha256="77" * 32)
            recorded.run("later", privacy=PROMISE)
            recorded.upload("later", 0, MODELS)
            later = recorded.report(run="later")
        for one in (alone, joined):
            assert answered(one, "What risk remains?").startswith("Some, within a proven limit")
        told = answered(report, "What risk remains?")
        assert told.startswith("Some, and no limit to it can be stated")
        assert "Outside this report content about the same images left without noise in run plain" in told
        assert json.loads(as_json(report))["other_runs_without_privacy"] == {"plain": True}
        assert json.loads(as_json(report))["privacy_loss"]["epsilon"] is None
        told = answered(later, "What risk remains?")
        assert "another version of the images, which may share images with this one, left without noise in run" in told

    @pytest.mark.parametrize(("epsilon", "verdict"), [(2.0, "within a proven limit"), (9.0, "proven, but weak")])
    def test_epsilon_is_told_in_odds_and_a_large_one_is_called_weak(
        self, tmp_path: Path, epsilon: float, verdict: str
    ) -> None:
        with Recorded(tmp_path, COORDINATOR) as recorded:
            recorded.run("noised", privacy={**PROMISE, "epsilon": epsilon})
            recorded.upload("noised", 0, MODELS)
            told = answered(recorded.report(), "What risk remains?")
        assert verdict in told.partition(".")[0]
        factor = {2.0: "7.4", 9.0: "8,104"}[epsilon]
        assert f"e^ε = {factor} times as often as an unused one" in told
        assert f"become {factor} to 1 at most" in told
        assert ("That is a weak limit." in told) == (epsilon > 8)

    def test_the_glossary_holds_the_words_that_occur_and_no_others(self, tmp_path: Path) -> None:
        with ordinary(tmp_path) as recorded:
            document = make_document(recorded.report())
        words = dict(document.sections[-1].blocks[0].items)  # type: ignore[union-attr, arg-type]
        assert {"model", "round", "epsilon", "differential privacy", "last layer"} <= set(words)
        assert not {"gradient", "prototype", "running statistics"} & set(words)
        assert "gradient" in dict(glossary_of("gradients of the last layer"))
        assert set(words) <= set(GLOSSARY)

    def test_the_last_rehearsal_stands_in_it_with_its_verdict_and_no_more_than_it_proves(self, tmp_path: Path) -> None:
        result = {
            "run": "spring",
            "plan_sha256": "ab" * 32,
            "made": "2026-01-31T12:30:00+00:00",
            "verdict": "not refuted",
            "unit": "image",
            "canaries": 500,
            "epsilon_lower_bound": 0.25,
            "delta": 1e-5,
            "confidence": 0.95,
            "claimed": {"epsilon": 1.5, "delta": 1e-5, "unit": "image", "adjacency": "zero-out", "accountant": "PLD"},
            "auc": 0.55,
        }
        folder = tmp_path / "rehearsal"
        folder.mkdir()
        (folder / "spring.json").write_text(json.dumps(result))
        (folder / "summer.json").write_text(json.dumps({**result, "run": "summer"}))
        with ordinary(tmp_path / "journal") as recorded:
            without = recorded.report()
            report = recorded.report(rehearsals=read_rehearsals(folder), run="spring")
        (told,) = json.loads(as_json(report))["rehearsals"]
        assert told.items() <= {**result, "made": "2026-01-31T12:30:00Z"}.items()
        text = json.dumps(make_document(report).to_data(), ensure_ascii=False)
        assert "made here on 2026-01-31 12:30 UTC with the plan abababababababab…: nothing was found" in text
        assert "with 95% confidence" in text
        assert "at least ε = 0.250 at δ = 1e-05; the plan's account of that round is ε = 1.500" in text
        assert "Tried out here" not in json.dumps(make_document(without).to_data())
        (folder / "summer.json").write_text("{}")
        with pytest.raises(DataError, match=r"summer\.json: cannot be read as a rehearsal's result"):
            read_rehearsals(folder)


class TestManyRuns:
    def test_a_report_may_be_limited_to_one(self, tmp_path: Path) -> None:
        with ordinary(tmp_path) as recorded:
            recorded.run("autumn", method="fedavg")
            recorded.upload("autumn", 0, {**MODELS, Exposure.SAMPLE_COUNT: {"samples": 8}})
            everything, autumn = recorded.report(), recorded.report(run="autumn")
            with pytest.raises(ConfigurationError, match="spring, autumn"):
                recorded.report(run="winter")
        assert [run.name for run in everything.runs] == ["spring", "autumn", ""]
        assert [run.name for run in autumn.runs] == ["autumn"]
        assert autumn.other_runs == ["spring"]
        assert "limited to run autumn" in make_document(autumn).warnings[-1]
        assert "Different kinds of content in 2 runs" in answered(everything, "What left?")

    def test_memory_does_not_grow_with_the_number_of_messages(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of what the report adds up; the verification holds the calls without a receipt, as these are."""
        unsound = Verification(str(tmp_path), problem="not looked at")
        monkeypatch.setattr(report_builder, "verify_evidence", lambda *_, **__: unsound)
        peaks = []
        for repeats in (30, 600):
            with Recorded(tmp_path / str(repeats)) as recorded:
                recorded.run("spring")
                for attempt in range(repeats):
                    recorded.upload("spring", attempt % 3, MODELS, attempt=attempt)
                recorded.report()
                tracemalloc.start()
                recorded.report()
                peaks.append(tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
        assert peaks[1] < 1.3 * peaks[0]


class TestCoordinator:
    @pytest.fixture
    def report(self, tmp_path: Path) -> Report:
        with Recorded(tmp_path, COORDINATOR) as recorded:
            recorded.run("spring")
            for silo in (SILO, OTHER):
                recorded.upload("spring", 0, MODELS, silo=silo)
            recorded.run("autumn", method="fedavg")
            recorded.upload("autumn", 0, {**MODELS, Exposure.SAMPLE_COUNT: {"samples": 8}})
            return recorded.report(
                answers=[Answer("spring", "east", False, ["RUNNING_STATISTICS"], "2030-01-01T10:00:00.000Z")],
                accuracies=[SharedAccuracy("spring", 2, 0.705)],
                attendance=[Attendance("spring", "east", 7, []), Attendance("spring", "west", 5, [2, 4])],
            )

    def test_has_every_hospital_and_every_method_by_class(self, report: Report) -> None:
        hospitals, methods = report.hospitals(), report.methods()
        assert set(hospitals) == {SILO.uri, OTHER.uri}
        assert Exposure.SAMPLE_COUNT in hospitals[SILO.uri]
        assert Exposure.SAMPLE_COUNT not in hospitals[OTHER.uri]
        assert list(methods) == ["diversifed", "fedavg"]
        assert methods["diversifed"][EXTRACTOR] == 2 * methods["fedavg"][EXTRACTOR]
        for table in (hospitals, methods):
            assert sum(sum(row.values()) for row in table.values()) == report.bytes_left

    def test_puts_exposure_beside_accuracy(self, report: Report) -> None:
        assert "70.5 % (2 hospitals)" in json.dumps(make_document(report).to_data())
        assert make_document(report).warnings == []

    def test_says_which_rounds_ended_without_which_hospital(self, report: Report) -> None:
        assert json.loads(as_json(report))["attendance"] == [
            {"run": "spring", "silo": "east", "rounds_delivered": 7, "late": []},
            {"run": "spring", "silo": "west", "rounds_delivered": 5, "late": [2, 4]},
        ]
        text = json.dumps(make_document(report).to_data())
        assert "2 rounds of run spring ended without an update of west: 2, 4." in text
        assert "without an update of east" not in text

    def test_calls_accuracies_on_synthetic_data_synthetic(self, tmp_path: Path) -> None:
        with Recorded(tmp_path, COORDINATOR) as recorded:
            recorded.run("spring")
            recorded.join("spring", silo=SILO, synthetic=True)
            recorded.join("spring", silo=OTHER, synthetic=False)
            report = recorded.report(accuracies=[SharedAccuracy("spring", 2, 0.705)])
        assert report.synthetic == [SILO.uri]
        assert make_document(report).warnings[0].startswith("Synthetic data. The images of north were")
        assert "Accuracy (synthetic data)" in json.dumps(make_document(report).to_data())

    def test_lists_who_declined_and_for_lack_of_what(self, report: Report) -> None:
        text = json.dumps(make_document(report).to_data())
        assert "declined, after 7 rounds of it" in text
        assert "2 hospitals agreed; 1 of them declined another run, or the rest of one" in text
        assert "RUNNING_STATISTICS" in text

    def test_says_that_the_update_of_an_open_round_was_used_for_nothing(self, tmp_path: Path) -> None:
        with Recorded(tmp_path, COORDINATOR) as recorded:
            recorded.run("spring")
            cause = Cause.WITHDRAWN.value
            recorded.door.note(
                WithdrawalRecord(run="spring", silo="east", rounds_acknowledged=[0, 1], dropped_round=1, cause=cause)
            )
            text = json.dumps(make_document(recorded.report()).to_data(), ensure_ascii=False)
        assert (
            "Its updates of rounds 1–2 had arrived; that of round 2, which was still open, was used for nothing."
            in text
        )
        assert "1 withdrew, or ended early, for a time or for good" in text

    def test_names_whose_consent_was_withdrawn_and_whose_part_ended(self, tmp_path: Path) -> None:
        with Recorded(tmp_path, COORDINATOR) as recorded:
            recorded.run("spring")
            for silo, cause in (("east", Cause.WITHDRAWN), ("west", Cause.EXPIRED)):
                recorded.door.note(WithdrawalRecord(run="spring", silo=silo, rounds_acknowledged=[0], cause=cause))
            answers = [Answer("spring", "east", True, [], "2030-01-01T10:00:00.000Z")]
            text = json.dumps(make_document(recorded.report(answers=answers)).to_data())
        assert "east: its consent to run spring was withdrawn. Its updates of round 1 had arrived; one of" in text
        assert "west: its part in run spring ended (consent expired)." in text

    def test_page_one_does_not_deny_the_noise_of_a_run_that_had_it(self, tmp_path: Path) -> None:
        with Recorded(tmp_path, COORDINATOR) as recorded:
            recorded.run("spring")
            recorded.run("noisy", privacy=PROMISE)
            for run in ("spring", "noisy"):
                recorded.upload(run, 0, MODELS)
            risk = answered(recorded.report(), "What risk remains?")
        assert "Run noisy promises each hospital" in risk
        assert "That does not cover 1 run without differential privacy (spring)" in risk
        assert "No noise was added" not in risk


class TestMaskedRuns:
    """What the report says of a run under masks follows from the bytes and the rosters on record."""

    def run(self, left: list[Exposure], sums: dict[int, int], back: tuple[Exposure, ...] = ()) -> Run:
        def flows(classes: Any) -> dict[Exposure, Flow]:
            return {exposure: Flow("r", "", exposure, bytes=10) for exposure in classes}

        return Run("r", None, None, [], flows(left), flows(back), sums)

    def test_the_sum_is_all_that_the_coordinator_saw_and_of_how_many(self) -> None:
        masked = [Exposure.PROTOCOL, Exposure.MASKED_UPDATE]
        assert self.run(masked, {0: 3, 1: 3}).statement == "masked: the coordinator saw only the sum of 3 silos"
        assert self.run(masked, {0: 5, 1: 3}).statement == "masked: the coordinator saw only the sum of 3 to 5 silos"

    def test_what_left_without_masks_is_named(self) -> None:
        beside = self.run([Exposure.MASKED_UPDATE, Exposure.LOCAL_METRICS], {0: 3}).statement
        assert beside.endswith("the sum of 3 silos; without masks: accuracies on own test images")
        later = self.run([Exposure.MASKED_UPDATE, EXTRACTOR, CLASSIFIER], {0: 3}).statement
        assert later.endswith("; without masks: models only")

    def test_without_a_roster_on_record_nothing_is_claimed(self) -> None:
        assert self.run([Exposure.MASKED_UPDATE], {}).statement == "masked updates"
        assert "masked" not in self.run([EXTRACTOR, CLASSIFIER], {0: 3}).statement
