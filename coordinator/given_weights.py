"""Weights that a run starts from, as a configuration names them, and what the plan says of them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from pydantic import Field, model_validator

from medsilo.privacy.consent.plan import ModelPlan, WeightsPlan
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.files.configuration import FilePath, Name, StrictModel
from medsilo.privacy.printable import Printable

OUTCOME = "outcome.safetensors"
"""In a run's folder at the coordinator: the one model that the run came to, where all silos were given the same."""

_OF_A_RUN = (OUTCOME, "model.json")
"""Beside a file of weights, these say that a run has made it."""


class WeightsConfig(StrictModel):
    """Weights that a run starts from: of a file, an earlier run of this coordinator, or torchvision.

    ``file``: a safetensors file, or a state that ``torch.save`` wrote; no code in it is run. ``run``: the name of an
    earlier run at this coordinator that gave all silos one model. ``torchvision``: a name such as
    ``ResNet18_Weights.IMAGENET1K_V1``, whose file lies in torchvision's cache; nothing is downloaded. One of the three.
    ``source``, ``licence``: where they are from and under which licence they may be used, for those who are to agree.
    ``public``: of a file, that no hospital's images have made it; otherwise it counts as made of hospitals' models,
    and hospitals must consent to PEER_INITIAL_MODEL. ``brought``: every hospital brings the file itself (``weights:``
    in its own configuration), so that it never travels and no consent is asked for. ``new_head``: the last layer is
    drawn anew, as it is anyway where it has another number of classes.
    """

    file: FilePath | None = None
    run: Name | None = None
    torchvision: str | None = Field(default=None, pattern=r"^\w+\.\w+$")
    source: Printable | None = Field(default=None, min_length=1, max_length=300)
    licence: Printable | None = Field(default=None, min_length=1, max_length=300)
    public: bool = False
    brought: bool = False
    new_head: bool = False

    @model_validator(mode="after")
    def _one(self) -> WeightsConfig:
        if sum(one is not None for one in (self.file, self.run, self.torchvision)) != 1:
            raise ValueError("names one of `file`, `run` and `torchvision`")
        if self.file is None and "public" in self.model_fields_set:
            raise ValueError("`public` is for a `file`: torchvision's weights are, and a run's outcome is not")
        return self

    def path(self, runs: Path | None) -> Path:
        """The file; ``runs``: the folder of the coordinator's runs, None where there are none.

        Raises ``ConfigurationError`` if it is not there, with what to do.
        """
        if self.file is not None:
            return _outside_a_run(self.file) if self.public else self.file
        if self.torchvision is not None:
            return _in_cache(self.torchvision)
        if runs is None:
            raise ConfigurationError("run: is for a coordinator's configuration; name the file of its outcome: `file:`")
        path = runs / str(self.run) / OUTCOME
        if not path.exists():
            raise ConfigurationError(
                f"run: {path} does not exist: run {self.run} has not ended here, or its method gives every silo "
                "a model of its own. Name a file instead, a hospital's model.safetensors for example: `file:`"
            )
        return path

    def plan(self, model: ModelPlan, *, trusted: tuple[str, ...], runs: Path | None) -> WeightsPlan:
        """What the run's plan says of them; raises ``ConfigurationError`` for weights that cannot be used."""
        from medsilo.algorithms.models.given_weights import BACKBONE

        if model.name.startswith(BACKBONE) and not self.brought:
            raise ConfigurationError(
                f"{model.name} needs the weights at every hospital, also for predictions later: set `brought: true`"
            )
        path = self.path(runs)
        if not path.is_file():
            raise ConfigurationError(f"{path}: there is no such file of weights")
        found = path.stat()
        sha256, tensors, without = _read(path, (found.st_mtime_ns, found.st_size), model, trusted, self.new_head)
        return WeightsPlan(
            sha256=sha256,
            tensors_sha256=tensors,
            source=self.source or self._source(path),
            licence=self.licence,
            public=self.public or self.torchvision is not None,
            without=without,
            brought=self.brought,
        )

    def _source(self, path: Path) -> str:
        if self.torchvision is not None:
            return f"torchvision's {self.torchvision}"
        return f"the outcome of run {self.run}" if self.run is not None else f"the file {path.name}"


def _outside_a_run(path: Path) -> Path:
    if path.name in _OF_A_RUN or any((path.parent / name).exists() for name in _OF_A_RUN):
        raise ConfigurationError(
            f"{path}: is a run's outcome, which hospitals' images have made, so it is not `public`; leave that out"
        )
    return path


def _in_cache(name: str) -> Path:
    import torch
    from torchvision.models import get_weight

    try:
        address = str(get_weight(name).url)
    except (ValueError, AttributeError, KeyError):
        raise ConfigurationError(
            f"torchvision: has no weights {name!r}; get_model_weights of torchvision.models lists a model's"
        ) from None
    path = Path(torch.hub.get_dir()) / "checkpoints" / address.rpartition("/")[2]
    if not path.is_file():
        raise ConfigurationError(
            f"torchvision: {name} is not in torchvision's cache ({path}), and nothing is downloaded here. Get "
            f"{address} by yourself, and put it there or name it: `file:`"
        )
    return path


@lru_cache(maxsize=64)
def _read(
    path: Path, version: tuple[int, int], model: ModelPlan, trusted: tuple[str, ...], new_head: bool
) -> tuple[str, str, str | None]:
    """A file's hash, that of what the model takes of it, and the layer that it does not take.

    ``version``: of the file, which may be another one tomorrow.
    """
    del version
    from medsilo.algorithms.features.backbone import uncut
    from medsilo.algorithms.models import build, classifier_of
    from medsilo.algorithms.models.given_weights import (
        BACKBONE,
        file_sha256,
        fillable,
        new_layer,
        read_weights,
        taken,
        tensors_sha256,
    )

    given = read_weights(path)
    without: str | None
    if model.name.startswith(BACKBONE):
        whole, without = uncut(model.name.removeprefix(BACKBONE))
    else:
        whole = build(model, seed=0, trusted=trusted)
        without = classifier_of(whole)[0] if new_head else new_layer(whole, given)
    found = taken(fillable(whole), given, without, where=path)
    return file_sha256(path), tensors_sha256(found), without
