"""``silo rehearse --run``: the whole planned run, trained on this hospital's images alone, before it consents.

Three things come of it. None is a verdict, and none needs another hospital:

* **leakage**: this hospital with all of its images, but that a fair coin for each of some units (the canaries) decides
  whether its training sees it, goes through every round of the run; after the first, the last and some in between the
  attackers of a rehearsal (``medsilo.silo.preview.attackers``) guess the coins from all that it has sent so far. Beside
  it stand pretend hospitals, which share the units that are no canaries.
* **accuracy**: the training images are dealt to as many pretend hospitals, a patient's to one of them where the shard
  says whose they are and there are patients enough. They go through the run together, and each
  alone, without noise; all are measured on this hospital's test images. All training images together, alone and
  without noise, stand beside them.
* **price**: what the run would cost by the ledger's account, and the bytes of tensors by exposure class.

Nothing is sent, charged or journalled, and nothing is kept.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from medsilo.algorithms.datasets import ImageDataset, load_npz
from medsilo.algorithms.local import Local
from medsilo.algorithms.method import Method, State
from medsilo.algorithms.models import build_start, state_of
from medsilo.algorithms.registry import make
from medsilo.privacy.budget import accounting
from medsilo.privacy.budget.accounting import Event, Grouped, Guarantee, Unit, own_share
from medsilo.privacy.budget.ledger import Ledger, Subject
from medsilo.privacy.budget.loss import DELTA
from medsilo.privacy.budget.noise import NoiseSource
from medsilo.privacy.budget.sealed_keys import Paid, unsealed
from medsilo.privacy.consent.plan import MethodPlan, RunPlan
from medsilo.privacy.errors import DataError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.silo.preview.attackers import Attackers
from medsilo.silo.preview.canaries import FEWEST_UNITS, Blanking, units_of, without
from medsilo.silo.preview.membership import MembershipAudit, audit_scores
from medsilo.silo.preview.pretend import PretendRun, WatchedSite
from medsilo.silo.preview.rehearsal import CANARIES, IMAGES_OF_A_UNIT
from medsilo.silo.run.account import check_promise
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.training.device import choose_device
from medsilo.silo.training.images import check_fits
from medsilo.silo.training.measuring import Measurement
from medsilo.silo.training.site import LocalSite

HOSPITALS = 4
"""So many pretend hospitals, unless told otherwise."""

LOOKS = 8
"""After so many rounds at most the attackers look; each look takes two gradients of every canary."""

Units = Sequence[npt.NDArray[np.int64]]


@dataclass(frozen=True)
class Leakage:
    """What attackers could tell of the canaries from all that was sent up to a round.

    Attributes:
        round: from 1.
        audit: of the rounds so far together; each look's bound holds by itself.
        claim: what those rounds cost by the plan's own account; None without privacy. Of noise that is shared out these
            attackers, who have this hospital's own model, see its share alone, and so has the claim.
    """

    round: int
    audit: MembershipAudit
    claim: Guarantee | None


@dataclass(frozen=True)
class Accuracies:
    """On this hospital's test images, each with the hospital's own model at the end.

    Attributes:
        units: that a pretend hospital has, the fewest.
        by_patient: a patient's images are all with one of them.
        joined: of the run, by pretend hospital.
        alone: of the same hospitals alone, with the plan's training without noise.
        whole: of all training images, alone and without noise.
    """

    units: int
    by_patient: bool
    joined: tuple[Measurement, ...]
    alone: tuple[Measurement, ...]
    whole: Measurement


@dataclass(frozen=True)
class Price:
    """What the run would cost.

    Attributes:
        run: by the charges that this hospital's ledger would have; None without privacy.
        alone: the same by this hospital's own share of noise that is shared out; None where none is.
        spent, after: what the most-spent image (patient) has cost so far by that ledger, and would have after the run.
        after_alone: after the run, by the hospital's own shares; None where no noise is shared out, or was.
        up, down: bytes of tensors that this hospital would send and be sent in all rounds, before masks.
    """

    run: Guarantee | None
    alone: Guarantee | None
    spent: Guarantee | None
    after: Guarantee | None
    after_alone: Guarantee | None
    up: Mapping[Exposure, int]
    down: Mapping[Exposure, int]


@dataclass(frozen=True)
class WholeRun:
    """What came out.

    ``made``: when, UTC. ``hospitals``: pretend ones. ``leakage``: by round; empty with too few units. ``accuracies``:
    None without test images.
    """

    plan: RunPlan
    silo: str
    made: datetime
    synthetic: bool
    unit: Unit
    units: int
    hospitals: int
    leakage: tuple[Leakage, ...]
    accuracies: Accuracies | None
    price: Price


@dataclass
class Told:
    """How far it is: so many of all trainings, and for what the one under way is."""

    of: int
    done: int = 0
    what: str = ""
    tell: Callable[[Told], None] = field(default=lambda _: None)

    def begin(self, what: str) -> None:
        """Another part has begun."""
        self.what = what
        self.tell(self)

    def trained(self) -> None:
        """A training has ended."""
        self.done += 1
        self.tell(self)


def rehearse_run(
    config: SiloConfig,
    plan: RunPlan,
    *,
    canaries: int = CANARIES,
    hospitals: int = HOSPITALS,
    coins: np.random.Generator | None = None,
    noise: NoiseSource | None = None,
    tell: Callable[[Told], None] = lambda _: None,
) -> WholeRun:
    """Trains the plan's run on this silo's images, and says what that tells, what it gains and what it costs.

    Args:
        canaries: at most so many, and at most half of the units.
        hospitals: how many pretend hospitals, 2 at least.
        coins: chooses canaries, throws their coins and deals units; by default seeded by the operating system.
        noise: of this hospital's own training with privacy; by default a source of its own.
        tell: is told how far it is.

    Raises ``RefusedError`` for a plan whose promise does not hold on paper or whose method needs what only the
    coordinator has, ``DataError`` for a shard that does not fit or is too small, ``ConfigurationError`` where the run
    starts from given weights whose file is not here.
    """
    rehearsed = _Rehearsed.of(config, plan, hospitals, coins or np.random.default_rng(secrets.randbits(128)))
    told = Told(of=plan.rounds * (3 * hospitals + 1), tell=tell)
    told.begin("the run with canaries")
    leakage, price = _leakage_and_price(rehearsed, canaries, noise, told)
    return WholeRun(
        plan=plan,
        silo=config.name,
        made=datetime.now(UTC).replace(microsecond=0),
        synthetic=rehearsed.dataset.synthetic,
        unit=rehearsed.unit,
        units=len(rehearsed.units),
        hospitals=hospitals,
        leakage=leakage,
        accuracies=_accuracies(rehearsed, told) if len(rehearsed.dataset.test) else None,
        price=price,
    )


@dataclass(frozen=True)
class _Rehearsed:
    """What all parts need."""

    config: SiloConfig
    plan: RunPlan
    method: Method
    dataset: ImageDataset
    unit: Unit
    units: Units
    hospitals: int
    coins: np.random.Generator
    device: torch.device

    @classmethod
    def of(cls, config: SiloConfig, plan: RunPlan, hospitals: int, coins: np.random.Generator) -> _Rehearsed:
        dataset = load_npz(config.shard)
        method = make(plan.method.name, plan.method.parameters)
        if method.needs_public:
            raise RefusedError(
                f"{method.name} measures models on images that the coordinator has, and they are not here: its whole "
                "run cannot be rehearsed. `silo rehearse` without --run tries out the first round"
            )
        check_promise(plan, method)
        check_fits(dataset, plan)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        unit: Unit = plan.privacy.unit if plan.privacy else "image"
        units = units_of(dataset, unit)
        if len(units) < hospitals:
            raise DataError(
                f"{dataset.source}: holds {len(units)} training units ({unit}), too few for {hospitals} pretend "
                "hospitals; take fewer with --hospitals"
            )
        device = choose_device(config.devices[0])
        return cls(config, plan, method, dataset, unit, units, hospitals, coins, device)

    def model(self) -> nn.Module:
        """The run's starting model."""
        config, plan = self.config, self.plan
        start = build_start(plan.model, seed=plan.seed, trusted=config.trusted_models, weights=config.weights)
        return start.to(self.device)

    def parts(self, units: Units, count: int) -> list[ImageDataset]:
        """Units (images' indices) dealt at random to so many hospitals, each with all test images."""
        dealt = np.array_split(self.coins.permutation(len(units)), count)
        images = (np.sort(np.concatenate([units[index] for index in part])) for part in dealt)
        return [dataclasses.replace(self.dataset, train=self.dataset.train.take(part)) for part in images]

    def site(self, name: str, images: ImageDataset, model: nn.Module, plan: RunPlan) -> LocalSite:
        return LocalSite(name, images, model, plan, device=self.device, charge=_free)

    def watched(
        self, images: ImageDataset, model: nn.Module, events: list[Event], noise: NoiseSource | None
    ) -> WatchedSite:
        """This hospital, with what its training costs written down."""

        def charge(_round: int, _phase: str, event: Event, _reads: str) -> Paid:
            events.append(event)
            return unsealed()

        return WatchedSite(
            self.config.name,
            images,
            model,
            self.plan,
            device=self.device,
            precision=self.config.precision,
            charge=charge,
            noise=noise,
        )


def _free(_round: int, _phase: str, _event: Event, _reads: str) -> Paid:
    return unsealed()


def _leakage_and_price(
    of: _Rehearsed, canaries: int, noise: NoiseSource | None, told: Told
) -> tuple[tuple[Leakage, ...], Price]:
    """The run with this hospital's images, half of the canaries left out."""
    plan, dataset, count = of.plan, of.dataset, len(of.units)
    most = min(canaries, max(count // 2, FEWEST_UNITS), count - (of.hospitals - 1))
    order = of.coins.permutation(count)
    chosen = np.sort(order[:most]) if most >= FEWEST_UNITS else np.zeros(0, np.int64)
    trained = of.coins.random(len(chosen)) < 0.5
    left_out = chosen[~trained]
    if plan.privacy is None:
        images = without(dataset, np.concatenate([np.zeros(0, np.int64), *(of.units[unit] for unit in left_out)]))
        source = noise
    else:
        images, source = dataset, Blanking(noise or NoiseSource(), left_out)
    model, events = of.model(), list[Event]()
    name = of.config.name
    own = of.watched(images, model, events, source)
    others = of.parts([of.units[index] for index in np.setdiff1d(np.arange(count), chosen)], of.hospitals - 1)
    peers = {f"{name}-pretend-{n}": one for n, one in enumerate(others, start=1)}
    sites = {peer: of.site(peer, one, model, plan) for peer, one in peers.items()}
    run = PretendRun(plan, of.method, model, {name: own, **sites}, told.trained)
    shown = [dataset.train.take(of.units[index][:IMAGES_OF_A_UNIT]) for index in chosen]
    start = state_of(model)
    attackers = Attackers(of.model(), start, shown) if len(chosen) else None
    looks = set(np.unique(np.linspace(1, plan.rounds, min(LOOKS, plan.rounds)).round().astype(int)).tolist())
    moved: State = {}
    before, found = start, []
    for number in range(plan.rounds):
        run.round(number, always=[name])
        released = run.released(name)
        began, own.began = own.began or before, None
        for key, tensor in released.items():
            moved[key] = moved.get(key, 0) + began[key].double() - tensor.double()
        before = released
        if attackers is not None and number + 1 in looks:
            audit = audit_scores(attackers.scores(released, moved), trained, delta=_delta(plan))
            found.append(Leakage(number + 1, audit, _cost(plan, [own_share(event) for event in events])))
    run.finish()
    return tuple(found), _price(of, events, run.up[name], run.down[name])


def _price(of: _Rehearsed, events: Sequence[Event], up: Mapping[Exposure, int], down: Mapping[Exposure, int]) -> Price:
    if of.plan.privacy is None:
        return Price(None, None, None, None, None, up, down)
    ledger = Ledger(of.config.ledgers, Subject(of.dataset.fingerprint, of.unit), of.dataset.contents)
    spent, after = (ledger.spending(of.plan.privacy.delta, extra=extra) for extra in ((), events))
    own = [own_share(event) for event in events]
    alone = _cost(of.plan, own) if own != list(events) else None
    return Price(_cost(of.plan, events), alone, spent.guarantee, after.guarantee, after.alone, up, down)


def _cost(plan: RunPlan, events: Sequence[Event | Grouped]) -> Guarantee | None:
    if plan.privacy is None:
        return None
    epsilon = accounting.epsilon(list(events), delta=plan.privacy.delta)
    return dataclasses.replace(plan.privacy.guarantee, epsilon=epsilon)


def _delta(plan: RunPlan) -> float:
    return plan.privacy.delta if plan.privacy else DELTA


def _accuracies(of: _Rehearsed, told: Told) -> Accuracies:
    patients = units_of(of.dataset, "patient") if of.dataset.train.patients is not None else []
    by_patient = len(patients) >= of.hospitals
    parts = of.parts(patients if by_patient else of.units, of.hospitals)
    shards = {f"pretend-{number}": part for number, part in enumerate(parts, start=1)}
    local = Local()
    # A plan of its own: with no noise, no masks, and nobody to send anything to.
    alone = of.plan.model_copy(
        update={
            "method": MethodPlan(name=local.name, parameters=local.parameters()),
            "required": local.required,
            "optional": (),
            "downlink": (),
            "participation": 1.0,
            "privacy": None,
            "secure_aggregation": None,
        }
    )

    def run(plan: RunPlan, method: Method, shards: Mapping[str, ImageDataset]) -> tuple[Measurement, ...]:
        model = of.model()
        sites = {name: of.site(name, shard, model, plan) for name, shard in shards.items()}
        pretend = PretendRun(plan, method, model, sites, told.trained)
        for number in range(plan.rounds):
            pretend.round(number)
        pretend.finish()
        return tuple(pretend.measured())

    told.begin(f"the run among {of.hospitals} pretend hospitals")
    joined = run(of.plan, of.method, shards)
    told.begin("the same hospitals alone")
    separate = run(alone, local, shards)
    told.begin("all images alone")
    (whole,) = run(alone, local, {of.config.name: of.dataset})
    least = min(len(units_of(part, of.unit)) for part in parts)
    return Accuracies(least, by_patient, joined, separate, whole)
