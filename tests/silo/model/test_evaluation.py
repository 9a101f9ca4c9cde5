"""``silo evaluate``: a model's figures on the hospital's own test images, told as they are and to nobody else."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medsilo.algorithms.datasets import ImageDataset, ImageSplit, save_npz
from medsilo.privacy.budget.accounting import SampledGaussian, noise_multiplier_for
from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.consent.plan import ModelPlan
from medsilo.privacy.errors import DataError
from medsilo.silo import cli
from medsilo.silo.data.synthetic import generate_tissue
from medsilo.silo.model.evaluation import KINDS, Evaluation, choose, evaluate
from medsilo.silo.model.model_card import as_markdown
from medsilo.silo.model.page import as_json, make_document, write_page
from medsilo.silo.model.performance import ClassPerformance
from medsilo.silo.model.pictures import spotlight, whereabouts
from medsilo.silo.model.prediction import load_model
from medsilo.silo.run.run_state import DESCRIPTION, MODEL, RESULTS
from medsilo.silo.state.config import SiloConfig
from tests.support.hospital.trained_hospital import CLASSES, configured, planned, train


@pytest.fixture(scope="module")
def shard() -> ImageDataset:
    """Nine classes, of which the test images lack the last."""
    made = generate_tissue(seed=1, train=160, test=90, size=16)
    test = made.test.take(np.flatnonzero(made.test.labels != CLASSES - 1))
    return dataclasses.replace(made, name="hospital1", test=test)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, shard: ImageDataset) -> SiloConfig:
    config = configured(tmp_path_factory.mktemp("hospital1"), shard)
    train(config, planned("autumn", "fedavg"))
    return config


@pytest.fixture
def config(trained: SiloConfig, tmp_path: Path) -> SiloConfig:
    """A hospital of its own for tests that change something."""
    folder = tmp_path / "hospital"
    shutil.copytree(trained.shard.parent, folder)
    return SiloConfig.read(folder / "hospital1.yaml")


@pytest.fixture(scope="module")
def found(trained: SiloConfig) -> Evaluation:
    return evaluate(trained)


def text_of(found: Evaluation) -> str:
    return json.dumps(make_document(found).to_data(), ensure_ascii=False).replace("\N{NO-BREAK SPACE}", " ")


def test_the_figures_are_those_of_the_models_own_predictions(trained: SiloConfig, found: Evaluation) -> None:
    predicted = load_model(trained.runs / "autumn").classify(trained.shard)
    confusion = np.zeros((CLASSES, CLASSES), int)
    for one in predicted:
        assert one.truth is not None
        confusion[one.truth, one.label] += 1
    assert np.array_equal(np.array(found.performance.confusion), confusion)
    share = float(np.trace(confusion) / confusion.sum())
    told = as_json(found)
    assert told["accuracy"]["value"] == pytest.approx(share)
    kept = json.loads((trained.runs / "autumn" / RESULTS).read_text())["measured"][-1]["accuracy"]
    assert kept == pytest.approx(share)
    assert f"{100 * share:.1f} % of the time" in text_of(found)


def test_intervals_are_over_patients_where_the_shard_names_them_and_over_images_else(
    config: SiloConfig, found: Evaluation, shard: ImageDataset
) -> None:
    assert shard.test.patients is not None
    assert found.performance.patients == len(set(shard.test.patients))
    assert as_json(found)["intervals"] == "patient-clustered bootstrap"
    assert "bootstrap over patients" in text_of(found)
    nameless = dataclasses.replace(shard, test=dataclasses.replace(shard.test, patients=None))
    save_npz(config.shard.parent / "nameless.npz", nameless)
    other = evaluate(config, images=config.shard.parent / "nameless.npz", samples=0)
    assert as_json(other)["intervals"] == "Wilson"
    assert "does not say whose the images are" in text_of(other)


def test_a_class_without_test_images_is_not_measured_and_never_nought(found: Evaluation) -> None:
    name = found.class_names[-1]
    told = as_json(found)
    json.dumps(told, allow_nan=False)
    last = told["classes"][-1]
    assert (last["sensitivity"]["value"], last["sensitivity"]["low"], last["auroc"]) == (None, None, None)
    assert f"Not measured, for want of test images: {name}." in told["warnings"]
    document = make_document(found)
    by_class, matrix, _ = document.sections[0].blocks
    assert by_class.rows[-1][1:4] == ["0", "0", "not measured"]  # type: ignore[union-attr]
    assert by_class.rows[-1][-1] == "not measured"  # type: ignore[union-attr]
    assert set(matrix.rows[-1][1:]) == {"–"}  # type: ignore[union-attr]
    assert "nan" not in as_markdown(found).lower().split()


def test_synthetic_images_and_small_numbers_are_called_so(found: Evaluation) -> None:
    warnings = make_document(found).warnings
    assert warnings[0].startswith("Synthetic images")
    assert any(warning.startswith("Few test images") for warning in warnings)
    assert "They are synthetic" in as_markdown(found)
    real = make_document(dataclasses.replace(found, synthetic=False)).warnings
    assert not any("ynthetic" in warning.split(":")[0] for warning in real)
    assert any("images of patients" in warning for warning in real)


def test_the_starting_model_is_compared_if_it_is_the_one_that_was_measured(
    config: SiloConfig, found: Evaluation
) -> None:
    assert found.compared is not None
    assert found.compared.run is None
    path = config.runs / "autumn" / RESULTS
    results = json.loads(path.read_text())
    assert found.compared.performance.accuracy.value == pytest.approx(results["measured"][0]["accuracy"])
    assert "before any training" in text_of(found)
    results["measured"][0]["loss"] *= 1.01
    path.write_text(json.dumps(results))
    without = evaluate(config, samples=0)
    assert without.compared is None
    assert as_json(without)["compared"] is None
    assert "does not measure what was measured at the start" in text_of(without)


def test_separate_training_is_what_working_together_is_held_against(config: SiloConfig) -> None:
    train(config, planned("alone", "local", seed=2))
    found = evaluate(config, run="autumn", samples=0)
    assert found.compared is not None
    assert (found.compared.run, found.compared.method) == ("alone", "local")
    ours, theirs = (
        np.array([one.label == one.truth for one in load_model(config.runs / run).classify(config.shard)])
        for run in ("autumn", "alone")
    )
    assert found.compared.difference.better == int((ours & ~theirs).sum())
    assert found.compared.difference.worse == int((theirs & ~ours).sum())
    assert "Has working together helped?" in text_of(found)
    described = config.runs / "alone" / DESCRIPTION
    described.write_text(described.read_text().replace('"data_sha256": "', '"data_sha256": "0'))
    again = evaluate(config, run="autumn", samples=0)
    assert again.compared is not None
    assert again.compared.run is None, "a model of other images is not held against it unasked"
    with pytest.raises(DataError, match="another version of the images"):
        evaluate(config, run="autumn", against="alone")


def test_images_that_do_not_fit_are_refused_with_the_way_out(config: SiloConfig, shard: ImageDataset) -> None:
    folder = config.shard.parent
    save_npz(folder / "renamed.npz", dataclasses.replace(shard, class_names=tuple("abcdefghi")))
    save_npz(folder / "large.npz", generate_tissue(seed=1, train=9, test=9, size=20))
    for name, words in (
        ("renamed.npz", "same classes in the same order"),
        ("large.npz", "the model takes 3×16×16"),
        ("slide.png", "silo predict"),
        ("none.npz", "no such file"),
    ):
        with pytest.raises(DataError, match=words):
            evaluate(config, images=folder / name)
    (config.runs / "autumn" / "plan.json").unlink()
    with pytest.raises(DataError, match=r"plan\.json"):
        evaluate(config)


def test_test_images_that_the_model_has_seen_are_told(config: SiloConfig, shard: ImageDataset) -> None:
    assert shard.train.patients is not None
    leaked = ImageSplit(shard.train.images[:40], shard.train.labels[:40], shard.train.patients[:40])
    path = config.shard.parent / "leaked.npz"
    save_npz(path, dataclasses.replace(shard, test=leaked))
    found = evaluate(config, images=path, samples=0)
    assert found.overlap.images == 40
    assert found.overlap.patients == len(set(shard.train.patients[:40]))
    assert "40 test images also stand among the training images" in text_of(found)
    assert "also have training images" in text_of(found)
    save_npz(config.shard, dataclasses.replace(shard, test=leaked))
    assert "have changed since the model was trained" in text_of(evaluate(config, samples=0))


def test_pictures_are_the_most_and_least_sure_of_right_and_wrong() -> None:
    right = np.array([True, False, True, True, False, True, True])
    sure = np.array([0.9, 0.8, 0.5, 0.7, 0.3, 0.99, 0.6])
    assert choose(right, sure, 2) == [
        ("wrong, most sure", 1),
        ("wrong, most sure", 4),
        ("right, most sure", 5),
        ("right, most sure", 0),
        ("right, least sure", 2),
        ("right, least sure", 6),
    ]
    assert choose(right, sure, 0) == []


def test_the_page_shows_each_picture_beside_its_map(found: Evaluation, shard: ImageDataset) -> None:
    assert {one.kind for one in found.samples} == set(KINDS)
    assert len({one.number for one in found.samples}) == len(found.samples) == 12
    for one in found.samples:
        assert np.array_equal(one.image, shard.test.images[one.number])
        assert one.saliency is not None
        assert (one.truth == one.said) == one.kind.startswith("right")
    drawn = json.dumps(make_document(found).to_data())
    assert drawn.count("data:image/png;base64,") == 24


def test_what_did_not_count_is_faded_and_what_did_is_as_it_was() -> None:
    image = np.full((9, 9, 3), 200, np.uint8)
    saliency = np.zeros((9, 9), np.float32)
    saliency[7, 1] = 1.0
    seen = spotlight(image, saliency)
    assert seen[7, 1].tolist() == [200] * 3
    assert seen[0, 0].tolist() == [139] * 3
    assert whereabouts(saliency) == "lower left"
    assert whereabouts(np.zeros((9, 9), np.float32)) == "nowhere"
    places = [whereabouts(np.eye(1, 9, k).reshape(3, 3).astype(np.float32)) for k in range(9)]
    assert places[4] == "centre"
    assert len(set(places)) == 9


def test_a_model_without_places_says_that_it_has_no_map(config: SiloConfig) -> None:
    model = ModelPlan(name="mlp-64", input_shape=(3, 16, 16), classes=CLASSES)
    train(config, planned("flat", "fedavg", model=model))
    found = evaluate(config, run="flat")
    assert found.layer is None
    assert "cannot be shown" in text_of(found)


def test_the_files_are_whole_and_for_the_silos_own_user_only(config: SiloConfig, found: Evaluation) -> None:
    before = {path: path.read_bytes() for path in config.runs.rglob("*") if path.is_file()}
    page, figures, card = write_page(found, config)
    for path in (page, figures, card):
        assert path.stat().st_mode & 0o777 == 0o600
    text = page.read_text()
    assert "<script" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert json.loads(figures.read_text()) == json.loads(json.dumps(as_json(found)))
    assert card == config.runs / "autumn" / "model-card.md"
    assert {path: path.read_bytes() for path in before} == before


def test_the_card_says_what_it_was_trained_on_and_that_it_is_no_medical_device(found: Evaluation) -> None:
    card = as_markdown(found)
    headings = [line[3:] for line in card.splitlines() if line.startswith("## ")]
    assert headings == [
        *("Model details", "Intended use", "Factors", "Metrics", "Evaluation data", "Training data"),
        *("Quantitative analyses", "Ethical considerations", "Caveats and recommendations"),
    ]
    for words in ("fedavg", "1 of 3 rounds", "160 images", "not a medical device", "ε = ∞", "lenet5-gn"):
        assert words in card
    noise = noise_multiplier_for(2.0, delta=1e-5, events=lambda z: [SampledGaussian(0.5, z, 12)])
    private = PrivacyPlan(
        epsilon=2.0, delta=1e-5, clipping_norm=1.0, noise_multiplier=noise, sampling_rate=0.5, steps=12
    )
    told = as_markdown(dataclasses.replace(found, plan=planned("autumn", "fedavg", privacy=private)))
    assert "at most ε = 2.000 at δ = 1e-05" in told
    alone = as_markdown(dataclasses.replace(found, plan=planned("autumn", "local")))
    assert "Nothing of other hospitals" in alone


def test_names_are_text_on_page_and_card(config: SiloConfig, found: Evaluation) -> None:
    names = ("<b>x</b>|y", "\u202ereversed", *found.class_names[2:])
    page, _, card = write_page(dataclasses.replace(found, class_names=names), config)
    for text in (page.read_text(), card.read_text()):
        assert "<b>" not in text
        assert "\u202e" not in text
    rows = [line for line in card.read_text().splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 2, "two tables, whole"


def test_many_classes_are_told_by_what_is_mixed_up_most(found: Evaluation) -> None:
    count = 30
    confusion = [[0] * count for _ in range(count)]
    confusion[3][4], confusion[5][5] = 7, 9
    one = found.performance.classes[0]
    classes = tuple(ClassPerformance(one.sensitivity, one.specificity, one.auroc) for _ in range(count))
    performance = dataclasses.replace(
        found.performance, confusion=tuple(tuple(row) for row in confusion), classes=classes
    )
    many = dataclasses.replace(found, performance=performance, class_names=tuple(f"c{n}" for n in range(count)),
                               training=(1,) * count, samples=())  # fmt: skip
    table = make_document(many).sections[0].blocks[1]
    assert table.rows == [["c3", "c4", "7"]]  # type: ignore[union-attr]


_watched: list[str] | None = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is not None and event.startswith(("socket.", "urllib.", "http.client.", "ftplib.", "smtplib.")):
        _watched.append(event)


def test_in_the_midst_of_a_run_it_says_what_the_model_has_behind_it(config: SiloConfig) -> None:
    """With FedAvg that is what the coordinator handed out before the last round that was trained here."""
    progress = config.runs / "autumn" / "progress.json"
    for rounds, trained, words in (
        (1, True, "The run has not ended here: this is the model after 1 of 3 rounds."),
        (0, False, "This model was not trained: no round of the run is in it."),
    ):
        content = {**json.loads(progress.read_text()), "finished": False, "rounds": rounds}
        progress.write_text(json.dumps(content))
        between = evaluate(config, run="autumn")
        assert (between.model.rounds, between.model.trained, between.ended) == (rounds, trained, False)
        assert words in make_document(between).warnings
        assert f"for {rounds} of 3 rounds" in as_markdown(between)
    with pytest.raises(DataError, match="no run has left a trained model"):
        evaluate(config)


@pytest.fixture
def connections() -> Iterator[list[str]]:
    """What Python's audit hook tells of sockets meanwhile; a hook cannot be taken away again."""
    global _watched
    sys.addaudithook(_watch)
    _watched = []
    yield _watched
    _watched = None


def test_the_command_opens_no_connection_and_leaves_the_journal_alone(
    config: SiloConfig, connections: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    command = ["silo", "evaluate", "--config", str(config.shard.parent / "hospital1.yaml"), "--samples", "1"]
    for options in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", [*command, *options])
        with pytest.raises(SystemExit) as ending:
            cli.main()
        assert not ending.value.code
        said = capsys.readouterr().out
        if options:
            assert json.loads(said) == json.loads((config.state / "evaluation" / "autumn.json").read_text())
        else:
            assert "May it be used on patients? No." in said
            assert "Did anything leave the building? Nothing." in said
    assert connections == []
    changed = {path.name for path in config.state.rglob("*") if path.is_file()}
    assert changed == {
        *("autumn.html", "autumn.json", "model-card.md"),
        *("plan.json", "progress.json", MODEL, DESCRIPTION, RESULTS, "personal-000001-end.safetensors"),
    }


def test_help_needs_neither_pytorch_nor_scikit_learn() -> None:
    code = "import sys, medsilo.silo.cli; sys.exit(len({'torch', 'sklearn', 'scipy', 'onnx'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("width", [1200, 360])
def test_axe_finds_nothing_and_nothing_is_cut_off(
    browser: Any, config: SiloConfig, found: Evaluation, width: int
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    path = write_page(found, config)[0]
    page = browser.new_page(viewport={"width": width, "height": 800})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    found_by_axe = axe.run(page).response["violations"]
    assert [(one["id"], one["impact"], one["nodes"][0]["html"]) for one in found_by_axe] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
    page.close()
