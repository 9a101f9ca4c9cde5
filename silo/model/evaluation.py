"""``silo evaluate``: the personalised model on the hospital's own test images, here and nowhere else.

Reads a run's folder and the shard; opens no connection, journals nothing, changes nothing that a run keeps.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F

from medsilo.algorithms.datasets import ImageDataset, Images, ImageSplit, image_hashes, load_npz, to_tensor
from medsilo.algorithms.local import Local
from medsilo.algorithms.models import build_start
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import ConfigurationError, DataError
from medsilo.silo.model.kept_models import KeptModel, find_model, kept_models, read_plan
from medsilo.silo.model.performance import Difference, Floats, Performance, compare, measure
from medsilo.silo.model.prediction import PersonalisedModel, check_images, load_kept, logits_of
from medsilo.silo.model.saliency import grad_cam
from medsilo.silo.run.run_state import DESCRIPTION, RESULTS, has_ended
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.training.device import choose_device

Kind = Literal["right, most sure", "right, least sure", "wrong, most sure", "wrong, least sure"]
KINDS: tuple[Kind, ...] = ("wrong, most sure", "wrong, least sure", "right, most sure", "right, least sure")
SAMPLES = 3
_SAME_LOSS = 1e-3


@dataclass(frozen=True, eq=False)
class Sample:
    """A test image with what the model says of it.

    Attributes:
        number: its place among the test images, from 0.
        probability: the model's, of the class it says.
        image: uint8 [H, W, C].
        saliency: float32 [H, W], from 0 to 1: what spoke for the class that the model says; None for a model that has
            no such map.
    """

    kind: Kind
    number: int
    truth: int
    said: int
    probability: float
    image: Images
    saliency: npt.NDArray[np.float32] | None


@dataclass(frozen=True)
class Comparison:
    """Another model on the same images. ``run``: whose it is; None for the starting model, before any training."""

    run: str | None
    method: str | None
    performance: Performance
    difference: Difference


@dataclass(frozen=True)
class Overlap:
    """Test images that are pixel for pixel among the training images, and test patients who have training images
    (None where nobody knows whose they are)."""

    images: int
    patients: int | None


@dataclass(frozen=True)
class Evaluation:
    """What came out.

    Attributes:
        made: when, UTC.
        model: which one it is; ``ended``: whether the run is over here.
        class_names: one for each class of the model.
        test: the file that the test images are from; ``own``: whether that is the hospital's shard.
        changed: the shard is not what the model was trained on.
        training: images of each class in the shard's training split.
        patients: whose the training images are; None where nobody knows.
        compared: None with the reason in ``not_compared``.
        layer: whose maps the samples' saliency is from, and of how many places; None without.
    """

    silo: str
    plan: RunPlan
    made: datetime
    model: KeptModel
    ended: bool
    class_names: tuple[str, ...]
    data: str
    test: str
    own: bool
    synthetic: bool
    changed: bool
    training: tuple[int, ...]
    patients: int | None
    model_sha256: str
    performance: Performance
    compared: Comparison | None
    not_compared: str
    overlap: Overlap
    samples: tuple[Sample, ...]
    layer: tuple[str, tuple[int, int]] | None


def evaluate(
    config: SiloConfig,
    *,
    run: str | None = None,
    round_: str | None = None,
    images: Path | None = None,
    against: str | None = None,
    samples: int = SAMPLES,
) -> Evaluation:
    """``run``, ``round_``: see ``medsilo.silo.model.kept_models.find_model``. ``images``: another ``.npz``, whose test
    images are taken. ``against``: another run, whose last model is compared; by default the newest of separate training
    (method ``local``), else the starting model. ``samples``: so many pictures of each of ``KINDS``.

    Raises ``DataError`` for files that are missing or do not fit each other, ``ConfigurationError`` for a device that
    is not there.
    """
    kept = find_model(config.runs, run, round_)
    folder = kept.folder
    trained = load_kept(kept, trusted=config.trusted_models, weights=config.weights)
    plan = read_plan(folder)
    shard = load_npz(config.shard)
    device = choose_device(config.devices[0])
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    chosen = shard if images is None else _read(images)
    check_images(chosen, trained)
    test = chosen.test
    model = trained.module.to(device)
    probabilities = _probabilities(model, test, device, kept.path)
    performance = measure(probabilities, test.labels, test.patients)
    compared, not_compared = _compared(config, kept, trained, shard, test, probabilities, device, against)
    found, layer = _samples(model, test, probabilities, samples, device)
    return Evaluation(
        silo=config.name,
        plan=plan,
        made=datetime.now(UTC),
        model=kept,
        ended=has_ended(folder, plan.sha256.hex()),
        class_names=trained.class_names,
        data=shard.name,
        test=(images or config.shard).name,
        own=images is None,
        synthetic=bool(trained.description.get("synthetic")) or chosen.synthetic or shard.synthetic,
        changed=trained.description.get("data_sha256") != shard.fingerprint,
        training=tuple(shard.train.counts(trained.plan.classes).tolist()),
        patients=None if shard.train.patients is None else len(np.unique(shard.train.patients)),
        model_sha256=file_sha256(kept.path),
        performance=performance,
        compared=compared,
        not_compared=not_compared,
        overlap=_overlap(shard.train, test),
        samples=found,
        layer=layer,
    )


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(images: Path) -> ImageDataset:
    if images.suffix != ".npz":
        raise DataError(
            f"{images}: an evaluation needs images with their labels, as the test images of an .npz; `silo predict` "
            "takes pictures"
        )
    return load_npz(images)


def _probabilities(model: nn.Module, test: ImageSplit, device: torch.device, where: Path) -> Floats:
    logits = logits_of(model, test.images, device=device)
    if not torch.isfinite(logits).all():
        raise DataError(f"{where}: this model gives numbers that are not finite; take the model of another run")
    found: Floats = torch.softmax(logits.double(), dim=1).numpy()
    return found


def _compared(
    config: SiloConfig,
    kept: KeptModel,
    trained: PersonalisedModel,
    shard: ImageDataset,
    test: ImageSplit,
    probabilities: Floats,
    device: torch.device,
    against: str | None,
) -> tuple[Comparison | None, str]:
    """The model beside another one on the same test images; None with the reason where there is no such model."""
    right = probabilities.argmax(axis=1) == test.labels

    def judged(other: nn.Module, name: str | None, method: str | None, where: Path) -> Comparison:
        theirs = _probabilities(other.to(device).eval(), test, device, where)
        difference = compare(right, theirs.argmax(axis=1) == test.labels, test.patients)
        return Comparison(name, method, measure(theirs, test.labels, test.patients), difference)

    other = _other_run(config, kept.folder, trained, against)
    if other is not None:
        theirs = load_kept(other, trusted=config.trusted_models, weights=config.weights)
        _check_comparable(other.folder, theirs, trained)
        return judged(theirs.module, other.run, read_plan(other.folder).method.name, other.path), ""
    plan = read_plan(kept.folder)
    try:
        start = build_start(plan.model, seed=plan.seed, trusted=config.trusted_models, weights=config.weights)
    except ConfigurationError as error:
        return None, f"The run folder holds no model from before, and the starting model cannot be made: {error}"
    if _is_the_start(start.to(device).eval(), kept.folder, shard, trained, device):
        return judged(start, None, None, kept.path), ""
    return None, (
        "The run folder holds no model from before, and the starting model, built again from the plan, does not "
        "measure what was measured at the start"
    )


def _other_run(config: SiloConfig, folder: Path, trained: PersonalisedModel, against: str | None) -> KeptModel | None:
    if against is not None:
        return find_model(config.runs, against)
    fitting = None
    for model in kept_models(config.runs):
        if model.folder == folder or not model.trained or not model.which.startswith("last"):
            continue
        try:
            description = json.loads((model.folder / DESCRIPTION).read_text(encoding="utf-8"))
            same = all(description[key] == trained.description[key] for key in ("data_sha256", "class_names"))
            alone = description["method"]["name"] == Local.name
        except (OSError, ValueError, KeyError, TypeError):
            continue  # an unreadable neighbour is no reason to fail; asked for by name, it is
        if alone and same:
            fitting = model
    return fitting


def _check_comparable(other: Path, theirs: PersonalisedModel, trained: PersonalisedModel) -> None:
    if (theirs.class_names, theirs.plan.input_shape) != (trained.class_names, trained.plan.input_shape):
        raise DataError(f"{other}: its model has other classes or other images; it cannot be compared")
    if theirs.description.get("data_sha256") != trained.description.get("data_sha256"):
        raise DataError(
            f"{other}: its model was trained on another version of the images, perhaps on some that are test images "
            "here; it cannot be compared"
        )


def _is_the_start(
    start: nn.Module, folder: Path, shard: ImageDataset, trained: PersonalisedModel, device: torch.device
) -> bool:
    """Whether a model measures on the shard what the run's starting model did."""
    try:
        first = json.loads((folder / RESULTS).read_text(encoding="utf-8"))["measured"][0]
        rounds, accuracy, loss = int(first["rounds"]), float(first["accuracy"]), float(first["loss"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return False
    if rounds != 0 or trained.description.get("data_sha256") != shard.fingerprint:
        return False
    logits, labels = logits_of(start, shard.test.images, device=device), torch.from_numpy(shard.test.labels)
    own_loss = float(F.cross_entropy(logits, labels))
    # A near-tie may fall the other way on another device.
    same = abs(float((logits.argmax(dim=1) == labels).double().mean()) - accuracy) <= 0.01
    return same and math.isclose(own_loss, loss, rel_tol=_SAME_LOSS)


def _overlap(train: ImageSplit, test: ImageSplit) -> Overlap:
    known = set(image_hashes(train.images))
    patients = None
    if train.patients is not None and test.patients is not None:
        patients = len(np.intersect1d(train.patients, test.patients))
    return Overlap(sum(digest in known for digest in image_hashes(test.images)), patients)


def _samples(
    model: nn.Module, test: ImageSplit, probabilities: Floats, each: int, device: torch.device
) -> tuple[tuple[Sample, ...], tuple[str, tuple[int, int]] | None]:
    said, sure = probabilities.argmax(axis=1), probabilities.max(axis=1)
    chosen = choose(said == test.labels, sure, each)
    if not chosen:
        return (), None
    places = np.array([number for _, number in chosen])
    pixels = test.images[places]
    found = grad_cam(model, to_tensor(pixels).to(device), torch.from_numpy(said[places]).to(device))
    samples = tuple(
        Sample(
            kind=kind,
            number=number,
            truth=int(test.labels[number]),
            said=int(said[number]),
            probability=float(sure[number]),
            image=pixels[row],
            saliency=None if found is None else found.maps[row],
        )
        for row, (kind, number) in enumerate(chosen)
    )
    return samples, None if found is None else (found.layer, found.places)


def choose(right: npt.NDArray[np.bool_], sure: Floats, each: int) -> list[tuple[Kind, int]]:
    """Up to ``each`` images of every kind, none twice; where there are too few, the most sure come first."""
    chosen: list[tuple[Kind, int]] = []
    order = np.argsort(-sure, kind="stable")
    for most, least, which in (
        ("wrong, most sure", "wrong, least sure", ~right),
        ("right, most sure", "right, least sure", right),
    ):
        ranked = [int(number) for number in order if which[number]]
        top, rest = ranked[:each], ranked[each:]
        chosen += [(most, number) for number in top]  # type: ignore[misc]
        chosen += [(least, number) for number in reversed(rest[max(0, len(rest) - each) :])]  # type: ignore[misc]
    return chosen
