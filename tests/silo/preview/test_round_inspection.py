"""``silo inspect`` counts the bytes of messages that are really built."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.algorithms.datasets import ImageDataset, ImageSplit, load_npz, save_npz
from medsilo.algorithms.method import PERSONAL, local_metrics
from medsilo.algorithms.models import build, state_of
from medsilo.algorithms.registry import make
from medsilo.algorithms.tensors import Part
from medsilo.algorithms.tensors.transfer import manifest, send
from medsilo.privacy.consent.consent import ConsentFile
from medsilo.privacy.consent.gate import ConsentGate, PlanGate
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.privacy.door.door import Call, Door
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.journal.journal import Journal, read_records
from medsilo.privacy.journal.records import RefusalRecord
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.nonces import nonce
from medsilo.protos.versions import PROTOCOL_VERSION
from medsilo.silo.oversight.live_page import View
from medsilo.silo.preview.inspection import Inspection, inspect
from medsilo.silo.run.run_state import RunState
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.state.plans import keep_plan, known_plan, read_plan
from medsilo.silo.training.site import LocalSite

ALL = ["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "PEER_DERIVED", "SAMPLE_COUNT", "LOCAL_METRICS"]


def make_plan(method: str, *, metrics: bool = True, **parameters: Any) -> RunPlan:
    chosen = make(method, parameters)
    return RunPlan(
        federation="test",
        coordinator="c",
        run="r",
        method=MethodPlan(name=chosen.name, parameters=chosen.parameters()),
        model=ModelPlan(name="mlp-64", input_shape=(3, 80, 80), classes=3),  # 1.2 million parameters: several chunks
        training=TrainingPlan(epochs=1, batch_size=4),
        rounds=3,
        seed=1,
        required=chosen.required,
        optional=(Exposure.LOCAL_METRICS,) if metrics else (),
        downlink=tuple(chosen.downlink),
    )


def configured(folder: Path, exposures: Iterable[str]) -> SiloConfig:
    images = np.random.default_rng(0).integers(0, 256, (6, 80, 80, 3), dtype=np.uint8)
    split = ImageSplit(images, np.arange(6, dtype=np.int64) % 3)
    save_npz(folder / "h.npz", ImageDataset("h", "a test", True, ("a", "b", "c"), split, None, split))
    consent = {
        "coordinator": "spiffe://test/coordinator/c",
        "methods": ["diversifed", "fedavg", "local"],
        "exposures": list(exposures),
        "rounds": 3,
    }
    (folder / "consent.yaml").write_text(yaml.safe_dump(consent))
    content = {
        "federation": "test",
        "name": "hospital1",
        "coordinator": {"address": "127.0.0.1:1", "name": "c"},
        "state": "state",
        "shard": "h.npz",
        "consent": "consent.yaml",
    }
    (folder / "h.yaml").write_text(yaml.safe_dump(content))
    return SiloConfig.read(folder / "h.yaml")


def really_sent(folder: Path, config: SiloConfig, plan: RunPlan) -> tuple[int, dict[str, int], dict[str, int]]:
    """Messages, bytes by class and bytes by field of a trained round's update, as the silo's door records them."""
    site = LocalSite("hospital1", load_npz(config.shard), build(plan.model, seed=1), plan, device=torch.device("cpu"))
    side = make(plan.method.name, plan.method.parameters).silo_side(site)
    side.begin(state_of(site.model))
    side.train(0, {})
    payload = dict(side.upload())
    consent = ConsentFile.read(config.consent)
    if Exposure.LOCAL_METRICS in set(plan.optional) & consent.consent.classes:
        payload[Exposure.LOCAL_METRICS] = Part.of({spec.name: torch.rand(()) for spec in local_metrics(plan)})
    header = wire.Update(
        nonce=nonce(),
        silo="hospital1",
        plan_sha256=plan.sha256,
        parts=manifest(payload),
        protocol_version=PROTOCOL_VERSION,
    )
    gate = ConsentGate(consent, plan.coordinator_identity, plan)
    with Journal(folder / "journal", key=Ed25519PrivateKey.generate(), origin="o") as journal:
        door = Door(journal, identity="i", federation="test", gate=gate)
        door.receipt_state("p").version = PROTOCOL_VERSION
        release = partial(door.release, call=Call("SubmitUpdate", "p", "", "t"))
        sent = list(send(release, wire.SubmitUpdateRequest(update=header), payload))
        records = [record for record in read_records(journal.directory) if record["kind"] == "message"]
    assert [record["length"] for record in records] == [len(data) for data in sent]
    classes: dict[str, int] = {}
    fields: dict[str, int] = {}
    for record in records:
        for into, what in ((classes, "classes"), (fields, "fields")):
            for name, count in record[what].items():
                into[name] = into.get(name, 0) + count
    return len(sent), classes, fields


def leaving(inspection: Inspection) -> dict[str, int]:
    return {item.exposure.value: item.bytes for item in inspection.content if item.leaves}


@pytest.mark.parametrize(
    ("method", "parameters"),
    [("diversifed", {}), ("fedavg", {}), ("fedavg", {"weighting": "uniform"}), ("local", {})],
)
@pytest.mark.parametrize("metrics", [True, False])
def test_the_bytes_shown_are_those_of_the_messages_really_sent(
    tmp_path: Path, method: str, parameters: dict[str, Any], metrics: bool
) -> None:
    config, plan = configured(tmp_path, ALL), make_plan(method, metrics=metrics, **parameters)
    shown = inspect(config, plan)
    messages, classes, fields = really_sent(tmp_path, config, plan)
    assert not shown.missing
    assert shown.messages == messages
    assert leaving(shown) == classes
    assert shown.total == sum(classes.values())
    assert {name: count for item in shown.content for name, count in item.fields.items()} == fields
    for item in shown.content:
        assert item.bytes == sum(item.fields.values())


def test_what_the_consent_does_not_let_out_is_not_counted_as_leaving(tmp_path: Path) -> None:
    config, plan = configured(tmp_path, ALL[:-1]), make_plan("diversifed")
    shown = inspect(config, plan)
    _, classes, _ = really_sent(tmp_path, config, plan)
    assert not shown.missing
    assert leaving(shown) == classes
    assert shown.total == sum(classes.values())
    assert shown.not_agreed == (Exposure.LOCAL_METRICS,), "what could leave too, if the hospital wanted"
    assert inspect(configured(tmp_path, ALL), plan).not_agreed == ()


def test_without_consent_to_the_run_nothing_leaves_and_what_is_missing_is_named(tmp_path: Path) -> None:
    shown = inspect(configured(tmp_path, ALL[:2]), make_plan("diversifed"))
    assert shown.missing.classes == (
        Exposure.MODEL_PARAMETERS_EXTRACTOR,
        Exposure.MODEL_PARAMETERS_CLASSIFIER,
        Exposure.PEER_DERIVED,
    )
    assert shown.total == 0
    assert not any(item.leaves for item in shown.content)
    assert {item.exposure for item in shown.content if item.agreed} == {Exposure.PROTOCOL, Exposure.IDENTITY}


def test_tensors_are_shown_with_name_shape_and_type(tmp_path: Path) -> None:
    shown = inspect(configured(tmp_path, ALL), make_plan("fedavg"))
    tensors = {item.exposure: item.tensors for item in shown.content}
    assert tensors[Exposure.SAMPLE_COUNT] == (("samples", (), "I64"),)
    assert tensors[Exposure.MODEL_PARAMETERS_CLASSIFIER] == (
        ("classifier.weight", (3, 64), "F32"),
        ("classifier.bias", (3,), "F32"),
    )
    assert tensors[Exposure.PROTOCOL] == ()


def test_inspecting_writes_nothing(tmp_path: Path) -> None:
    config = configured(tmp_path, ALL)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    inspect(config, make_plan("diversifed"))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_plan_is_read_from_its_file_or_what_is_wrong_is_named(tmp_path: Path) -> None:
    path, plan = tmp_path / "plan.json", make_plan("diversifed")
    path.write_text(plan.model_dump_json())
    assert read_plan(path) == plan
    for content, words in (
        ("{", "is not a plan"),
        ("[]", "plan.json"),
        (json.dumps({**json.loads(plan.model_dump_json()), "rouns": 3}), "did you mean `rounds`"),
        (json.dumps({**json.loads(plan.model_dump_json()), "seed": -1}), "`seed`"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigurationError, match=words):
            read_plan(path)
    with pytest.raises(ConfigurationError, match="no such file"):
        read_plan(tmp_path / "none.json")


def test_a_silo_that_has_seen_no_plan_is_told_where_to_get_one(tmp_path: Path) -> None:
    config = configured(tmp_path, ALL)
    with pytest.raises(ConfigurationError, match=r"--plan"):
        known_plan(config)
    config.state.mkdir()
    for method in ("local", "fedavg"):
        keep_plan(config, make_plan(method))
        assert known_plan(config) == make_plan(method), "the one that was shown last"


def test_of_a_run_that_has_ended_it_says_so(tmp_path: Path) -> None:
    config, plan = configured(tmp_path, ALL), make_plan("fedavg")
    before = inspect(config, plan)
    state = RunState(config.runs / plan.run, plan, "hospital1", load_npz(config.shard))
    personal = {PERSONAL: state_of(build(plan.model, seed=1))}
    state.save(personal, trained_rounds=plan.rounds, measurements={}, finished=True)
    shown = inspect(config, plan)
    assert (before.ended, shown.ended, shown.total) == (False, True, before.total)


def test_nothing_leaves_while_the_consent_is_withdrawn(tmp_path: Path) -> None:
    config, plan = configured(tmp_path, ALL), make_plan("fedavg")
    config.withdrawal.parent.mkdir(parents=True, exist_ok=True)
    config.withdrawal.write_text("{}")
    shown = inspect(config, plan)
    assert shown.total == 0
    assert shown.withdrawn


def test_the_page_of_a_hospital_that_declined_a_run_shows_that(tmp_path: Path) -> None:
    config = configured(tmp_path, ALL)
    with Journal(config.journal, key=Ed25519PrivateKey.generate(), origin=config.journal_origin) as journal:
        door = Door(journal, identity=config.identity.uri, federation="test", gate=PlanGate(Exposure))
        door.note(RefusalRecord(run="r", plan_sha256="ab", plan={}, reason="the consent does not cover it"))
    (refused,) = View(config).look({})["refused"]
    assert (refused["rpc"], refused["reason"]) == ("plan", "the consent does not cover it")


def test_what_leaves_only_in_other_rounds_is_named(tmp_path: Path) -> None:
    config = configured(tmp_path, [*ALL, "RUNNING_STATISTICS"])
    plan = make_plan("fedap")
    plan = plan.model_copy(update={"model": ModelPlan(name="lenet5", input_shape=(3, 80, 80), classes=3)})
    found = inspect(config, plan)
    assert Exposure.RUNNING_STATISTICS not in {item.exposure for item in found.content}
    assert found.other_rounds == (Exposure.RUNNING_STATISTICS,)
    assert inspect(config, make_plan("fedavg")).other_rounds == ()
