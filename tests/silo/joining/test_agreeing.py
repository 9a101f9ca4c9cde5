"""What `silo init --yes-to` agrees to: what the method sends, and nothing that a plan asks for besides."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from medsilo.privacy.consent.consent import ConsentFile
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import ConfigurationError, ConsentError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.invitation import Invitation
from medsilo.silo.cli import app
from medsilo.silo.commands.joining import _agree
from medsilo.silo.joining.setting_up import write_consent
from medsilo.silo.state.config import SiloConfig

FEDAVG = ("MODEL_PARAMETERS_EXTRACTOR", "MODEL_PARAMETERS_CLASSIFIER", "SAMPLE_COUNT", "PEER_DERIVED")


def plan(*required: str, rounds: int = 10) -> RunPlan:
    return RunPlan.model_validate(
        {
            "federation": "test",
            "coordinator": "coordinator",
            "run": "run1",
            "method": {"name": "fedavg", "parameters": {"weighting": "samples"}},
            "model": {"name": "mlp-64", "input_shape": (1, 4, 4), "classes": 3},
            "training": {},
            "rounds": rounds,
            "seed": 1,
            "required": required,
            "optional": ["LOCAL_METRICS"],
            "downlink": ["PEER_DERIVED"],
        }
    )


@pytest.fixture
def config(tmp_path: Path) -> SiloConfig:
    path = tmp_path / "hospital1.yaml"
    path.write_text(
        "federation: test\nname: hospital1\ncoordinator: {address: 'localhost:1'}\nstate: state\nshard: images.npz\n"
        "consent: consent.yaml\n"
    )
    return SiloConfig.read(path)


def agree(config: SiloConfig, found: RunPlan, *yes_to: str, rounds: int = 100) -> ConsentFile:
    agreed, how = _agree(found, list(yes_to), rounds, config, asking=False)
    write_consent(config, found, agreed, how=how)
    return ConsentFile.read(config.consent)


def test_without_a_word_nothing_is_agreed_to(config: SiloConfig) -> None:
    whole = plan("PROTOCOL", "IDENTITY", *FEDAVG)
    file = agree(config, whole)
    assert file.consent.classes == frozenset()
    assert file.missing_to_ask(config.coordinator_identity)
    assert config.consent is not None
    # The comments hold what would be needed: without their # they are a consent to the run.
    text = config.consent.read_text().partition("\n\n")[2]
    config.consent.write_text("\n".join(line.removeprefix("# ") for line in text.splitlines()))
    assert not ConsentFile.read(config.consent).missing_for(whole)


def test_yes_to_the_method_is_no_yes_to_an_absurd_training(config: SiloConfig) -> None:
    whole = plan("PROTOCOL", "IDENTITY", *FEDAVG)
    training = whole.training.model_copy(update={"epochs": 5000, "learning_rate": 1e6})
    absurd = whole.model_copy(update={"training": training})
    file = agree(config, absurd, "fedavg")
    assert [line.split(" (")[0] for line in file.missing_for(absurd).lines()] == [
        "5000 epochs a round",
        "a learning rate of 1e+06",
    ]


def test_yes_to_the_method_covers_the_run_and_no_more(config: SiloConfig) -> None:
    whole = plan("PROTOCOL", "IDENTITY", *FEDAVG)
    file = agree(config, whole, "fedavg")
    assert not file.missing_for(whole)
    assert {exposure.value for exposure in file.consent.classes} == {"PROTOCOL", "IDENTITY", *FEDAVG}
    assert (file.consent.rounds, file.consent.methods) == (10, ("fedavg",))
    assert (file.consent.approval, file.consent.plan_sha256) == ("changes", whole.sha256.hex())
    assert (file.consent.total_rounds, file.consent.training.epochs) == (100, whole.training.epochs)
    assert config.consent is not None
    assert "LOCAL_METRICS" not in yaml.safe_load(config.consent.read_text())["exposures"]
    assert "Optional, and not agreed to: LOCAL_METRICS." in " ".join(
        config.consent.read_text().replace("#", "").split()
    )
    with pytest.raises(ConfigurationError, match="exists already and is not overwritten"):
        write_consent(config, whole, (), how="")


def test_an_optional_class_is_agreed_to_by_its_name(config: SiloConfig) -> None:
    file = agree(config, plan("PROTOCOL", "IDENTITY", *FEDAVG), "fedavg", "LOCAL_METRICS")
    assert Exposure.LOCAL_METRICS in file.consent.classes


@pytest.mark.parametrize(
    ("found", "yes_to", "words"),
    [
        (plan("PROTOCOL", "IDENTITY", *FEDAVG), ["pfedsim"], "is of the method fedavg, and --yes-to says pfedsim"),
        (plan("PROTOCOL", "IDENTITY", *FEDAVG), ["LOCAL_METRICS"], "--yes-to says no method"),
        (plan("PROTOCOL", "IDENTITY", *FEDAVG), ["fedavg", "LABEL_COUNTS"], "does not ask for LABEL_COUNTS"),
        (plan("PROTOCOL", "IDENTITY", *FEDAVG, "DATA_IDENTIFIER"), ["fedavg"], "asks for DATA_IDENTIFIER"),
        (plan("PROTOCOL", "IDENTITY", *FEDAVG, rounds=101), ["fedavg"], "has 101 rounds, and 100 are agreed to"),
    ],
)
def test_what_was_not_meant_is_not_agreed_to(config: SiloConfig, found: RunPlan, yes_to: list[str], words: str) -> None:
    with pytest.raises(ConsentError, match=words):
        agree(config, found, *yes_to)
    assert config.consent is not None
    assert not config.consent.exists()


def test_an_invitation_that_has_expired_is_not_tried(tmp_path: Path) -> None:
    line = Invitation(
        host="localhost",
        port=1,
        enrolment_port=2,
        federation="tissue",
        coordinator="coordinator",
        silo="hospital1",
        ca_sha256="ab" * 32,
        code="a" * 26,
        expires=datetime(2026, 1, 1, 12, 30, tzinfo=UTC),
    ).line
    done = CliRunner().invoke(app, ["init", line, "--data", "images.npz", "--folder", str(tmp_path)])
    assert isinstance(done.exception, ConfigurationError)
    assert "was good until 2026-01-01 12:30 UTC" in str(done.exception)
    assert "coordinator invite hospital1" in str(done.exception)
    assert list(tmp_path.iterdir()) == []
