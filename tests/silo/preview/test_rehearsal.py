"""``silo rehearse``: a training that keeps its promise is not accused, one that is broken is caught, nothing is left
behind but a page for the silo's own eyes."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import binomtest
from torch import nn

from medsilo.algorithms.datasets import ImageDataset, ImageSplit, load_npz
from medsilo.algorithms.models import ARCHITECTURES
from medsilo.algorithms.registry import METHODS, make
from medsilo.privacy.budget.accounting import SampledGaussian, Unit, epsilon, noise_multiplier_for
from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.privacy.errors import DataError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.report.rehearsed import read_rehearsals
from medsilo.silo import cli
from medsilo.silo.data.synthetic import generate_tissue
from medsilo.silo.preview import rehearsal
from medsilo.silo.preview.membership import Attack, Guesses, MembershipAudit, audit_scores
from medsilo.silo.preview.rehearsal import Rehearsal, rehearse
from medsilo.silo.preview.rehearsal_page import as_json, make_document, write_page
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.training import private_training
from medsilo.silo.training.private_training import clipped_sum
from tests.support.hospital.seeded_noise import Seeded
from tests.support.hospital.trained_hospital import configured
from tests.support.methods.fitting import fitting

ROUNDS = 2


def planned(
    method: str = "fedavg", *, model: str = "lenet5-gn", private: bool = False, unit: Unit = "image", **changes: Any
) -> RunPlan:
    chosen = make(method, changes.pop("parameters", {}))
    training = {"epochs": 2, "optimizer": "sgd", "learning_rate": 0.1, "batch_size": 16, **changes.pop("training", {})}
    size, classes = changes.pop("size", 28), changes.pop("classes", 9)
    privacy = None
    if private:
        rate, each = 0.5, 4

        def events(noise: float) -> list[SampledGaussian]:
            return [SampledGaussian(rate, noise, each)]

        noise = noise_multiplier_for(1.0, delta=1e-5, events=events)  # one round costs 1
        privacy = PrivacyPlan(
            epsilon=changes.pop("epsilon", 2.0),
            delta=1e-5,
            unit=unit,
            clipping_norm=0.01,
            noise_multiplier=noise,
            sampling_rate=rate,
            steps=ROUNDS * each,
        )
    return RunPlan(
        federation="test",
        coordinator="coordinator",
        run="autumn",
        method=MethodPlan(name=method, parameters=chosen.parameters()),
        model=ModelPlan(name=model, input_shape=(3, size, size), classes=classes),
        training=TrainingPlan.model_validate(training),
        rounds=ROUNDS,
        seed=1,
        required=chosen.required,
        privacy=privacy,
    )


@pytest.fixture(scope="module")
def shard() -> ImageDataset:
    return generate_tissue(seed=1, train=200, test=9)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, shard: ImageDataset) -> SiloConfig:
    return configured(tmp_path_factory.mktemp("hospital1"), shard)


@pytest.fixture(scope="module")
def sound(config: SiloConfig) -> Rehearsal:
    """A rehearsal of DP-SGD as it is."""
    return rehearse(config, planned(private=True), coins=np.random.default_rng(1), noise=Seeded(1))


def test_real_dp_training_is_not_accused(sound: Rehearsal) -> None:
    assert sound.claim is not None
    assert sound.audit.epsilon <= sound.claim.epsilon
    assert sound.verdict == "not refuted"
    assert not sound.blind
    assert sound.audit.highest > 3.5, "had there been something to find, it could have been found"


def test_noise_that_is_multiplied_by_nothing_is_caught(config: SiloConfig, sound: Rehearsal) -> None:
    found = rehearse(config, planned(private=True), coins=np.random.default_rng(1), noise=Seeded(1, factor=0.0))
    assert found.claim == sound.claim
    assert found.verdict == "broken"
    assert found.audit.epsilon > 1.5


def test_clipping_that_was_forgotten_is_caught(config: SiloConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def unclipped(*arguments: Any) -> Any:
        *others, _bound = arguments
        return clipped_sum(*others, 1e9)

    monkeypatch.setattr(private_training, "clipped_sum", unclipped)
    found = rehearse(config, planned(private=True), coins=np.random.default_rng(1), noise=Seeded(1))
    assert found.verdict == "broken"
    assert found.audit.epsilon > 1.2


def linear_plan() -> RunPlan:
    """Full-batch steps of a linear layer, as the preset `head` has them: a round of two costs 1."""
    plan = planned(private=True, model="linear", training={"momentum": 0.9, "keep_optimizer_state": True})
    noise = noise_multiplier_for(1.0, delta=1e-5, events=lambda z: [SampledGaussian(1.0, z, 2)])
    changes = {"sampling_rate": 1.0, "noise_multiplier": noise, "steps": ROUNDS * 2, "averaged_share": 0.5}
    assert plan.privacy is not None
    return plan.model_copy(update={"privacy": plan.privacy.model_copy(update=changes)})


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "not refuted"), (0.0, "broken")])
def test_a_heads_training_is_held_against_its_claim(
    config: SiloConfig, monkeypatch: pytest.MonkeyPatch, factor: float, verdict: str
) -> None:
    monkeypatch.setitem(
        ARCHITECTURES, "linear", lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(28 * 28 * 3, classes))
    )
    monkeypatch.setattr(private_training, "clipped_sum", None)  # it is trained the quick way
    found = rehearse(config, linear_plan(), coins=np.random.default_rng(1), noise=Seeded(1, factor=factor))
    assert found.claim is not None
    assert 0.99 < found.claim.epsilon <= 1.0
    assert found.verdict == verdict
    assert not found.blind


def test_the_claim_is_what_the_account_charges_for_the_round_that_was_rehearsed(sound: Rehearsal) -> None:
    privacy = sound.plan.privacy
    assert privacy is not None
    assert sound.claim is not None
    assert sound.claim.epsilon == epsilon([privacy.training(4)], delta=1e-5) < privacy.epsilon
    assert sound.claim.conditions == "unit image, adjacency zero-out, accountant PLD"


def test_a_canary_that_is_left_out_is_in_no_step_and_still_counts(
    config: SiloConfig, shard: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero-out adjacency: its images are blanked, the number of units is public."""
    seen: list[npt.NDArray[np.uint8]] = []

    def watching(model: Any, parameters: Any, images: Any, *rest: Any) -> Any:
        pixels = ((images.numpy() * 0.5 + 0.5) * 255).round().astype(np.uint8).transpose(0, 2, 3, 1)
        seen.extend(pixels)
        return clipped_sum(model, parameters, images, *rest)

    monkeypatch.setattr(private_training, "clipped_sum", watching)
    noise = Seeded(1)
    found = rehearse(config, planned(private=True), coins=np.random.default_rng(1), noise=noise)
    assert noise.counts == {200}
    taken = {image.tobytes() for image in seen}
    of_training = {shard.train.images[index].tobytes() for index in np.flatnonzero(found.trained)}
    left_out = {shard.train.images[index].tobytes() for index in np.flatnonzero(~found.trained)}
    assert len(of_training & taken) > 0.8 * len(of_training)
    assert not left_out & taken


def test_without_privacy_the_training_has_the_images_that_the_coins_gave_it(
    config: SiloConfig, shard: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ImageSplit] = []
    real = rehearsal.LocalSite

    def watching(name: str, dataset: ImageDataset, *rest: Any, **options: Any) -> Any:
        seen.append(dataset.train)
        return real(name, dataset, *rest, **options)

    monkeypatch.setattr(rehearsal, "LocalSite", watching)
    found = rehearse(config, planned(model="mlp-64"), coins=np.random.default_rng(5))
    (used,) = seen
    assert np.array_equal(used.images, shard.train.images[found.trained])
    assert 70 < found.audit.trained < 130, "fair coins"
    assert found.verdict == "no promise"
    assert not found.broken


def test_plain_training_that_overfits_is_seen_to_tell_whose_images_it_used(config: SiloConfig) -> None:
    plan = planned(model="mlp-64", training={"epochs": 40, "optimizer": "adam", "learning_rate": 0.003})
    found = rehearse(config, plan, coins=np.random.default_rng(1))
    assert found.audit.epsilon > 0.5
    assert found.audit.best.auc > 0.7


def test_the_same_coins_and_noise_give_the_same_figures(config: SiloConfig, sound: Rehearsal) -> None:
    again = rehearse(config, planned(private=True), coins=np.random.default_rng(1), noise=Seeded(1))
    assert again.audit == sound.audit
    assert np.array_equal(again.trained, sound.trained)


def test_fewer_canaries_leave_the_other_images_to_the_training(config: SiloConfig) -> None:
    found = rehearse(config, planned(model="mlp-64"), canaries=40)
    assert (found.audit.canaries, found.units, len(found.trained)) == (40, 200, 40)


def test_with_the_patient_as_unit_coins_are_tossed_for_patients(
    tmp_path: Path, shard: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    patients = np.array([f"patient {index // 5}" for index in range(200)])
    train = ImageSplit(shard.train.images, shard.train.labels, patients)
    ours = configured(tmp_path, dataclasses.replace(shard, train=train))
    steps: list[int] = []

    def watching(model: Any, parameters: Any, images: Any, labels: Any, groups: Any, bound: float) -> Any:
        steps.extend(np.bincount(groups).tolist())
        return clipped_sum(model, parameters, images, labels, groups, bound)

    monkeypatch.setattr(private_training, "clipped_sum", watching)
    found = rehearse(ours, planned(private=True, unit="patient", model="mlp-64"))
    assert (found.unit, found.units, found.audit.canaries) == ("patient", 40, 40)
    assert set(steps) == {5}, "a patient is used whole or not at all"
    text = json.dumps(make_document(found).to_data())
    assert "40 patients" in text
    assert "unit patient" in text


@pytest.mark.parametrize("parameters", [{}, {"per_class": True}, {"centre": "none"}], ids=str)
def test_two_identifiers_give_a_new_images_mean_columns(tmp_path: Path, parameters: dict[str, Any]) -> None:
    """With 500 images, then 501: to 2e-5 (pixels of about 0.7, all of one sign, round a little worse than that)."""
    ours = configured(tmp_path, generate_tissue(seed=2, train=501, test=9))
    plan = planned("feddfq", model="mlp-64", parameters=parameters, training={"epochs": 1})
    found = rehearse(ours, plan, canaries=20).identifier
    assert found is not None
    assert found.tried == 20
    assert found.error <= found.worst <= 5e-5
    assert parameters == {"centre": "none"} or found.error < 2e-5
    assert found.guess > 100 * found.worst, "and one identifier alone does not give it"
    assert np.abs(np.array(found.truth) - np.array(found.found)).max() <= found.worst


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SiloConfig:
    return configured(tmp_path_factory.mktemp("small"), generate_tissue(seed=3, train=36, test=9, size=16))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_can_be_rehearsed_and_says_what_of_its_model_leaves(small: SiloConfig, method: str) -> None:
    plan = planned(method, model=fitting(make(method, {}), "mlp-64", "resnet8"), size=16, training={"epochs": 1})
    found = rehearse(small, plan, coins=np.random.default_rng(1))
    sends = {Exposure.MODEL_PARAMETERS_EXTRACTOR, Exposure.MODEL_PARAMETERS_CLASSIFIER} & set(found.plan.required)
    assert set(found.leaves) == sends
    assert (found.identifier is not None) == (Exposure.DATA_IDENTIFIER in found.plan.required)
    warnings = " ".join(make_document(found).warnings)
    assert ("sends no model" in warnings) == (not sends)
    assert ("a part of the model only" in warnings) == (len(sends) == 1)


def test_batch_normalisation_can_be_rehearsed(small: SiloConfig) -> None:
    assert np.isfinite(rehearse(small, planned(model="resnet8", size=16, training={"epochs": 1})).scores["loss"]).all()


def test_a_plan_whose_promise_is_false_on_paper_is_refused_as_at_joining(config: SiloConfig) -> None:
    with pytest.raises(RefusedError, match="steps"):
        rehearse(config, planned(private=True, epsilon=1.0))


def test_too_few_images_are_refused(tmp_path: Path) -> None:
    ours = configured(tmp_path, generate_tissue(seed=3, train=19, test=9, size=16))
    with pytest.raises(DataError, match="holds 19 training units"):
        rehearse(ours, planned(model="mlp-64", size=16))


def with_bound(found: Rehearsal, *, right: bool, canaries: int = 200) -> Rehearsal:
    """The same, had the attackers known all coins or none."""
    coins = np.random.default_rng(9).permutation(np.arange(canaries) < canaries // 2)
    other = np.tile([True, False], canaries // 2)
    audit = audit_scores({"loss": (coins if right else other) + np.linspace(0, 0.1, canaries)}, coins, delta=1e-5)
    return dataclasses.replace(
        found, audit=audit, trained=coins, scores={"loss": np.linspace(0, 1, canaries)}, units=canaries
    )


def test_the_verdict_is_in_words_that_need_no_statistics(sound: Rehearsal) -> None:
    bare = dataclasses.replace(sound, claim=None, plan=planned())
    cases = [
        (with_bound(sound, right=True), "broken", "do not take part in this run", "bad"),
        (with_bound(sound, right=False), "not refuted", "Nothing was found against it", "good"),
        (with_bound(sound, right=True, canaries=8), "cannot tell", "This rehearsal cannot tell", "attention"),
        (with_bound(bare, right=True), "no promise", "The run promises none", "attention"),
    ]
    for found, verdict, words, tone in cases:
        assert found.verdict == as_json(found)["verdict"] == verdict
        first, membership, *_ = make_document(found).answers
        assert words in first.verdict
        assert first.tone == tone
        told = " ".join([first.verdict, *first.sentences, membership.question, membership.verdict])
        assert "AUC" not in told
        assert "curve" not in told
    assert "Synthetic images" in " ".join(make_document(sound).warnings)
    told = " ".join(make_document(cases[0][0]).answers[1].sentences)
    assert "Of 200 guesses" in told
    assert "200 were right" in told
    assert "less than 0.01 %" in told


def guessed(sound: Rehearsal, right: int) -> Rehearsal:
    """Of 400 guesses about 400 canaries so many right, without any bound above 0; all other tests as chance has it."""
    first = Guesses(400, right, 0.0, 4.0)
    others = tuple(Guesses(made, made // 2, 0.0, 4.0) for made in (200, 100, 40))
    attacks = (Attack("loss", 0.5, (first, *others)), Attack("gradient", 0.5, (Guesses(400, 200, 0.0, 4.0), *others)))
    return dataclasses.replace(sound, audit=MembershipAudit(400, 200, attacks, 1e-5, 0.95))


def test_the_headline_is_worded_by_the_test_that_was_made_and_not_beyond_it(sound: Rehearsal) -> None:
    """224 of 400 is z = 2.4: of one test rarer than one in a hundred, of the best of eight not rare enough to show."""
    for right, alone, together, headline in (
        (224, "1.0 %", "7.5 %", f"Not shown by this test of round 1 of {ROUNDS}"),
        (232, "0.08 %", "0.7 %", f"Yes, better than by chance in round 1 of {ROUNDS}"),
        (200, "52.0 %", "100.0 %", f"Not shown by this test of round 1 of {ROUNDS}"),
    ):
        found = guessed(sound, right)
        membership = make_document(found).answers[1]
        told = " ".join([membership.verdict, *membership.sentences])
        assert membership.verdict.startswith(headline)
        assert "No better than by chance" not in told
        assert f"Of 400 guesses, those of which the better attacker was surest, {right} were right" in told
        exact = binomtest(right, 400, 0.5, alternative="greater").pvalue
        assert found.audit.best.best.chance == pytest.approx(exact)
        assert found.audit.chance == as_json(found)["by_chance"] == pytest.approx(min(1.0, 8 * exact))
        assert f"with a probability of {alone}" in told
        assert f"with up to {together}" in told
        assert f"The test covered round 1 of {ROUNDS}" in told
        assert as_json(found)["rounds_covered"] == [1]


def test_the_page_is_whole_and_for_the_silos_own_user_only(config: SiloConfig, sound: Rehearsal) -> None:
    folder = config.state / "rehearsal"
    folder.mkdir(parents=True)
    (folder / ".autumn.html.partial").write_text("left by a crash, readable for all")
    path = write_page(sound, config)
    assert path == folder / "autumn.html"
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    assert text.count("<svg") == 2
    assert "Nothing was found against it" in text
    assert "<script" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert {one.name for one in folder.iterdir()} == {"autumn.html", "autumn.json"}
    assert (folder / "autumn.json").stat().st_mode & 0o777 == 0o600
    (told,) = read_rehearsals(folder)
    assert (told.verdict, told.epsilon_lower_bound, told.claimed) == (sound.verdict, sound.audit.epsilon, sound.claim)


def test_the_command_fails_when_the_promise_is_refuted_and_leaves_nothing_but_the_page(
    tmp_path: Path, shard: ImageDataset, sound: Rehearsal, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    configured(tmp_path, shard)
    (tmp_path / "plan.json").write_text(sound.plan.model_dump_json())
    words = ["silo", "rehearse", "-c", str(tmp_path / "hospital1.yaml"), "--plan", str(tmp_path / "plan.json")]
    for found, code in ((with_bound(sound, right=True), 11), (sound, 0)):
        monkeypatch.setattr(rehearsal, "rehearse", lambda *_, found=found, **__: found)
        for options in ([], ["--json"]):
            monkeypatch.setattr(sys, "argv", [*words, *options])
            with pytest.raises(SystemExit) as ending:
                cli.main()
            assert ending.value.code == code
            said = capsys.readouterr()
            assert ("do not take part" in " ".join(said.err.split())) == (code == 11)
            if options:
                assert json.loads(said.out)["epsilon_lower_bound"] == found.audit.epsilon
            else:
                assert make_document(found).answers[0].verdict in said.out
    assert {str(p.relative_to(tmp_path / "state")) for p in (tmp_path / "state").rglob("*") if p.is_file()} == {
        "rehearsal/autumn.html",
        "rehearsal/autumn.json",
    }
    assert load_npz(tmp_path / "shard.npz").fingerprint == shard.fingerprint
