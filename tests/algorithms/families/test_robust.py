"""What a minority of poisoned updates can do to an average, and what it cannot to a trimmed mean or a median."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import trim_mean
from torch import Tensor

from medsilo.algorithms.ditto import Ditto
from medsilo.algorithms.families.partial_sharing import PartialSharing
from medsilo.algorithms.families.robust import FEW, average, left_out, trimmed_mean
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.fedbabu import FedBABU
from medsilo.algorithms.fedbn import FedBN
from medsilo.algorithms.feddyn import FedDyn
from medsilo.algorithms.fedper import FedPer
from medsilo.algorithms.fedprox import FedProx
from medsilo.algorithms.fedrep import FedRep
from medsilo.algorithms.fedrod import FedRoD
from medsilo.algorithms.method import Federation, Method, Round
from medsilo.algorithms.models import Layout, state_of
from medsilo.algorithms.moon import Moon
from medsilo.algorithms.perfedavg import PerFedAvg
from medsilo.algorithms.pfedme import PFedMe
from medsilo.algorithms.pfedsim import PFedSim
from medsilo.algorithms.protection.masked import masked_rounds
from medsilo.algorithms.registry import make
from medsilo.algorithms.scaffold import Scaffold
from medsilo.algorithms.tensors import BLOCK, MemoryWorkspace, Part, Payload, Stack
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.exposure import Exposure
from medsilo.simulation.federation import Simulation
from tests.support.methods.small_site import SmallSite, small_model
from tests.support.methods.tiny_federation import run_plan, shard

ROBUST: tuple[type[Any], ...] = (FedAvg, FedProx, Moon, PerFedAvg, Ditto, FedPer, FedRep, FedBN, FedBABU, FedRoD)
LARGEST = float(np.finfo(np.float32).max)


def averaged(method: PartialSharing | PFedSim, models: list[Tensor], images: list[int] | None = None) -> Tensor:
    """What a coordinator makes of flat models ``[29]`` in its first round, flat as well."""
    layout = Layout.of(small_model())
    silos = tuple(f"hospital{n}" for n in range(len(models)))
    side = method.coordinator_side(Federation(layout, 4, 1, silos))
    uploads: dict[str, Payload] = {}
    for number, silo in enumerate(silos):
        upload: dict[Exposure, Part] = {}
        start = 0
        for exposure, specs in side.upload_parts(0, silo).items():
            if exposure == Exposure.SAMPLE_COUNT:
                upload[exposure] = Part.of({"samples": torch.tensor(images[number] if images else 1)})
                continue
            tensors = {}
            for spec in specs:
                size = spec.nbytes // 4
                tensors[spec.name] = models[number][start : start + size].reshape(spec.shape).clone()
                start += size
            upload[exposure] = Part.of(tensors)
        uploads[silo] = upload
    everyone = side.aggregate(Round(0, uploads, uploads, MemoryWorkspace())).everyone
    assert everyone is not None
    return torch.cat([t.reshape(-1) for t in everyone[Exposure.PEER_DERIVED].tensors().values()])


finite = st.floats(-1e6, 1e6, width=32)
anything = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(data=st.data(), honest=st.integers(2, FEW + 4))
def test_liars_up_to_k_cannot_leave_the_range_of_honest_values(data: st.DataObject, honest: int) -> None:
    """The bound that the method promises, with as many liars as it can withstand, coordinate by coordinate."""
    liars = data.draw(st.integers(1, honest - 1))
    good = data.draw(arrays(np.float64, (honest, 7), elements=finite))
    bad = data.draw(arrays(np.float64, (liars, 7), elements=anything))
    order = data.draw(st.permutations(range(honest + liars)))
    found = trimmed_mean(torch.from_numpy(np.concatenate([good, bad])[list(order)]), liars).numpy()
    slack = 1e-9 * np.abs(good).max(axis=0)  # a mean of equal numbers may differ from them in its last bit
    assert (found >= good.min(axis=0) - slack).all()
    assert (found <= good.max(axis=0) + slack).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, FEW, FEW + 1, 23])
def test_it_is_scipys_trimmed_mean_and_numpys_median(rows: int) -> None:
    values = np.random.default_rng(rows).normal(size=(rows, 20_000))
    values[:, :5] = 1.0
    for k in range((rows - 1) // 2 + 1):
        found = trimmed_mean(torch.from_numpy(values), k).numpy()
        np.testing.assert_allclose(found, trim_mean(values, (k + 1e-6) / rows, axis=0), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(found, np.median(values, axis=0), rtol=1e-12, atol=1e-15)


def test_no_fewer_are_left_out_than_the_share_says_and_never_all() -> None:
    assert [left_out(n, 0.1) for n in (1, 2, 3, 10, 11, 20, 30)] == [0, 0, 1, 1, 2, 2, 3]
    assert [left_out(n, 0.49) for n in (3, 4, 5, 100)] == [1, 1, 2, 49]
    assert [left_out(n, None) for n in (1, 2, 3, 4, 5, 6)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("attack", ["huge", "negated", "garbage"])
@pytest.mark.parametrize(
    "method",
    [
        kind(**how)
        for kind in ROBUST
        for how in ({"aggregation": "median"}, {"aggregation": "trimmed_mean", "trim": 0.2})
    ]
    + [PFedSim(aggregation="median")],
    ids=lambda m: f"{m.name}-{m.aggregation}",
)
def test_two_of_ten_liars_move_a_robust_average_no_further_than_honest_silos_differ(
    method: PartialSharing | PFedSim, attack: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    centre = torch.randn(29, generator=generator)
    honest = [centre + 0.1 * torch.randn(29, generator=generator) for _ in range(8)]
    wrong = {
        "huge": torch.full((29,), LARGEST),
        "negated": -1000 * centre,
        "garbage": LARGEST * (2 * torch.rand(29, generator=generator) - 1),
    }[attack]
    models = [wrong, *honest, wrong]
    found = averaged(method, models)
    sent = torch.stack(honest)[:, : len(found)]
    assert (found >= sent.amin(dim=0)).all()
    assert (found <= sent.amax(dim=0)).all()
    plain = averaged(dataclasses.replace(method, aggregation="mean", trim=None), models)
    away = ((plain < sent.amin(dim=0)) | (plain > sent.amax(dim=0))).float().mean()
    assert away > 0.8, "the plain average follows the liars"


def test_a_silo_that_claims_many_images_gains_nothing() -> None:
    models = [torch.zeros(29), torch.ones(29), torch.full((29,), 9.0)]
    assert averaged(FedAvg(), models, [1, 1, 10**9]).mean() > 8.99
    robust = FedAvg(aggregation="median")
    assert torch.equal(averaged(robust, models), torch.ones(29))
    assert Exposure.SAMPLE_COUNT not in robust.uploads
    side = robust.silo_side(SmallSite())
    side.begin(state_of(small_model()))
    assert Exposure.SAMPLE_COUNT not in side.upload()


class _Poisoned:
    """A silo side whose classifier goes up turned round and blown up."""

    def __init__(self, side: Any) -> None:
        self._side = side

    def __getattr__(self, name: str) -> Any:
        return getattr(self._side, name)

    def upload(self) -> Payload:
        sent: Mapping[Exposure, Part] = self._side.upload()
        return {
            exposure: Part.of({name: -30 * tensor for name, tensor in part.tensors().items()})
            if exposure == Exposure.MODEL_PARAMETERS_CLASSIFIER
            else part
            for exposure, part in sent.items()
        }


def accuracy_under_attack(method: Method) -> float:
    """The honest silos' mean accuracy at the end, one of five turning its classifier round in each round."""
    shards = [shard(f"hospital{n}", seed=n, train=60, test=30) for n in range(1, 6)]
    simulation = Simulation(run_plan(method, rounds=6), method, shards, device=torch.device("cpu"))
    sides: Any = simulation.silos
    sides["hospital3"] = _Poisoned(sides["hospital3"])
    for _ in range(6):
        simulation.step()
    measured = simulation.finish()
    return float(np.mean([m.accuracy for name, m in measured.items() if m is not None and name != "hospital3"]))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny trainings take long when several threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_one_liar_of_five_ruins_the_mean_and_not_the_median(one_thread: None) -> None:
    assert accuracy_under_attack(FedAvg()) < 0.6
    assert accuracy_under_attack(FedAvg(aggregation="median")) > 0.8
    assert accuracy_under_attack(FedAvg(aggregation="trimmed_mean", trim=0.2)) > 0.8


@pytest.mark.parametrize("method", [FedAvg(aggregation="median"), PFedSim(aggregation="trimmed_mean", trim=0.1)])
def test_masks_and_robust_averages_do_not_go_together(method: Method) -> None:
    with pytest.raises(ConfigurationError, match="single silos' numbers, which masks hide"):
        masked_rounds(method, 4)


@pytest.mark.parametrize("kind", [Scaffold, FedDyn, PFedMe])
def test_methods_that_compute_with_sums_refuse_it(kind: type[Any]) -> None:
    with pytest.raises(ConfigurationError, match="only mean will do"):
        kind(aggregation="median")


@pytest.mark.parametrize("kind", [*ROBUST, PFedSim])
@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"aggregation": "krum"}, "mean or trimmed_mean or median"),
        ({"aggregation": "trimmed_mean"}, "trim is None"),
        ({"aggregation": "trimmed_mean", "trim": 0.5}, "below 0.5"),
        ({"aggregation": "trimmed_mean", "trim": 0}, "above 0"),
        ({"aggregation": "trimmed_mean", "trim": "much"}, "a number"),
        ({"trim": 0.1}, "trim is for"),
        ({"aggregation": "median", "trim": 0.1}, "trim is for"),
    ],
)
def test_a_setting_that_would_not_protect_is_refused(kind: type[Any], parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make(kind.name, parameters)


def test_plans_without_it_are_written_as_before_there_was_any() -> None:
    assert FedAvg().parameters() == {"weighting": "samples"}
    assert FedAvg(aggregation="median").parameters() == {"weighting": "samples", "aggregation": "median"}
    stated = FedAvg(aggregation="trimmed_mean", trim=0.2).parameters()
    assert make("fedavg", stated) == FedAvg(aggregation="trimmed_mean", trim=0.2)


def test_the_operator_hears_how_many_liars_are_withstood() -> None:
    assert FedAvg().warnings(3, "mlp-64", "adam") == []
    assert "withstands 1 " in FedAvg(aggregation="median").warnings(3, "mlp-64", "adam")[0]
    assert "is the mean" in FedAvg(aggregation="trimmed_mean", trim=0.4).warnings(2, "mlp-64", "adam")[0]
    assert "later mixtures are not robust" in PFedSim(aggregation="median").warnings(5, "mlp-64", "adam")[0]


def test_a_model_of_many_blocks_is_averaged_in_order() -> None:
    values = torch.arange(BLOCK + 5, dtype=torch.float32)
    stack = Stack([[Part.of({"w": values + shift})] for shift in (-1.0, 0.0, LARGEST)])
    part = average(stack, torch.empty(0), MemoryWorkspace(), aggregation="median", trim=None)
    assert torch.equal(part.tensors()["w"], values)
