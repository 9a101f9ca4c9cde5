"""What a silo keeps of a run: the round before or the round after, never something in between."""

from __future__ import annotations

import dataclasses
import json
import math
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from medsilo.algorithms.datasets import ImageSplit, save_npz
from medsilo.algorithms.method import PERSONAL, Memory
from medsilo.algorithms.models import build, frozen_state, plain_state, state_of
from medsilo.algorithms.tensors import Part
from medsilo.privacy.consent.plan import ModelPlan, RunPlan
from medsilo.privacy.errors import DataError, DiskError
from medsilo.privacy.files.durable import on_disk
from medsilo.silo.model.kept_models import find_model
from medsilo.silo.model.prediction import load_model
from medsilo.silo.run import run_state
from medsilo.silo.run.run_state import DESCRIPTION, MODEL, RESULTS, RunState
from medsilo.silo.training.measuring import Measurement
from tests.support.hospital.run_folder import dataset, memory, plan


def same(one: Memory, other: Memory) -> bool:
    return {g: set(s) for g, s in one.items()} == {g: set(s) for g, s in other.items()} and all(
        torch.equal(one[g][n], other[g][n]) for g in one for n in one[g]
    )


def open_state(folder: Path, **changes: Any) -> RunState:
    return RunState(folder, plan(**changes), "hospital1", dataset())


def save(state: RunState, rounds: int, **changes: Any) -> None:
    content: dict[str, Any] = {
        "trained_rounds": rounds,
        "measurements": {rounds: Measurement(0.25 * rounds, 1.0 / rounds)},
    }
    state.save(memory(rounds), **{**content, **changes})


def test_a_fresh_run_has_nothing(tmp_path: Path) -> None:
    state = open_state(tmp_path / "r")
    assert (state.trained_rounds, state.finished, state.measured, state.memory()) == (0, False, [], {})
    assert RunPlan.model_validate_json((tmp_path / "r" / "plan.json").read_bytes()) == plan()
    assert not (tmp_path / "r" / MODEL).exists()
    assert (tmp_path / "r").stat().st_mode & 0o077 == 0


def test_a_saved_round_is_found_again(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    for rounds in (1, 2):
        save(state, rounds)
    again = open_state(tmp_path)
    assert again.trained_rounds == 2
    assert not again.finished
    assert same(again.memory(), memory(2))
    assert [(m.rounds, m.accuracy, m.loss) for m in again.measured] == [(1, 0.25, 1.0), (2, 0.5, 0.5)]
    save(again, 2, finished=True, measurements={3: None})
    last = open_state(tmp_path)
    assert last.finished
    assert len(last.measured) == 2


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_round_whose_loss_is_not_finite_is_found_again(tmp_path: Path, loss: float) -> None:
    measured = {1: Measurement(0.25, loss)}
    RunState(tmp_path, plan(), "h", dataset()).save(memory(1), trained_rounds=1, measurements=measured, received={})
    again = RunState(tmp_path, plan(), "h", dataset())
    assert again.trained_rounds == 1
    assert repr(again.measured[-1].loss) == repr(loss)


def test_old_rounds_files_are_removed_and_no_partial_ones_left(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    for rounds in (1, 2, 3):
        save(state, rounds)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [
            "plan.json",
            "progress.json",
            MODEL,
            DESCRIPTION,
            RESULTS,
            "personal-000003.safetensors",
            "extra-000003.safetensors",
        ]
    )


class CrashError(Exception):
    """The process ends here."""


@pytest.mark.parametrize("crash_at", ["progress.json", DESCRIPTION, RESULTS])
def test_a_crash_while_saving_leaves_the_round_before_or_the_round_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: str
) -> None:
    state = open_state(tmp_path)
    save(state, 1)
    real = run_state.write_atomically

    def crash(path: Path, content: bytes) -> None:
        if path.name == crash_at:
            raise CrashError
        real(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(run_state, "write_atomically", crash)
        with pytest.raises(CrashError):
            save(state, 2)
    again = open_state(tmp_path)
    found = 1 if crash_at == "progress.json" else 2
    assert again.trained_rounds == found
    assert same(again.memory(), memory(found))
    shown = load_file(tmp_path / MODEL)
    assert all(torch.equal(shown[name], tensor) for name, tensor in memory(found)[PERSONAL].items())
    assert json.loads((tmp_path / DESCRIPTION).read_text())["rounds_trained"] == found
    assert json.loads((tmp_path / RESULTS).read_text())["measured"][-1]["rounds"] == found
    save(again, 2)
    assert same(open_state(tmp_path).memory(), memory(2))


def test_a_crash_while_a_tensor_file_is_written_leaves_the_round_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = open_state(tmp_path)
    save(state, 1)

    def crash(*_: object, **__: object) -> None:
        (tmp_path / "personal-000002.safetensors").write_bytes(b"half")
        raise CrashError

    with monkeypatch.context() as patched:
        patched.setattr(run_state, "write_tensors", crash)
        with pytest.raises(CrashError):
            save(state, 2)
    again = open_state(tmp_path)
    assert again.trained_rounds == 1
    assert same(again.memory(), memory(1))


def test_a_disk_that_takes_no_more_is_told_and_leaves_the_round_before(tmp_path: Path) -> None:
    """Safetensors has an error of its own for what the disk says."""
    state = open_state(tmp_path)
    save(state, 1)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(DiskError, match="may not grow further"), on_disk(tmp_path):
            save(state, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    again = open_state(tmp_path)
    assert again.trained_rounds == 1
    assert same(again.memory(), memory(1))


def test_the_shown_model_loads_into_the_architecture(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    save(state, 1)
    description = json.loads((tmp_path / DESCRIPTION).read_text())
    model = build(ModelPlan(**description["architecture"]))
    model.load_state_dict(load_file(tmp_path / MODEL))
    assert all(torch.equal(t, memory(1)[PERSONAL][n]) for n, t in model.state_dict().items())
    assert description["class_names"] == ["fat", "mucus", "tumour"]
    assert description["synthetic"] is True
    assert description["plan_sha256"] == plan().sha256.hex()


def test_results_tell_what_was_measured(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    save(state, 1, measurements={0: Measurement(0.1, 2.0), 1: Measurement(0.5, 1.0)})
    results = json.loads((tmp_path / RESULTS).read_text())
    assert results["measured"] == [
        {"rounds": 0, "accuracy": 0.1, "loss": 2.0},
        {"rounds": 1, "accuracy": 0.5, "loss": 1.0},
    ]
    assert (results["run"], results["silo"], results["method"], results["test_images"]) == (
        "r",
        "hospital1",
        "local",
        6,
    )


def test_a_run_of_the_same_name_with_another_plan_is_not_continued(tmp_path: Path) -> None:
    save(open_state(tmp_path), 1)
    with pytest.raises(DataError, match="another plan"):
        open_state(tmp_path, seed=2)


def test_after_a_refused_plan_the_folder_still_holds_the_plan_of_its_run(tmp_path: Path) -> None:
    save(open_state(tmp_path), 1)
    with pytest.raises(DataError):
        open_state(tmp_path, seed=2)
    assert RunPlan.model_validate_json((tmp_path / "plan.json").read_bytes()) == plan()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"trained_rounds": 1}', b"\xff\xfe"])
def test_damaged_progress_says_what_to_do(tmp_path: Path, content: bytes) -> None:
    save(open_state(tmp_path), 1)
    (tmp_path / "progress.json").write_bytes(content)
    with pytest.raises(DataError, match=r"(?s)progress\.json.*the disk is well.*move .* away.*backup"):
        open_state(tmp_path)


def test_what_is_written_anew_stays_what_it_was_for_who_reads_it_still(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    save(state, 1)
    held = state.memory()[PERSONAL]  # a mapping of the file
    before = {name: tensor.clone() for name, tensor in held.items()}
    state.save(memory(2), trained_rounds=1, measurements={})
    assert same(state.memory(), memory(2))
    assert all(torch.equal(held[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("damage", ["gone", "cut short"])
@pytest.mark.parametrize("group", ["personal", "extra"])
def test_a_damaged_memory_says_what_to_do(tmp_path: Path, damage: str, group: str) -> None:
    save(open_state(tmp_path), 1)
    path = tmp_path / f"{group}-000001.safetensors"
    content = path.read_bytes()
    path.unlink()
    if damage == "cut short":
        path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=f"(?s){group}-000001.*the disk is well.*move .* away.*backup"):
        open_state(tmp_path).memory()


# Prediction reads nothing but such a folder.


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    save(open_state(tmp_path / "runs" / "r"), 1)
    return tmp_path / "runs" / "r"


def expected(images: np.ndarray[Any, Any]) -> tuple[list[int], list[float]]:
    model = build(plan().model)
    model.load_state_dict(memory(1)[PERSONAL])
    model.eval()
    pixels = (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    with torch.inference_mode():
        probabilities, labels = torch.softmax(model(pixels), dim=1).max(dim=1)
    return labels.tolist(), probabilities.tolist()


def test_pictures_in_a_folder_are_classified_in_the_order_of_their_names(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    images = dataset().test.images
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number}.png")
    (folder / "notes.txt").write_text("not a picture")
    found = load_model(trained).classify(folder)
    labels, probabilities = expected(images)
    assert [p.image for p in found] == [f"{number}.png" for number in range(6)]
    assert [p.label for p in found] == labels
    assert [p.probability for p in found] == pytest.approx(probabilities, abs=1e-6)
    assert [p.class_name for p in found] == [("fat", "mucus", "tumour")[label] for label in labels]
    assert {p.truth for p in found} == {None}


def test_a_picture_of_another_size_and_kind_is_fitted_to_the_model(trained: Path, tmp_path: Path) -> None:
    for mode in ("L", "RGBA", "P", "CMYK"):
        path = tmp_path / f"{mode}.tiff"
        Image.new(mode, (50, 31)).save(path)
        (one,) = load_model(trained).classify(path)
        assert one.image == f"{mode}.tiff"


def test_a_folder_for_each_class_is_classified_with_its_truth(trained: Path, tmp_path: Path) -> None:
    images = dataset().test
    names = ("fat", "mucus", "tumour")
    for number, (image, label) in enumerate(zip(images.images, images.labels, strict=True)):
        folder = tmp_path / "pictures" / names[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    found = load_model(trained).classify(tmp_path / "pictures")
    assert [one.image for one in found] == [
        *("fat/0.png", "fat/3.png", "mucus/1.png", "mucus/4.png", "tumour/2.png", "tumour/5.png")
    ]
    assert [one.truth for one in found] == [0, 0, 1, 1, 2, 2]
    labels, _ = expected(images.images)
    assert [one.label for one in found] == [labels[number] for number in (0, 3, 1, 4, 2, 5)]
    (tmp_path / "pictures" / "bone").mkdir()
    shutil.copy(tmp_path / "pictures" / "fat" / "0.png", tmp_path / "pictures" / "bone" / "0.png")
    with pytest.raises(DataError, match=r"bone/0\.png: its class 'bone' is not one of fat, mucus, tumour"):
        load_model(trained).classify(tmp_path / "pictures")


def test_what_is_not_as_the_training_images_were_is_said(trained: Path, tmp_path: Path) -> None:
    """The model was trained on 16 × 16 pixels with colour."""
    numbers = np.random.default_rng(1)
    for name, picture in {
        "as-trained.png": Image.fromarray(dataset().test.images[0]),
        "large.png": Image.fromarray(numbers.integers(0, 256, (64, 64, 3), dtype=np.uint8)),
        "wide.png": Image.fromarray(numbers.integers(0, 256, (30, 50, 3), dtype=np.uint8)),
        "grey.png": Image.fromarray(dataset().test.images[0]).convert("L"),
    }.items():
        (tmp_path / "one" / name).mkdir(parents=True)
        picture.save(tmp_path / "one" / name / name)

    def notices(*names: str) -> str:
        told: list[str] = []
        folder = tmp_path / "-".join(names)
        folder.mkdir()
        for name in names:
            shutil.copy(tmp_path / "one" / name / name, folder / name)
        load_model(trained).classify(folder, notice=told.append)
        return " ".join(told)

    assert notices("as-trained.png") == ""
    assert notices("as-trained.png", "large.png") == (
        "1 of 2 pictures were scaled from 64 × 64 pixels to the 16 × 16 that the model was trained on, as `silo "
        "prepare` does."
    )
    assert "scaled and stretched from 50 × 30 pixels" in notices("wide.png")
    assert notices("grey.png") == "1 of 1 images are grey; the model was trained on images with colour."


def test_colour_given_to_a_model_that_was_trained_on_grey_is_said(tmp_path: Path) -> None:
    shard = dataset()
    grey = dataclasses.replace(
        shard, train=ImageSplit(np.repeat(shard.train.images[..., :1], 3, axis=3), shard.train.labels)
    )
    save(RunState(tmp_path / "r", plan(), "hospital1", grey), 1)
    save_npz(tmp_path / "shard.npz", shard)
    told: list[str] = []
    load_model(tmp_path / "r").classify(tmp_path / "shard.npz", notice=told.append)
    assert told == ["6 of 6 images have colour; the model was trained on grey ones."]


def test_an_npz_of_other_classes_is_not_taken(trained: Path, tmp_path: Path) -> None:
    """Right answers would be counted by numbers that mean something else."""
    save_npz(tmp_path / "shard.npz", dataclasses.replace(dataset(), class_names=("tumour", "mucus", "fat")))
    with pytest.raises(DataError, match=r"its classes are tumour, mucus, fat; the model's are fat, mucus, tumour"):
        load_model(trained).classify(tmp_path / "shard.npz")


def test_an_npz_is_classified_with_its_truth(trained: Path, tmp_path: Path) -> None:
    save_npz(tmp_path / "shard.npz", dataset())
    found = load_model(trained).classify(tmp_path / "shard.npz")
    labels, _ = expected(dataset().test.images)
    assert [p.label for p in found] == labels
    assert [p.truth for p in found] == dataset().test.labels.tolist()
    assert found[2].image == "shard.npz#2"


def test_what_cannot_be_classified_is_a_data_error(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nrubbish")
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "wrong.npz", **{f"{s}_images": np.zeros((2, 8, 8, 3), np.uint8) for s in ("train", "test")},
             **{f"{s}_labels": np.zeros((2, 1), np.uint8) for s in ("train", "test")})  # fmt: skip
    for name, words in (
        ("broken.png", "cannot be read as a picture"),
        ("none.png", "none.png: there is no such file or folder"),
        ("empty", "holds no pictures"),
        ("wrong.npz", "the model takes"),
    ):
        with pytest.raises(DataError, match=words):
            load_model(trained).classify(tmp_path / name)


def test_a_folder_whose_model_does_not_fit_its_description_is_a_data_error(trained: Path, tmp_path: Path) -> None:
    Image.new("RGB", (16, 16)).save(tmp_path / "x.png")
    description = json.loads((trained / DESCRIPTION).read_text())
    description["architecture"]["classes"] = 4
    (trained / DESCRIPTION).write_text(json.dumps(description))
    with pytest.raises(DataError, match="does not hold this model"):
        load_model(trained).classify(tmp_path / "x.png")
    (trained / DESCRIPTION).write_text("{}")
    with pytest.raises(DataError, match="does not describe a model"):
        load_model(trained).classify(tmp_path / "x.png")


def test_a_loaded_model_says_what_it_is_and_takes_pixels_of_its_own_size_alone(trained: Path) -> None:
    model = load_model(str(trained))
    assert not model.module.training
    assert model.class_names == ("fat", "mucus", "tumour")
    assert model.description == json.loads((trained / DESCRIPTION).read_text())
    images = dataset().test.images
    _, probabilities = expected(images)
    assert model.probabilities(images).max(dim=1).values.tolist() == pytest.approx(probabilities, abs=1e-6)
    assert model.probabilities(images[:0]).shape == (0, 3)
    for wrong in (images[:, :8], images.astype(np.float32), images[0]):
        with pytest.raises(DataError, match="the model takes uint8"):
            model.probabilities(wrong)


def test_a_run_is_found_by_name_or_as_the_only_one(trained: Path, tmp_path: Path) -> None:
    assert find_model(trained.parent).folder == find_model(trained.parent, "r").folder == trained
    with pytest.raises(DataError, match="holds no model; models are there of: r"):
        find_model(trained.parent, "other")
    with pytest.raises(DataError, match="no run has left a model"):
        find_model(tmp_path / "nowhere")


def test_an_update_that_is_made_again_after_a_restart_has_the_first_ones_bytes(tmp_path: Path) -> None:
    """Files sort what they hold; FedDFQ's gradient came back with its names in another order, and was refused."""
    memory = {
        PERSONAL: {"w": torch.ones(2), "b": torch.zeros(1)},
        "gradient": {"head.weight": torch.ones(3), "head.bias": torch.zeros(2), "count": torch.tensor(3)},
    }
    run, data = plan(), dataset()
    RunState(tmp_path, run, "h", data).save(memory, trained_rounds=1, measurements={})
    found = RunState(tmp_path, run, "h", data).memory()
    assert {group: list(tensors) for group, tensors in found.items()} == {
        PERSONAL: ["w", "b"],
        "gradient": ["head.weight", "head.bias", "count"],
    }
    assert Part.of(found["gradient"]).specs == Part.of(memory["gradient"]).specs


def partly(seed: int) -> dict[str, Any]:
    """What a round leaves of a network of which the head alone is trained."""
    model = build(ModelPlan(name="diversifed-cnn", input_shape=(3, 16, 16), classes=3, train="head"), seed=1)
    state = {name: torch.full_like(tensor, seed) for name, tensor in state_of(model).items()}
    return {
        "memory": {PERSONAL: state},
        "frozen": frozen_state(model),
        "plain": plain_state(model, state),
        "trained_rounds": seed,
        "measurements": {},
        "validation": Measurement({1: 0.5, 2: 0.9, 3: 0.4}[seed], 1.0),
    }


def test_what_is_frozen_is_written_once_and_the_model_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    state = open_state(folder)
    state.save(**partly(1))
    (written,) = folder.glob("frozen*")
    inode = written.stat().st_ino
    for rounds in (2, 3):
        state.save(**partly(rounds))
    assert [path.stat().st_ino for path in folder.glob("frozen*")] == [inode]
    again = open_state(folder)
    assert set(again.frozen()) == set(partly(1)["frozen"])
    assert set(again.memory()[PERSONAL]) == {"classifier.weight", "classifier.bias"}
    for which, rounds in (("last", 3), ("best", 2)):
        model = load_model(folder, file=find_model(tmp_path, "r", which).path).module.state_dict()
        assert all(torch.equal(model[name], tensor) for name, tensor in partly(rounds)["plain"].items())
        assert len(model) == len(partly(rounds)["plain"])
    assert "train" not in json.loads((folder / DESCRIPTION).read_text())["architecture"]
    kept = {path.name for path in folder.glob("*.safetensors")}
    assert kept == {
        "best-000002.safetensors",
        "frozen.safetensors",
        "model-000003.safetensors",
        "model.safetensors",
        f"{PERSONAL}-000003.safetensors",
    }


def test_a_run_folder_without_its_frozen_part_says_so(tmp_path: Path) -> None:
    open_state(tmp_path).save(**partly(1))
    (tmp_path / "frozen.safetensors").unlink()
    with pytest.raises(DataError, match=r"frozen\.safetensors: cannot be read"):
        open_state(tmp_path).frozen()
