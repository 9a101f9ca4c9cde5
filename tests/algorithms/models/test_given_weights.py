"""Weights from files: nothing of a file is run, nothing of another architecture is taken, and the hash decides."""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from medsilo.algorithms.models import build, build_start, state_of, whole_state
from medsilo.algorithms.models.given_weights import (
    brought_start,
    file_sha256,
    find_weights,
    new_layer,
    read_weights,
    sent_names,
    taken,
    tensors_sha256,
    whole_start,
)
from medsilo.privacy.consent.plan import ModelPlan, WeightsPlan
from medsilo.privacy.errors import ConfigurationError, RefusedError
from medsilo.privacy.exposure import Exposure

PLAN = ModelPlan(name="lenet5", input_shape=(3, 28, 28), classes=4)


def given(seed: int = 7, classes: int = 4) -> dict[str, Tensor]:
    return state_of(build(PLAN.model_copy(update={"classes": classes}), seed=seed))


def weights_plan(path: Path, state: dict[str, Tensor], **fields: object) -> WeightsPlan:
    return WeightsPlan(
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        tensors_sha256=tensors_sha256(state),
        source="a test",
        **fields,  # type: ignore[arg-type]
    )


class Runs:
    """Unpickled, it would make a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.folder),)


def test_both_kinds_of_file_hold_the_same_tensors(tmp_path: Path) -> None:
    state = given()
    torch.save(state, tmp_path / "a.pt")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "b.ckpt")
    save_file(state, tmp_path / "c.safetensors")
    for path in tmp_path.iterdir():
        found = read_weights(path)
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    torch.save({"weight": Runs(tmp_path / "made")}, tmp_path / "bad.pt")
    with pytest.raises(ConfigurationError, match=r"bad\.pt: .* holds code .* not run.*safetensors"):
        read_weights(tmp_path / "bad.pt")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.pt", b"no weights at all"), ("a.safetensors", b"no weights at all"), ("a.pth", b"")],
)
def test_what_is_no_file_of_weights_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"is no file of (weights|tensors)"):
        read_weights(tmp_path / name)
    with pytest.raises(ConfigurationError, match="there is no such file"):
        read_weights(tmp_path / "other.pt")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(ConfigurationError, match="holds no state of a model"):
        read_weights(tmp_path / "list.pt")


def test_another_number_of_classes_leaves_the_last_layer_and_nothing_else() -> None:
    model = build(PLAN, seed=1)
    other = given(classes=9)
    assert new_layer(model, other) == "classifier"
    assert new_layer(model, given()) is None
    found = taken(model.state_dict(), other, "classifier", where="f")
    assert set(model.state_dict()) - set(found) == {"classifier.weight", "classifier.bias"}
    assert all(torch.equal(tensor, other[name]) for name, tensor in found.items())


def test_another_architecture_is_refused_by_the_names_that_are_missing() -> None:
    model = build(PLAN, seed=1)
    prefixed = {f"module.{name}": tensor for name, tensor in given().items()}
    with pytest.raises(ConfigurationError, match=r"f\.pt: 18 of .* convolution1\.weight.*it has module\.convolution1"):
        taken(model.state_dict(), prefixed, None, where="f.pt")
    wider = given() | {"hidden1.weight": torch.zeros(120, 7)}
    with pytest.raises(ConfigurationError, match=r"hidden1\.weight is 120×7, and the model's is 120×256"):
        taken(model.state_dict(), wider, None, where="f.pt")
    with pytest.raises(ConfigurationError, match="not finite"):
        taken(model.state_dict(), given() | {"hidden1.bias": torch.full((120,), torch.nan)}, None, where="f.pt")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_numbers_that_the_models_type_cannot_hold_are_refused(tmp_path: Path, suffix: str) -> None:
    """1e300 is finite in the file's 64 bits, and infinite in the model's 32."""
    state = given() | {"hidden1.bias": torch.full((120,), 1e300, dtype=torch.float64)}
    path = tmp_path / f"a{suffix}"
    (torch.save if suffix == ".pth" else save_file)(state, path)  # type: ignore[operator]
    with pytest.raises(ConfigurationError, match=r"hidden1\.bias holds .* too large for the model's float32"):
        taken(given(), read_weights(path), None, where=path)


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_other_types_of_real_numbers_are_taken(tmp_path: Path, kind: torch.dtype) -> None:
    state = given()
    torch.save(state | {"hidden1.bias": state["hidden1.bias"].to(kind)}, tmp_path / "a.pth")
    found = taken(given(), read_weights(tmp_path / "a.pth"), None, where="f")
    assert torch.equal(found["hidden1.bias"], state["hidden1.bias"].to(kind).float())


ODD = {
    "complex": lambda weight: weight.to(torch.complex64),
    "sparse": lambda weight: weight.to_sparse(),
    "quantised": lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
    "without numbers": lambda weight: weight.to("meta"),
    "nested": lambda weight: torch.nested.nested_tensor([weight[0], weight[1]]),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_dense_tensor_of_real_numbers_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    torch.save({"hidden1.weight": ODD[kind](given()["hidden1.weight"])}, tmp_path / "a.pth")  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigurationError, match=r"a\.pth: (hidden1\.weight is no dense tensor of real|is no file of)"):
        read_weights(tmp_path / "a.pth")


@pytest.mark.parametrize("name", ["a.pth", "old.pth", "a.safetensors"])
def test_a_damaged_file_is_refused_or_read_and_nothing_else(tmp_path: Path, name: str) -> None:
    path, numbers = tmp_path / name, random.Random(1)
    state = {"weight": torch.ones(8, 8), "bias": torch.zeros(8)}
    if name == "a.safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=name == "a.pth")
    whole, refused = path.read_bytes(), 0
    for _ in range(100):
        damaged = bytearray(whole)
        for _ in range(numbers.choice((1, 3, 20))):
            damaged[numbers.randrange(len(damaged))] = numbers.randrange(256)
        path.write_bytes(bytes(damaged))
        try:
            read_weights(path)
        except ConfigurationError:
            refused += 1
    assert refused


def test_files_from_before_batches_were_counted_do_as_well() -> None:
    old = {name: tensor for name, tensor in given().items() if not name.endswith("num_batches_tracked")}
    found = taken(build(PLAN, seed=1).state_dict(), old, None, where="f")
    assert int(found["norm1.num_batches_tracked"]) == 0
    without_numbers = {name: tensor.to("meta") for name, tensor in given().items()}
    assert int(taken(without_numbers, old, None, where="f")["norm1.num_batches_tracked"]) == 0


def test_the_hash_of_tensors_is_the_one_of_its_definition() -> None:
    tensors = {"b": torch.tensor([1.0, 2.0]), "a": torch.tensor(3)}
    by_hand = hashlib.sha256()
    by_hand.update(json.dumps(["a", [], "I64"], separators=(",", ":")).encode() + b"\n")
    by_hand.update((3).to_bytes(8, "little"))
    by_hand.update(json.dumps(["b", [2], "F32"], separators=(",", ":")).encode() + b"\n")
    by_hand.update(bytes.fromhex("0000803f00000040"))
    assert tensors_sha256(tensors) == by_hand.hexdigest()


def test_the_file_is_found_by_its_hash_whatever_its_name(tmp_path: Path) -> None:
    state = given()
    save_file(state, tmp_path / "right.safetensors")
    save_file(given(8), tmp_path / "wrong.safetensors")
    plan = weights_plan(tmp_path / "right.safetensors", state)
    (tmp_path / "right.safetensors").rename(tmp_path / "zzz.safetensors")
    assert find_weights(plan, [tmp_path]) == tmp_path / "zzz.safetensors"
    assert find_weights(plan, [tmp_path / "zzz.safetensors"]) == tmp_path / "zzz.safetensors"
    assert file_sha256(tmp_path / "zzz.safetensors") == plan.sha256
    for places, said in (([], "names no file or folder"), ([tmp_path / "wrong.safetensors"], "none of")):
        with pytest.raises(ConfigurationError, match=said) as caught:
            find_weights(plan, places)
        assert plan.sha256 in str(caught.value)


def test_what_a_file_gives_is_what_the_plan_names(tmp_path: Path) -> None:
    state = given()
    save_file(state, tmp_path / "a.safetensors")
    plan = weights_plan(tmp_path / "a.safetensors", state)
    model = build(PLAN, seed=1)
    found = brought_start(model, plan, [tmp_path])
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    other = plan.model_copy(update={"tensors_sha256": "0" * 64})
    with pytest.raises(ConfigurationError, match="not the weights that were agreed on"):
        brought_start(model, other, [tmp_path])
    with_it = PLAN.model_copy(update={"weights": plan})
    started = build_start(with_it, seed=1, weights=[tmp_path]).state_dict()
    assert all(torch.equal(started[name], tensor) for name, tensor in state.items())


def test_a_silo_takes_no_other_start_than_the_plans(tmp_path: Path) -> None:
    state = given()
    save_file(state, tmp_path / "a.safetensors")
    plan = PLAN.model_copy(update={"weights": weights_plan(tmp_path / "a.safetensors", state)})
    model = build(PLAN, seed=1)
    found = whole_start(plan, model, state, [])
    assert found.keys() == state.keys()
    changed = state | {"hidden1.bias": state["hidden1.bias"] + 1e-6}
    with pytest.raises(RefusedError, match="not the weights that were agreed on"):
        whole_start(plan, model, changed, [])


def test_a_silo_that_has_the_plans_file_takes_no_tensors_that_are_not_in_it(tmp_path: Path) -> None:
    """Else a plan could name a publisher's file, and the hash of other tensors beside it."""
    save_file(given(), tmp_path / "published.safetensors")
    other = given(8)
    weights = weights_plan(tmp_path / "published.safetensors", other, public=True)
    plan, model = PLAN.model_copy(update={"weights": weights}), build(PLAN, seed=1)
    with pytest.raises(RefusedError, match=r"published\.safetensors: .* not the weights that were agreed on"):
        whole_start(plan, model, other, [tmp_path])
    right = PLAN.model_copy(update={"weights": weights_plan(tmp_path / "published.safetensors", given(), public=True)})
    assert whole_start(right, model, given(), [tmp_path]).keys() == given().keys()


@pytest.mark.parametrize("brought", [False, True])
def test_low_rank_updates_that_change_the_agreed_weights_are_refused(tmp_path: Path, brought: bool) -> None:
    state = given()
    save_file(state, tmp_path / "a.safetensors")
    weights = weights_plan(tmp_path / "a.safetensors", state, brought=brought)
    plan = ModelPlan(name="lenet5", input_shape=(3, 28, 28), classes=4, train={"lora": {"rank": 2}}, weights=weights)
    model = build(plan, seed=1)
    start = whole_state(build_start(plan, seed=1, weights=[tmp_path]))
    sent = {name: start[name] for name in sent_names(plan, model)}
    up = next(name for name in sent if name.endswith(".up.weight"))
    with pytest.raises(RefusedError, match=r"low-rank updates that are not zero \(.*up\.weight\)"):
        whole_start(plan, model, sent | {up: torch.full_like(sent[up], 1e-6)}, [tmp_path])


def test_of_a_start_that_silos_bring_only_the_new_layer_is_sent(tmp_path: Path) -> None:
    state = given(classes=9)
    save_file(state, tmp_path / "a.safetensors")
    model = build(PLAN, seed=1)
    own = taken(model.state_dict(), state, "classifier", where="f")
    weights = weights_plan(tmp_path / "a.safetensors", own, brought=True, without="classifier")
    plan = PLAN.model_copy(update={"weights": weights})
    names = list(model.state_dict())
    assert sent_names(plan, model) == ["classifier.weight", "classifier.bias"]
    head = {name: model.state_dict()[name] for name in sent_names(plan, model)}
    whole = whole_start(plan, build(PLAN, seed=2), head, [tmp_path])
    assert list(whole) == names
    assert all(torch.equal(whole[name], {**own, **head}[name]) for name in names)
    assert sent_names(PLAN, model) == names


@pytest.mark.parametrize("train", ["head", {"last": 2}, {"lora": {"rank": 2}}])
@pytest.mark.parametrize("brought", [False, True])
def test_a_model_of_which_a_part_is_trained_starts_from_given_weights(
    tmp_path: Path, train: Any, brought: bool
) -> None:
    """Low-rank updates are in no file: they are drawn, and sent also where hospitals bring the rest."""
    state = given()
    save_file(state, tmp_path / "a.safetensors")
    weights = weights_plan(tmp_path / "a.safetensors", state, brought=brought)
    plan = ModelPlan(name="lenet5", input_shape=(3, 28, 28), classes=4, train=train, weights=weights)
    start = whole_state(build_start(plan, seed=1, weights=[tmp_path]))
    assert all(torch.equal(start[name], state[name]) for name in state)
    here = build(plan, seed=2)
    sent = {name: start[name] for name in sent_names(plan, here)}
    if brought:
        assert set(sent) == set(start) - set(state)
    whole = whole_start(plan, here, sent, [tmp_path])
    assert list(whole) == list(start)
    assert all(torch.equal(whole[name], start[name]) for name in start)


def test_what_hospitals_made_has_a_class_of_its_own_and_is_asked_for(tmp_path: Path) -> None:
    state = given()
    save_file(state, tmp_path / "a.safetensors")
    for public, brought, start in (
        (True, False, Exposure.INITIAL_MODEL),
        (False, False, Exposure.PEER_INITIAL_MODEL),
        (False, True, Exposure.INITIAL_MODEL),  # what is sent is the new layer alone
    ):
        weights = weights_plan(tmp_path / "a.safetensors", state, public=public, brought=brought)
        plan = PLAN.model_copy(update={"weights": weights})
        assert plan.start == start
        assert plan.asks == frozenset({start}) - {Exposure.INITIAL_MODEL}
        assert ("made of hospitals' models" in weights.words) == (not public)
