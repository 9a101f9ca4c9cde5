"""Weights from a file, that a run starts from: found by their hash, read without running code, fitted to a model.

A plan names the file's SHA-256 (``medsilo.privacy.consent.plan.WeightsPlan``). Whoever has the file, the coordinator or
each hospital, takes from it what the model's state has by the same names.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from medsilo.algorithms.models.layout import classifier_of, whole_state
from medsilo.algorithms.models.low_rank import added_names
from medsilo.algorithms.tensors import TensorSpec
from medsilo.privacy.consent.plan import ModelPlan, WeightsPlan
from medsilo.privacy.errors import ConfigurationError, RefusedError

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""How the names of files of weights end."""

BACKBONE = "torchvision-features:"
"""How the names of models begin that stand on a torchvision classifier's features: its weights are in every silo's
model, and are no part of the state that is trained and sent."""

_COUNTER = "num_batches_tracked"
_SHOWN = 3
# How torchvision's DenseNets are named in their files, and no longer in the models.
_OLD_DENSE = re.compile(r"^(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\..*)$")


def file_sha256(path: Path) -> str:
    """Of a file's bytes, as ``sha256sum`` gives it; raises ``ConfigurationError`` for one that cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror})") from None


def find_weights(plan: WeightsPlan, places: Iterable[Path]) -> Path:
    """The file with the plan's hash among these files and, one level deep, in these folders.

    Raises ``ConfigurationError`` where none has it.
    """
    places = tuple(places)
    if (path := _found(plan, places)) is not None:
        return path
    looked = f"none of {', '.join(map(str, places))} has that hash" if places else "`weights:` names no file or folder"
    raise ConfigurationError(
        f"the weights that the run starts from are not here ({plan.source}; SHA-256 {plan.sha256}): {looked}. Get the "
        "file (`sha256sum FILE` shows its hash), and name it, or its folder, under `weights:` in the configuration"
    )


def _found(plan: WeightsPlan, places: Iterable[Path]) -> Path | None:
    for place in places:
        inside = sorted(place.iterdir()) if place.is_dir() else [place]
        for path in inside:
            wanted = path == place or path.suffix in SUFFIXES
            if wanted and path.is_file() and file_sha256(path) == plan.sha256:
                return path
    return None


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a state that ``torch.save`` wrote, by name, on the CPU.

    A checkpoint that holds one under ``state_dict`` is taken for that. Nothing of a file is run. Raises
    ``ConfigurationError`` for a file that is missing or holds anything else.
    """
    if not path.is_file():
        raise ConfigurationError(f"{path}: there is no such file of weights")
    try:
        content = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except pickle.UnpicklingError:
        raise ConfigurationError(
            f"{path}: is no file of tensors alone: it is none of weights at all, or holds code (a whole model, for "
            "example), which is not run. Save the weights by themselves, where you trust the file: "
            "`safetensors.torch.save_file(model.state_dict(), FILE)`"
        ) from None
    except Exception as error:  # what a damaged file raises depends on its bytes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigurationError(f"{path}: is no file of weights (safetensors or torch.save): {reason}") from None
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise ConfigurationError(
            f"{path}: holds no state of a model, which is tensors by name; save `model.state_dict()`"
        )
    for name, tensor in content.items():
        if not _is_plain(tensor):
            raise ConfigurationError(
                f"{path}: {name} is no dense tensor of real numbers (but sparse, quantised, nested or complex, or has "
                "a shape alone); save the weights as dense real numbers"
            )
    return {_OLD_DENSE.sub(r"\1\2", str(name)): tensor.detach().contiguous() for name, tensor in content.items()}


def _is_plain(tensor: Tensor) -> bool:
    odd = tensor.is_quantized or tensor.is_nested or tensor.is_complex() or tensor.is_meta
    return tensor.layout == torch.strided and not odd


def new_layer(model: nn.Module, given: Mapping[str, Tensor]) -> str | None:
    """The path of the model's classifier where the given one is for another number of classes; None where it is the
    same, or where there is none at all."""
    path, _ = classifier_of(model)
    own = {name: tensor for name, tensor in whole_state(model).items() if is_in(name, path)}
    other = any(name in given and given[name].shape != tensor.shape for name, tensor in own.items())
    return path if other else None


def is_in(name: str, layer: str | None) -> bool:
    """Whether a tensor of that name is a layer's, by the layer's path."""
    return layer is not None and name.startswith(f"{layer}.")


def taken(
    state: Mapping[str, Tensor], given: Mapping[str, Tensor], without: str | None, *, where: object
) -> dict[str, Tensor]:
    """What a model takes of given tensors: all of its state but the layer ``without``, in the state's order and types.

    Args:
        state: the model's.
        given: from the file; more than the model has is left.
        without: a layer's path.
        where: the file, for errors.

    Raises ``ConfigurationError`` naming tensors that are missing, not finite in the model's types, or of another shape.
    """
    wanted = {name: tensor for name, tensor in state.items() if not is_in(name, without)}
    missing = [name for name in wanted if name not in given and not name.endswith(_COUNTER)]
    if missing:
        extra = [name for name in given if name not in state]
        has = f"; it has {_few(extra)}, which the model has not" if extra else ""
        raise ConfigurationError(
            f"{where}: {len(missing)} of the model's {len(wanted)} tensors are not in it: {_few(missing)}{has}. "
            "Weights are of one architecture: name that one, or rename the tensors as the model has them"
        )
    found = {}
    for name, own in wanted.items():
        # Old files have no counters; a model reads them for nothing but an average over all batches.
        tensor = given.get(name, torch.zeros(own.shape, dtype=own.dtype))
        if tensor.shape != own.shape:
            raise ConfigurationError(
                f"{where}: {name} is {_times(tensor)}, and the model's is {_times(own)}. Weights are of one "
                "architecture, and of images of one shape; only the last layer may have another number of classes"
            )
        found[name] = tensor.to(own.dtype, copy=True)
        if not _finite(tensor) or not _finite(found[name]):
            raise ConfigurationError(
                f"{where}: {name} holds numbers that are not finite, or too large for the model's {_type(own)}"
            )
    return found


def _finite(tensor: Tensor) -> bool:
    # What has 8 bits cannot be asked.
    return bool(torch.isfinite(tensor.float() if tensor.itemsize == 1 else tensor).all())


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Of tensors in the order of their names: of each its name, shape and type as JSON, a line feed, its bytes
    (little-endian, row-major)."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        spec = TensorSpec.of(name, tensors[name])
        found.update(json.dumps([spec.name, list(spec.shape), spec.dtype], separators=(",", ":")).encode() + b"\n")
        found.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def brought_start(model: nn.Module, plan: WeightsPlan, places: Sequence[Path]) -> dict[str, Tensor]:
    """What a model takes of the file that this side brings; raises ``ConfigurationError`` as the functions above, or if
    what it takes is not what the plan names."""
    path = find_weights(plan, places)
    return check_taken(taken(fillable(model), read_weights(path), plan.without, where=path), plan, where=path)


def fillable(model: nn.Module) -> dict[str, Tensor]:
    """What of a model's state weights from a file may fill: all but low-rank updates, which are drawn."""
    added = added_names(model)
    return {name: tensor.detach() for name, tensor in nn.Module.state_dict(model).items() if name not in added}


def check_taken(tensors: dict[str, Tensor], plan: WeightsPlan, *, where: object) -> dict[str, Tensor]:
    """The same tensors, without the layer that is drawn anew; raises ``ConfigurationError`` if they are not the ones
    that the plan names."""
    found = {name: tensor for name, tensor in tensors.items() if not is_in(name, plan.without)}
    if (own := tensors_sha256(found)) != plan.tensors_sha256:
        raise ConfigurationError(
            f"{where}: its tensors have the SHA-256 {own}, and the plan names {plan.tensors_sha256} ({plan.source}): "
            "they are not the weights that were agreed on"
        )
    return tensors


def sent_names(plan: ModelPlan, model: nn.Module) -> list[str]:
    """Which tensors of a run's starting model the coordinator sends: all, or, where silos bring their weights
    themselves, those that are not in these."""
    given, names = plan.weights, list(whole_state(model))
    if given is None or not given.brought or plan.name.startswith(BACKBONE):
        return names
    added = added_names(model)
    return [name for name in names if name in added or is_in(name, given.without)]


def whole_start(
    plan: ModelPlan, model: nn.Module, sent: Mapping[str, Tensor], places: Sequence[Path]
) -> dict[str, Tensor]:
    """A silo's starting model: what the coordinator sent, with the weights from the file that the silo brings itself
    where the plan wants that. A silo that has the plan's file anyway holds its tensors against the plan.

    Args:
        plan: of the model.
        model: as ``build`` makes it.
        sent: by name.
        places: files and folders in which the silo's own may be.

    Raises ``ConfigurationError`` for a file that is missing or is not the one of the plan, ``RefusedError`` if what was
    sent is not what the plan names, if what the plan names is not in its file, or if low-rank updates change the
    weights from the first.
    """
    given = plan.weights
    if given is None or plan.name.startswith(BACKBONE):
        return dict(sent)
    added = added_names(model)
    changing = [name for name in sent if name in added and name.endswith(".up.weight") and bool(sent[name].any())]
    if changing:
        raise RefusedError(
            f"the starting model that the coordinator sent has low-rank updates that are not zero ({_few(changing)}): "
            "with them it is not the weights that were agreed on"
        )
    if given.brought:
        own = brought_start(model, given, places)
        return {name: tensor for name in whole_state(model) if (tensor := {**sent, **own}.get(name)) is not None}
    filled = {name: tensor for name, tensor in sent.items() if name not in added}
    try:
        if _found(given, places) is not None:
            brought_start(model, given, places)
        check_taken(filled, given, where="the starting model that the coordinator sent")
    except ConfigurationError as error:
        raise RefusedError(str(error)) from None
    return dict(sent)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _times(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "one number"
