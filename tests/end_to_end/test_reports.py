"""The reports over real daemons: they tell apart what methods expose, from the bytes on record and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pypdf import PdfReader

from medsilo.algorithms.datasets import save_npz
from medsilo.silo.data.synthetic import generate_tissue
from tests.support.runs.federation import Federation

Make = Callable[..., Federation]

PLAIN, NORMALISED = "diversifed-cnn", "lenet5"
STATISTICS = (
    "models, running statistics (averages of images' features) and accuracies on public images: more than models only"
)
RUNS: dict[str, tuple[dict[str, Any], str, str]] = {
    # What the coordinator mixes of pFedSim's models is the rest without the last layer, once its warm-up is over.
    "diversifed": ({"name": "diversifed"}, PLAIN, "models only"),
    "pfedsim": (
        {"name": "pfedsim", "warmup_share": 0.0},
        PLAIN,
        "models only, last layers included, but not mixed with others'",
    ),
    "pfedsim-warm": (
        {"name": "pfedsim"},
        PLAIN,
        "models (last layers included, but not mixed with others') and the number of training images",
    ),
    "feddfq": (
        {"name": "feddfq"},
        PLAIN,
        "models (without their last layer), an identifier of the data and gradients of the last layer",
    ),
    "fedpdc": ({"name": "fedpdc"}, PLAIN, "models and accuracies on public images"),
    "fedavg": ({"name": "fedavg"}, PLAIN, "models and the number of training images"),
    # A model with batch normalisation: its statistics stay in the building, or the report says that they left.
    "normalised-stay": ({"name": "fedavg", "weighting": "uniform"}, NORMALISED, "models only"),
    "normalised-leave": ({"name": "fedpdc", "buffers": "aggregate"}, NORMALISED, STATISTICS),
}
CLASSES = (
    "PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "PEER_DERIVED", "SAMPLE_COUNT", "RUNNING_STATISTICS",
    "CLASSIFIER_GRADIENT", "DATA_IDENTIFIER", "DERIVED_ACCURACY",
)  # fmt: skip


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory, shards: Any) -> Any:
    """Eight runs, one after the other, in one federation; hospitals' and coordinator's reports of all of them."""
    folder = tmp_path_factory.mktemp("reports")
    public = folder / "public.npz"
    save_npz(public, generate_tissue(seed=99, train=90, test=9))
    (folder / "federation").mkdir()
    one = Federation(
        folder / "federation",
        shards[:2],
        exposures=CLASSES,
        coordinator={"public_data": str(public)},
        run={"rounds": 3},
    )
    try:
        for name in one.silos:
            one.write_consent(name, methods=sorted({method["name"] for method, _, _ in RUNS.values()}))
        for name, (method, model, _) in RUNS.items():
            run = one.coordinator_config["run"]
            run.update(name=name, method=method, ask_for=[], model={**run["model"], "name": model})
            one.write("coordinator.yaml", one.coordinator_config)
            one.log("coordinator.yaml").unlink(missing_ok=True)
            one.run_to_the_end()
        said = {name: one.command("silo", "report", "--config", f"{name}.yaml") for name in one.silos}
        said["coordinator"] = one.command("coordinator", "report", "--config", "coordinator.yaml")
        yield one, said
    finally:
        one.kill_everything()


def report(one: Federation, party: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((one.folder / "state" / party / "report" / "report.json").read_text())
    return found


def test_the_report_tells_methods_apart_by_what_really_left(reported: Any) -> None:
    one, said = reported
    for party in (*one.silos, "coordinator"):
        content = report(one, party)
        assert {run["run"]: run["what_left"] for run in content["runs"] if run["run"]} == {
            name: statement for name, (_, _, statement) in RUNS.items()
        }
        assert content["verification"]["sound"]
        assert content["outside_consent"] == {}
        page = (one.folder / "state" / party / "report" / "report.html").read_text()
        for _, _, statement in RUNS.values():
            assert statement.replace("'", "&#39;") in page
            assert statement in re.sub(r"\s+", " ", said[party])


def test_statistics_that_travel_are_never_called_models_only(reported: Any) -> None:
    one, _ = reported
    for party in (*one.silos, "coordinator"):
        for run in report(one, party)["runs"]:
            classes = {flow["exposure"] for flow in run["left"]}
            assert (run["what_left"][:11] == "models only") <= ("RUNNING_STATISTICS" not in classes)
    (run,) = [run for run in report(one, one.silos[0])["runs"] if run["run"] == "normalised-leave"]
    assert "RUNNING_STATISTICS" in {flow["exposure"] for flow in run["left"]}


def test_hospitals_and_coordinator_report_the_same_bytes_by_class_and_round(reported: Any) -> None:
    one, _ = reported
    coordinator = report(one, "coordinator")

    def told(content: dict[str, Any], way: str, silo: str) -> dict[tuple[str, str], Any]:
        # A call that brings no tensors may learn of its round on one side alone.
        return {
            (run["run"], flow["exposure"]): (flow["bytes"], flow["messages"], flow["per_round"], flow["tensors"])
            for run in content["runs"]
            for flow in run[way]
            if flow["exposure"] not in ("PROTOCOL", "IDENTITY") and flow["peer"].endswith(f"/{silo}")
        }

    for silo in one.silos:
        for way in ("left", "came_back"):
            own = told(report(one, silo), way, "coordinator")
            assert own
            assert own == told(coordinator, way, silo)


def test_every_recorded_byte_stands_in_the_report(reported: Any) -> None:
    one, _ = reported
    for silo in one.silos:
        content = report(one, silo)
        assert content["bytes_left"] == sum(record["length"] for record in one.messages(silo, "sent"))
        assert content["record"]["records"] == len(one.records(silo))
        (peer,) = content["peers"]
        assert peer["bytes_came_back"] == sum(record["length"] for record in one.messages(silo, "received"))
    content = report(one, "coordinator")
    assert content["bytes_left"] == sum(record["length"] for record in one.messages("coordinator", "received"))


def test_the_coordinators_report_has_the_matrices(reported: Any) -> None:
    one, _ = reported
    content = report(one, "coordinator")
    assert set(content["hospitals"]) == {f"spiffe://test/silo/{silo}" for silo in one.silos}
    assert set(content["methods"]) == {"diversifed", "pfedsim", "feddfq", "fedpdc", "fedavg"}
    assert "DATA_IDENTIFIER" in content["methods"]["feddfq"]
    assert "DATA_IDENTIFIER" not in content["methods"]["fedavg"]
    for table in ("hospitals", "methods"):
        assert sum(sum(row.values()) for row in content[table].values()) == content["bytes_left"]
    assert {(answer["run"], answer["accepted"]) for answer in content["answers"]} == {(name, True) for name in RUNS}
    page = (one.folder / "state" / "coordinator" / "report" / "report.html").read_text()
    assert "Bytes that left each hospital, by kind" in page
    assert "exposure beside its accuracy" in page
    assert "measurements on hospitals&#39; models" in page
    assert content["synthetic"] == [f"spiffe://test/silo/{silo}" for silo in one.silos]
    assert "Accuracy (synthetic data)" in page


def test_page_and_pdf_hold_the_same_findings_and_the_records_hash(reported: Any) -> None:
    one, _ = reported
    for party in (*one.silos, "coordinator"):
        folder = one.folder / "state" / party / "report"
        root = report(one, party)["record"]["root_sha256"]
        page = (folder / "report.html").read_text()
        paper = "".join("".join(page.extract_text() for page in PdfReader(folder / "report.pdf").pages).split())
        assert root in page.replace("<wbr>", "")
        assert root in paper
        for _, _, statement in RUNS.values():
            assert "".join(statement.split()) in paper
        assert "Synthetic data." in page
        assert "Syntheticdata." in paper


def test_a_report_may_be_limited_to_one_run_and_one_format(reported: Any) -> None:
    one, _ = reported
    name = one.silos[0]
    command = ("silo", "report", "--config", f"{name}.yaml", "--out", "limited", "--format", "json")
    one.command(*command, "--run", "fedavg")
    assert [path.name for path in Path(one.folder / "limited").iterdir()] == ["report.json"]
    content = json.loads((one.folder / "limited" / "report.json").read_text())
    assert [run["run"] for run in content["runs"]] == ["fedavg"]
    assert content["other_runs"] == [run for run in RUNS if run != "fedavg"]
    assert "not on record" in one.command(*command, "--run", "no-such-run", expect=2)
