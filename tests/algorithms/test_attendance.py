"""Every method with hospitals that are alone, come late, stay away, leave, or join long after the start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch

import medsilo.simulation.federation as federation
from medsilo.algorithms.datasets.public_set import PublicImages
from medsilo.algorithms.models import build, state_of
from medsilo.algorithms.protection.masked import digest
from medsilo.algorithms.registry import METHODS, make
from medsilo.algorithms.tensors import Payload
from medsilo.privacy.exposure import STARTS, Exposure
from tests.support.methods.fitting import fitting
from tests.support.methods.tiny_federation import run_plan, shard


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Of models this small threads take the most time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Attendance:
    """A round: which hospitals are asked, and which of them deliver too late to count."""

    asked: str
    late: str = ""


class Attended(federation.Simulation):
    """A simulation with a list of who comes, round by round; what comes late is dropped, as a coordinator does."""

    def attend(self, rounds: Sequence[Attendance]) -> None:
        names = sorted(self._sides)
        for number, attendance in enumerate(rounds):
            asked, late = ([names["abc".index(letter)] for letter in letters] for letters in vars(attendance).values())
            self._late, self._before = late, dict(self._latest)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(federation, "participants", lambda *_, asked=asked, **__: tuple(asked))
                self.step()
            assert self.round == number + 1
        self.finish()

    def _aggregate(self, number: int, uploads: Mapping[str, Payload]) -> None:
        for name in self._late:
            del self._latest[name]
            if name in self._before:
                self._latest[name] = self._before[name]
        self._latest = dict(sorted(self._latest.items()))
        if counted := {name: payload for name, payload in uploads.items() if name not in self._late}:
            super()._aggregate(number, counted)


def attended(name: str, rounds: Sequence[Attendance], *, silos: int) -> Attended:
    method = make(name, {})
    plan = run_plan(method, rounds=len(rounds), model=fitting(method, "mlp-64", "lenet5"))
    shards = [shard(f"hospital{n}", seed=n) for n in range(1, silos + 1)]
    public = PublicImages(shard("public", seed=9), build(plan.model, seed=plan.seed), plan.model.input_shape)
    one = Attended(plan, method, shards, device=torch.device("cpu"), public=public)
    one.attend(rounds)
    return one


def assert_all_have_models(one: Attended) -> None:
    start = state_of(build(one.plan.model, seed=one.plan.seed))
    for name, side in one.silos.items():
        personal = side.personal()
        assert all(torch.isfinite(tensor).all() for tensor in personal.values()), f"{name} has numbers without end"
        moved = [key for key in start if not torch.equal(personal[key], start[key])]
        assert moved, f"{name} still has the starting model"


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("silos", [1, 2])
def test_one_or_two_hospitals_end_with_a_model(name: str, silos: int) -> None:
    assert_all_have_models(attended(name, [Attendance("abc"[:silos])] * 3, silos=silos))


@pytest.mark.parametrize("name", METHODS)
def test_hospitals_that_come_late_leave_or_join_near_the_end_stop_nobody(name: str) -> None:
    rounds = [
        Attendance("ab"),
        Attendance("ab", late="b"),  # one update
        Attendance("ab", late="ab"),  # none
        Attendance("a"),
        Attendance("b"),
        Attendance("abc"),  # c for the first time
        Attendance("ac"),  # b never comes back
        Attendance("ac", late="c"),
    ]
    assert_all_have_models(attended(name, rounds, silos=3))


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_calls_common_is_given_to_all_hospitals_of_a_round_alike(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hospitals hold it against each other: what differs here would accuse an honest coordinator."""
    common = METHODS[name].common
    given: list[set[bytes]] = []
    seen: set[Exposure] = set()
    ordinary = federation.Simulation._received_bytes

    def noted(self: federation.Simulation, silo: str, payload: Payload) -> object:
        shared = {exposure: part for exposure, part in payload.items() if exposure in common}
        seen.update(shared)
        given[-1].add(digest(shared))
        return ordinary(self, silo, payload)

    def counted(method: Callable[[federation.Simulation], object]) -> Callable[[federation.Simulation], object]:
        def called(self: federation.Simulation) -> object:
            given.append(set())
            return method(self)

        return called

    monkeypatch.setattr(federation.Simulation, "_received_bytes", noted)
    for method in ("step", "finish"):
        monkeypatch.setattr(federation.Simulation, method, counted(getattr(federation.Simulation, method)))
    rounds = [Attendance("ab"), Attendance("abc"), Attendance("bc", late="c"), Attendance("abc"), Attendance("abc")]
    attended(name, rounds, silos=3)
    assert [len(digests) for digests in given] == [1] * (len(rounds) + 1)
    assert seen == common - set(STARTS)


@pytest.mark.parametrize("name", METHODS)
def test_a_hospital_whose_first_update_is_late_gets_into_the_next_round(name: str) -> None:
    rounds = [Attendance("ab"), Attendance("ab"), Attendance("abc", late="c"), Attendance("abc")]
    one = attended(name, rounds, silos=3)
    assert_all_have_models(one)
    if METHODS[name].uploads:
        assert set(one._latest) == set(one.silos)
