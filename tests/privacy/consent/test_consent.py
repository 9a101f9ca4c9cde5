"""Consent, plans and configuration files: a consent is what its file says, and an unusable file says what is wrong."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from medsilo.algorithms.fedavg import FedAvg
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.consent import consent as consent_module
from medsilo.privacy.consent.consent import Consent, ConsentFile, Missing
from medsilo.privacy.consent.gate import ConsentGate
from medsilo.privacy.consent.plan import RunPlan, SecureAggregationPlan, TrainingPlan
from medsilo.privacy.errors import ConfigurationError, ConsentError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.files.canonical import write_canonical
from medsilo.privacy.files.configuration import with_home
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.journal.records import ConsentRecord, RunRecord
from medsilo.privacy.verify import result
from medsilo.privacy.verify.permission import Permissions
from medsilo.silo.state.config import SiloConfig
from tests.support.evidence.planning import make_plan

COORDINATOR = Identity("test", "coordinator", "c")
FULL = """
coordinator: spiffe://test/coordinator/c
methods: [diversifed]
exposures: [PROTOCOL, IDENTITY, MODEL_PARAMETERS, PEER_DERIVED]
rounds: 5
expires: 2030-06-30
"""


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "consent.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def full(folder: Path, **changes: Any) -> ConsentFile:
    content = {
        "coordinator": COORDINATOR.uri,
        "methods": ["diversifed"],
        "exposures": ["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "PEER_DERIVED"],
        "rounds": 5,
    }
    return ConsentFile.read(written(folder, yaml.safe_dump({**content, **changes})))


class Clock:
    """Stands in for ``datetime`` in the consent's module."""

    def __init__(self, today: date) -> None:
        self.today = today

    def now(self, _: object) -> Clock:
        return self

    def date(self) -> date:
        return self.today


@pytest.fixture
def in_2030(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(date(2030, 6, 30))
    monkeypatch.setattr(consent_module, "datetime", clock)
    return clock


@pytest.mark.parametrize("content", [None, "", "{}", "# nothing yet\n"], ids=["no file", "empty", "braces", "comment"])
def test_consent_is_to_nothing_by_default(tmp_path: Path, content: str | None) -> None:
    file = ConsentFile.read(None) if content is None else ConsentFile.read(written(tmp_path, content))
    nothing = file.consent
    assert nothing == Consent()
    assert (nothing.coordinator, nothing.methods, nothing.classes, nothing.rounds) == (None, (), frozenset(), 0)
    asked = file.missing_to_ask(COORDINATOR)
    assert asked.classes == (Exposure.PROTOCOL, Exposure.IDENTITY)
    assert asked.coordinator == COORDINATOR.uri
    missing = file.missing_for(make_plan())
    assert missing.method == "diversifed"
    assert missing.rounds == 5
    assert missing.coordinator == COORDINATOR.uri
    assert missing.classes == make_plan().required
    with pytest.raises(ConsentError):
        ConsentGate(file, COORDINATOR).check([Exposure.PROTOCOL])


def test_a_sufficient_consent_lacks_nothing(tmp_path: Path) -> None:
    assert not full(tmp_path).missing_for(make_plan())


@pytest.mark.parametrize(
    ("removed", "found"),
    [
        ("coordinator: spiffe://test/coordinator/c", Missing(coordinator=COORDINATOR.uri)),
        ("methods: [diversifed]", Missing(method="diversifed")),
        ("rounds: 5", Missing(rounds=5)),
        ("PEER_DERIVED", Missing(classes=(Exposure.PEER_DERIVED,))),
        (
            "MODEL_PARAMETERS, ",
            Missing(classes=(Exposure.MODEL_PARAMETERS_EXTRACTOR, Exposure.MODEL_PARAMETERS_CLASSIFIER)),
        ),
    ],
)
def test_one_thing_taken_away_is_the_one_thing_missing(
    tmp_path: Path, in_2030: Clock, removed: str, found: Missing
) -> None:
    assert not ConsentFile.read(written(tmp_path, FULL)).missing_for(make_plan())
    assert removed in FULL
    assert ConsentFile.read(written(tmp_path, FULL.replace(removed, ""))).missing_for(make_plan()) == found


def test_a_run_of_more_rounds_than_agreed_is_too_long(tmp_path: Path, in_2030: Clock) -> None:
    file = ConsentFile.read(written(tmp_path, FULL))
    assert not file.missing_for(make_plan())
    assert file.missing_for(make_plan(rounds=6)) == Missing(rounds=6)


def test_a_refusal_names_each_missing_class_and_the_method_with_the_line_that_would_allow_it() -> None:
    file = ConsentFile.read(None)
    text = str(file.refusal(file.missing_for(make_plan()), "run r"))
    for exposure in make_plan().required:
        assert f"exposure class {exposure} (under `exposures:`)" in text
    for line in ("`methods: [diversifed]`", "`rounds: 5`", f"`coordinator: {COORDINATOR.uri}`"):
        assert line in text


def test_a_refusal_names_each_thing_that_is_missing(tmp_path: Path) -> None:
    plan = make_plan(FedAvg(), rounds=9)
    file = full(tmp_path, exposures=["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS_EXTRACTOR"], expires="2020-05-17")
    text = str(file.refusal(file.missing_for(plan), "run r"))
    for word in (
        "method fedavg", "9 rounds", "2020-05-17", "MODEL_PARAMETERS_CLASSIFIER", "SAMPLE_COUNT", "PEER_DERIVED",
        str(file.path),
    ):  # fmt: skip
        assert word in text
    assert "MODEL_PARAMETERS_EXTRACTOR" not in text


def test_another_coordinator_gets_nothing(tmp_path: Path) -> None:
    other = Identity("test", "coordinator", "other")
    file = full(tmp_path)
    assert file.missing_to_ask(other).coordinator == other.uri
    with pytest.raises(ConsentError, match=other.uri):
        ConsentGate(file, other, make_plan()).check([Exposure.PROTOCOL])


def test_before_a_plan_is_joined_only_protocol_and_identity_pass(tmp_path: Path) -> None:
    file = full(tmp_path)
    ConsentGate(file, COORDINATOR).check([Exposure.PROTOCOL, Exposure.IDENTITY])
    with pytest.raises(ConsentError, match="MODEL_PARAMETERS_EXTRACTOR"):
        ConsentGate(file, COORDINATOR).check([Exposure.MODEL_PARAMETERS_EXTRACTOR])


def test_what_the_plan_does_not_ask_for_does_not_leave_even_with_consent(tmp_path: Path) -> None:
    file = full(tmp_path, exposures=["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "PEER_DERIVED", "LABEL_COUNTS"])
    gate = ConsentGate(file, COORDINATOR, make_plan())
    gate.check([Exposure.PROTOCOL, Exposure.MODEL_PARAMETERS_EXTRACTOR])
    with pytest.raises(ConsentError):
        gate.check([Exposure.LABEL_COUNTS])
    with pytest.raises(ConsentError):
        gate.check([Exposure.LOCAL_METRICS])  # asked for as an option, and not consented to


def test_the_gate_names_every_class_that_may_not_leave(tmp_path: Path, in_2030: Clock) -> None:
    gate = ConsentGate(ConsentFile.read(written(tmp_path, FULL)), COORDINATOR, make_plan())
    with pytest.raises(ConsentError) as caught:
        gate.check([Exposure.PROTOCOL, Exposure.LABEL_COUNTS, Exposure.SAMPLE_COUNT])
    assert "LABEL_COUNTS" in str(caught.value)
    assert "SAMPLE_COUNT" in str(caught.value)
    assert "class PROTOCOL" not in str(caught.value)


def test_consent_holds_through_its_last_day_and_not_beyond(tmp_path: Path) -> None:
    today = datetime.now(UTC).date()
    ConsentGate(full(tmp_path, expires=today), COORDINATOR, make_plan()).check([Exposure.PROTOCOL])
    yesterday = full(tmp_path, expires=today - timedelta(days=1))
    with pytest.raises(ConsentError, match="ended with"):
        ConsentGate(yesterday, COORDINATOR, make_plan()).check([Exposure.PROTOCOL])


def test_consent_that_ends_in_the_middle_of_a_run_refuses_without_claiming_that_nothing_left(
    tmp_path: Path, in_2030: Clock
) -> None:
    gate = ConsentGate(ConsentFile.read(written(tmp_path, FULL)), COORDINATOR, make_plan())
    gate.check(make_plan().required)  # five rounds of updates may have passed here
    in_2030.today = date(2030, 7, 1)
    for classes in ([Exposure.PROTOCOL], make_plan().required):
        with pytest.raises(ConsentError, match="ended with 2030-06-30") as caught:
            gate.check(classes)
        assert "Nothing of this run has left" not in str(caught.value)


def test_what_stands_in_the_journal_is_the_consent_and_its_files_hash(tmp_path: Path) -> None:
    path = written(tmp_path, FULL)
    described = json.loads(json.dumps(ConsentFile.read(path).describe()))
    assert described["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert described["exposures"] == ["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "PEER_DERIVED"]
    assert (described["rounds"], described["expires"]) == (5, "2030-06-30")


def test_a_consent_once_read_cannot_be_widened() -> None:
    consent = Consent()
    with pytest.raises(ValueError, match="frozen"):
        consent.exposures = ("MODEL_PARAMETERS",)  # type: ignore[misc]


def test_a_missing_file_is_not_consent_to_nothing_but_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such file"):
        ConsentFile.read(tmp_path / "consent.yaml")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        ConsentFile.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"exposures: [MODEL]", "'MODEL' is not an exposure class"),
        (b"exposures: [IMAGES]", "'IMAGES' is not an exposure class"),
        (b"exposures: PROTOCOL", "exposures"),
        (b"coordinator: spiffe://test/silo/a", "spiffe://FEDERATION/coordinator/NAME"),
        (b"coordinator: coordinator.example.org", "coordinator"),
        (b"coordinator: spiffe://TEST/coordinator/c", "coordinator"),
        (b"coordinator: spiffe://test/admin/c", "coordinator"),
        (b"rounds: -1", "rounds"),
        (b"rounds: many", "rounds"),
        (b"expires: 2030-13-45", "YAML"),
        (b"expires: soon", "expires"),
        (b"exposure: [PROTOCOL]", "unknown key `exposure`; did you mean `exposures`?"),
        (b"everything: true", "unknown key `everything`"),
        (b"Rounds: 5", "did you mean `rounds`"),
        (b"methods: [a]\nmethods: [b]", "'methods' stands twice"),
        (b"rounds: 1\nrounds: 2", "stands twice"),
        (b"[1, 2]", "key: value"),
        (b"just words", "key: value"),
        (b"1: 2", "1"),
        (b"? !!set {a}\n: b", "YAML"),
        (b"? [a]\n: b", "a key must be a word"),
        (b"a: [", "not valid YAML: line 1, column 5"),
        (b"rounds: 3\nmethods:\n  - a\n b: 2\n", "not valid YAML: line 4, column 2"),
        (b"expires: 21.11.2027", "should be a day as year-month-day, for example 2027-11-21 (got '21.11.2027')"),
        (b"\x00", "not valid YAML"),
        (b"\xff\xfe\x00\x01\x80", "cannot be read"),
        (b"\x7fELF\x02\x01\x01\x00", "YAML"),
        (b"[" * 20_000, "YAML"),
        (b"a: &a [*a]", "YAML"),
        (b"!!python/object/apply:os.getcwd []", "YAML"),
    ],
)
def test_an_unusable_file_is_one_error_that_names_file_and_place(tmp_path: Path, text: bytes, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        ConsentFile.read(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_an_unknown_key_deep_inside_names_the_nearest_valid_one(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.yaml"
    path.write_text("federation: a\nrun: {trainig: {}, training: {epoch: 3}}\n")
    with pytest.raises(ConfigurationError) as caught:
        CoordinatorConfig.read(path)
    text = str(caught.value)
    assert "unknown key `run.trainig`; did you mean `training`?" in text
    assert "unknown key `run.training.epoch`; did you mean `epochs`?" in text
    assert "the key `listen` is missing" in text


def test_a_misspelt_key_stands_before_what_follows_from_it_and_no_whole_part_of_the_file_is_repeated(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        SiloConfig.read(written(tmp_path, b"federation: a\nname: b\ncoordinator: {address: 'c:1'}\nstate: s\nshart: x"))
    first, second = str(caught.value).splitlines()
    assert "unknown key `shart`; did you mean `shard`?" in first
    assert "the key `shard` is missing" in second
    with pytest.raises(ConfigurationError) as caught:
        ConsentFile.read(written(tmp_path, b"exposures: [PROTOCOL, LOCAL_METRIC]"))
    assert str(caught.value).endswith("'LOCAL_METRIC' is not an exposure class; did you mean LOCAL_METRICS?")


def test_a_home_folder_that_nobody_has_is_named(tmp_path: Path) -> None:
    text = b"{federation: a, name: b, coordinator: {address: 'c:1'}, state: ~no-such-user/s, shard: x}"
    with pytest.raises(ConfigurationError, match="`state`: names a home folder that is not known here: ~no-such-user"):
        SiloConfig.read(written(tmp_path, text))
    with pytest.raises(ConfigurationError, match="names a home folder that is not known here: ~no-such-user"):
        with_home(Path("~no-such-user/images.npz"))


def test_relative_paths_are_taken_from_the_files_folder(tmp_path: Path) -> None:
    path = tmp_path / "hospital1.yaml"
    path.write_text("{federation: a, name: hospital1, coordinator: {address: 'c:1'}, state: s, shard: /x/y.npz}")
    found = SiloConfig.read(path)
    assert found.state == tmp_path / "s"
    assert found.shard == Path("/x/y.npz")


@pytest.mark.parametrize("address", ["10.0.0.1:7443", "coordinator.example:7443", "0.0.0.0:7443"])
def test_plain_text_is_for_this_machine_alone(tmp_path: Path, address: str) -> None:
    path = tmp_path / "hospital1.yaml"
    path.write_text(
        f"{{federation: a, name: b, coordinator: {{address: '{address}'}}, state: s, shard: x, insecure: true}}"
    )
    with pytest.raises(ConfigurationError, match="loopback"):
        SiloConfig.read(path)


def test_a_plan_keeps_its_hash_on_the_way() -> None:
    plan = make_plan(participation=0.7, training=TrainingPlan(learning_rate=0.1, optimizer="sgd", momentum=0.9))
    again = RunPlan.from_message(type(plan.to_message()).FromString(plan.to_message().SerializeToString()))
    assert again == plan
    assert again.sha256 == plan.sha256
    assert make_plan(seed=2).sha256 != make_plan().sha256


def test_a_plan_that_does_not_hold_together_is_refused() -> None:
    for change, words in (
        ({"rounds": 0}, "rounds"),
        ({"participation": 7.0}, "participation"),
        ({"required": [250]}, "exposure class 250"),
        ({"federation": "../etc"}, "federation"),
    ):
        message = make_plan().to_message()
        for name, value in change.items():
            if isinstance(value, list):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        with pytest.raises(RefusedError, match=words):
            RunPlan.from_message(message)
    message = make_plan().to_message()
    message.method.parameters_json = "{"
    with pytest.raises(RefusedError, match="not JSON"):
        RunPlan.from_message(message)


class TestMasks:
    """A consent that demands masks is kept to; a plan says what is masked, and without masks is what it was."""

    MASKS = SecureAggregationPlan(minimum=3, rounds=5)

    def missing(self, folder: Path, plan: RunPlan, **demanded: Any) -> list[str]:
        file = full(folder, secure_aggregation=demanded or None)
        return file.missing_for(plan, day=date(2030, 1, 1)).lines()

    def test_without_the_demand_masks_are_neither_here_nor_there(self, tmp_path: Path) -> None:
        assert self.missing(tmp_path, make_plan()) == []
        assert self.missing(tmp_path, make_plan(secure_aggregation=self.MASKS)) == []

    def test_what_a_demand_lacks_is_named_with_the_way_out(self, tmp_path: Path) -> None:
        (line,) = self.missing(tmp_path, make_plan(), minimum=3)
        assert line == "a run without masks (take `secure_aggregation:` out of the consent)"
        assert self.missing(tmp_path, make_plan(secure_aggregation=self.MASKS), minimum=3) == []
        (line,) = self.missing(tmp_path, make_plan(secure_aggregation=self.MASKS), minimum=4)
        assert line == "sums of 3 hospitals (`secure_aggregation: minimum: 3`)"
        some = SecureAggregationPlan(minimum=3, rounds=2)
        (line,) = self.missing(tmp_path, make_plan(secure_aggregation=some), minimum=3)
        assert line.startswith("updates without masks from round 3 on")

    def test_blind_mixtures_are_held_against_a_demand(self, tmp_path: Path) -> None:
        blind = SecureAggregationPlan(
            mode="blind", minimum=3, fraction_bits=38, rounds=4, sketch_size=2048, largest_isolation=2.5
        )
        plan = make_plan(secure_aggregation=blind).model_copy(update={"rounds": 4})
        assert RunPlan.from_message(plan.to_message()) == plan
        more, isolated = self.missing(tmp_path, plan, minimum=4)
        assert more == "mixtures of 3 hospitals (`secure_aggregation: minimum: 3`)"
        assert isolated == (
            "mixtures out of which a model stands 2.5 times (`secure_aggregation: largest_isolation: 2.5`)"
        )
        assert self.missing(tmp_path, plan, largest_isolation=2.5) == []

    def test_what_a_plan_says_of_masked_sums_is_hashed_as_before_there_were_blind_mixtures(self) -> None:
        content = json.loads(make_plan(secure_aggregation=self.MASKS).canonical())
        assert content["secure_aggregation"] == {"minimum": 3, "fraction_bits": 32, "rounds": 5}

    @pytest.mark.parametrize("wrong", [{"minimum": 2}, {"audit_keys": {"b": "ab"}}, {"audit_keys": {"B!": "ab" * 32}}])
    def test_a_demand_that_makes_no_sense_is_no_consent(self, tmp_path: Path, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match="secure_aggregation"):
            full(tmp_path, secure_aggregation=wrong)

    def test_a_plan_keeps_its_masks_on_the_way_and_its_hash_without_them(self) -> None:
        plan = make_plan(secure_aggregation=self.MASKS)
        assert RunPlan.from_message(plan.to_message()) == plan
        assert "secure_aggregation" not in json.loads(make_plan().canonical())
        assert plan.sha256 != make_plan().sha256
        message = plan.to_message()
        message.secure_aggregation.minimum = 2
        with pytest.raises(RefusedError, match="minimum"):
            RunPlan.from_message(message)

    @pytest.mark.parametrize(
        ("changes", "run", "why"),
        [
            ({"insecure": True}, {}, "needs certificates"),
            ({"silos": ["a", "b"]}, {}, "may have only 2 silos"),
            ({"start_with": 2}, {}, "may have only 2 silos"),
            ({}, {"participation": 0.5}, "may have only 2 silos"),
            ({}, {"secure_aggregation": {"minimum": 2}}, "greater than or equal to 3"),
            ({}, {"secure_aggregation": {"fraction_bits": 60}}, "less than or equal to 48"),
            ({}, {"secure_aggregation": {"sketch_size": 4096}}, "`mode: sum` has no sketch_size"),
            ({}, {"secure_aggregation": {"mode": "blind", "fraction_bits": 32}}, "`mode: blind` has no fraction_bits"),
            ({}, {"secure_aggregation": {"mode": "blind"}, "quorum": 3}, "needs all silos in every round"),
        ],
    )
    def test_a_coordinator_that_cannot_keep_to_it_does_not_start(
        self, changes: dict[str, Any], run: dict[str, Any], why: str
    ) -> None:
        with pytest.raises(ValueError, match=why):
            self.config(run, **changes)

    def test_the_plan_names_the_sum_and_nothing_else(self) -> None:
        plan = self.config({}).plan()
        assert plan.required == (
            Exposure.PROTOCOL, Exposure.IDENTITY, Exposure.PEER_DERIVED, Exposure.MASKED_UPDATE,
        )  # fmt: skip
        assert plan.secure_aggregation == SecureAggregationPlan(minimum=3, fraction_bits=32, rounds=5)
        with pytest.raises(ConfigurationError, match="diversifed cannot run with secure aggregation: each silo gets"):
            self.config({"method": {"name": "diversifed"}}).plan()

    @staticmethod
    def config(run: dict[str, Any], **changes: Any) -> CoordinatorConfig:
        return CoordinatorConfig.model_validate(
            {
                "federation": "test",
                "listen": "127.0.0.1:1",
                "state": "state",
                "silos": ["a", "b", "c", "d"],
                "run": {
                    "name": "r",
                    "method": {"name": "fedavg"},
                    "model": {"name": "mlp-64", "input_shape": (1, 16, 16), "classes": 3},
                    "rounds": 5,
                    "secure_aggregation": {},
                    **run,
                },
                **changes,
            }
        )


@pytest.mark.parametrize(
    ("training", "parameters", "said"),
    [
        ({"epochs": 201}, {}, "201 epochs a round (`training: epochs: 201`)"),
        ({"learning_rate": 1e9}, {}, "a learning rate of 1e+09 (`training: learning_rate: 1e+09`)"),
        ({}, {"head_epochs": 5000}, "5000 epochs a round (`training: epochs: 5000`)"),
        ({}, {"inner_rate": 11.0}, "a learning rate of 11 (`training: learning_rate: 11`)"),
        ({}, {"server_learning_rate": float("nan")}, "a learning rate of nan"),
        ({"epochs": 150, "batch_size": 2}, {}, "150000 steps a round (`training: steps: 150000`)"),
        ({"epochs": 150, "batch_size": 100}, {}, ""),
        ({"epochs": 200, "learning_rate": 10.0}, {"inner_rate": 10.0}, ""),
    ],
)
def test_an_absurd_training_is_refused_by_a_consent_that_says_nothing_of_it(
    tmp_path: Path, in_2030: Clock, training: dict[str, Any], parameters: dict[str, Any], said: str
) -> None:
    plan = make_plan()
    method = plan.method.model_copy(update={"parameters": {**plan.method.parameters, **parameters}})
    changed = plan.model_copy(
        update={"method": method, "training": TrainingPlan.model_validate({**plan.training.model_dump(), **training})}
    )
    lines = full(tmp_path).missing_for(changed, images=2000).lines()
    assert len(lines) == bool(said)
    assert said in "".join(lines)


def test_rounds_of_all_runs_together_have_a_bound_of_their_own(tmp_path: Path, in_2030: Clock) -> None:
    file = ConsentFile.read(written(tmp_path, f"{FULL}\ntotal_rounds: 7\n"))
    assert not file.missing_for(make_plan(), earlier_rounds=2)
    missing = file.missing_for(make_plan(), earlier_rounds=3)
    assert missing.lines() == ["8 rounds of all runs together (`total_rounds: 8`)"]


class TestTrust:
    """Noise is shared out with a hospital whose consent trusts as many as the plan relies on, and with no other."""

    PLAN = make_plan().model_copy(
        update={
            "secure_aggregation": SecureAggregationPlan(minimum=6, rounds=5),
            "privacy": PrivacyPlan(
                epsilon=4, delta=1e-5, clipping_norm=1, noise_multiplier=9, sampling_rate=1, steps=5, honest=4
            ),
        }
    )

    @pytest.mark.parametrize("honest", ["4 of 6", "5 of 6", "4 of 5"])
    def test_as_much_trust_or_more_is_enough(self, tmp_path: Path, honest: str) -> None:
        file = full(tmp_path, trusts={"honest": honest})
        assert file.missing_for(self.PLAN, day=date(2030, 1, 1)).lines() == []

    @pytest.mark.parametrize("honest", [None, "3 of 6", "4 of 7", "6 of 7"])
    def test_less_is_not_and_the_line_that_would_do_is_named(self, tmp_path: Path, honest: str | None) -> None:
        file = full(tmp_path, trusts={"honest": honest} if honest else None)
        (line,) = file.missing_for(self.PLAN, day=date(2030, 1, 1)).lines()
        assert line.endswith("(`trusts: {honest: 4 of 6}`)")

    def test_in_a_blind_mixture_noise_is_not_shared_out(self) -> None:
        """A sum holds all shares of it; a mixture holds some, by weights."""
        masks = SecureAggregationPlan(
            mode="blind", minimum=6, fraction_bits=38, rounds=5, sketch_size=2048, largest_isolation=1
        )
        plan = self.PLAN.model_copy(update={"secure_aggregation": masks})
        with pytest.raises(RefusedError, match="under masks alone, in every round"):
            RunPlan.from_message(plan.to_message())

    def test_noise_in_full_needs_no_trust(self, tmp_path: Path) -> None:
        assert self.PLAN.privacy is not None
        plan = self.PLAN.model_copy(update={"privacy": self.PLAN.privacy.model_copy(update={"honest": None})})
        assert full(tmp_path).missing_for(plan, day=date(2030, 1, 1)).lines() == []

    @pytest.mark.parametrize("honest", ["4", "4 of", "6 of 6", "7 of 6", "1 of 6", "four of six", 4])
    def test_what_is_no_such_trust_is_no_consent(self, tmp_path: Path, honest: Any) -> None:
        with pytest.raises(ConfigurationError, match="trusts"):
            full(tmp_path, trusts={"honest": honest})

    def test_evidence_in_which_a_run_was_joined_without_it_is_broken(self, tmp_path: Path) -> None:
        plan = self.PLAN.model_dump(mode="json")
        run = RunRecord(run="r", plan_sha256=hashlib.sha256(write_canonical(plan)).hexdigest(), plan=plan)
        for honest, sound in (("4 of 6", True), ("3 of 6", False), (None, False)):
            consent = full(tmp_path, trusts={"honest": honest} if honest else None).consent
            permissions = Permissions("spiffe://test/silo/a")
            permissions.consented(ConsentRecord(consent=consent.model_dump(mode="json")))
            if sound:
                permissions.joined(run)
                continue
            with pytest.raises(result.ConsentError, match="relies on 4 of 6 hospitals to be honest"):
                permissions.joined(run)
