"""Experiment files: what they sweep over, what they refuse, and what is cut for public images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from pydantic import TypeAdapter

from medsilo.algorithms.datasets import ImageDataset, ImageSplit, image_hashes
from medsilo.algorithms.models import build, state_of
from medsilo.privacy.budget.accounting import epsilon
from medsilo.privacy.consent.plan import ModelPlan, Train
from medsilo.privacy.errors import ConfigurationError
from medsilo.silo.data.settings import ByPatient, Dirichlet, PooledDirichlet, PracticalGroups, Setting
from medsilo.silo.data.sharding import cut
from medsilo.silo.data.synthetic import generate_tissue
from medsilo.simulation.experiment import ExperimentConfig, folder_name, runs
from medsilo.simulation.public_images import cut_public

DIRICHLET = {"kind": "dirichlet", "silos": 4, "alpha": 0.5, "train_per_silo": 30, "test_per_silo": 10}


def experiment(folder: Path, **changes: Any) -> ExperimentConfig:
    content: dict[str, Any] = {
        "name": "sweep",
        "data": "synthetic",
        "setting": DIRICHLET,
        "model": "mlp-64",
        "training": {"epochs": 1, "batch_size": 20},
        "rounds": 2,
        "seeds": [1],
        "methods": [{"name": "local"}],
        **changes,
    }
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}, sort_keys=False))
    return ExperimentConfig.read(path)


def test_an_experiment_starts_from_a_file_beside_it_but_where_a_method_does_not(tmp_path: Path) -> None:
    plan = ModelPlan(name="mlp-64", input_shape=(3, 28, 28), classes=9)
    torch.save(state_of(build(plan, seed=7)), tmp_path / "given.pt")
    methods = [{"name": "local"}, {"name": "local", "weights": None, "label": "at random"}]
    config = experiment(tmp_path, weights={"file": "given.pt", "public": True}, methods=methods, participation=[1])
    one, other = runs(config, (), tmp_path)
    found = one.plan(generate_tissue(train=9, test=9)).model
    assert one.weights == (tmp_path / "given.pt",)
    assert found.weights is not None
    assert found.weights.public
    assert other.weights == ()
    assert other.plan(generate_tissue(train=9, test=9)).model == plan
    with pytest.raises(ConfigurationError, match="weights stand at the experiment"):
        experiment(tmp_path, methods=[{"name": "local", "weights": {"file": "given.pt"}}])


def test_a_list_is_swept_over_and_runs_are_the_product_of_all(tmp_path: Path) -> None:
    config = experiment(
        tmp_path,
        setting=None,
        settings={"mild": DIRICHLET, "hard": {**DIRICHLET, "alpha": 0.1}},
        seeds=[1, 2, 3],
        participation=[1, 0.5],
        methods=[{"name": "local"}, {"name": "diversifed", "temperature": [0.5, 1.1], "proximal_weight": [1, 2]}],
    )
    found = runs(config, (), tmp_path)
    assert len(found) == 2 * 3 * 2 * (1 + 4)
    assert len({run.folder for run in found}) == len(found)
    assert [run.variant.label for run in found[:5]] == [
        "local",
        "diversifed-temperature=0.5-proximal_weight=1",
        "diversifed-temperature=0.5-proximal_weight=2",
        "diversifed-temperature=1.1-proximal_weight=1",
        "diversifed-temperature=1.1-proximal_weight=2",
    ]
    assert found[0].folder == tmp_path / "synthetic" / "mild" / "local" / "seed-1"
    half = next(run for run in found if run.participation == 0.5)
    assert half.folder.parts[-3] == "mild-participation=0.5"
    assert half.plan(generate_tissue(seed=0, train=90, test=90)).participation == 0.5


PRIVACY = {"epsilon": [8, float("inf")], "delta": 1e-5, "sampling_rate": 0.25}


def test_privacy_is_swept_over_and_an_infinite_epsilon_is_training_without_it(tmp_path: Path) -> None:
    config = experiment(
        tmp_path,
        privacy=PRIVACY,
        methods=[
            {"name": "fedavg"},
            {"name": "diversifed", "label": "ours", "privacy": {"epsilon": 2, "clipping_norm": 0.5}},
            {"name": "local", "privacy": None},
        ],
    )
    data = generate_tissue(seed=0, train=90, test=90)
    found = {run.variant.label: run.plan(data).privacy for run in runs(config, (), tmp_path)}
    assert list(found) == ["fedavg-epsilon=8", "fedavg-epsilon=inf", "ours", "local"]
    assert found["fedavg-epsilon=inf"] is None
    assert found["local"] is None
    private, own = found["fedavg-epsilon=8"], found["ours"]
    assert private is not None
    assert own is not None
    assert (private.epsilon, private.delta, private.sampling_rate, private.clipping_norm) == (8, 1e-5, 0.25, 1.0)
    assert private.steps == 2 * 1 * 4
    assert 7.9 < epsilon(private.events, delta=1e-5) <= 8
    assert (own.epsilon, own.delta, own.clipping_norm) == (2, 1e-5, 0.5)
    assert {variant.base for variant in config.variants()} == {"fedavg", "ours", "local"}


def test_a_preset_chooses_the_training_of_each_method_at_each_epsilon(tmp_path: Path) -> None:
    preset = {"preset": "head", "epsilon": [0.5, 2], "delta": 1e-5, "unit": "image", "units": 100}
    config = experiment(tmp_path, privacy=preset, methods=[{"name": "fedavg"}, {"name": "local"}])
    data = generate_tissue(seed=0, train=90, test=90)
    found = {run.variant.label: run.plan(data) for run in runs(config, (), tmp_path)}
    silos = next(iter(config.make_settings().values())).silos
    steps = {label: plan.training.learning_rate for label, plan in found.items()}
    assert all(plan.training.momentum == 0.9 and plan.training.keep_optimizer_state for plan in found.values())
    assert steps["fedavg-epsilon=0.5"] < steps["fedavg-epsilon=2"], "less noise carries further"
    assert steps["fedavg-epsilon=2"] == pytest.approx(silos**0.5 * steps["local-epsilon=2"], rel=0.01)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": [{"name": "feddfq"}]}, "selection: argmin.*privacy: null"),
        ({"methods": [{"name": "fedproto"}]}, "prototypes"),
        ({"engine": "stacked"}, "engine: alone"),
        ({"privacy": {"epsilon": 8}}, "local: privacy: the key `delta` is missing"),
        ({"privacy": {**PRIVACY, "epsilom": 8}}, "epsilom"),
        ({"methods": [{"name": "local", "privacy": 8}]}, "local: privacy should hold"),
    ],
)
def test_privacy_that_cannot_be_is_refused_with_the_way_out(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        experiment(tmp_path, **{"privacy": PRIVACY, **changes})


def test_a_method_may_have_its_own_training_and_model(tmp_path: Path) -> None:
    config = experiment(
        tmp_path,
        methods=[
            {"name": "local"},
            {
                "name": "fedavg",
                "training": {"optimizer": "sgd", "learning_rate": [0.1, 0.01]},
                "model": "diversifed-cnn",
            },
        ],
    )
    plain, first, second = config.variants()
    assert (plain.training.optimizer, plain.training.epochs, plain.model) == ("adam", 1, "mlp-64")
    assert (first.training.optimizer, first.training.learning_rate, first.training.epochs) == ("sgd", 0.1, 1)
    assert second.training.learning_rate == 0.01
    assert first.model == "diversifed-cnn"
    assert first.label == "fedavg-model=diversifed-cnn-optimizer=sgd-learning_rate=0.1"


def test_one_seed_and_methods_with_their_defaults_need_no_brackets(tmp_path: Path) -> None:
    config = experiment(tmp_path, seeds=3, methods=["local", "fedavg"])
    assert config.seeds == (3,)
    assert [variant.label for variant in config.variants()] == ["local", "fedavg"]


def test_what_methods_say_of_such_runs_is_told(tmp_path: Path) -> None:
    notes = experiment(tmp_path, setting={**DIRICHLET, "silos": 2}, methods=["diversifed", "scaffold", "local"]).notes()
    assert len(notes) == 2
    assert "fewer than three silos" in notes[0]
    assert notes[1].startswith("scaffold: scaffold reads gradients off SGD's steps")


def test_it_is_told_where_training_given_to_a_method_changes_nothing(tmp_path: Path) -> None:
    methods = [
        {"name": name, "training": {"optimizer": "sgd", "learning_rate": 0.1, "epochs": 3}}
        for name in ("pfedme", "fedavg")
    ]
    notes = experiment(tmp_path, methods=methods).notes()
    (note,) = notes
    assert note.startswith("pfedme-")
    assert note.endswith("pfedme takes steps of its own; optimizer, learning_rate of `training:` change nothing")


def test_a_label_of_its_own_gets_only_what_is_swept(tmp_path: Path) -> None:
    methods = [{"name": "diversifed", "label": "ours", "proximal_weight": 1, "temperature": [0.5, 1.1]}]
    labels = [variant.label for variant in experiment(tmp_path, methods=methods).variants()]
    assert labels == ["ours-temperature=0.5", "ours-temperature=1.1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"setting": None}, "either one `setting:` or several"),
        ({"settings": {"a": dict(DIRICHLET)}}, "either one `setting:` or several"),
        ({"setting": {**DIRICHLET, "kind": "iid"}}, "kind is 'iid'; use one of practical, pathological"),
        ({"setting": {**DIRICHLET, "shards": 3}}, "dirichlet has no shards; it has alpha"),
        ({"setting": {**DIRICHLET, "alpha": 0}}, "setting dirichlet: alpha is 0"),
        ({"setting": {**DIRICHLET, "kind": "dirichlet-pooled"}}, "has no test_per_silo, train_per_silo; it has alpha"),
        ({"setting": {**DIRICHLET, "silos": "many"}}, "setting dirichlet: silos"),
        ({"methods": [{"temperature": 1}]}, "needs a `name`"),
        ({"methods": [{"name": "divers"}]}, "did you mean 'diversifed'"),
        ({"methods": [{"name": "diversifed", "temprature": [1, 2]}]}, "did you mean 'temperature'"),
        ({"methods": [{"name": "diversifed", "temperature": []}]}, "is an empty list"),
        ({"methods": [{"name": "local"}, {"name": "local"}]}, "two methods are called 'local'"),
        ({"methods": [{"name": "local", "training": {"optimiser": "sgd"}}]}, "did you mean `optimizer`"),
        ({"methods": [{"name": "local", "training": "sgd"}]}, "should hold `key: value` pairs"),
        ({"participation": 0}, "participation"),
        ({"published": {"practical": {"local": 60}}}, "practical is not a setting of this experiment"),
        ({"published": {"dirichlet": {"local": 60}}}, "are for one data set; name it"),
        ({"published_on": "pathmnist"}, "there are none"),
        ({"public_per_class": 2, "public_share": 0.1}, "not both"),
        ({"sedes": [1]}, "did you mean `seeds`"),
        ({"seeds": [1, 2, 1]}, "`seeds` has a value twice"),
        ({"seeds": []}, "`seeds` is empty"),
        ({"model": ["mlp-64", "lenet5"]}, "a sweep stands inside a method"),
        ({"training": {"learning_rate": [0.1, 0.01]}}, "`training`: learning_rate is one for all methods"),
        ({"methods": []}, "`methods` is empty"),
        ({"engine": "lanes", "device": "cuda"}, "on a GPU take `engine: stacked`"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message) as error:
        experiment(tmp_path, **changes)
    assert "experiment.yaml" in str(error.value)


def test_data_stand_in_the_file_or_are_given(tmp_path: Path) -> None:
    config = experiment(tmp_path, data=["synthetic", "sets/colon.npz"])
    assert [run.data for run in runs(config, (), tmp_path)] == ["synthetic", str(tmp_path / "sets" / "colon.npz")]
    assert [run.folder.parts[-4] for run in runs(config, (), tmp_path)] == ["synthetic", "colon"]
    assert [run.data for run in runs(config, ("pathmnist",), tmp_path)] == ["pathmnist"]
    with pytest.raises(ConfigurationError, match="names no data set"):
        runs(experiment(tmp_path, data=None), (), tmp_path)
    with pytest.raises(ConfigurationError, match="called alike"):
        runs(config, ("a/x.npz", "b/x.npz"), tmp_path)


def test_folders_of_different_labels_differ_and_stay_inside() -> None:
    labels = ["a/b", "a_b", "../x", "a b", "x" * 300, "x" * 299, ".hidden"]
    names = [folder_name(label) for label in labels]
    assert len(set(names)) == len(labels)
    assert all("/" not in name and not name.startswith(".") and len(name) <= 100 for name in names)
    assert folder_name("diversifed-temperature=0.5") == "diversifed-temperature=0.5"


def test_the_shipped_experiments_can_be_read() -> None:
    found = sorted((Path(__file__).parents[2] / "configs" / "experiments").glob("*.yaml"))
    assert found
    for path in found:
        assert runs(ExperimentConfig.read(path), ("synthetic",), Path("runs"))


def pixels(*splits: ImageSplit) -> set[bytes]:
    return {digest for split in splits for digest in image_hashes(split.images)}


@pytest.mark.parametrize("validation", [True, False])
@pytest.mark.parametrize("test_from", ["test", "train"])
def test_public_images_are_balanced_and_nobody_elses(validation: bool, test_from: Any) -> None:
    whole = generate_tissue(seed=3, train=450, test=180)
    if validation:
        split = whole.test
        dataset = ImageDataset("v", "s", True, whole.class_names, whole.train, split, whole.test)
    else:
        dataset = ImageDataset("t", "s", True, whole.class_names, whole.train, None, whole.test)
    setting: Setting = Dirichlet(silos=3, alpha=1.0, train_per_silo=40, test_per_silo=10, test_from=test_from)
    shards = cut(dataset, setting, seed=1)
    public = cut_public(dataset, setting, shards, seed=1, per_class=3)
    counts = public.train.counts(9) + public.test.counts(9)
    assert counts.tolist() == [3] * 9
    ours = pixels(public.train, public.test)
    assert not ours & {digest for shard in shards for digest in pixels(shard.train, shard.test)}
    assert ours <= pixels(dataset.validation or dataset.train)
    again = cut_public(dataset, setting, shards, seed=1, per_class=3)
    assert again.fingerprint == public.fingerprint
    # 450 or 180 images, a tenth of them over nine classes
    tenth = cut_public(dataset, setting, shards, seed=1, share=0.1)
    assert tenth.train.counts(9).sum() + tenth.test.counts(9).sum() == (18 if validation else 45)


def test_public_images_beside_pooled_silos_come_from_the_validation_split_alone() -> None:
    whole = generate_tissue(seed=3, train=450, test=180)
    train, test = (ImageSplit(split.images, split.labels) for split in (whole.train, whole.test))
    kept = ImageSplit(train.images[:90], train.labels[:90])
    rest = ImageSplit(train.images[90:], train.labels[90:])
    setting = PooledDirichlet(silos=3, alpha=5.0)
    dataset = ImageDataset("p", "s", True, whole.class_names, rest, kept, test)
    shards = cut(dataset, setting, seed=1)
    public = cut_public(dataset, setting, shards, seed=1, per_class=1)
    assert pixels(public.train, public.test) <= pixels(kept)
    without = ImageDataset("p", "s", True, whole.class_names, rest, None, test)
    with pytest.raises(ConfigurationError, match="0 training images of it are free"):
        cut_public(without, setting, shards, seed=1, per_class=1)


def test_public_images_that_are_not_there_are_refused() -> None:
    whole = generate_tissue(seed=3, train=450, test=180)
    patients = np.array([f"p{index % 9}" for index in range(450)])
    train = ImageSplit(whole.train.images, whole.train.labels, patients)
    dataset = ImageDataset("p", "s", True, whole.class_names, train, None, whole.test)
    every = ByPatient(silos=3, test_from="train")
    with pytest.raises(ConfigurationError, match="0 training images of it are free"):
        cut_public(dataset, every, cut(dataset, every, seed=1), seed=1, per_class=1)
    setting = PracticalGroups(groups=(1, 1, 1), train_per_silo=60, test_per_silo=10)
    with pytest.raises(ConfigurationError, match="give the silos fewer images"):
        cut_public(dataset, setting, cut(dataset, setting, seed=1), seed=1, per_class=49)


def test_what_is_trained_is_swept_over_and_named_in_labels() -> None:
    config = ExperimentConfig.model_validate(
        {
            "name": "e",
            "data": "synthetic",
            "setting": {"kind": "practical"},
            "model": "lenet5",
            "train": "head",
            "rounds": 1,
            "seeds": [1],
            "methods": [
                {"name": "fedavg"},
                {"name": "fedavg", "label": "part", "train": ["all", {"last": 2}, {"lora": {"rank": 4}}]},
            ],
        }
    )
    of: TypeAdapter[Train] = TypeAdapter(Train)
    found = {variant.label: of.dump_python(variant.train) for variant in config.variants()}
    assert found == {
        "fedavg": "head",
        "part-train=all": "all",
        "part-last=2": {"last": 2},
        "part-rank=4": {"lora": {"rank": 4}},
    }
    images = generate_tissue(seed=1, train=9, test=9)
    plans = [run.plan(images) for run in runs(config, ("synthetic",), Path("runs"))]
    assert [plan.model.train for plan in plans] == [variant.train for variant in config.variants()]


def test_another_part_in_a_method_is_refused_in_a_sentence() -> None:
    fields = {"name": "e", "data": "synthetic", "setting": {"kind": "practical"}, "rounds": 1, "seeds": [1]}
    config = ExperimentConfig.model_validate({**fields, "methods": [{"name": "fedavg", "train": "tail"}]})
    with pytest.raises(ConfigurationError, match="train: should be all, head,"):
        list(config.variants())
