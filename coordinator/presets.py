"""Settings of private training that are known to learn: ``privacy: {preset: head}``.

They are chosen by what is public alone, before any data is looked at: ε, δ, the least number of units that a hospital
has, the number of hospitals in a round, and the rounds. The plan holds plain numbers, which silos check as ever.

**head**: one linear layer on fixed features whose norm is bounded. Full-batch steps (q = 1: nothing is sampled, no
amplification is claimed), about ``STEPS`` in the whole run; SGD with momentum that is kept from round to round; a
training gives the mean of the later half of its models; the least noise that keeps to ε. Where noise is shared out a
round is one step; for patients without momentum, which is slow to begin where steps are few.

The step size follows from how far noise may carry the model. With momentum β and T steps of size η, gradients clipped
to C go at most the way L = η·T·C / (1 - β). At a hospital with n units, under noise of multiplier z, the noise that
gathers on the way has deviation L·√T·z / (T·n) in each coordinate, and 1/√H of that in the mean over H hospitals, or
1/√(H·m) where noise is shared out among m of them. So L = ``REACH`` · √(H·m)·n·√T / z keeps the noise in the model the
same whatever the setting, and ``LONGEST`` is as far as a model goes without noise. Neither the number of classes nor
that of features is in it. The constants are from trials on patients of a training split (docs/differential-privacy.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from medsilo.privacy.budget.accounting import Unit
from medsilo.privacy.consent.consent import TrainingConsent
from medsilo.privacy.consent.plan import TrainingPlan

STEPS = 96
REACH = 1.5
SHARED_REACH = 1.1
"""The same where noise is shared out."""
LONGEST = 2000.0
LARGEST_RATE = TrainingConsent().learning_rate
"""Beyond it, hospitals would have to say that they take larger ones."""
MOMENTUM = 0.9
SAMPLING_RATE = 1.0
CLIPPING_NORM: dict[Unit, float] = {"image": 1.0, "patient": 0.25}
"""A patient's gradient is the mean of its images', and shorter."""
AVERAGED_SHARE = 0.5
LEAST_WAY = 100.0
"""Models that could go less far had, in the trials of docs/differential-privacy.md, 34 % as the mean of four classes'
accuracies at most, where guessing has 25 and no noise 51 to 56."""


UNIT: Unit = "patient"
"""Unless the file says otherwise."""


def mechanism(unit: Unit, *, shared_out: bool) -> dict[str, float]:
    """What the preset sets of ``privacy:``. ``shared_out``: whether noise is; a round then has one step."""
    return {
        "sampling_rate": SAMPLING_RATE,
        "clipping_norm": CLIPPING_NORM[unit],
        "averaged_share": 0.0 if shared_out else AVERAGED_SHARE,
    }


def epochs(rounds: int, *, shared_out: bool = False) -> int:
    """Steps of a round: an epoch at q = 1 is one, and so is all of a round where noise is shared out."""
    return 1 if shared_out else max(1, round(STEPS / rounds))


@dataclass(frozen=True)
class Known:
    """What the step size follows from: all of it public.

    Attributes:
        units: n, the fewest that a hospital has.
        clipping_norm: C.
        hospitals: H, whose models are averaged in a round; 1 where none are.
        honest: m, by whom noise is shared out; 1 where each adds all of it.
        rounds: of the run.
        noise_multiplier: z.
        steps: T, of all trainings, by which z was chosen.
        unit: whose contribution is hidden.
    """

    units: int
    clipping_norm: float
    hospitals: int
    honest: int
    rounds: int
    noise_multiplier: float
    steps: int
    unit: Unit


def way(known: Known) -> float:
    """How far a model may go from the start, per length of the gradients: L / C."""
    reach = SHARED_REACH if known.honest > 1 else REACH
    reach *= math.sqrt(known.hospitals * known.honest * known.steps) * known.units / known.noise_multiplier
    return min(LONGEST, reach) / known.clipping_norm


def warnings(known: Known) -> list[str]:
    """What the operator should know before the run: where there are too few units for so much noise."""
    if (share := way(known) / LEAST_WAY) >= 1:
        return []
    return [
        f"`privacy.preset`: with {known.units} units in a hospital (`privacy.units`) so much noise leaves next to "
        f"nothing to learn: it takes about {math.ceil(known.units / share)} in each, a larger epsilon, or more "
        "hospitals"
    ]


def training(known: Known) -> TrainingPlan:
    """The training of a round."""
    each = epochs(known.rounds, shared_out=known.honest > 1)
    # What patients' few steps would lose at their beginning, images' large ones need to get anywhere.
    momentum = 0.0 if known.honest > 1 and known.unit == "patient" else MOMENTUM
    rate = (1 - momentum) * way(known) / (each * known.rounds)
    return TrainingPlan(
        epochs=each,
        optimizer="sgd",
        learning_rate=float(f"{min(rate, LARGEST_RATE):.3g}"),
        momentum=momentum,
        keep_optimizer_state=momentum > 0,
    )
