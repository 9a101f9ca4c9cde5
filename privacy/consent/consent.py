"""A silo's consent: what it agrees to, in a file of its own that nobody else can widen. Default: nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from medsilo.privacy.budget.accounting import Guarantee, Unit, epsilon
from medsilo.privacy.budget.promise import PrivacyPlan, steps_of
from medsilo.privacy.consent.plan import Proposal, Trust
from medsilo.privacy.errors import ConsentError, IdentityError
from medsilo.privacy.exposure import UNDER_ROSTER, Exposure, expand
from medsilo.privacy.files.configuration import Name, StrictModel, load
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.pages.wording import shown
from medsilo.privacy.witness.config import WitnessPolicy


def today() -> date:
    """The day, UTC."""
    return datetime.now(UTC).date()


LEAST_UNITS = 50
"""How many units an average is over at least where a consent does not say."""


class PrivacyConsent(StrictModel):
    """What all releases may cost any image (patient) together, over all runs and versions of the data set, and how
    it is counted. Without it, each run is held to its own promise.

    ``epsilon``, ``delta``: the budget; adjacency zero-out, accountant PLD. ``unit``: whose contribution is hidden.
    ``clipping_norm``: the largest that a plan may have; any by default. ``demanded``: whether runs without differential
    privacy are refused. ``least_units``: with fewer units than this, no mean over them leaves (FedDFQ's identifier).
    ``metrics_epsilon``: what accuracies may cost the test images, which have an account of their own; without it none
    leaves a private run.
    """

    epsilon: float = Field(gt=0, allow_inf_nan=False)
    delta: float = Field(gt=0, lt=1)
    unit: Unit = "image"
    clipping_norm: float | None = Field(default=None, gt=0)
    demanded: bool = True
    least_units: int = Field(default=LEAST_UNITS, ge=1)
    metrics_epsilon: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    def budget(self, split: str) -> float | None:
        """The budget of the units of a split (train or test); None where there is none."""
        return self.epsilon if split == "train" else self.metrics_epsilon

    def missing_for(self, plan: Proposal) -> tuple[str, ...]:
        """What a plan needs beyond this, each in words with the line that would allow it."""
        found = plan.privacy
        if found is None:
            return ("a run without differential privacy (`privacy: demanded: false`)",) if self.demanded else ()
        lines = []
        if found.unit != self.unit:
            lines.append(f"the {found.unit} as unit of privacy (`privacy: unit: {found.unit}`)")
        if self.clipping_norm is not None and found.clipping_norm > self.clipping_norm:
            lines.append(
                f"a clipping norm of {found.clipping_norm:g} (`privacy: clipping_norm: {found.clipping_norm:g}`)"
            )
        cost = epsilon(found.events, delta=self.delta)
        if cost > self.epsilon:
            guarantee = Guarantee(cost, self.delta, found.unit)
            lines.append(f"a privacy loss of {guarantee} (`privacy: epsilon: {shown(cost)}`)")
        return tuple(lines)

    def lowered_from(self, before: PrivacyConsent | None, plan: PrivacyPlan) -> tuple[str, ...]:
        """What a run that began under ``before`` goes by until it ends, and this gives less of, each in words."""
        if before is None:
            return ("a run that began without a budget (take `privacy:` out of the consent)",)
        lines = [
            f"the {name} that the run began with (`privacy: {name}: {given:g}`)"
            for name, given, now in (("epsilon", before.epsilon, self.epsilon), ("delta", before.delta, self.delta))
            if now < given
        ]
        if plan.releases and self.least_units > before.least_units:
            lines.append(f"averages of {before.least_units} units (`privacy: least_units: {before.least_units}`)")
        return tuple(lines)


INVENTED_HOSPITALS = (
    "the consent names no audit keys of the hospitals that this one masks with (`secure_aggregation: audit_keys:`): "
    "whoever runs the federation's CA, often the coordinator's operator, could invent hospitals, and take their parts "
    "out of the sum (the mixture) until this hospital's update alone is left"
)
"""What masks do not assure to a consent that names no audit keys."""


LARGEST_SKETCH = 0.125
"""The share of a model's numbers that a sketch of it may have, unless a consent says otherwise."""


LARGEST_OVER_ROUNDS = 3.0
"""How far a model may stand out of what others got in the last rounds together, unless a consent says otherwise."""


class SecureAggregationConsent(StrictModel):
    """Demands that updates leave under masks only, in every round.

    ``minimum``: the fewest hospitals whose sum the coordinator may learn, or whose models a blind mixture may hold, its
    recipient's own among them. ``audit_keys``: SHA-256 of the audit keys of the other hospitals, by name; then updates
    are masked together with these alone, and nobody, not even who runs the federation's CA, can put an invented
    hospital among them. ``largest_isolation``: of blind mixtures, how far this hospital's model may stand out of what
    others get: its weight over the Euclidean norm of all others' but the recipient's own; 1 is two models in equal
    parts. ``largest_isolation_over_rounds``: the same of what they got in the last four rounds of training together,
    where others' models are taken to have changed as much as this hospital's. ``colluders``: for so many recipients
    together both have to hold. ``largest_sketch``: of blind mixtures, of how many numbers, as a share of what is
    compared, a sketch may be from which distances between models are taken: it is what a hospital that works with the
    coordinator can learn of every other's model. 1 allows exact distances.
    """

    minimum: int = Field(default=3, ge=3)
    largest_isolation: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    largest_isolation_over_rounds: float = Field(default=LARGEST_OVER_ROUNDS, gt=0, allow_inf_nan=False)
    colluders: int = Field(default=1, ge=1, le=3)
    largest_sketch: float = Field(default=LARGEST_SKETCH, gt=0, le=1)
    audit_keys: dict[Name, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] = Field(default_factory=dict)

    def missing_for(self, plan: Proposal) -> tuple[str, ...]:
        """What a plan needs beyond this, each in words with the line that would allow it."""
        found = plan.secure_aggregation
        if found is None:
            return ("a run without masks (take `secure_aggregation:` out of the consent)",)
        lines = []
        if plan.rounds is not None and found.rounds < plan.rounds:
            lines.append(
                f"updates without masks from round {found.rounds + 1} on (take `secure_aggregation:` out of the "
                "consent)"
            )
        if found.minimum < self.minimum:
            what = "mixtures" if found.mode == "blind" else "sums"
            lines.append(f"{what} of {found.minimum} hospitals (`secure_aggregation: minimum: {found.minimum}`)")
        if found.largest_isolation is not None and found.largest_isolation > self.largest_isolation:
            most = f"{found.largest_isolation:g}"
            lines.append(
                f"mixtures out of which a model stands {most} times (`secure_aggregation: largest_isolation: {most}`)"
            )
        return tuple(lines)


class TrustConsent(StrictModel):
    """Whom the hospital trusts with a part of the noise that protects its images.

    ``honest``: ``4 of 6`` for: of each 6 hospitals whose updates are summed, itself among them, 4 at least add their
    share of the noise and tell nobody of it. Runs that share noise out, and presume as much, are then joined, and what
    they cost the budget is what they cost if it is so; without it none is. That is against who knows no honest
    hospital's share: one of the 4 that looks itself knows its own, so that against it the noise of 3 protects.
    """

    honest: Annotated[str, Field(pattern=r"^[0-9]{1,5} of [0-9]{1,5}$")]

    @field_validator("honest")
    @classmethod
    def _some_but_not_all(cls, honest: str) -> str:
        found = trust_of(honest)
        if not 2 <= found.honest < found.of:
            raise ValueError("should be, for example, 4 of 6: 2 at least, and fewer than all")
        return honest

    def missing_for(self, plan: Proposal) -> tuple[str, ...]:
        """What a plan needs beyond this, in words with the line that would allow it."""
        wanted = plan.trust
        return () if wanted is None or trust_of(self.honest).covers(wanted) else _distrust(wanted)


def trust_of(words: str) -> Trust:
    """What ``4 of 6`` says; raises ``ValueError`` for anything else."""
    honest, of = words.split(" of ")
    return Trust(int(honest), int(of))


def _distrust(wanted: Trust) -> tuple[str, ...]:
    return (
        f"noise of which this hospital adds a share alone, relying on {wanted} hospitals to be honest (`trusts: "
        f"{{honest: {wanted}}}`)",
    )


_RATES = ("learning_rate", "inner_rate")
"""How the names of methods' own learning rates end."""


class TrainingConsent(StrictModel):
    """The most that one round may train on the hospital's images.

    ``epochs``: passes over the images, of each training in a round. ``steps``: of the optimiser, of all trainings of a
    round together. ``learning_rate``: the largest, the method's own rates included. The defaults are far above what
    trains well, and keep out what is absurd.
    """

    epochs: int = Field(default=200, ge=1)
    steps: int = Field(default=100_000, ge=1)
    learning_rate: float = Field(default=10.0, gt=0, allow_inf_nan=False)

    @classmethod
    def of(cls, plan: Proposal) -> TrainingConsent:
        """What a plan needs, but for what is absurd."""
        most = cls()
        epochs, rates = _epochs_and_rates(plan)
        return cls(epochs=min(epochs, most.epochs), learning_rate=min(max(rates), most.learning_rate))

    def missing_for(self, plan: Proposal, images: int | None) -> tuple[str, ...]:
        """What a plan needs beyond this, each in words with the line that would allow it. ``images``: how many the
        hospital trains on; where that is not known, steps are not looked at."""
        if plan.training is None:
            return ()
        epochs, rates = _epochs_and_rates(plan)
        lines = []
        if epochs > self.epochs:
            lines.append(f"{epochs} epochs a round (`training: epochs: {epochs}`)")
        if images is not None:
            each = steps_of(1, plan.privacy.sampling_rate) if plan.privacy else -(-images // plan.training.batch_size)
            if (steps := each * plan.training.epochs) > self.steps:
                lines.append(f"{steps} steps a round (`training: steps: {steps}`)")
        for rate in rates:
            if not rate <= self.learning_rate:  # as what is no number is not
                lines.append(f"a learning rate of {rate:g} (`training: learning_rate: {rate:g}`)")
        return tuple(lines)


def _epochs_and_rates(plan: Proposal) -> tuple[int, list[float]]:
    """The most epochs of a training, and all learning rates, that a plan names for its training or its method's own."""
    assert plan.training is not None
    numbers = {name: value for name, value in plan.method.parameters.items() if isinstance(value, int | float)}
    epochs = [int(value) for name, value in numbers.items() if name.endswith("epochs")]
    rates = [float(value) for name, value in numbers.items() if name.endswith(_RATES)]
    return max(plan.training.epochs, *epochs, 1), [plan.training.learning_rate, *rates]


class Consent(StrictModel):
    """What a silo agrees to. An empty file agrees to nothing, not even to ask for a plan.

    ``coordinator``: identity of the only coordinator that the silo speaks to. ``methods``: methods it takes part
    in. ``exposures``: classes of bytes that may leave (``MODEL_PARAMETERS`` stands for extractor and classifier).
    ``rounds``: most rounds of one run. ``total_rounds``: of all runs together; no limit by default. ``training``: the
    most that one round may train. ``expires``: last day (UTC) on which anything may leave. ``approval``: which runs
    wait for ``silo approve`` before they are joined: each (``required``), those with another plan than the one that
    this consent was given for (``changes``), ``none``. ``plan_sha256``: of that plan; by default the first one that is
    joined with this file as it stands. ``privacy``: a budget for it. ``secure_aggregation``: demands masks. ``trusts``:
    in whom; nobody by default. ``witnesses``: to whom this journal's checkpoints may go (with CHECKPOINT under
    ``exposures``), and whose cosignatures they are to have; nobody by default.
    """

    coordinator: str | None = None
    methods: tuple[str, ...] = ()
    exposures: tuple[str, ...] = ()
    rounds: int = Field(default=0, ge=0)
    total_rounds: int | None = Field(default=None, ge=0)
    training: TrainingConsent = TrainingConsent()
    expires: date | None = None
    approval: Literal["none", "changes", "required"] = "changes"
    plan_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    privacy: PrivacyConsent | None = None
    secure_aggregation: SecureAggregationConsent | None = None
    trusts: TrustConsent | None = None
    witnesses: WitnessPolicy | None = None

    @field_validator("coordinator")
    @classmethod
    def _identity(cls, uri: str | None) -> str | None:
        try:
            good = uri is None or Identity.parse(uri).role == "coordinator"
        except IdentityError as error:
            raise ValueError(str(error)) from None
        if not good:
            raise ValueError("should be spiffe://FEDERATION/coordinator/NAME")
        return uri

    @field_validator("exposures")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        expand(names)
        return names

    @property
    def classes(self) -> frozenset[Exposure]:
        """The exposure classes that may leave."""
        return expand(self.exposures)

    def lowered_from(self, before: Consent, plan: Proposal) -> tuple[str, ...]:
        """What of the privacy that a run began with this gives less of than ``before``: the run's part goes by it until
        it ends, and begins anew with less."""
        if plan.privacy is None or self.privacy is None:
            return ()
        return self.privacy.lowered_from(before.privacy, plan.privacy)

    def masks_missing_for(self, plan: Proposal) -> tuple[str, ...]:
        """What of masks, and of trust in those who mask together, a plan needs beyond this, each in words."""
        masks = self.secure_aggregation.missing_for(plan) if self.secure_aggregation is not None else ()
        if self.trusts is not None:
            return masks + self.trusts.missing_for(plan)
        return masks if plan.trust is None else masks + _distrust(plan.trust)

    @property
    def masks_with_anyone(self) -> bool:
        """Whether updates may leave under masks, together with whomever the federation's CA has certified."""
        demanded = self.secure_aggregation
        return bool(UNDER_ROSTER & self.classes) and not (demanded and demanded.audit_keys)


@dataclass(frozen=True)
class Missing:
    """What a consent lacks for a plan; false when it lacks nothing."""

    classes: tuple[Exposure, ...] = ()
    method: str | None = None
    coordinator: str | None = None
    rounds: int | None = None
    expired: date | None = None
    privacy: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    total_rounds: int | None = None
    training: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        rounds = self.rounds is not None or self.total_rounds is not None
        words = (self.privacy, self.masks, self.training)
        return any((self.classes, self.method, self.coordinator, rounds, self.expired, *words))

    def lines(self) -> list[str]:
        """Each thing that is missing, in words, with the line that would allow it."""
        lines = []
        if self.expired:
            lines.append(f"the consent ended with {self.expired} (`expires: {self.expired}`)")
        if self.coordinator:
            lines.append(f"coordinator {self.coordinator} (`coordinator: {self.coordinator}`)")
        if self.method:
            lines.append(f"method {self.method} (`methods: [{self.method}]`)")
        if self.rounds is not None:
            lines.append(f"{self.rounds} rounds (`rounds: {self.rounds}`)")
        if self.total_rounds is not None:
            lines.append(f"{self.total_rounds} rounds of all runs together (`total_rounds: {self.total_rounds}`)")
        lines += [f"exposure class {exposure} (under `exposures:`)" for exposure in self.classes]
        return [*lines, *self.training, *self.privacy, *self.masks]


@dataclass(frozen=True)
class ConsentFile:
    """A consent as read from its file, with the hash of the exact bytes that were read."""

    path: Path | None
    consent: Consent
    sha256: str

    @classmethod
    def read(cls, path: Path | None) -> ConsentFile:
        """Raises ``ConfigurationError`` for a file that cannot be used; no file at all is consent to nothing."""
        if path is None:
            return cls(None, Consent(), hashlib.sha256(b"").hexdigest())
        consent = load(path, Consent)
        return cls(path, consent, hashlib.sha256(path.read_bytes()).hexdigest())

    def describe(self) -> dict[str, Any]:
        """The consent as it stands in the journal."""
        unused = set() if self.consent.witnesses is not None else {"witnesses"}
        return {"sha256": self.sha256, **self.consent.model_dump(mode="json", exclude=unused)}

    def missing_to_ask(self, coordinator: Identity, *, day: date | None = None) -> Missing:
        """What is missing to ask a coordinator for its plan; ``day``: today by default."""
        needed = (Exposure.PROTOCOL, Exposure.IDENTITY)
        return self._missing(coordinator, needed, day)

    def missing_for(
        self, plan: Proposal, *, day: date | None = None, images: int | None = None, earlier_rounds: int = 0
    ) -> Missing:
        """What is missing to take part in a run.

        ``day``: today by default. ``images``: how many the hospital trains on, where that is known. ``earlier_rounds``:
        how many rounds of other runs with this coordinator it has taken part in.
        """
        consent = self.consent
        base = self._missing(plan.coordinator_identity, plan.required, day)
        total = earlier_rounds + (plan.rounds or 0)
        return Missing(
            classes=base.classes,
            method=None if plan.method.name in consent.methods else plan.method.name,
            coordinator=base.coordinator,
            rounds=plan.rounds if (plan.rounds or 0) > consent.rounds else None,
            expired=base.expired,
            privacy=consent.privacy.missing_for(plan) if consent.privacy is not None else (),
            masks=consent.masks_missing_for(plan),
            total_rounds=total if consent.total_rounds is not None and total > consent.total_rounds else None,
            training=consent.training.missing_for(plan, images),
        )

    def refusal(self, missing: Missing, purpose: str) -> ConsentError:
        """The error that names everything that is missing."""
        where = f"the consent in {self.path}" if self.path else "there is no consent file (key `consent:`), which"
        lines = "".join(f"\n  - {line}" for line in missing.lines())
        return ConsentError(
            f"refused: {where} does not cover {purpose}. Missing:{lines}\n"
            "What needs it is not sent. If the hospital agrees, add the lines; if not, there is nothing to do."
        )

    def _missing(self, coordinator: Identity, needed: Iterable[Exposure], day: date | None) -> Missing:
        consent = self.consent
        allowed = consent.classes
        day = day or today()
        return Missing(
            classes=tuple(exposure for exposure in Exposure if exposure in set(needed) - allowed),
            coordinator=None if consent.coordinator == coordinator.uri else coordinator.uri,
            expired=consent.expires if consent.expires is not None and consent.expires < day else None,
        )
