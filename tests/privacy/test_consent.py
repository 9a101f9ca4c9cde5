"""Consent, plans and configuration files."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from algorithms.diversifed import DiversiFed
from algorithms.fedavg import FedAvg
from coordinator.config import CoordinatorConfig
from privacy.consent import ConsentFile
from privacy.errors import ConfigurationError, ConsentError, RefusedError
from privacy.exposure import Exposure
from privacy.gate import ConsentGate
from privacy.pki import Identity
from privacy.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from silo.config import SiloConfig

COORDINATOR = Identity("test", "coordinator", "c")


def make_plan(**changes: Any) -> RunPlan:
    method = DiversiFed()
    fields: dict[str, Any] = {
        "federation": "test",
        "coordinator": "c",
        "run": "r",
        "method": MethodPlan(name=method.name, parameters=method.parameters()),
        "model": ModelPlan(name="diversifed-cnn", input_shape=(3, 28, 28), classes=9),
        "training": TrainingPlan(),
        "rounds": 5,
        "seed": 1,
        "required": method.required,
        "optional": (Exposure.LOCAL_METRICS,),
        "downlink": (Exposure.INITIAL_MODEL, Exposure.PEER_DERIVED),
    }
    return RunPlan(**{**fields, **changes})


def consent(folder: Path, **content: Any) -> ConsentFile:
    path = folder / "consent.yaml"
    path.write_text(yaml.safe_dump(content))
    return ConsentFile.read(path)


def full(folder: Path, **changes: Any) -> ConsentFile:
    content = {
        "coordinator": COORDINATOR.uri,
        "methods": ["diversifed"],
        "exposures": ["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "PEER_DERIVED"],
        "rounds": 5,
    }
    return consent(folder, **{**content, **changes})


@pytest.mark.parametrize("kind", ["no file", "empty file"])
def test_consent_is_to_nothing_by_default(tmp_path: Path, kind: str) -> None:
    file = ConsentFile.read(None) if kind == "no file" else consent(tmp_path)
    assert file.consent.classes == frozenset()
    missing = file.missing_to_ask(COORDINATOR)
    assert missing.classes == (Exposure.PROTOCOL, Exposure.IDENTITY)
    assert missing.coordinator == COORDINATOR.uri
    with pytest.raises(ConsentError):
        ConsentGate(file, COORDINATOR).check([Exposure.PROTOCOL])


def test_a_sufficient_consent_lacks_nothing(tmp_path: Path) -> None:
    assert not full(tmp_path).missing_for(make_plan())


def test_a_refusal_names_each_thing_that_is_missing(tmp_path: Path) -> None:
    method = FedAvg()
    plan = make_plan(
        method=MethodPlan(name="fedavg", parameters=method.parameters()), required=method.required, rounds=9
    )
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


def test_consent_holds_through_its_last_day_and_not_beyond(tmp_path: Path) -> None:
    today = datetime.now(UTC).date()
    ConsentGate(full(tmp_path, expires=today), COORDINATOR, make_plan()).check([Exposure.PROTOCOL])
    yesterday = full(tmp_path, expires=today - timedelta(days=1))
    with pytest.raises(ConsentError, match="ended with"):
        ConsentGate(yesterday, COORDINATOR, make_plan()).check([Exposure.PROTOCOL])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("exposures: [MODEL]", "'MODEL' is not an exposure class"),
        ("exposures: [IMAGES]", "'IMAGES' is not an exposure class"),
        ("coordinator: spiffe://test/silo/a", "spiffe://FEDERATION/coordinator/NAME"),
        ("rounds: -1", "rounds"),
        ("exposure: [PROTOCOL]", "unknown key `exposure`; did you mean `exposures`?"),
        ("methods: [a]\nmethods: [b]", "'methods' stands twice"),
        ("[1, 2]", "key: value"),
        ("a: [", "not valid YAML"),
        ("\x00", "not valid YAML"),
    ],
)
def test_a_consent_file_that_cannot_be_used_says_what_is_wrong(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "consent.yaml"
    path.write_text(content)
    with pytest.raises(ConfigurationError) as caught:
        ConsentFile.read(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_unknown_key_deep_inside_names_the_nearest_valid_one(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.yaml"
    path.write_text("federation: a\nrun: {trainig: {}, training: {epoch: 3}}\n")
    with pytest.raises(ConfigurationError) as caught:
        CoordinatorConfig.read(path)
    text = str(caught.value)
    assert "unknown key `run.trainig`; did you mean `training`?" in text
    assert "unknown key `run.training.epoch`; did you mean `epochs`?" in text
    assert "the key `listen` is missing" in text


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
