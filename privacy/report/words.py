"""The report's words: what each kind of content is called, what left in a few words, what risk remains, a glossary.

Written for someone who does not know what a gradient is, and honest: a risk is not made smaller by a pleasant name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from medsilo.privacy.exposure import Exposure
from medsilo.privacy.pages.wording import listed, number_of, rounds_of

TELLING = tuple(
    exposure
    for exposure in Exposure
    if exposure
    not in (
        *(Exposure.PROTOCOL, Exposure.IDENTITY, Exposure.INITIAL_MODEL, Exposure.PUBLIC_DATA),
        Exposure.CHECKPOINT,
    )
)
"""The classes that say something about patients."""

NAME: dict[Exposure, str] = {
    Exposure.PROTOCOL: "Protocol",
    Exposure.IDENTITY: "Names and certificates",
    Exposure.INITIAL_MODEL: "Starting model",
    Exposure.MODEL_PARAMETERS_EXTRACTOR: "Model: feature part",
    Exposure.MODEL_PARAMETERS_CLASSIFIER: "Model: last layer",
    Exposure.RUNNING_STATISTICS: "Running statistics",
    Exposure.CLASSIFIER_GRADIENT: "Gradients of the last layer",
    Exposure.DATA_IDENTIFIER: "Identifier of the data",
    Exposure.PROTOTYPES: "Prototypes",
    Exposure.SAMPLE_COUNT: "Number of training images",
    Exposure.LABEL_COUNTS: "Number of images of each class",
    Exposure.LOCAL_METRICS: "Accuracy on own test images",
    Exposure.DERIVED_ACCURACY: "Accuracy on public images",
    Exposure.PEER_DERIVED: "Mixtures of several hospitals",
    Exposure.MODEL_GRADIENT: "Gradients of the whole model",
    Exposure.PARAMETER_MASK: "Which numbers of the model matter",
    Exposure.PEER_RATINGS: "Ratings of others' models",
    Exposure.PEER_MODELS: "Other hospitals' models",
    Exposure.PUBLIC_DATA: "Fingerprints of public images",
    Exposure.MASKED_UPDATE: "Masked updates",
    Exposure.PEER_INITIAL_MODEL: "Starting model made of hospitals' models",
    Exposure.FEATURE_MOMENTS: "Sums of products of features",
    Exposure.SEALED_MODEL: "Sealed models",
    Exposure.MODEL_DISTANCES: "Distances between models",
    Exposure.OPENING_SHARES: "What opens others' mixtures",
    Exposure.MIXING_WEIGHTS: "Weights of all mixtures",
    Exposure.SEALED_MIXTURE: "Sealed mixtures",
    Exposure.CHECKPOINT: "Checkpoints for witnesses",
}
"""Each class's name in tables and pictures."""

_PHRASE = {
    Exposure.RUNNING_STATISTICS: "running statistics (averages of images' features)",
    Exposure.DATA_IDENTIFIER: "an identifier of the data",
    Exposure.CLASSIFIER_GRADIENT: "gradients of the last layer",
    Exposure.MODEL_GRADIENT: "gradients of the whole model",
    Exposure.PROTOTYPES: "prototypes (average features of each class)",
    Exposure.PARAMETER_MASK: "which numbers of the model matter",
    Exposure.PEER_RATINGS: "ratings of other hospitals' models",
    Exposure.SAMPLE_COUNT: "the number of training images",
    Exposure.LABEL_COUNTS: "the number of images of each class",
    Exposure.LOCAL_METRICS: "accuracies on own test images",
    Exposure.DERIVED_ACCURACY: "accuracies on public images",
    Exposure.PEER_DERIVED: "mixtures of several hospitals",
    Exposure.PEER_MODELS: "other hospitals' models",
    Exposure.MASKED_UPDATE: "masked updates",
    Exposure.PEER_INITIAL_MODEL: "a starting model made of hospitals' models",
    Exposure.FEATURE_MOMENTS: "sums of products of images' features",
    Exposure.SEALED_MODEL: "sealed models",
    Exposure.MODEL_DISTANCES: "distances between models",
    Exposure.OPENING_SHARES: "what opens others' mixtures",
    Exposure.MIXING_WEIGHTS: "weights of all mixtures",
    Exposure.SEALED_MIXTURE: "sealed mixtures",
}

NOTHING = "nothing about patients"
_MOST_KINDS = 8


def classify(left: Collection[Exposure], came_back: Collection[Exposure], *, last_layer_apart: bool) -> str:
    """What left, in a few words.

    ``left`` and ``came_back``: the classes of which bytes went from a hospital to the coordinator and back. Accuracies
    that the coordinator measured on a hospital's model count as having left: the hospital's model gave them away.
    ``last_layer_apart``: last layers left, but were not mixed into what came back.

    >>> from medsilo.privacy.exposure import MODEL
    >>> classify(MODEL, [], last_layer_apart=False)
    'models only'
    >>> classify([*MODEL, Exposure.RUNNING_STATISTICS], [], last_layer_apart=False)
    "models and running statistics (averages of images' features): more than models only"
    """
    extractor = Exposure.MODEL_PARAMETERS_EXTRACTOR in left
    classifier = Exposure.MODEL_PARAMETERS_CLASSIFIER in left
    remark = ""
    if extractor and classifier:
        remark = "last layers included, but not mixed with others'" if last_layer_apart else ""
    elif extractor:
        remark = "without their last layer"
    elif classifier:
        remark = "the last layer alone"
    exposed = set(left) | (set(came_back) & {Exposure.DERIVED_ACCURACY})
    others = [phrase for exposure, phrase in _PHRASE.items() if exposure in exposed]
    if not extractor and not classifier:
        return listed(others) or NOTHING
    if not others:
        return "models only" + (f", {remark}" if remark else "")
    words = listed(["models" + (f" ({remark})" if remark else ""), *others])
    return words + (": more than models only" if Exposure.RUNNING_STATISTICS in exposed else "")


def masked_sums(silos: Collection[int]) -> str:
    """What masks let the coordinator see; ``silos``: how many were in each round's sum.

    >>> masked_sums([3, 3])
    'masked: the coordinator saw only the sum of 3 silos'
    """
    least, most = min(silos), max(silos)
    count = number_of(least, "silo") if least == most else f"{least} to {most} silos"
    return f"masked: the coordinator saw only the sum of {count}"


BLIND_MIXTURE = (
    "blind mixture: the coordinator learnt how far models lie apart, and chose the weights by it; it learnt no model"
)
"""What blind mixing lets the coordinator see."""


RISK: dict[Exposure, str] = {
    Exposure.MODEL_PARAMETERS_EXTRACTOR: "Whoever holds it, and has the skill, can sometimes tell whether a given "
    "image was among those it was trained on, and what a hospital's images have in common. Whole images have been "
    "rebuilt from models only under favourable conditions in laboratories; it cannot be ruled out.",
    Exposure.MODEL_PARAMETERS_CLASSIFIER: "How often each kind of finding occurs in the hospital can be estimated from "
    "it. With the feature part, it helps to tell whether a given image was used.",
    Exposure.RUNNING_STATISTICS: "They are averages over the hospital's images, not something learned from them: they "
    "show how its images differ from other hospitals' (devices, staining, mix of cases). Over few images they come "
    "close to single ones.",
    Exposure.CLASSIFIER_GRADIENT: "The shares of the findings in the hospital's data can be read off directly; from "
    "small groups of images, the finding of a single image.",
    Exposure.DATA_IDENTIFIER: "An average over all training images, column by column. Two of them, from before and "
    "after one patient was added, give away that patient's part.",
    Exposure.PROTOTYPES: "They show which findings a hospital has. Where it has few images of a finding, they come "
    "close to those patients' images as the model sees them.",
    Exposure.SAMPLE_COUNT: "Tells the size of the hospital's collection and, between two runs, how much it grew. It "
    "says nothing about a single patient.",
    Exposure.LABEL_COUNTS: "Tells how often each finding occurs in the hospital; of a rare finding, how many patients "
    "have it.",
    Exposure.LOCAL_METRICS: "Tells how well the model does at this hospital. It says little about single patients, "
    "unless there are very few test images.",
    Exposure.DERIVED_ACCURACY: "It is measured on the model that left, with public images, so it tells nothing that "
    "the model does not; it does rank the hospitals.",
    Exposure.PEER_DERIVED: "Part of what each hospital sent reaches the other hospitals. The more hospitals are mixed, "
    "the less it tells about one of them; with two, each can work out what the other sent.",
    Exposure.MODEL_GRADIENT: "As telling as the model itself; the shares of the findings, and from small groups of "
    "images single images, can be worked out from it.",
    Exposure.PARAMETER_MASK: "Shows what a hospital's images have in common and which hospitals are alike; less than "
    "the model itself.",
    Exposure.PEER_RATINGS: "Show which hospitals' patients are alike; nothing about a single patient is known to "
    "follow.",
    Exposure.PEER_MODELS: "Every hospital of the run can try on single hospitals' models whatever can be tried on a "
    "model; the coordinator is not the only one to be trusted.",
    Exposure.MASKED_UPDATE: "By itself it cannot be told from random numbers. The sum is a model of all hospitals in "
    "it: what can be tried on a model can be tried on that, without telling whose images were the cause. Masks hold as "
    "long as another hospital in the sum keeps its key to itself. Who runs both the coordinator and the federation's "
    "certificate authority could have invented the other hospitals, unless the consent names their audit keys. Sums "
    "over different hospitals, taken together, can tell what one of them sent, and exactly how many images it has: so "
    "in one run this hospital masks for the same hospitals every time (unless noise limits it); between runs, nothing "
    "but another starting model stands against it.",
    Exposure.PEER_INITIAL_MODEL: "What an earlier training learnt of its hospitals' images reaches every hospital of "
    "this run; what this run promises of privacy is of this run alone, and says nothing of that one.",
    Exposure.FEATURE_MOMENTS: "They are exact sums over the hospital's images: the mean features and their spread, and "
    "how many images of each finding there are, can be read off directly. Sums with and without an image give that "
    "image's features and its finding; of fewer images than there are features, single ones can be worked out.",
    Exposure.SEALED_MODEL: "By itself it cannot be told from random numbers, as long as learning with errors is as "
    "hard as is thought. Each other hospital opens a mixture that this hospital's model is part of: what can be tried "
    "on a model can be tried on that. A coordinator that works with three other hospitals or more has to be thought "
    "able to read the model itself, and one that changes mixtures on their way some of its numbers. Nobody outside "
    "the project has reviewed how models are sealed.",
    Exposure.MODEL_DISTANCES: "The coordinator learns which hospitals' models are alike, so whose patients are. A "
    "hospital that works with the coordinator can give away a sketch of this hospital's model, for small models the "
    "model itself.",
    Exposure.OPENING_SHARES: "Nothing can be read off them but what each hospital opens: its own mixture.",
    Exposure.MIXING_WEIGHTS: "They show every hospital of the run which hospitals' models are alike.",
    Exposure.SEALED_MIXTURE: "The hospital that it is made for can try on it what can be tried on a model. The more "
    "hospitals are mixed, the less it tells about one of them.",
}
"""What someone who holds content of a class could still do with it, no noise having been added."""

NOISED_RISK: dict[Exposure, str] = {
    Exposure.MODEL_PARAMETERS_EXTRACTOR: "Noise was added in training: how surely anyone can tell whether one given "
    "{unit} was used has that limit. What a hospital's images have in common it does not hide.",
    Exposure.MODEL_PARAMETERS_CLASSIFIER: "Noise was added in training: what it tells about one {unit} has that limit. "
    "How often each kind of finding occurs in the hospital can still be estimated, roughly.",
    Exposure.CLASSIFIER_GRADIENT: "They are of training steps with noise: the finding of one {unit} cannot be read off "
    "beyond that limit. The shares of the findings can still be estimated, roughly.",
    Exposure.DATA_IDENTIFIER: "An average over all training images, with noise: two of them, from before and after "
    "one {unit} was added, do not give its part away beyond that limit. It describes the images as a whole, and as the "
    "same numbers are sent in every run, those who compare notes see that it is the same hospital.",
    Exposure.LOCAL_METRICS: "The count of test images that the model was right on, with noise: what it tells about one "
    "{unit} of the test images has that limit.",
    Exposure.DERIVED_ACCURACY: "It is measured with public images on a model that was trained with noise, and tells "
    "nothing that the model does not; it does rank the hospitals.",
    Exposure.PEER_DERIVED: "Part of what each hospital sent, with its noise, reaches the other hospitals: what it "
    "tells about one {unit} has that limit there too.",
    Exposure.MODEL_GRADIENT: "It follows from models that were trained with noise: what it tells about one {unit} has "
    "that limit. The shares of the findings can still be estimated, roughly.",
    Exposure.PARAMETER_MASK: "It follows from models that were trained with noise: what it tells about one {unit} has "
    "that limit. It shows which hospitals are alike.",
    Exposure.MASKED_UPDATE: "Each hospital added noise before it masked: what the sum tells about one {unit} has that "
    "limit even if the masks were lifted.",
    Exposure.FEATURE_MOMENTS: "Sums over all training images, with noise: two of them, from before and after one "
    "{unit} was added, do not give its part away beyond that limit. How the images vary as a whole, and how often each "
    "kind of finding occurs, can still be estimated.",
    **dict.fromkeys(
        (Exposure.SEALED_MODEL, Exposure.MODEL_DISTANCES, Exposure.OPENING_SHARES),
        "It follows from a model that was trained with noise: what it tells about one {unit} has that limit even if "
        "the model were not sealed.",
    ),
    **dict.fromkeys(
        (Exposure.MIXING_WEIGHTS, Exposure.SEALED_MIXTURE),
        "It is made of models that were trained with noise: what it tells about one {unit} has that limit.",
    ),
}
"""The same of content with noise on it, for which a limit is stated; ``{unit}`` is what that limit is of."""

SHARED_OUT = (
    "The hospitals shared noise out: what the sum tells about one {unit} has the first limit if as many of them "
    "as it says kept to the protocol and told nobody of their noise; if the masks were lifted, the second, larger one."
)
"""The same of masked updates whose noise hospitals share out."""

SHORT_RISK = (
    (
        (Exposure.MODEL_PARAMETERS_EXTRACTOR, Exposure.MODEL_PARAMETERS_CLASSIFIER, Exposure.MODEL_GRADIENT),
        "Someone who holds the models can sometimes find out whether a given image was used to train them, and how "
        "often each finding occurs in the hospital.",
        "How often each finding occurs in the hospital can be estimated from the models, roughly; what they tell about "
        "single images has a limit, as noise was added in training.",
    ),
    (
        (Exposure.CLASSIFIER_GRADIENT,),
        "How often each finding occurs can be read directly off the gradients.",
        "How often each finding occurs can be estimated from the gradients, roughly, as they have noise.",
    ),
    (
        (Exposure.RUNNING_STATISTICS, Exposure.DATA_IDENTIFIER, Exposure.PROTOTYPES, Exposure.FEATURE_MOMENTS),
        "Averages over the hospital's images left too. Over few images they come close to single ones.",
        "An average over the hospital's images left too, with noise: it describes them as a whole, and there is a "
        "limit to what it tells about single ones.",
    ),
    (
        (Exposure.MASKED_UPDATE,),
        "The sum of several hospitals' models may tell something about the images of all of them together, not whose.",
        "The sum of several hospitals' models tells something about the images of all of them together; about single "
        "images only up to a limit, as each hospital added noise.",
    ),
    (
        (Exposure.SEALED_MODEL,),
        "The coordinator learnt which hospitals' models are alike. Mixtures of several hospitals' models may tell the "
        "hospitals that get them something about the images of all of them together.",
        "The coordinator learnt which hospitals' models are alike. What mixtures of several hospitals' models tell "
        "about single images has a limit, as each hospital added noise.",
    ),
    (
        (Exposure.LABEL_COUNTS, Exposure.SAMPLE_COUNT, Exposure.LOCAL_METRICS, Exposure.PEER_RATINGS),
        "The figures that left describe the collection as a whole, not single patients.",
        "The figures that left describe the collection as a whole, not single patients.",
    ),
)
"""For page one: a sentence for each group of classes of which something left: without noise, and all with noise."""

NO_DIFFERENTIAL_PRIVACY = (
    "No differential privacy was used: no noise was added to what left, so no limit can be stated to what could be "
    "worked out from it (in figures: ε = ∞)."
)

NO_LIMIT_KNOWN = (
    "If an app that is not Medsilo's added noise, nothing here accounts for it: no limit can be stated to what could "
    "be worked out from what left (in figures: ε = ∞)."
)

GLOSSARY: dict[str, str] = {
    "accuracy": "The share of test images for which the model names the right finding.",
    "audit key": "The pair of keys with which a party signs its record; the secret half never leaves its machine.",
    "bundle": "One file with the whole record, its signatures and all that is needed to check it elsewhere.",
    "certificate": "A file that proves a party's name, signed by the federation's own authority.",
    "checkpoint": "A signature over the whole record so far. A later change of any entry no longer fits it.",
    "consent": "The hospital's own file that says what may leave, to whom, and until when. Nobody else can change it.",
    "coordinator": "The computer that collects what hospitals send and answers each of them. It sees no images.",
    "differential privacy": "Noise added in such a way that a proven limit holds for what anyone could learn about one "
    "patient.",
    "epsilon": "The size of that limit, written ε: the smaller, the less can be learned; ∞ means that there is none.",
    "exposure class": "A kind of content, by what it can tell about patients. Every byte belongs to exactly one.",
    "feature": "A number that a model computes from an image on the way to its answer, such as how grainy it is.",
    "federated learning": "Hospitals train a model together; the images stay where they are, and only results of "
    "training travel.",
    "gradient": "The direction in which training would change a model's numbers to suit some images better.",
    "hash": "A short fingerprint of some bytes (SHA-256). Other bytes have another one.",
    "identifier of the data": "A few numbers that describe a hospital's images as a whole: their average brightness, "
    "column by column.",
    "last layer": "The last step of a model, which turns features into a named finding; also called classifier.",
    "mask": "Random numbers that a hospital adds to what it sends. They cancel in the sum over all hospitals of the "
    "round, and in no other.",
    "masked": "Sent with masks: the receiver can read the sum over several hospitals, and no single hospital's part.",
    "membership": "Whether a given image was among those that a model was trained on.",
    "method": "The recipe of a run: what hospitals train, what they send, and what they get back.",
    "mixture": "A model whose numbers are averages of several hospitals' models.",
    "model": "Numbers by which a program tells findings apart; training adjusts them to images.",
    "parameters": "The numbers that make up a model.",
    "plan": "The description of a run that each hospital gets before it says yes or no.",
    "prototype": "The average of the features of all images of one finding.",
    "receipt": "The receiver's signed word that certain bytes arrived.",
    "record": "The list of everything that was sent, received, agreed to or refused; also called journal. An entry is "
    "written before its message is sent.",
    "round": "Each hospital trains on its own images, sends what the method asks for, and gets an answer back.",
    "run": "One training from beginning to end, by one plan.",
    "running statistics": "Averages and spreads of features over a hospital's images, which some models (those with "
    "batch normalisation) keep beside their parameters.",
    "signature": "Proof that the holder of a key signed exactly these bytes.",
    "synthetic": "Made by a program; showing no patient.",
    "tensor": "A block of numbers with a name, a part of a model.",
}
"""Words that a reader may not know, in plain ones."""


def glossary_of(text: str) -> list[tuple[str, str]]:
    """The glossary's entries for the words that occur in a text, or in the entries for those words."""
    chosen: dict[str, str] = {}
    missing = dict(GLOSSARY)
    while found := {
        word: meaning
        for word, meaning in missing.items()
        if re.search(rf"\b{re.escape(word)}(s|es)?\b", text, re.IGNORECASE)
        or (word == "accuracy" and "accuracies" in text)
        or (word == "epsilon" and "ε" in text)
    }:
        chosen |= found
        missing = {word: meaning for word, meaning in missing.items() if word not in found}
        text = " ".join(found.values())
    return sorted(chosen.items())


def consented(consent: Mapping[str, Any], *, withdrawn: bool) -> str:
    """A consent in a sentence for page one."""
    methods = list(consent.get("methods") or ())
    rounds = consent.get("rounds", 0)
    parts = [
        f"the method{'s' if len(methods) > 1 else ''} {listed(methods)}" if methods else "no method",
        _short(list(consent.get("exposures") or ())),
        f"at most {number_of(rounds, 'round')} a run",
        f"until {consent['expires']}" if consent.get("expires") else "without an end date",
    ]
    if masks := consent.get("secure_aggregation"):
        known = listed(sorted(masks.get("audit_keys") or ())) or "whomever the federation's CA knows"
        parts.append(f"only masked, in sums of {masks['minimum']} hospitals or more, together with {known}")
    if trusts := consent.get("trusts"):
        parts.append(f"with noise that hospitals share out, {trusts['honest']} of whom it trusts to be honest")
    return f"It {'allowed' if withdrawn else 'allows'} {'; '.join(part for part in parts if part)}."


def _short(names: Sequence[str]) -> str:
    """Classes by their plain names; protocol and identity go without saying."""
    plain = []
    for name in names:
        if name == "MODEL_PARAMETERS":
            plain.append("models")
        elif name in Exposure.__members__:
            if Exposure[name] in TELLING:
                plain.append(NAME[Exposure[name]].lower())
        else:
            plain.append(name)
    return listed(plain[:_MOST_KINDS]) + (" and others" if len(plain) > _MOST_KINDS else "")


def nothing_refused(*, of_silo: bool) -> str:
    """What it means that a record tells of no refusal."""
    if of_silo:
        return (
            "This hospital had to refuse no run and no message that reached it. What the coordinator refused, its "
            "record tells."
        )
    return (
        "The coordinator had to refuse no message of a hospital. Hospitals that declined a run stand under “On which "
        "consent?”; attempts to enrol that failed, in `coordinator status` and the daemon's log."
    )


def updates_arrived(rounds: Collection[int]) -> str:
    """What a hospital itself knows of its updates in a run in which its part has ended. ``rounds``: those that the
    coordinator had acknowledged, from 0.

    >>> updates_arrived([])
    'no update of it had arrived'
    """
    if not rounds:
        return "no update of it had arrived"
    return f"its updates of {rounds_of(rounds)} had arrived; one of a round that was still open is used for nothing"
