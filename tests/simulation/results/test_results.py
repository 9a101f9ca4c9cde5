"""``simulation results``: tables, bytes and pictures, from runs written by hand."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from medsilo.privacy.errors import ConfigurationError, DataError
from medsilo.privacy.exposure import Exposure
from medsilo.simulation.execution import ROUNDS, RUN, WEIGHTS, Recorded, _description
from medsilo.simulation.experiment import ExperimentConfig, Run
from medsilo.simulation.results.runs import read_runs
from medsilo.simulation.results.table import Section, tabulate
from medsilo.simulation.results.writing import _by_epsilon, write_results

DIVERSIFED = "diversifed-temperature=0.5"


def config_file(folder: Path, **changes: Any) -> Path:
    content: dict[str, Any] = {
        "name": "made",
        "settings": {
            "mild": {"kind": "dirichlet", "silos": 2, "alpha": 1.0},
            "hard": {"kind": "dirichlet", "silos": 2, "alpha": 0.1},
        },
        "model": "mlp-64",
        "rounds": 12,
        "seeds": [0, 1],
        "methods": [{"name": "local"}, {"name": "diversifed", "temperature": 0.5}],
        "published": {"mild": {DIVERSIFED: {"accuracy": 58.25, "std": 0.5, "source": "Table I"}, "fedamp": 54}},
        "published_on": "made images",
        **changes,
    }
    path = folder / "made.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def write_run(
    runs: Path,
    label: str,
    seed: int,
    accuracies: list[float],
    *,
    setting: str = "mild",
    synthetic: bool = False,
    finished: bool = True,
    up: int = 0,
    fingerprint: str = "ab" * 32,
    experiment: ExperimentConfig | None = None,
    model: str = "mlp-64",
    final: float = 1.0,
    of_classes: tuple[float, float] | None = None,
) -> Path:
    """Two silos, 0.1 below and above the given accuracy of each round, and ``final`` at the end, with a mean accuracy
    of classes of ``of_classes`` each; ``up`` bytes of extractor a round and silo."""
    experiment = experiment or ExperimentConfig.read(config_file(runs.parent))
    folder = runs / "made" / "set" / setting / label / f"seed-{seed}"
    folder.mkdir(parents=True)
    variant = next(variant for variant in experiment.variants() if variant.label == label)
    run = Run(experiment, "set.npz", setting, experiment.make_settings()[setting], 1.0, variant, seed, folder)
    images = {"data": "made images", "data_source": "by hand", "synthetic": synthetic, "data_sha256": fingerprint}
    shape = {"model": {"input_shape": [1, 28, 28], "classes": 10}}
    info = {**_description(run, Recorded.of({**images, "plan": shape}), "alone"), "finished": finished}
    info["plan"]["rounds"] = len(accuracies)
    info["plan"]["model"]["name"] = model
    (folder / RUN).write_text(json.dumps(info))
    count = len(accuracies) + 1
    silo_rows = [(number, silo) for number in range(count) for silo in ("hospital1", "hospital2")]
    table = {
        "round": [number for number, _ in silo_rows],
        "silo": [silo for _, silo in silo_rows],
        "accuracy": [
            (accuracies[number] + (0.1 if silo == "hospital2" else -0.1)) if number < count - 1 else final
            for number, silo in silo_rows
        ],
        "up_MODEL_PARAMETERS_EXTRACTOR": [up if number < count - 1 else 0 for number, _ in silo_rows],
        "down_INITIAL_MODEL": [1_500_000 if number == 0 else 0 for number, _ in silo_rows],
    }
    if of_classes is not None:
        table["of_classes"] = [0.0] * (2 * count - 2) + list(of_classes)
    pq.write_table(pa.table(table), folder / ROUNDS)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    write_run(folder, "local", 0, [0.9] + [0.3] + [0.4] * 10)
    write_run(folder, "local", 1, [0.5] * 2 + [0.6] * 10)
    for seed in (0, 1):
        write_run(folder, DIVERSIFED, seed, [0.5] * 12, up=250_000)
    return folder


def sections(runs: Path, folder: Path, **changes: Any) -> list[Section]:
    return tabulate(read_runs(runs / "made"), ExperimentConfig.read(config_file(folder, **changes)))


def test_best_last_ten_and_wins_are_those_of_the_curves(runs: Path, tmp_path: Path) -> None:
    (section,) = sections(runs, tmp_path)
    alone, together = section.rows
    # best 90 and 60; the last ten rounds 40 and 60; the hand-out after the last round is no round
    assert alone.best == pytest.approx((75.0, 15.0))
    assert alone.last == pytest.approx((50.0, 10.0))
    assert alone.wins is None
    assert together.last == pytest.approx((50.0, 0.0))
    assert (together.wins, together.compared, together.seeds) == (1, 2, (0, 1))
    np.testing.assert_allclose(alone.curve, [70.0, 40.0] + [50.0] * 10)


def test_exposed_bytes_are_per_silo_for_the_whole_run(runs: Path, tmp_path: Path) -> None:
    (section,) = sections(runs, tmp_path)
    alone, together = section.rows
    assert alone.total("up") == 0
    assert alone.megabytes["down"] == {Exposure.INITIAL_MODEL: 1.5}
    assert together.megabytes["up"] == {Exposure.MODEL_PARAMETERS_EXTRACTOR: 3.0}  # 12 rounds of 0.25 MB
    assert together.total("down") == 1.5


def test_a_papers_numbers_stand_on_no_page_of_another_data_set(runs: Path, tmp_path: Path) -> None:
    path = config_file(tmp_path, published_on="another")
    page = write_results(ExperimentConfig.read(path), path, runs, tmp_path / "out").read_text()
    assert "58.25" not in page
    assert "| fedamp" not in page
    assert "The published numbers of the experiment are for another; none stands here." in page


def test_the_page_has_tables_pictures_published_numbers_and_commands(runs: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        folder = write_run(runs, DIVERSIFED, seed, [0.5] * 12, setting="hard")
        weights = {"round": [0] * 4, "silo": list("aabb"), "other": list("abab"), "weight": [1.2, -0.2, 0.1, 0.9]}
        pq.write_table(pa.table(weights), folder / WEIGHTS)
    path, out = config_file(tmp_path), tmp_path / "out"
    page = write_results(ExperimentConfig.read(path), path, runs, out, everything=True).read_text()
    lines = page.splitlines()
    assert (
        f"| {DIVERSIFED} | 2 | 50.00 ± 0.00 | 50.00 ± 0.00 | 100.00 ± 0.00 | – | 1 of 2 | 58.25 ± 0.5 | -8.25 | "
        "Table I |" in lines
    )
    assert "| fedamp | not run | – | – | – | – | – | 54 | – |  |" in lines
    assert f"| {DIVERSIFED} | blind mixture | 50.00 ± 0.00 | 3 | 1.5 | 3 | 1.5 |" in lines
    assert "What was simulated, and measured, is the plain method" in page
    assert "Not finished: local." in page
    assert "synthetic" not in page.lower()
    assert f"simulation run --config {path} --data set.npz --runs {runs}" in lines
    assert f"simulation results --config {path} --runs {runs} --out {out} --all" in lines
    for name in (line.partition("(")[2].rstrip(")") for line in lines if line.startswith("![")):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert sum("silo-to-silo weights" in line for line in lines) == 1
    exposure = list(csv.DictReader((out / "made-exposure.csv").open()))
    assert {
        (row["setting"], row["method"], row["direction"], row["exposure"], float(row["mb_per_silo"]))
        for row in exposure
        if row["setting"] == "mild" and row["method"] != "local"
    } == {
        ("mild", DIVERSIFED, "up", "MODEL_PARAMETERS_EXTRACTOR", 3.0),
        ("mild", DIVERSIFED, "down", "INITIAL_MODEL", 1.5),
    }
    content = json.loads((out / "made.json").read_text())
    assert [s["setting"] for s in content["sections"]] == ["mild", "hard"]
    accuracy = list(csv.DictReader((out / "made.csv").open()))
    assert float(accuracy[0]["best_mean"]) == pytest.approx(75)


def test_a_page_has_its_tables_and_one_picture_a_section_unless_all_is_asked_for(runs: Path, tmp_path: Path) -> None:
    path, out = config_file(tmp_path), tmp_path / "out"
    page = write_results(ExperimentConfig.read(path), path, runs, out).read_text()
    assert {file.name for file in out.iterdir()} == {
        "made.md",
        "made.csv",
        "made-exposure.csv",
        "made-set-mild-exposure.png",
    }
    assert "[`made.csv`](made.csv), [`made-exposure.csv`](made-exposure.csv)." in page
    assert page.count("![") == 1
    write_results(ExperimentConfig.read(path), path, runs, out, everything=True)
    assert {"made.json", "made-set-mild-curves.png"} <= {file.name for file in out.iterdir()}


def test_accuracy_stands_beside_epsilon_with_all_that_it_takes_to_read_it(tmp_path: Path) -> None:
    sweep = {"epsilon": [4, float("inf")], "delta": 1e-5, "sampling_rate": 0.1}
    path = config_file(
        tmp_path, privacy=sweep, methods=[{"name": "diversifed", "temperature": 0.5}], published={}, published_on=""
    )
    folder, experiment = tmp_path / "runs", ExperimentConfig.read(path)
    for label, accuracy in (("epsilon=inf", 0.7), ("epsilon=4", 0.5)):
        for seed in (0, 1):
            place = write_run(folder, f"{DIVERSIFED}-{label}", seed, [accuracy] * 12, experiment=experiment)
            info = json.loads((place / RUN).read_text())
            info["spent"] = {"hospital1": {"epsilon": 3.9}} if info["plan"].get("privacy") else {}
            (place / RUN).write_text(json.dumps(info))
    page = write_results(ExperimentConfig.read(path), path, folder, tmp_path / "out").read_text()
    assert "ε at δ = 1e-05 (unit image, adjacency zero-out, accountant PLD)" in page
    assert "cannot be repeated bit for bit" in " ".join(page.split())
    assert f"| {DIVERSIFED}-epsilon=4 | 2 | 50.00 ± 0.00 | 50.00 ± 0.00 | 100.00 ± 0.00 | – | – | – | 4 |" in page
    infinite = (
        f"| {DIVERSIFED}-epsilon=inf | 2 | 70.00 ± 0.00 | 70.00 ± 0.00 | 100.00 ± 0.00 | – | – | – | ∞ (no noise) |"
    )
    assert infinite in page
    assert (tmp_path / "out" / "made-set-mild-privacy.png").stat().st_size > 1000
    (section,) = tabulate(read_runs(folder / "made"), ExperimentConfig.read(path))
    assert _by_epsilon(section) == {
        DIVERSIFED: [(4, (pytest.approx(50), 0.0)), (float("inf"), (pytest.approx(70), 0.0))]
    }
    rows = list(csv.DictReader((tmp_path / "out" / "made.csv").read_text().splitlines()))
    assert [(row["epsilon"], row["unit"]) for row in rows] == [("4.0", "image"), ("inf", "")]
    info["spent"] = {"hospital1": {"epsilon": 4.1}}
    (place / RUN).write_text(json.dumps(info))
    with pytest.raises(DataError, match="spent more than the ε = 4 of its plan"):
        tabulate([run for run in read_runs(folder / "made") if run.folder == place], ExperimentConfig.read(path))


def test_synthetic_data_is_called_so_wherever_numbers_stand(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    write_run(folder, "local", 0, [0.5] * 12, synthetic=True)
    path = config_file(tmp_path, seeds=[0])
    page = write_results(ExperimentConfig.read(path), path, folder, tmp_path, everything=True).read_text()
    assert "**Synthetic data: generated images." in page
    assert "## made images (set), mild – SYNTHETIC DATA" in page
    assert ",True," in (tmp_path / "made.csv").read_text()
    assert json.loads((tmp_path / "made.json").read_text())["sections"][0]["synthetic"] is True


def test_unfinished_runs_are_not_counted(runs: Path, tmp_path: Path) -> None:
    write_run(runs, "local", 2, [0.99] * 12, finished=False)
    (section,) = sections(runs, tmp_path, seeds=[0, 1, 2])
    assert section.rows[0].seeds == (0, 1)
    with pytest.raises(DataError, match="no finished runs; start them with `simulation run`"):
        read_runs(tmp_path / "nowhere")


def test_runs_that_do_not_belong_together_are_not_put_together(runs: Path, tmp_path: Path) -> None:
    write_run(runs, DIVERSIFED, 2, [0.5] * 12, fingerprint="cd" * 32)
    with pytest.raises(ConfigurationError, match="not all on the same images"):
        sections(runs, tmp_path, seeds=[0, 1, 2])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"rounds": 13}, "another rounds;"),
        ({"training": {"epochs": 50}}, "another training;"),
        ({"model": "diversifed-cnn"}, "another model;"),
        (
            {
                "settings": {"mild": {"kind": "dirichlet", "silos": 2, "alpha": 2.0}},
                "published": {},
                "published_on": "",
            },
            "another setting;",
        ),
        ({"engine": "stacked"}, "another engine;"),
    ],
)
def test_no_number_stands_under_a_configuration_that_it_was_not_run_with(
    changes: dict[str, Any], what: str, runs: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=what):
        sections(runs, tmp_path, **changes)


def test_wins_are_over_separate_training_of_the_same_model(tmp_path: Path) -> None:
    """And of the same training; where only that differs, over the experiment's own."""
    methods = [
        {"name": "local", "model": ["lenet5", "mlp-64"]},
        {"name": "diversifed", "model": ["lenet5", "mlp-64", "diversifed-cnn"]},
        {"name": "fedavg", "model": "mlp-64", "training": {"optimizer": "sgd"}},
    ]
    experiment = ExperimentConfig.read(config_file(tmp_path, methods=methods, published={}, published_on="", seeds=[0]))
    for label, accuracy in (
        ("local-model=lenet5", 0.3),
        ("local-model=mlp-64", 0.6),
        ("diversifed-model=lenet5", 0.4),
        ("diversifed-model=mlp-64", 0.5),
        ("diversifed-model=diversifed-cnn", 0.9),
        ("fedavg-model=mlp-64-optimizer=sgd", 0.7),
    ):
        model = label.partition("model=")[2].removesuffix("-optimizer=sgd")
        write_run(tmp_path / "runs", label, 0, [accuracy] * 12, experiment=experiment, model=model)
    (section,) = tabulate(read_runs(tmp_path / "runs" / "made"), experiment)
    assert {row.label: row.wins for row in section.rows if row.method != "local"} == {
        "diversifed-model=lenet5": 1,
        "diversifed-model=mlp-64": 0,
        "diversifed-model=diversifed-cnn": None,
        "fedavg-model=mlp-64-optimizer=sgd": 1,
    }


def private_page(tmp_path: Path, finals: dict[str, tuple[float, float, float]]) -> tuple[list[Section], str]:
    """By label the accuracies at the end on three seeds, of runs that a preset chose at ε = 1, or without noise."""
    methods = [{"name": "local"}, {"name": "fedavg"}]
    sweep = {"preset": "head", "units": 1000, "epsilon": [1, float("inf")], "delta": 1e-5, "unit": "image"}
    changes = {"privacy": sweep, "methods": methods, "published": {}, "published_on": "", "seeds": [0, 1, 2]}
    path = config_file(tmp_path, **changes)
    experiment = ExperimentConfig.read(path)
    for label, values in finals.items():
        for seed, final in enumerate(values):
            folder = write_run(
                tmp_path / "runs", label, seed, [0.5] * 12, experiment=experiment, final=final, of_classes=(0.25, 0.75)
            )
            info = json.loads((folder / RUN).read_text())
            info["spent"] = {"hospital1": {"epsilon": 1.0}} if info["plan"].get("privacy") else {}
            (folder / RUN).write_text(json.dumps(info))
    page = write_results(experiment, path, tmp_path / "runs", tmp_path / "out").read_text()
    return tabulate(read_runs(tmp_path / "runs" / "made"), experiment), page


def test_a_presets_runs_stand_beside_a_hospital_alone_with_noise_and_without(tmp_path: Path) -> None:
    """Though the preset chooses a training of its own for who trains alone."""
    (section,), page = private_page(
        tmp_path,
        {
            "local-epsilon=1": (0.60, 0.62, 0.64),
            "local-epsilon=inf": (0.66, 0.66, 0.66),
            "fedavg-epsilon=1": (0.72, 0.73, 0.74),
            "fedavg-epsilon=inf": (0.60, 0.70, 0.68),
        },
    )
    rows = {row.label: row for row in section.rows}
    joined, free, noised = rows["fedavg-epsilon=1"], rows["fedavg-epsilon=inf"], rows["local-epsilon=1"]
    assert joined.alone is not None
    assert joined.alone_without_noise is not None
    assert joined.alone.difference == pytest.approx((11.0, np.std([12, 11, 10])))
    assert joined.alone_without_noise.difference == pytest.approx((7.0, np.std([6, 7, 8])))
    assert (joined.alone_without_noise.wins, joined.alone_without_noise.compared) == (3, 3)
    assert joined.alone_without_noise.clear
    assert joined.alone_without_noise_of_classes is not None
    assert joined.alone_without_noise_of_classes.difference == (0, 0)
    assert not joined.alone_without_noise_of_classes.clear
    assert free.alone == free.alone_without_noise
    assert free.alone is not None
    assert (free.alone.wins, free.alone.clear) == (2, False)  # two seeds of three, by less than they differ
    assert noised.alone is None
    assert noised.alone_without_noise is not None
    assert noised.alone_without_noise.difference[0] == pytest.approx(-4)
    assert rows["local-epsilon=inf"].alone_without_noise is None
    assert "| 50.00 ± 0.00 | **+11.00 ± 0.82** | **+7.00 ± 0.82** | 1 |" in page
    assert "| 50.00 ± 0.00 | +0.00 ± 4.32 | +0.00 ± 4.32 | ∞ (no noise) |" in page
    assert "| method | ε = 1 | ∞ (no noise) |" in page
    assert "| local | 62.0 / 50.0 | 66.0 / 50.0 |" in page
    assert "| fedavg | **73.0** / 50.0 | 66.0 / 50.0 |" in page
    (written,) = [
        row
        for row in csv.DictReader((tmp_path / "out" / "made.csv").read_text().splitlines())
        if row["method"] == "fedavg-epsilon=1"
    ]
    assert float(written["above_alone_without_noise_mean"]) == pytest.approx(7)
    assert (written["above_alone_without_noise_clearly"], float(written["of_classes_mean"])) == ("True", 50)


def test_of_one_seed_no_deviation_is_told_and_of_few_rounds_no_last_ten(tmp_path: Path) -> None:
    path = config_file(tmp_path, seeds=[0], rounds=3, published={}, published_on="")
    experiment = ExperimentConfig.read(path)
    for label in ("local", DIVERSIFED):
        write_run(tmp_path / "runs", label, 0, [0.25, 0.5, 0.75], experiment=experiment)
    page = write_results(experiment, path, tmp_path / "runs", tmp_path / "out", everything=True).read_text()
    assert (
        "| method | seeds | best round | all 3 rounds | at the end | mean accuracy of classes | seeds on which" in page
    )
    assert "| local | 1 | 75.00 | 50.00 | 100.00 | – | – |" in page
    (row, _) = csv.DictReader((tmp_path / "out" / "made.csv").read_text().splitlines())
    assert (row["best_std"], row["last10_std"]) == ("", "")
    content = json.loads((tmp_path / "out" / "made.json").read_text())
    assert content["sections"][0]["methods"][0]["best"] == {"mean": 75.0, "std": None}


def test_a_method_that_makes_its_models_at_the_end_is_judged_by_those(tmp_path: Path) -> None:
    path = config_file(
        tmp_path, methods=[{"name": "local"}, {"name": "fedbabu"}], published={}, published_on="", seeds=[0]
    )
    experiment = ExperimentConfig.read(path)
    for label in ("local", "fedbabu"):
        write_run(tmp_path / "runs", label, 0, [0.6] * 12, experiment=experiment)
    page = write_results(experiment, path, tmp_path / "runs", tmp_path / "out").read_text()
    assert "| fedbabu | 1 | 100.00 | 100.00 | 100.00 | – | 1 of 1 |" in page
    assert "Made only at the end, so that this stands in all columns: the models of fedbabu." in page


def test_a_damaged_table_is_named(runs: Path) -> None:
    path = next((runs / "made").glob(f"*/*/*/*/{ROUNDS}"))
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match=f"{path.name}: cannot be read"):
        read_runs(runs / "made")
