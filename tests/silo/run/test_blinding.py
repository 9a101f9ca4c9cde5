"""A silo's part in blind mixtures: what it helps to open once, what it refuses, and that it knows it when it was
started anew."""

from __future__ import annotations

import hashlib
import shutil
import stat
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medsilo.algorithms.protection import blind
from medsilo.algorithms.protection.blind import (
    check_plan,
    mix_sealed,
    mixing_of,
    openers,
    share_parts,
    stated,
    upload_parts,
)
from medsilo.algorithms.registry import make
from medsilo.algorithms.tensors import MemoryWorkspace, Part, Payload
from medsilo.algorithms.tensors.files import FileWorkspace, Spares
from medsilo.algorithms.tensors.transfer import check_parts
from medsilo.privacy.consent.consent import Consent
from medsilo.privacy.consent.helped import Help
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.consent.withdrawal import History
from medsilo.privacy.door.door import Door
from medsilo.privacy.errors import ConfigurationError, DataError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.authority import create_authority, issue
from medsilo.privacy.identity.certificates import load_credentials
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import create_keys, load_audit_key
from medsilo.privacy.journal.journal import Journal, read_records
from medsilo.privacy.secure_aggregation.blind_mixing import SMALLEST
from medsilo.silo.run.blinding import Blinding

NAMES = ("a", "b", "c", "d")
RECEIVED = b"m" * 32
METHOD = make("fedamp", {"sigma": 1000.0, "step_size": 400.0})
PLAN = RunPlan.model_validate(
    {
        "federation": "test",
        "coordinator": "coordinator",
        "run": "r",
        "method": {"name": "fedamp", "parameters": METHOD.parameters()},
        "model": {"name": "mlp-64", "input_shape": (1, 16, 16), "classes": 3},
        "training": {},
        "rounds": 4,
        "seed": 1,
        "required": ["SEALED_MODEL"],
        "secure_aggregation": {
            "mode": "blind",
            "minimum": 3,
            "fraction_bits": 38,
            "rounds": 4,
            "sketch_size": 8192,
            "largest_isolation": 1.0,
        },
    }
)
assert PLAN.secure_aggregation is not None
MASKS = PLAN.secure_aggregation
MIXING = mixing_of(PLAN, METHOD, 0)


def model_of(name: str, number: int = 0, moved: float = 0.0) -> Payload:
    drawn = np.random.default_rng(ord(name)).normal(0, 0.1, 5000)
    drawn += moved * np.random.default_rng(1000 * number + ord(name)).normal(0, 0.1, 5000)
    values = torch.from_numpy(drawn.astype(np.float32))
    return {
        Exposure.MODEL_PARAMETERS_CLASSIFIER: Part.of({"w": values[:3000].reshape(30, 100)}),
        Exposure.MODEL_PARAMETERS_EXTRACTOR: Part.of({"v": values[3000:]}),
    }


class Everything:
    def check(self, classes: Any) -> None: ...

    held = nullcontext


class Hospitals:
    """Four of them in one process, and what a coordinator makes of what they send."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.consents: dict[str, dict[str, Any]] = {
            name: {"secure_aggregation": {"largest_sketch": 1}} for name in NAMES
        }
        self._journals: dict[str, Journal] = {}
        create_authority(folder / "ca", "test")
        for name in NAMES:
            request = create_keys(folder / name, Identity("test", "silo", name)).request
            issue(folder / "ca", name, request, folder / name / "tls.pem")
        self.silos = {name: self.started(name) for name in NAMES}

    def started(self, name: str, plan: RunPlan = PLAN) -> Blinding:
        """A hospital, again after an earlier process has ended."""
        if (old := self._journals.pop(name, None)) is not None:
            old.close()
        place = self.folder / name
        audit_key = load_audit_key(place / "audit.key")
        history = History.read(place / "journal")
        self._journals[name] = Journal(place / "journal", key=audit_key, origin=f"medsilo/test/silo/{name}")
        identity = Identity("test", "silo", name)
        assert plan.secure_aggregation is not None
        return Blinding(
            place / f"{plan.run}.json",
            plan,
            plan.secure_aggregation,
            credentials=load_credentials(
                ca=self.folder / "ca" / "ca.pem",
                certificate=place / "tls.pem",
                key=place / "tls.key",
                expected=identity,
            ),
            audit_key=audit_key,
            consents=lambda: [Consent.model_validate(self.consents[name])],
            door=Door(self._journals[name], identity=identity.uri, federation="test", gate=Everything()),
            earlier=history.masked,
            helped=history.helped.get(plan.sha256.hex(), Help()).found,
        )

    def copy(self, name: str, to: Path) -> None:
        """A silo's files of the run."""
        to.mkdir()
        for file in self._files(self.folder / name):
            shutil.copy(file, to / file.name)

    def put_back(self, name: str, copied: Path) -> None:
        """A silo that is started anew with older files of the run, or with none, beside its journal."""
        for file in self._files(self.folder / name):
            file.unlink()
        for file in copied.glob("*"):
            shutil.copy(file, self.folder / name / file.name)
        self.silos[name] = self.started(name)

    @staticmethod
    def _files(folder: Path) -> list[Path]:
        return [*folder.glob("r.*"), *folder.glob("mixes.*")]

    def seal(self, number: int = 0, *, moved: float = 0.0) -> dict[str, Payload]:
        """``moved``: by how much each model has changed since the round before, as a share of itself."""
        received = RECEIVED if number == 0 else bytes([number]) * 32
        stated = [silo.statement(number, received) for silo in self.silos.values()]
        self.roster = [key.to_message() for key in stated if key is not None]
        sealed = {}
        for name, silo in self.silos.items():
            sent = silo.mask(number, self.roster, model_of(name, number, moved))[1]
            # As it arrives: the file that it is sent from is written over by the next.
            copied = {e: {key: tensor.clone() for key, tensor in part.tensors().items()} for e, part in sent.items()}
            sealed[name] = {exposure: Part.of(tensors) for exposure, tensors in copied.items()}
        for payload in sealed.values():
            parts = {exposure: part.specs for exposure, part in model_of("a").items()}
            check_parts({e: part.specs for e, part in payload.items()}, upload_parts(parts, MIXING, MASKS, len(NAMES)))
        return sealed

    def refusals(self, name: str) -> list[str]:
        return [r["reason"] for r in read_records(self.folder / name / "journal") if r["kind"] == "refusal"]

    def close(self) -> None:
        for journal in self._journals.values():
            journal.close()


@pytest.fixture
def hospitals(tmp_path: Path) -> Iterator[Hospitals]:
    found = Hospitals(tmp_path)
    yield found
    found.close()


def told(weights: Any) -> Payload:
    """Weights with something that is said of mixtures."""
    tensor = torch.as_tensor(np.asarray(weights), dtype=torch.int64)
    return stated({Exposure.MIXING_WEIGHTS: Part.of({"weights": tensor})}, [bytes(32)] * len(tensor))


def weigh(sealed: dict[str, Payload]) -> tuple[Payload, dict[str, Payload], Any]:
    """What all are told, the mixtures, and what is shown to people."""
    weights, shown = blind.weigh(sealed, MIXING, MASKS)
    mixed, digests = mix_sealed(sealed, weights, MemoryWorkspace())
    return stated(weights, digests), mixed, shown


def given_to(mixed: dict[str, Payload], shares: dict[str, Payload]) -> dict[str, Payload]:
    for payload in shares.values():
        check_parts({e: part.specs for e, part in payload.items()}, share_parts(len(NAMES)))
    return {name: {**mixed[name], **opening} for name, opening in openers(shares).items()}


def weights_in(payload: Payload) -> np.ndarray:
    found: np.ndarray = payload[Exposure.MIXING_WEIGHTS].tensors()["weights"].numpy()
    return found


@pytest.mark.parametrize("restarted", [False, True])
def test_each_silo_opens_the_mixture_that_all_saw_the_weights_of(
    hospitals: Hospitals, tmp_path: Path, restarted: bool
) -> None:
    """Also a silo that was started anew after it had sealed its model, and after it had helped."""
    sealed = hospitals.seal()
    weights, shown = blind.weigh(sealed, MIXING, MASKS)
    spares = Spares(tmp_path / "spare", most=4)
    mixed, digests = mix_sealed(sealed, weights, FileWorkspace(tmp_path / "results", spares))
    weights = stated(weights, digests)
    for name in NAMES if restarted else ():
        hospitals.silos[name] = hospitals.started(name)
    shares = {name: silo.shares(1, weights) for name, silo in hospitals.silos.items()}
    for name in NAMES if restarted else ():
        hospitals.silos[name] = hospitals.started(name)
        again = hospitals.silos[name].shares(1, weights)[Exposure.OPENING_SHARES]
        assert again.tensors()["shares"].equal(shares[name][Exposure.OPENING_SHARES].tensors()["shares"])
    given = given_to(mixed, shares)
    models = torch.stack(
        [
            torch.cat([t.reshape(-1) for e in Exposure if e in m for t in m[e].tensors().values()])
            for m in map(model_of, NAMES)
        ]
    )
    expected = shown.weights @ models.double()
    received = {hospitals.silos[name].received(given[name]) for name in NAMES}
    assert len(received) == 1, "what the next roster is checked by"
    assert shown.weights.diagonal().max() < 0.9, "models are mixed"
    for place, name in enumerate(NAMES):
        silo = hospitals.silos[name]
        opened = silo.opened(2, given[name])[Exposure.PEER_DERIVED]
        assert [spec.name for spec in opened.specs] == ["v", "w"]
        found = torch.cat([t.reshape(-1) for t in opened.tensors().values()])
        assert float((found - expected[place]).abs().max()) < 2e-4
        path = hospitals.folder / name / "r.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        silo.settled(2)
        assert not path.exists()
        assert not path.with_suffix(".safetensors").exists()


def test_the_methods_weights_are_what_is_made_of_distances_alone(hospitals: Hospitals) -> None:
    weights, _, shown = weigh(hospitals.seal())
    models = torch.stack([model_of(n)[Exposure.MODEL_PARAMETERS_CLASSIFIER].tensors()["w"].reshape(-1) for n in NAMES])
    rest = torch.stack([model_of(n)[Exposure.MODEL_PARAMETERS_EXTRACTOR].tensors()["v"] for n in NAMES])
    whole = torch.cat([models, rest], dim=1).double()
    squared = torch.cdist(whole, whole).square()
    expected = MIXING.weights(squared[None])
    assert float((shown.weights - expected).abs().max()) <= 3.1 / 1024
    assert (weights_in(weights) == (shown.weights * 1024).numpy()).all()


def test_after_it_has_helped_a_silo_helps_with_no_other_weights_and_seals_no_more(hospitals: Hospitals) -> None:
    weights, _, _ = weigh(hospitals.seal())
    hospitals.silos["a"].shares(1, weights)
    others = weights_in(weights).copy()
    others[0] += np.array([-3, 1, 1, 1])
    for why in ("has helped to open mixtures of that round's models", "no mask key was stated"):
        silo = hospitals.silos["a"]
        with pytest.raises(RefusedError, match="the same models are asked for by other weights"):
            silo.shares(1, told(others))
        assert silo.statement(0, RECEIVED) is None, "no key is stated for that round again"
        with pytest.raises(RefusedError, match=why):
            silo.mask(0, hospitals.roster, model_of("a"))
        hospitals.silos["a"] = hospitals.started("a")
    assert len(hospitals.refusals("a")) == 3


def test_a_model_that_is_sealed_again_before_has_nothing_to_do_with_the_first(hospitals: Hospitals) -> None:
    first = hospitals.seal()
    for silo in hospitals.silos.values():
        silo.used()
    second = hospitals.seal()
    for name in NAMES:
        one, other = (s[name][Exposure.SEALED_MODEL].tensors()["words"] for s in (first, second))
        assert not (one == other).all(dim=1).any()
    # What was sealed first, nobody can open any more, nor can it be passed off for what was sealed last.
    _, mixed, _ = weigh(first)
    weights, others, _ = weigh(second)
    told_of = weights[Exposure.MIXING_WEIGHTS].tensors()
    for name, why in (("b", "mixture_of_sealed"), ("a", "mixture_as_stated")):
        digests = [bytes(row) for row in told_of["mixtures"].numpy()]
        if name == "b":
            digests[1] = hashlib.sha256(mixed["b"][Exposure.SEALED_MIXTURE].source.read(0, 12 * SMALLEST)).digest()
            weights = stated({Exposure.MIXING_WEIGHTS: Part.of({"weights": told_of["weights"]})}, digests)
            shares = {each: silo.shares(1, weights) for each, silo in hospitals.silos.items()}
        given = given_to({**others, name: mixed[name]}, shares)
        with pytest.raises(RefusedError, match=why):
            hospitals.silos[name].opened(2, given[name])


def test_what_was_sealed_has_to_be_there_when_it_is_asked_about(hospitals: Hospitals) -> None:
    weights, _, _ = weigh(hospitals.seal())
    (hospitals.folder / "a" / "r.safetensors").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        hospitals.silos["a"].shares(1, weights)


def test_other_check_sums_for_another_hospital_are_found_out_by_the_next_roster(hospitals: Hospitals) -> None:
    weights, mixed, _ = weigh(hospitals.seal())
    shares = {name: silo.shares(1, weights) for name, silo in hospitals.silos.items()}
    given = given_to(mixed, shares)
    opening = {name: tensor.clone() for name, tensor in given["b"][Exposure.OPENING_SHARES].tensors().items()}
    opening["sums"][3, 0, 0] += 1
    given["b"] = {**given["b"], Exposure.OPENING_SHARES: Part.of(opening)}
    received = [hospitals.silos[name].received(given[name]) for name in ("a", "b")]
    assert received[0] != received[1]
    with pytest.raises(RefusedError, match="check_sums: those that came for d"):
        hospitals.silos["b"].opened(2, given["b"])


@pytest.mark.parametrize(
    ("consent", "change", "rule"),
    [
        ({}, [[1024, 0, 0, 0]], "minimum: the mixture of b"),
        ({}, [[600, 300, 100, 24]], "largest_isolation: a's model would stand out 5.83 times in what b get"),
        ({"minimum": 4}, [[341, 341, 342, 0]], "minimum: the mixture of b would hold 2 models"),
        ({"largest_isolation": 0.5}, None, "largest_isolation: a's model would stand out"),
        ({"colluders": 2, "largest_isolation": 1.0}, [[256] * 4, [250, 256, 256, 262]], "in what b, c get"),
        ({}, [[1, 1, 1, 1]], "a row of weights has to add up to 1024"),
    ],
)
def test_weights_that_break_a_rule_are_refused_by_its_name(
    hospitals: Hospitals, consent: dict[str, Any], change: list[list[int]] | None, rule: str
) -> None:
    hospitals.seal()
    weights = np.full((4, 4), 256)
    for row, numbers in enumerate(change or ()):
        weights[1 + row] = numbers
    hospitals.consents["a"] = {"secure_aggregation": consent} if consent else {}
    if consent:
        hospitals.consents["d"] = {}
    with pytest.raises(RefusedError, match=rule) as refused:
        hospitals.silos["a"].shares(1, told(weights))
    assert refused.value.recorded
    (reason,) = hospitals.refusals("a")
    assert rule in reason
    assert "round 2 is not opened by the coordinator's weights" in reason


def with_row(row: list[int]) -> np.ndarray:
    """Even weights for all but b."""
    found = np.full((4, 4), 256)
    found[1] = row
    return found


PLUS, MINUS = [300, 264, 260, 200], [200, 264, 300, 260]
"""For b: each is fair to all; of the same models twice, the one less 0.8 times the other is next to nothing of c and d,
and 140 parts of a."""


def three_rounds(hospitals: Hospitals, moved: float) -> Blinding:
    """Three rounds, of which two have passed."""
    for number, row in ((0, PLUS), (2, MINUS)):
        hospitals.seal(number, moved=moved)
        for silo in hospitals.silos.values():
            silo.shares(number + 1, told(with_row(row)))
            silo.settled(number + 1)
    hospitals.seal(4, moved=moved)
    return hospitals.silos["a"]


def test_weights_that_change_while_models_do_not_are_refused_by_the_rules_name(hospitals: Hospitals) -> None:
    with pytest.raises(RefusedError, match="largest_isolation_over_rounds: a's model would stand out") as refused:
        three_rounds(hospitals, moved=0.0)
    assert refused.value.recorded
    (reason,) = hospitals.refusals("a")
    assert "in what b get in 2 rounds of training together; 3 is the most" in reason


def test_also_by_a_silo_that_was_started_anew_in_between(hospitals: Hospitals) -> None:
    hospitals.seal(0)
    for silo in hospitals.silos.values():
        silo.shares(1, told(with_row(PLUS)))
        silo.settled(1)
    hospitals.silos["a"] = hospitals.started("a")
    hospitals.seal(2)
    hospitals.silos["a"] = hospitals.started("a")
    with pytest.raises(RefusedError, match="largest_isolation_over_rounds"):
        hospitals.silos["a"].shares(3, told(with_row(MINUS)))


def test_of_models_that_have_changed_the_same_weights_are_as_of_new_ones(hospitals: Hospitals) -> None:
    """Three times as far as they are from nothing."""
    silo = three_rounds(hospitals, moved=3.0)
    silo.shares(5, told(with_row(PLUS)))
    helped = [r for r in read_records(hospitals.folder / "a" / "journal") if r["kind"] == "mix"]
    assert [r["rounds"] for r in helped] == [1, 2, 3]
    assert all(1.1 > r["isolation_over_rounds"] >= r["isolation"] > 0.4 for r in helped)


def test_the_last_rounds_weights_again_give_what_they_gave(hospitals: Hospitals) -> None:
    """Another mixture by the same weights tells of models what the first did, and how they moved."""
    for number in (0, 2):
        hospitals.seal(number, moved=0.1)
        hospitals.silos["a"].shares(number + 1, told(with_row(PLUS)))
        hospitals.silos["a"].settled(number + 1)
    first, second = (r for r in read_records(hospitals.folder / "a" / "journal") if r["kind"] == "mix")
    assert first["isolation"] == second["isolation_over_rounds"] == second["isolation"]
    assert first["mix_sha256"] != second["mix_sha256"], "shares of the one open nothing of the other"


def test_shares_of_the_last_round_open_nothing_of_this_one(hospitals: Hospitals) -> None:
    hospitals.seal(0)
    weights = told(np.full((4, 4), 256))
    old = {name: silo.shares(1, weights) for name, silo in hospitals.silos.items()}
    for silo in hospitals.silos.values():
        silo.settled(1)
    sealed = hospitals.seal(2)
    mixed, digests = mix_sealed(sealed, weights, MemoryWorkspace())
    for silo in hospitals.silos.values():
        silo.shares(3, stated(weights, digests))
    with pytest.raises(RefusedError, match="check_sums"):
        hospitals.silos["b"].opened(4, given_to(mixed, old)["b"])


def test_what_was_kept_of_a_run_and_is_lost_is_not_made_up(hospitals: Hospitals) -> None:
    hospitals.seal(0)
    (hospitals.folder / "a" / "mixes.json").unlink()
    with pytest.raises(RefusedError, match=r"mixes.json\) is lost"):
        hospitals.started("a").shares(1, told(np.full((4, 4), 256)))


def test_with_its_files_put_back_a_silo_does_not_help_again_with_what_its_journal_has(
    hospitals: Hospitals, tmp_path: Path
) -> None:
    """Neither with other weights, nor after it has sealed the same model once more; with the same weights it does."""
    weights, _, _ = weigh(hospitals.seal())
    hospitals.copy("a", tmp_path / "before")
    shares = hospitals.silos["a"].shares(1, weights)
    hospitals.put_back("a", tmp_path / "before")
    others = weights_in(weights).copy()
    others[0] += np.array([-3, 1, 1, 1])
    with pytest.raises(RefusedError, match="by other weights, or in another attempt, than this silo's journal has"):
        hospitals.silos["a"].shares(1, told(others))
    again = hospitals.silos["a"].shares(1, weights)[Exposure.OPENING_SHARES].tensors()["shares"]
    assert again.equal(shares[Exposure.OPENING_SHARES].tensors()["shares"])
    hospitals.put_back("a", tmp_path / "nothing")
    assert hospitals.silos["a"].statement(0, RECEIVED) is None, "no key is stated for that round again"
    hospitals.put_back("b", tmp_path / "nothing")
    assert hospitals.silos["b"].statement(0, RECEIVED) is not None, "that has not helped"


def test_what_recipients_have_of_earlier_rounds_is_not_forgotten_with_its_file(
    hospitals: Hospitals, tmp_path: Path
) -> None:
    for number in (0, 2):
        hospitals.seal(number)
        if number == 2:
            hospitals.copy("a", tmp_path / "older")
        hospitals.silos["a"].shares(number + 1, told(with_row(PLUS)))
        hospitals.silos["a"].settled(number + 1)
    for copied in ("nothing", "older"):
        hospitals.put_back("a", tmp_path / copied)
        hospitals.seal(4)
        with pytest.raises(RefusedError, match=r"mixes.json\) is lost"):
            hospitals.silos["a"].shares(5, told(with_row(PLUS)))


@pytest.mark.parametrize("plan", [PLAN, PLAN.model_copy(update={"run": "again"})])
def test_a_roster_with_one_silo_exchanged_is_not_sealed_for(hospitals: Hospitals, plan: RunPlan) -> None:
    """In the next round of the run, and in another run that begins with the same models."""
    hospitals.seal(0)
    folder = hospitals.folder
    request = create_keys(folder / "e", Identity("test", "silo", "e")).request
    issue(folder / "ca", "e", request, folder / "e" / "tls.pem")
    hospitals.consents["e"] = hospitals.consents["a"]
    others = {name: hospitals.started(name, plan) for name in ("a", "b", "c", "e")}
    number, received = (2, b"n" * 32) if plan is PLAN else (0, RECEIVED)
    stated = [silo.statement(number, received) for silo in others.values()]
    with pytest.raises(RefusedError, match=r"asks for the sum of a, b, c, e, and this silo has|from the same models"):
        others["a"].mask(number, [key.to_message() for key in stated if key is not None], model_of("a"))
    assert hospitals.refusals("a")


def test_what_is_not_weights_or_not_the_round_before_is_refused(hospitals: Hospitals) -> None:
    silo = hospitals.silos["a"]
    with pytest.raises(RefusedError, match="has sealed no model in round 1"):
        silo.shares(1, told(np.full((4, 4), 256)))
    hospitals.seal()
    for wrong in ({}, told(np.full((3, 3), 300)), {**told(np.full((4, 4), 256)), **model_of("b")}):
        with pytest.raises(RefusedError, match="weights"):
            silo.shares(1, wrong)
    with pytest.raises(RefusedError, match="nobody asked this silo to open the last one"):
        silo.opened(2, {})
    with pytest.raises(RefusedError, match="a mixture before there is any model"):
        silo.opened(0, model_of("b"))


def test_from_the_same_models_a_silo_seals_in_one_run_alone(hospitals: Hospitals) -> None:
    """A second run that begins as the first would give a second mixture of the same models."""
    hospitals.seal()
    plan = PLAN.model_copy(update={"run": "again"})
    silos = {name: hospitals.started(name, plan) for name in NAMES}
    stated = [silo.statement(0, RECEIVED) for silo in silos.values()]
    with pytest.raises(RefusedError, match="has trained in round 1 of run r from the same models"):
        silos["a"].mask(0, [key.to_message() for key in stated if key is not None], model_of("a"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rounds": 3}, "takes two of the run's rounds"),
        ({"participation": 0.9}, "need all silos"),
        ({"secure_aggregation": MASKS.model_copy(update={"rounds": 2})}, "all of them blind"),
        ({"secure_aggregation": MASKS.model_copy(update={"fraction_bits": 32})}, "multiples of 2"),
    ],
)
def test_a_plan_with_blind_mixtures_that_does_not_hold_together_is_refused(change: dict[str, Any], why: str) -> None:
    check_plan(PLAN, MASKS, METHOD)
    plan = PLAN.model_copy(update=change)
    assert plan.secure_aggregation is not None
    with pytest.raises(ConfigurationError, match=why):
        check_plan(plan, plan.secure_aggregation, METHOD)


def test_rounds_of_a_blind_run() -> None:
    assert [PLAN.is_masked(number) for number in range(5)] == [True, False, True, False, False]
    assert (PLAN.training_rounds, PLAN.rounds_each) == (2, 2)


def test_a_sketch_that_would_be_the_model_is_refused_by_the_rules_name(hospitals: Hospitals) -> None:
    """What a hospital that works with the coordinator learns of the others."""
    hospitals.consents = {name: {} for name in NAMES}
    with pytest.raises(
        RefusedError, match=r"largest_sketch: distances are to be taken of 5000 numbers of the 5000 that"
    ):
        hospitals.seal()
    assert any("largest_sketch" in reason for name in NAMES for reason in hospitals.refusals(name))
