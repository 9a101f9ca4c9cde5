"""Which of a hospital's models is used: what was trained, what did best on validation images, what somebody chose."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from medsilo.algorithms.method import PERSONAL
from medsilo.algorithms.models import build, state_of
from medsilo.privacy.consent.early_end import EarlyEnd, EndReason
from medsilo.privacy.errors import DataError
from medsilo.silo import cli
from medsilo.silo.model.kept_models import (
    choose_model,
    chosen_model,
    find_model,
    kept_models,
    listed,
    models_of,
    use_newest,
)
from medsilo.silo.model.prediction import load_kept
from medsilo.silo.run.run_state import RunState
from medsilo.silo.training.measuring import Measurement
from medsilo.silo.training.site import LocalSite
from tests.support.hospital.run_folder import dataset, memory, plan


def keep(runs: Path, run: str, accuracies: list[float | None], *, when: float = 0.0, **changes: Any) -> RunState:
    """A run whose rounds did so well on the validation images; its model is as old as ``when`` says."""
    state = RunState(runs / run, plan(run=run, rounds=5), "hospital1", dataset())
    for rounds, accuracy in enumerate(accuracies, start=1):
        state.save(
            memory(rounds),
            trained_rounds=rounds,
            measurements={rounds: Measurement(0.5, 1.0)},
            validation=None if accuracy is None else Measurement(accuracy, 1.0),
            **changes,
        )
    for path in (runs / run).glob("*.safetensors"):
        os.utime(path, (when, when))
    return state


def seed_of(path: Path) -> int:
    """Which of ``memory``'s models a file holds."""
    found = load_file(path)
    return next(
        seed for seed in range(1, 9) if all(torch.equal(found[n], t) for n, t in memory(seed)[PERSONAL].items())
    )


def test_the_best_round_by_validation_images_stays_beside_the_last_and_no_other(tmp_path: Path) -> None:
    keep(tmp_path, "r", [0.2, 0.8, 0.5, 0.6])
    best, last = models_of(tmp_path / "r")
    assert (best.which, best.rounds, best.validation, seed_of(best.path)) == ("best", 2, 0.8, 2)
    assert (last.which, last.rounds, last.validation, seed_of(last.path)) == ("last", 4, 0.6, 4)
    files = {path.name for path in (tmp_path / "r").glob("*.safetensors")}
    assert files == {"model.safetensors", "personal-000004.safetensors", "extra-000004.safetensors", best.path.name}
    assert len({path.stat().st_ino for path in (tmp_path / "r").glob("*.safetensors")}) == 3, "two models, one extra"
    assert find_model(tmp_path, round_="best") == best
    assert find_model(tmp_path, round_="2") == best
    assert find_model(tmp_path) == find_model(tmp_path, round_="4") == last


def test_a_best_round_that_is_the_last_takes_no_place_of_its_own(tmp_path: Path) -> None:
    keep(tmp_path, "r", [0.2, 0.8])
    (model,) = models_of(tmp_path / "r")
    assert (model.which, model.rounds) == ("last and best", 2)
    assert find_model(tmp_path, round_="best") == find_model(tmp_path, round_="last") == model
    personal = [path for path in (tmp_path / "r").glob("*.safetensors") if not path.name.startswith("extra")]
    assert len({path.stat().st_ino for path in personal}) == 1


def test_without_validation_images_there_is_no_best_round_and_test_images_choose_none(tmp_path: Path) -> None:
    keep(tmp_path, "r", [None, None])
    with pytest.raises(DataError, match=r"no best round.*validation images.*by test images none is chosen"):
        find_model(tmp_path, round_="best")
    with pytest.raises(DataError, match=r"--round 1: of run r are kept: 2 \(last\)"):
        find_model(tmp_path, round_="1")


def test_the_best_round_outlives_a_restart_and_is_judged_anew_on_other_images(tmp_path: Path) -> None:
    keep(tmp_path, "r", [0.2, 0.8])
    again = RunState(tmp_path / "r", plan(run="r", rounds=5), "hospital1", dataset())
    again.save(memory(3), trained_rounds=3, measurements={}, validation=Measurement(0.5, 1.0))
    assert find_model(tmp_path, round_="best").rounds == 2
    shard = dataset()
    other = dataclasses.replace(shard, validation=shard.test)
    changed = RunState(tmp_path / "r", plan(run="r", rounds=5), "hospital1", other)
    changed.save(memory(4), trained_rounds=4, measurements={}, validation=Measurement(0.4, 1.0))
    assert find_model(tmp_path, round_="best").rounds == 4, "accuracies on different images are not compared"


def test_a_run_that_did_not_train_is_passed_over_and_taken_only_where_it_is_named(tmp_path: Path) -> None:
    keep(tmp_path, "spring", [None], when=100)
    keep(
        tmp_path,
        "summer",
        [None],
        when=200,
        rounds=0,
        finished=True,
        early_end=EarlyEnd(0, EndReason.TOO_FEW_FOR_MASKS),
    )
    assert find_model(tmp_path).run == "spring"
    named = find_model(tmp_path, "summer")
    assert not named.trained
    assert named.end == (
        "ended after 0 of 5 rounds: so many hospitals have withdrawn that too few are left for a masked sum"
    )
    found, in_use = listed(tmp_path)
    assert [model.run for model in found] == ["spring", "summer"]
    assert in_use == found[0]


def test_a_model_of_the_hospitals_own_from_a_run_that_came_to_nothing_is_not_the_runs_model(tmp_path: Path) -> None:
    """It was trained here for a round, and there is nothing of the run in it."""
    keep(tmp_path, "r", [None], finished=True, early_end=EarlyEnd(0, EndReason.TOO_FEW_FOR_MASKS))
    with pytest.raises(DataError, match=r"no run has left a trained model.*r: the run ended after 0 of 5 rounds"):
        find_model(tmp_path)


def test_the_starting_model_is_never_the_best_one(tmp_path: Path) -> None:
    keep(tmp_path, "r", [0.9], rounds=0)
    (model,) = models_of(tmp_path / "r")
    assert (model.which, model.trained) == ("last", False)


def test_of_a_folder_of_an_earlier_release_the_rounds_behind_the_model_are_still_told(tmp_path: Path) -> None:
    """FedAvg's model is what the coordinator hands out: after a round's training it is still the one before."""
    from medsilo.algorithms.registry import make
    from medsilo.privacy.consent.plan import MethodPlan

    method = make("fedavg", {})
    chosen = plan(rounds=3, method=MethodPlan(name="fedavg", parameters=method.parameters()), required=method.required)
    for folder, finished, measured, expected in (
        ("begun", False, [0, 1], 0),
        ("nothing", True, [0, 1], 0),
        ("whole", True, [0, 1, 2, 3, 3], 3),
    ):
        state = RunState(tmp_path / folder, chosen, "hospital1", dataset())
        trained = max(measured)
        state.save(memory(1), trained_rounds=trained, measurements={}, finished=finished)
        path = tmp_path / folder / "progress.json"
        content = json.loads(path.read_text())
        for key in ("rounds", "last", "best", "early_end"):
            del content[key]
        content["measured"] = [{"rounds": rounds, "accuracy": 0.5, "loss": 1.0} for rounds in measured]
        path.write_text(json.dumps(content))
        (model,) = models_of(tmp_path / folder)
        assert (model.rounds, model.trained) == (expected, expected > 0), folder


def test_a_model_that_was_put_in_use_stays_however_the_run_goes_on_until_the_newest_is_taken_again(
    tmp_path: Path,
) -> None:
    spring = keep(tmp_path, "spring", [0.2, 0.8, 0.5], when=100)
    assert choose_model(tmp_path, "spring", "best").rounds == 2
    spring.save(memory(4), trained_rounds=4, measurements={}, validation=Measurement(0.9, 1.0))
    keep(tmp_path, "summer", [0.1], when=2_000_000_000)
    used = find_model(tmp_path)
    assert (used.run, used.rounds, used.which, used.validation, seed_of(used.path)) == ("spring", 2, "chosen", 0.8, 2)
    assert [(one.run, one.rounds) for one in listed(tmp_path)[0]] == [("spring", 4), ("summer", 1), ("spring", 2)]
    assert find_model(tmp_path, round_="last").run == "spring", "a round is one of the run in use"
    assert find_model(tmp_path, "summer").run == "summer", "what is named goes before what is in use"
    module = load_kept(used).module
    assert all(torch.equal(t, memory(2)[PERSONAL][n]) for n, t in state_of(module).items())

    assert choose_model(tmp_path, None, "last").rounds == 4
    assert len(list(tmp_path.glob("in-use-*"))) == 1, "one model is kept for it, not one more each time"
    assert use_newest(tmp_path).run == "summer"
    assert chosen_model(tmp_path) is None
    assert not list(tmp_path.glob("in-use*"))


def test_a_model_in_use_that_is_gone_is_said_with_the_way_back(tmp_path: Path) -> None:
    keep(tmp_path, "r", [0.2])
    path = choose_model(tmp_path, "r", None).path
    path.unlink()
    with pytest.raises(DataError, match="silo models --newest"):
        find_model(tmp_path)
    (tmp_path / "in-use.json").write_text("{")
    with pytest.raises(DataError, match="silo models --newest"):
        find_model(tmp_path)


def test_a_run_whose_files_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    keep(tmp_path, "spring", [0.2], when=100)
    keep(tmp_path, "summer", [0.2], when=200)
    (tmp_path / "summer" / "progress.json").write_text("{")
    assert [model.run for model in kept_models(tmp_path)] == ["spring"]
    with pytest.raises(
        DataError, match=r"summer.*progress\.json is missing or cannot be read.*the disk.*--run.*only a backup"
    ):
        find_model(tmp_path, "summer")


def test_a_lost_plan_can_be_had_again_from_the_coordinator_and_the_message_says_so(tmp_path: Path) -> None:
    keep(tmp_path, "summer", [None])
    path = tmp_path / "summer" / "plan.json"
    path.unlink()
    with pytest.raises(DataError, match=r"the disk.*`silo train`.*`coordinator plan`.*A backup has it too"):
        models_of(path.parent)
    path.write_text(json.dumps(plan(run="summer", rounds=5).model_dump(mode="json"), indent=2))  # what that prints
    assert [model.which for model in models_of(path.parent)] == ["last"]


@pytest.mark.parametrize("source", ["validation split", "set aside by the method", "none"])
def test_validation_is_on_the_shards_split_else_on_what_the_method_set_aside_and_never_on_test_images(
    source: str,
) -> None:
    shard = dataset()
    if source == "validation split":
        shard = dataclasses.replace(shard, validation=shard.train.take([0, 1, 2, 3, 4]))
    site = LocalSite("hospital1", shard, build(plan().model, seed=1), plan(), device=torch.device("cpu"))
    if source == "set aside by the method":
        site.reserve(0.4)
    found = site.validate(memory(1)[PERSONAL])
    if source == "none":
        assert found is None
        return
    images = 5 if source == "validation split" else len(site.reserved_data()[1])
    assert found is not None
    assert (found.accuracy * images) == pytest.approx(round(found.accuracy * images)), f"a share of {images} images"


def test_silo_models_lists_puts_in_use_and_goes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.hospital.trained_hospital import configured

    config = configured(tmp_path, dataset())
    keep(config.runs, "spring", [0.2, 0.75, 0.5], when=100)
    keep(config.runs, "summer", [0.1], when=200)

    def say(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["silo", "models", "--config", str(tmp_path / "hospital1.yaml"), *words])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        return capsys.readouterr().out

    def in_use() -> list[tuple[str, int]]:
        rows = json.loads(say("--json"))["models"]
        return [(row["run"], row["rounds"]) for row in rows if row["in_use"]]

    assert in_use() == [("summer", 1)]
    table = say()
    assert "75.0 % right" in table
    assert "2 of 5" in table
    assert "run spring, after 2 of 5 rounds (its best on validation images)" in say(
        "--run", "spring", "--round", "best"
    )
    assert in_use() == [("spring", 2)]
    assert "run summer, after 1 of 5 rounds" in say("--newest")
    assert in_use() == [("summer", 1)]
