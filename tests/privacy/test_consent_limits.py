"""A consent is what its file says, and an unusable file says what is wrong where."""

from __future__ import annotations

import hashlib
import json
from datetime import date
from pathlib import Path

import pytest

from algorithms.diversifed import DiversiFed
from privacy import consent as consent_module
from privacy.consent import Consent, ConsentFile, Missing
from privacy.errors import ConfigurationError, ConsentError
from privacy.exposure import Exposure
from privacy.gate import ConsentGate
from privacy.pki import Identity
from privacy.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan

COORDINATOR = Identity("test", "coordinator", "c")
FULL = """
coordinator: spiffe://test/coordinator/c
methods: [diversifed]
exposures: [PROTOCOL, IDENTITY, MODEL_PARAMETERS, PEER_DERIVED]
rounds: 5
expires: 2030-06-30
"""


def plan(rounds: int = 5) -> RunPlan:
    method = DiversiFed()
    return RunPlan(
        federation="test",
        coordinator="c",
        run="r",
        method=MethodPlan(name=method.name, parameters=method.parameters()),
        model=ModelPlan(name="diversifed-cnn", input_shape=(3, 28, 28), classes=9),
        training=TrainingPlan(),
        rounds=rounds,
        seed=1,
        required=method.required,
    )


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "consent.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


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


def test_consent_default_allows_nothing() -> None:
    nothing = Consent()
    assert (nothing.coordinator, nothing.methods, nothing.classes, nothing.rounds) == (None, (), frozenset(), 0)
    missing = ConsentFile.read(None).missing_for(plan())
    assert missing.method == "diversifed"
    assert missing.rounds == 5
    assert missing.coordinator == COORDINATOR.uri
    assert missing.classes == plan().required


def test_a_refusal_names_each_missing_class_and_the_method_with_the_line_that_would_allow_it() -> None:
    file = ConsentFile.read(None)
    text = str(file.refusal(file.missing_for(plan()), "run r"))
    for exposure in plan().required:
        assert f"exposure class {exposure} (under `exposures:`)" in text
    for line in ("`methods: [diversifed]`", "`rounds: 5`", f"`coordinator: {COORDINATOR.uri}`"):
        assert line in text


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
    assert not ConsentFile.read(written(tmp_path, FULL)).missing_for(plan())
    assert removed in FULL
    assert ConsentFile.read(written(tmp_path, FULL.replace(removed, ""))).missing_for(plan()) == found


def test_a_run_of_more_rounds_than_agreed_is_too_long(tmp_path: Path, in_2030: Clock) -> None:
    file = ConsentFile.read(written(tmp_path, FULL))
    assert not file.missing_for(plan(5))
    assert file.missing_for(plan(6)) == Missing(rounds=6)


def test_consent_ends_after_its_last_day_in_the_middle_of_a_run(tmp_path: Path, in_2030: Clock) -> None:
    gate = ConsentGate(ConsentFile.read(written(tmp_path, FULL)), COORDINATOR, plan())
    gate.check(plan().required)
    in_2030.today = date(2030, 7, 1)
    with pytest.raises(ConsentError, match="ended with 2030-06-30"):
        gate.check([Exposure.PROTOCOL])


def test_a_refusal_in_the_middle_of_a_run_does_not_claim_that_nothing_has_left(tmp_path: Path, in_2030: Clock) -> None:
    gate = ConsentGate(ConsentFile.read(written(tmp_path, FULL)), COORDINATOR, plan())
    gate.check(plan().required)  # five rounds of updates may have passed here
    in_2030.today = date(2030, 7, 1)
    with pytest.raises(ConsentError) as caught:
        gate.check(plan().required)
    assert "Nothing of this run has left" not in str(caught.value)


def test_the_gate_names_every_class_that_may_not_leave(tmp_path: Path, in_2030: Clock) -> None:
    gate = ConsentGate(ConsentFile.read(written(tmp_path, FULL)), COORDINATOR, plan())
    with pytest.raises(ConsentError) as caught:
        gate.check([Exposure.PROTOCOL, Exposure.LABEL_COUNTS, Exposure.SAMPLE_COUNT])
    assert "LABEL_COUNTS" in str(caught.value)
    assert "SAMPLE_COUNT" in str(caught.value)
    assert "class PROTOCOL" not in str(caught.value)


def test_what_stands_in_the_journal_is_the_consent_and_its_files_hash(tmp_path: Path) -> None:
    path = written(tmp_path, FULL)
    described = json.loads(json.dumps(ConsentFile.read(path).describe()))
    assert described["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert described["exposures"] == ["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "PEER_DERIVED"]
    assert (described["rounds"], described["expires"]) == (5, "2030-06-30")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"coordinator: coordinator.example.org", "coordinator"),
        (b"coordinator: spiffe://TEST/coordinator/c", "coordinator"),
        (b"coordinator: spiffe://test/admin/c", "coordinator"),
        (b"rounds: many", "rounds"),
        (b"expires: 2030-13-45", "YAML"),
        (b"expires: soon", "expires"),
        (b"exposures: PROTOCOL", "exposures"),
        (b"everything: true", "unknown key `everything`"),
        (b"Rounds: 5", "did you mean `rounds`"),
        (b"rounds: 1\nrounds: 2", "stands twice"),
        (b"just words", "key: value"),
        (b"1: 2", "1"),
        (b"? !!set {a}\n: b", "YAML"),
        (b"? [a]\n: b", "a key must be a word"),
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


def test_a_missing_file_is_not_consent_to_nothing_but_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such file"):
        ConsentFile.read(tmp_path / "consent.yaml")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        ConsentFile.read(tmp_path)


def test_a_comment_alone_is_consent_to_nothing(tmp_path: Path) -> None:
    assert ConsentFile.read(written(tmp_path, "# nothing yet\n")).consent == Consent()


def test_a_consent_once_read_cannot_be_widened() -> None:
    consent = Consent()
    with pytest.raises(ValueError, match="frozen"):
        consent.exposures = ("MODEL_PARAMETERS",)  # type: ignore[misc]
