"""A rehearsal in words, for a data protection officer who does not know what an AUC is; as a page and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from medsilo.privacy.budget.accounting import shown
from medsilo.privacy.exposure import MODEL, Exposure
from medsilo.privacy.files.durable import write_atomically
from medsilo.privacy.pages.blocks import (
    Answered,
    Block,
    Document,
    Paragraph,
    Picture,
    Section,
    Steps,
    Table,
    Terms,
    harmless,
)
from medsilo.privacy.report.words import grouped, number_of
from medsilo.privacy.report.writing import page
from medsilo.silo.config import SiloConfig
from medsilo.silo.preview.membership import Attack
from medsilo.silo.rehearsal import Rehearsal
from medsilo.silo.rehearsal_pictures import epsilon_bars, profiles, score_histograms

_ATTACKERS = {
    "loss": "looks at how much better the model has become at the image",
    "gradient": "looks for the image's own pull in the difference between the model before and after",
}


def write_page(found: Rehearsal, config: SiloConfig) -> Path:
    """Writes ``STATE/rehearsal/RUN.html``, for the silo's own user only, and returns its path; beside it ``RUN.json``,
    of which ``silo report`` tells the result."""
    folder = config.state / "rehearsal"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{found.plan.run}.html"
    write_atomically(path, page(make_document(found)), mode=0o600)
    write_atomically(path.with_suffix(".json"), json.dumps(as_json(found), indent=2).encode(), mode=0o600)
    return path


def make_document(found: Rehearsal) -> Document:
    """A rehearsal in words."""
    plan = found.plan
    made = found.made.strftime("%Y-%m-%d %H:%M UTC")
    return harmless(
        Document(
            title=f"What could be learnt from what {found.silo} is about to share",
            subtitle=f"Rehearsal of the first round of run {plan.run} ({plan.method.name}), made on this machine on "
            f"{made}. Nothing was sent.",
            warnings=_warnings(found),
            answers=[
                _promise(found),
                _membership(found),
                *([_identifier(found)] if Exposure.DATA_IDENTIFIER in plan.required else []),
                Answered(
                    "What did the rehearsal cost?",
                    "Nothing",
                    ["Nothing left this building, and no privacy budget was used: only what is shared costs any."],
                    "good",
                ),
            ],
            sections=[
                Section("how", "What was done", _how(found)),
                Section("figures", "Figures", _figures(found)),
                *([Section("identifier", "The identifier", _profiles(found))] if found.identifier else []),
                Section("limits", "What this does not show", _limits(found)),
                Section("words", "Words used here", [Terms(_terms(found))]),
            ],
            evidence=f"Made from {grouped(found.units)} training {_units(found)} and the plan `{plan.sha256.hex()}`. "
            "The result stays here: it is in no message and no journal. The silo's own report tells the last one.",
        )
    )


def as_json(found: Rehearsal) -> dict[str, Any]:
    """A rehearsal for machines; ``docs/rehearsal.md`` describes it."""
    audit = found.audit
    return {
        "run": found.plan.run,
        "plan_sha256": found.plan.sha256.hex(),
        "method": found.plan.method.name,
        "made": found.made.isoformat(),
        "synthetic": found.synthetic,
        "verdict": found.verdict,
        "unit": found.unit,
        "units": found.units,
        "canaries": audit.canaries,
        "trained": audit.trained,
        "auc": None if math.isnan(audit.best.auc) else audit.best.auc,
        "rounds_covered": [1],
        "by_chance": audit.chance,
        "epsilon_lower_bound": audit.epsilon,
        "highest_possible_bound": audit.highest,
        "delta": audit.delta,
        "confidence": audit.confidence,
        "claimed": None if found.claim is None else asdict(found.claim),
        "claimed_of_the_run": None if found.plan.privacy is None else asdict(found.plan.privacy.guarantee),
        "attacks": [
            {
                "name": attack.name,
                "auc": None if math.isnan(attack.auc) else attack.auc,
                "guesses": [{**asdict(guesses), "by_chance": guesses.chance} for guesses in attack.guesses],
            }
            for attack in audit.attacks
        ],
        "leaves": [exposure.value for exposure in found.leaves],
        "identifier": None if found.identifier is None else asdict(found.identifier),
    }


def _units(found: Rehearsal) -> str:
    return f"{found.unit}s"


def _warnings(found: Rehearsal) -> list[str]:
    warnings = []
    if found.synthetic:
        warnings.append("Synthetic images, generated by a program: these figures say nothing about patients.")
    if not found.leaves:
        warnings.append(
            f"The method {found.plan.method.name} sends no model. What follows is what could be learnt from the model "
            "if somebody got hold of it here."
        )
    elif len(found.leaves) < len(MODEL):
        warnings.append(
            f"The method {found.plan.method.name} sends a part of the model only. The attackers here were given all of "
            "it, so that they know more than whoever receives that part."
        )
    return warnings


def _promise(found: Rehearsal) -> Answered:
    question = "Does the protection hold that the run promises?"
    audit, claim = found.audit, found.claim
    if claim is None:
        return Answered(
            question,
            "The run promises none",
            ["It trains without differential privacy, so there is no promise that a rehearsal could test."],
            "attention",
        )
    proven = f"at least ε = {audit.epsilon:.3f} was proven"
    promised = f"the first round's promise is at most {claim}"
    if found.broken:
        return Answered(
            question,
            "No: do not take part in this run",
            [
                f"More could be learnt than the run promises: {proven}, and {promised}.",
                f"Chance alone does this in at most one of {round(1 / (1 - audit.confidence))} rehearsals. Rehearse "
                "once more; if it happens again, the software on this machine does not protect as it says. Please "
                "report it.",
            ],
            "bad",
        )
    if found.blind:
        return Answered(
            question,
            "This rehearsal cannot tell",
            [
                f"With {number_of(audit.canaries, found.unit)} to guess about, even an attacker who is always right "
                f"would prove no more than ε = {audit.highest:.3f}, and {promised}. A protection that is broken would "
                "not have been noticed.",
            ],
            "attention",
        )
    return Answered(
        question,
        "Nothing was found against it",
        [
            f"The attackers could not show more than the run promises: {proven}, and {promised}.",
            "That is no proof that the protection holds, but a fault could have shown: with so many guesses, up to "
            f"ε = {audit.highest:.3f}.",
            *(
                ["The run's optimiser, Adam, hides most of what a fault would show."]
                if found.plan.training.optimizer == "adam"
                else []
            ),
        ],
        "good",
    )


def _membership(found: Rehearsal) -> Answered:
    audit = found.audit
    best = audit.best.best
    counted = (
        f"Of {grouped(best.made)} guesses, those of which the better attacker was surest, {grouped(best.right)} were "
        f"right: which {_units(found)} the training had used. Tossed coins get so many or more with a probability of "
        f"{_probability(best.chance)}, and in the best of the {audit.tests} sets of guesses that were tried with up to "
        f"{_probability(audit.chance)}."
    )
    covered = f"The test covered round 1 of {found.plan.rounds}: after more rounds a model tells more."
    pairs = (
        ""
        if math.isnan(audit.best.auc)
        else f"Shown one {found.unit} that was used and one that was not, it tells which is which "
        f"{round(100 * audit.best.auc)} times in 100; a coin does 50 times."
    )
    question = f"Could somebody who holds the model tell whose {_units(found)} it was trained on?"
    after = [counted, pairs, *([covered] if found.plan.rounds > 1 else [])]
    where = f"round 1 of {found.plan.rounds}" if found.plan.rounds > 1 else "the round"
    if audit.epsilon == 0 and audit.chance > 1 - audit.confidence:
        return Answered(
            question, f"Not shown by this test of {where}", [*after, "That it cannot be told is not shown either."]
        )
    if audit.epsilon == 0:
        verdict = f"Yes, better than by chance in {where}, by too little to prove an ε above 0"
    else:
        many = best.right >= 0.9 * best.made and best.made >= audit.canaries / 2
        verdict = "Yes, of many" if many else "Yes, of some"
    return Answered(
        question,
        verdict,
        [*after, "That a person's image is in a hospital's training images can tell that the person is ill."],
        "attention",
    )


def _probability(value: float) -> str:
    """``0.8 %``, rounded up."""
    if value < 1e-4:
        return "less than 0.01 %"
    places = 2 if value < 1e-3 else 1
    return f"{math.ceil(value * 10 ** (places + 2) - 1e-9) / 10**places:.{places}f} %"


def _identifier(found: Rehearsal) -> Answered:
    probe = found.identifier
    question = "Could a new patient's image be worked out from two data identifiers?"
    if probe is None:
        return Answered(
            question, "Not tried", ["The run has differential privacy; what protects the identifier is its noise."]
        )
    return Answered(
        question,
        "Yes, its brightness column by column" if probe.error < probe.guess / 10 else "Not exactly",
        [
            f"If this hospital sent an identifier, added one {found.unit} and sent another in a later run, whoever has "
            f"both gets the new one's average brightness of each column to within {probe.error:.6f} (brightness goes "
            f"from -1 to 1; with one identifier alone one is off by {probe.guess:.2f}).",
            "The fewer images are added between two runs, the more of each can be seen.",
        ],
        "attention",
    )


def _how(found: Rehearsal) -> list[Block]:
    audit = found.audit
    left_out = (
        "was blanked: no step used it, while the number of units stayed as it is"
        if found.claim is not None
        else "was taken out of the training images"
    )
    return [
        Steps(
            [
                f"For each of {grouped(audit.canaries)} {_units(found)} out of {grouped(found.units)} a fair coin was "
                f"tossed. It gave {grouped(audit.trained)} to the training; each of the others {left_out}.",
                f"One round was trained as the run's first round would be: method {found.plan.method.name}, model "
                f"{found.plan.model.name}, the plan's settings, from the plan's starting model.",
                "Two attackers were given the model before and after, and all the images, and said of the canaries of "
                "which they were surest which way the coin had fallen.",
                "How often they were right says how much the model tells, at the least.",
            ]
        )
    ]


def _figures(found: Rehearsal) -> list[Block]:
    audit = found.audit
    best = audit.best
    bars = [(f"proven by this rehearsal: at least ε = {audit.epsilon:.3f}", audit.epsilon, True)]
    if found.claim is not None:
        bars.append((f"promised for the round: at most ε = {shown(found.claim.epsilon)}", found.claim.epsilon, False))
    else:
        bars.append(("promised: no limit (ε = ∞)", math.inf, False))
    bars.append((f"most that so few canaries could prove: ε = {audit.highest:.3f}", audit.highest, False))
    scores = f"How the better attacker ({best.name}) scored what was used and what was left out"
    rows = [_row(attack, number) for attack in audit.attacks for number in range(len(attack.guesses))]
    whole = found.plan.privacy.guarantee if found.plan.privacy else None
    return [
        Picture(score_histograms(found.scores[best.name], found.trained, title=scores), scores),
        Paragraph("The more the two rows look alike, the less the model tells."),
        Picture(
            epsilon_bars(bars, title="Privacy loss: proven, promised, provable"), "; ".join(words for words, *_ in bars)
        ),
        *([Paragraph(f"The round is promised {found.claim}; the whole run {whole}.")] if whole else []),
        Table(
            f"Guesses and what they prove, at δ = {audit.delta:g}, all together with {audit.confidence:.0%} confidence",
            ["Attacker", "Area under the curve", "Guesses", "Right", "Proven ε, at least"],
            rows,
            [1, 2, 3, 4],
            [2, 2, 1, 1, 2],
        ),
        Paragraph(" ".join(f"The attacker `{name}` {what}." for name, what in _ATTACKERS.items())),
    ]


def _row(attack: Attack, number: int) -> list[str]:
    guesses = attack.guesses[number]
    auc = "–" if math.isnan(attack.auc) else f"{attack.auc:.2f}"
    return [attack.name, auc, grouped(guesses.made), grouped(guesses.right), f"{guesses.epsilon:.3f}"]


def _profiles(found: Rehearsal) -> list[Block]:
    probe = found.identifier
    assert probe is not None
    title = f"One {found.unit}'s brightness, column by column: as it is, and as worked out"
    return [
        Paragraph(
            f"{number_of(probe.tried, found.unit)} of this hospital's own were taken out, one at a time, and the "
            "identifiers with and without it were made as the method makes them. The difference of the two sums is "
            f"what came in between. Off by {probe.error:.1e} in the middle of all tries and by {probe.worst:.1e} in "
            f"the worst; without a second identifier, by {probe.guess:.2f}."
        ),
        Picture(profiles(probe.truth, probe.found, title=title), title),
    ]


def _limits(found: Rehearsal) -> list[Block]:
    rounds = found.plan.rounds
    return [
        Paragraph(
            "What is proven is a lower limit. A low one does not mean that the model is safe: a cleverer attacker, or "
            "a longer training, may get more out of it."
        ),
        Paragraph(
            f"Only the first of {number_of(rounds, 'round')} was rehearsed, alone. Over many rounds a model takes in "
            "more of its images, and what other hospitals' models add is missing here."
        ),
        Paragraph(
            "Coins are tossed anew each time, so figures differ from one rehearsal to the next. Whoever rehearses many "
            "times and keeps the best or the worst has proven nothing: the confidence is that of a single rehearsal."
        ),
        Paragraph(
            "Without differential privacy the rehearsed training had fewer images than the real one will have, which "
            "makes it tell rather more of each."
            if found.claim is None
            else "Faults that cost less than a factor of several in the noise are smaller than what a single rehearsal "
            "can see."
        ),
    ]


def _terms(found: Rehearsal) -> list[tuple[str, str]]:
    terms = [
        ("area under the curve (AUC)", "how often an attacker tells a used image from an unused one: 0.5 is chance."),
        ("canary", f"one of the hospital's own {_units(found)}, of which a coin decides whether the training uses it."),
        ("δ", "a small probability that is left out of account: with it, the limit ε may fail."),
        (
            "ε",
            "how much can be learnt about one unit: 0 is nothing; each step of 0.7 doubles the odds of a right guess.",
        ),
    ]
    if found.plan.privacy:
        terms.append(("unit", "whom the promise is about: one image, or one patient with all their images."))
    return terms
