"""``run.model.train``: what a plan says of it, how it travels, and what is said of a part that there is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from medsilo.coordinator.config import CoordinatorConfig
from medsilo.privacy.consent.plan import ModelPlan, RunPlan
from medsilo.privacy.errors import ConfigurationError, RefusedError
from medsilo.protos.medsilo.v1 import plan_pb2

PRIVATE = {"privacy": {"preset": "head", "epsilon": 1.0, "delta": 1e-5, "unit": "image", "units": 1000}}


def config(folder: Path, train: Any = None, **run: Any) -> CoordinatorConfig:
    model = {"name": "lenet5", "input_shape": [3, 20, 20], "classes": 4}
    content = {
        "federation": "test",
        "listen": "127.0.0.1:7443",
        "insecure": True,
        "state": str(folder / "state"),
        "silos": ["hospital1", "hospital2"],
        "run": {
            "name": "r",
            "method": {"name": "fedavg"},
            "model": model if train is None else {**model, "train": train},
            "rounds": 12,
            **run,
        },
    }
    (folder / "coordinator.yaml").write_text(yaml.safe_dump(content))
    return CoordinatorConfig.read(folder / "coordinator.yaml")


@pytest.mark.parametrize("train", ["head", {"last": 3}, {"lora": {"rank": 4}}], ids=str)
def test_what_is_trained_is_in_the_plan_and_its_hash_and_travels(tmp_path: Path, train: Any) -> None:
    plan = config(tmp_path, train).plan()
    assert plan.model_dump(mode="json")["model"]["train"] == train
    assert plan.sha256 != config(tmp_path).plan().sha256
    received = plan_pb2.RunPlan.FromString(plan.to_message().SerializeToString())
    assert RunPlan.from_message(received) == plan == RunPlan.model_validate_json(plan.model_dump_json())


def test_a_plan_that_trains_all_is_hashed_as_before_there_was_a_choice(tmp_path: Path) -> None:
    plan = config(tmp_path).plan()
    assert '"train"' not in plan.canonical().decode()
    assert plan == config(tmp_path, "all").plan()
    assert not plan.to_message().model.HasField("train")


def test_the_last_layer_is_the_head() -> None:
    made = [ModelPlan(name="lenet5", input_shape=(3, 20, 20), classes=4, train=t) for t in ("head", {"last": 1})]  # type: ignore[arg-type]
    assert made[0] == made[1]


@pytest.mark.parametrize(
    "train",
    ["hed", {"last": 0}, {"lora": {}}, {"lora": {"rank": -1}}, {"last": 2, "lora": {"rank": 2}}, 3, {"first": 2}],
)
def test_another_part_is_an_error_that_says_which_there_are(tmp_path: Path, train: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"`run\.model\.train`: should be all, head, \{last: N\}") as told:
        config(tmp_path, train)
    assert len(str(told.value).splitlines()) == 1


def test_a_plan_of_two_parts_or_none_is_refused(tmp_path: Path) -> None:
    for part in (plan_pb2.Train(last=2, rank=2), plan_pb2.Train()):
        message = config(tmp_path, "head").plan().to_message()
        message.model.train.CopyFrom(part)
        with pytest.raises(RefusedError, match=r"model\.train.*should be all, head"):
            RunPlan.from_message(message)


def test_more_layers_than_there_are_is_said_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"`run\.model`: model lenet5: `train: last: 9` is more than the 5 layers"
    ):
        config(tmp_path, {"last": 9}).build_model()


def test_the_head_preset_is_for_any_network_whose_head_alone_is_trained(tmp_path: Path) -> None:
    plan = config(tmp_path, "head", **PRIVATE).plan()
    assert plan.privacy is not None
    assert plan.privacy.sampling_rate == 1
    with pytest.raises(ConfigurationError, match=r"`run\.privacy\.preset`: .*Say `train: head` under"):
        config(tmp_path, {"lora": {"rank": 2}}, **PRIVATE).plan()
