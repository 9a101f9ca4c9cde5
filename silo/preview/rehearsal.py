"""``silo rehearse``: what could be learnt from a round's update, tried out here before anything leaves.

A round is trained as in the run's first one, but for a fair coin for each of some units (images, patients), the
canaries, that decides whether the training sees it. Two attackers then guess the coins from the trained model
(``medsilo.silo.preview.membership`` says what right guesses prove):

* *loss*: by how much the canary's cross entropy fell from the starting model to the trained one;
* *gradient*: how much of the canary's own gradient is in the difference of the two models. It knows what the
  coordinator knows, and all images besides; under noise that is missing or too small it is much the stronger.

With privacy, a canary that is left out is blanked: it counts, but no step takes it. That is zero-out adjacency to the
letter. Without privacy its images are taken out of the training images.

Nothing is sent, charged or journalled, and nothing that a run keeps is touched.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from medsilo.algorithms.datasets import ImageDataset, load_npz
from medsilo.algorithms.feddfq import FedDFQSilo
from medsilo.algorithms.method import Downloads, Federation, Memory, Method, State
from medsilo.algorithms.models import build_start, state_of
from medsilo.algorithms.registry import make
from medsilo.algorithms.tensors import Payload
from medsilo.privacy.budget import accounting
from medsilo.privacy.budget.accounting import Event, Guarantee, Unit
from medsilo.privacy.budget.loss import DELTA
from medsilo.privacy.budget.noise import NoiseSource
from medsilo.privacy.budget.sealed_keys import Paid, unsealed
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import DataError
from medsilo.privacy.exposure import MODEL, Exposure
from medsilo.silo.preview.attackers import Attackers
from medsilo.silo.preview.canaries import FEWEST_UNITS, Blanking, units_of, without
from medsilo.silo.preview.membership import MembershipAudit, audit_scores
from medsilo.silo.preview.pretend import released_model
from medsilo.silo.run.account import check_promise
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.training.device import choose_device
from medsilo.silo.training.images import check_fits
from medsilo.silo.training.measuring import Progress
from medsilo.silo.training.site import LocalSite

CANARIES = 1000
"""At most so many, unless told otherwise."""

IMAGES_OF_A_UNIT = 16
"""Of a patient's, those that attackers look at."""

_PROBES = 20


@dataclass(frozen=True)
class IdentifierProbe:
    """What two identifiers tell of a unit that came in between: its own column profile, by the difference of the sums.

    Profiles are in the scale of the numbers that would be sent: images go from -1 (black) to 1 (white).

    Attributes:
        tried: units, each taken out once.
        error: how far the worked-out profile is off at its worst column; the median over units.
        worst: the same of the worst unit.
        guess: the median for who has but one identifier, and takes it for the unit's profile.
        truth: one unit's profile: that of the median unit.
        found: the same, worked out.
    """

    tried: int
    error: float
    worst: float
    guess: float
    truth: tuple[float, ...]
    found: tuple[float, ...]


@dataclass(frozen=True)
class Rehearsal:
    """What came out.

    Attributes:
        made: when, UTC.
        unit: what the canaries are.
        units: how many this silo has for training.
        claim: what the rehearsed trainings cost by the plan's own account; None without privacy.
        audit: of the trained model.
        trained: the coins, ``bool [m]``.
        scores: by attacker, ``float64 [m]``.
        leaves: of the model's two parts, extractor and classifier, those that the method sends.
        identifier: None where the method sends none, or sends it with noise.
    """

    plan: RunPlan
    silo: str
    made: datetime
    synthetic: bool
    unit: Unit
    units: int
    claim: Guarantee | None
    audit: MembershipAudit
    trained: npt.NDArray[np.bool_]
    scores: Mapping[str, npt.NDArray[np.float64]]
    leaves: tuple[Exposure, ...]
    identifier: IdentifierProbe | None

    @property
    def broken(self) -> bool:
        """The bound lies above what the plan promises."""
        return self.claim is not None and self.audit.epsilon > self.claim.epsilon

    @property
    def blind(self) -> bool:
        """There is a promise, and no guesses about so few canaries could have refuted it."""
        return self.claim is not None and self.audit.highest <= self.claim.epsilon

    @property
    def verdict(self) -> str:
        """``broken``: the promise is refuted; ``not refuted``; ``cannot tell``: it could not have been with so few
        canaries; ``no promise``: the plan makes none."""
        if self.claim is None:
            return "no promise"
        if self.broken:
            return "broken"
        return "cannot tell" if self.blind else "not refuted"


def rehearse(
    config: SiloConfig,
    plan: RunPlan,
    *,
    canaries: int = CANARIES,
    coins: np.random.Generator | None = None,
    noise: NoiseSource | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Rehearsal:
    """Trains one round of the plan on this silo's images, attacks what comes out, and says what that proves.

    Args:
        canaries: at most so many; all units if there are fewer.
        coins: chooses canaries and throws their coins; by default seeded by the operating system.
        noise: of the training with privacy; by default a source of its own.
        progress: is told where the training stands.

    Raises ``RefusedError`` for a plan whose promise does not hold on paper, ``DataError`` for a shard that does not
    fit or is too small, ``ConfigurationError`` where the run starts from given weights whose file is not here.
    """
    dataset = load_npz(config.shard)
    method = make(plan.method.name, plan.method.parameters)
    check_promise(plan, method)
    check_fits(dataset, plan)
    device = choose_device(config.devices[0])
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    unit: Unit = plan.privacy.unit if plan.privacy else "image"
    members = _enough_units(dataset, unit)
    coins = coins or np.random.default_rng(secrets.randbits(128))
    chosen = np.sort(coins.permutation(len(members))[: max(canaries, 2)])
    trained = coins.random(len(chosen)) < 0.5
    start = _start(config, plan)
    initial = state_of(start)
    upload, memory, events = _train(
        config, plan, method, dataset, start, members, chosen[~trained], device=device, noise=noise, progress=progress
    )
    released = released_model(memory, upload)

    model = _start(config, plan).to(device)
    shown = [dataset.train.take(members[index][:IMAGES_OF_A_UNIT]) for index in chosen]
    scores = Attackers(model, initial, shown).scores(released)
    delta = plan.privacy.delta if plan.privacy else DELTA
    return Rehearsal(
        plan=plan,
        silo=config.name,
        made=datetime.now(UTC).replace(microsecond=0),
        synthetic=dataset.synthetic,
        unit=unit,
        units=len(members),
        claim=_claim(plan, events),
        audit=audit_scores(scores, trained, delta=delta),
        trained=trained,
        scores=scores,
        leaves=tuple(exposure for exposure in MODEL if exposure in upload),
        identifier=_probe(config, plan, method, dataset, members, coins),
    )


def _enough_units(dataset: ImageDataset, unit: Unit) -> list[npt.NDArray[np.int64]]:
    """Each training unit's images; raises ``DataError`` where they are too few."""
    members = units_of(dataset, unit)
    if len(members) < FEWEST_UNITS:
        raise DataError(
            f"{dataset.source}: holds {len(members)} training units ({unit}); guesses about fewer than {FEWEST_UNITS} "
            "prove nothing, so there is nothing to rehearse"
        )
    return members


def _claim(plan: RunPlan, events: Sequence[Event]) -> Guarantee | None:
    """What the rehearsed trainings cost by the plan's own account; None without privacy."""
    if plan.privacy is None:
        return None
    # Of noise that is shared out, the attacker here sees the hospital's own share alone.
    cost = accounting.epsilon([accounting.own_share(event) for event in events], delta=plan.privacy.delta)
    return dataclasses.replace(plan.privacy.guarantee, epsilon=cost)


def _start(config: SiloConfig, plan: RunPlan) -> nn.Module:
    return build_start(plan.model, seed=plan.seed, trusted=config.trusted_models, weights=config.weights)


def _train(
    config: SiloConfig,
    plan: RunPlan,
    method: Method,
    dataset: ImageDataset,
    start: nn.Module,
    members: Sequence[npt.NDArray[np.int64]],
    left_out: npt.NDArray[np.int64],
    *,
    device: torch.device,
    noise: NoiseSource | None,
    progress: Callable[[Progress], None],
) -> tuple[Payload, Memory, list[Event]]:
    """The run's first round without the units ``left_out``: what would be sent, what is kept, and what it costs."""
    events: list[Event] = []
    images = dataset
    if plan.privacy is None:
        images = without(dataset, np.concatenate([np.zeros(0, np.int64), *(members[unit] for unit in left_out)]))
    else:
        noise = Blanking(noise or NoiseSource(), left_out)

    def charge(_round: int, _phase: str, event: Event, _reads: str) -> Paid:
        events.append(event)
        return unsealed()

    site = LocalSite(
        config.name,
        images,
        start,
        plan,
        device=device,
        precision=config.precision,
        progress=progress,
        charge=charge,
        noise=noise,
    )
    upload, memory = _first_round(plan, method, site, state_of(start))
    return upload, memory, events


def _first_round(plan: RunPlan, method: Method, site: LocalSite, initial: State) -> tuple[Payload, Memory]:
    """What the silo's side would send at the end of the run's first round, and what it would keep."""
    federation = Federation(site.layout, plan.training_rounds, plan.seed, (site.name,), plan.model.input_shape)
    download = method.coordinator_side(federation).downloads(0, [site.name], Downloads()).for_silo(site.name)
    side = method.silo_side(site)
    side.begin(initial)
    side.train(0, download)
    return side.upload(), side.memory


def _probe(
    config: SiloConfig,
    plan: RunPlan,
    method: Method,
    dataset: ImageDataset,
    members: Sequence[npt.NDArray[np.int64]],
    coins: np.random.Generator,
) -> IdentifierProbe | None:
    """Takes units out one at a time, and works out each one's profile from the two identifiers that would be sent."""
    if Exposure.DATA_IDENTIFIER not in method.uploads or plan.privacy is not None:
        return None
    model = _start(config, plan)
    start = state_of(model)

    def identifier(images: ImageDataset) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The numbers that would be sent, a row each profile, and how many images each profile is the mean of."""
        side = method.silo_side(LocalSite(config.name, images, model, plan, device=torch.device("cpu")))
        assert isinstance(side, FedDFQSilo), "no other method sends an identifier"
        side.begin(start)
        profile = side.identifier(0)
        rows = np.atleast_2d(profile.double().numpy())
        counts = images.train.counts(plan.model.classes) if len(rows) > 1 else np.array([len(images.train)])
        return rows, counts.astype(np.float64)[:, np.newaxis]

    after, count = identifier(dataset)
    tried = []
    for index in coins.permutation(len(members))[:_PROBES]:
        own = members[index]
        before, less = identifier(without(dataset, own))
        truth, size = identifier(dataclasses.replace(dataset, train=dataset.train.take(own)))
        held = size[:, 0] > 0
        found = (count * after - less * before)[held] / size[held]
        error = float(np.abs(found - truth[held]).max())
        guess = float(np.abs(after[held] - truth[held]).max())
        tried.append((error, guess, truth[held][0], found[0]))
    tried.sort(key=lambda one: one[0])
    error, _, truth_shown, found_shown = tried[(len(tried) - 1) // 2]
    return IdentifierProbe(
        tried=len(tried),
        error=error,
        worst=tried[-1][0],
        guess=float(np.median([guess for _, guess, _, _ in tried])),
        truth=tuple(truth_shown.tolist()),
        found=tuple(found_shown.tolist()),
    )
