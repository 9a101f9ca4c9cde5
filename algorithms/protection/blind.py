"""What a method's statement ``under_blind`` comes to: an upload that the coordinator can mix and not read, the weights
that it mixes by, mixtures, and their opening.

A method can where all that its coordinator makes of a round's models is mixtures, one for each silo, by weights made of
the distances between them. Its silos' sides notice nothing: they are given their mixture as ever. A round of training
takes two of the run's rounds (``RunPlan.is_blind``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medsilo.algorithms.declarations import Blind, Compared, Mixing
from medsilo.algorithms.method import Method, SiloWeights
from medsilo.algorithms.models import Layout
from medsilo.algorithms.protection.private import unmet
from medsilo.algorithms.tensors import MemorySource, Part, Payload, TensorSpec, Workspace
from medsilo.algorithms.tensors.stack import columns_of
from medsilo.privacy.consent.consent import LARGEST_SKETCH
from medsilo.privacy.consent.plan import RunPlan, SecureAggregationPlan
from medsilo.privacy.errors import ConfigurationError, RefusedError
from medsilo.privacy.exposure import BLIND_DOWNLINK, BLIND_UPLINK, MODEL, Exposure
from medsilo.privacy.secure_aggregation import ring
from medsilo.privacy.secure_aggregation.blind_distances import SIZE, Message, messages, sketch, squared_distance
from medsilo.privacy.secure_aggregation.blind_mixing import (
    FRACTION_BITS,
    PIECE,
    WEIGHT_BITS,
    Mix,
    Opener,
    Sealer,
    add_shares,
    check_room,
    mixtures,
    sealed_size,
    whole_weights,
)
from medsilo.privacy.secure_aggregation.masking import PairKey
from medsilo.privacy.secure_aggregation.mixing_rules import MixingRules
from medsilo.privacy.secure_aggregation.mixture_checks import CHECKS, CheckSums

Parts = Mapping[Exposure, Sequence[TensorSpec]]
_ORDER = (*MODEL, Exposure.RUNNING_STATISTICS)
"""In which all silos put the classes that are mixed."""
Specs = tuple[TensorSpec, ...]
_TAG = hashlib.sha256().digest_size


def blind_method(method: Method) -> Blind:
    """What a method's mixtures are; raises ``ConfigurationError`` with the reason if they cannot be blind."""
    stated = method.under_blind
    if isinstance(stated, Blind):
        if (needed := unmet(method, stated.conditions)) is not None:
            raise ConfigurationError(f"{method.name} can run with blind mixtures only with {needed}")
        return stated
    raise ConfigurationError(
        f"{method.name} cannot run with blind mixtures: {stated}. Use another method, or a run without `mode: blind`"
    )


def mixing_of(plan: RunPlan, method: Method, round_number: int) -> Mixing:
    """What is mixed of what silos send in one of the run's rounds."""
    trained = round_number // plan.rounds_each
    return blind_method(method).mixing(method, trained, plan.training_rounds)


def required(method: Method, rounds: int) -> tuple[Exposure, ...]:
    """What a silo must consent to where mixtures are blind, in a run of so many rounds of training."""
    asked = {Exposure.PROTOCOL, Exposure.IDENTITY} | BLIND_UPLINK | BLIND_DOWNLINK
    for compared in _all_compared(method, rounds):
        if not compared.sketched and compared.exposure is not None:
            asked.add(compared.exposure)
    return tuple(exposure for exposure in Exposure if exposure in asked)


def given_alike(plan: RunPlan, method: Method) -> frozenset[Exposure]:
    """What all silos of a round are given alike, so that two can hold it against each other."""
    return method.common | ({Exposure.MIXING_WEIGHTS} if plan.is_blind else frozenset())


def check_plan(plan: RunPlan, masks: SecureAggregationPlan, method: Method) -> None:
    """Raises ``ConfigurationError`` for a plan with blind mixtures that does not hold together."""
    blind_method(method)
    if method.downloads_last:
        raise ConfigurationError(
            f"{method.name} needs what comes of the last round, which is not built where it is blind"
        )
    if plan.rounds % 2 or masks.rounds != plan.rounds:
        raise ConfigurationError(
            "a round of training with blind mixtures takes two of the run's rounds, all of them blind"
        )
    if masks.fraction_bits != FRACTION_BITS:
        raise ConfigurationError(f"blind mixtures are of multiples of 2^-{FRACTION_BITS}, and of no other fractions")
    if plan.participation < 1:
        raise ConfigurationError("blind mixtures need all silos in every round: use `participation: 1`")


def rules_of(masks: SecureAggregationPlan) -> MixingRules:
    """What the coordinator has promised of its weights."""
    assert masks.largest_isolation is not None
    return MixingRules(minimum=masks.minimum - 1, largest_isolation=masks.largest_isolation)


def upload_parts(
    parts: Parts, mixing: Mixing, masks: SecureAggregationPlan, silos: int
) -> dict[Exposure, tuple[TensorSpec, ...]]:
    """Names and shapes of an update, whose parts are these where it is not blind, among so many silos."""
    count = sum(spec.nbytes // 4 for exposure in mixing.mixed & parts.keys() for spec in parts[exposure])
    found: dict[Exposure, tuple[TensorSpec, ...]] = {Exposure.SEALED_MODEL: (_sealed_spec(count),)}
    if mixing.compared is not None:
        rows, width = compared_shape(parts, mixing, mixing.compared)
        size = sketch_size(rows, width, mixing.compared, masks)
        found[Exposure.MODEL_DISTANCES] = (
            TensorSpec("hidden", (silos - 1, rows, size), "I64"),
            TensorSpec("scalar", (silos - 1, rows), "I64"),
        )
    return found


def compared_shape(parts: Parts, mixing: Mixing, compared: Compared) -> tuple[int, int]:
    """Of how many rows, of how many numbers each, distances are taken."""
    if compared.exposure is None:
        return 1, sum(spec.nbytes // 4 for exposure in mixing.mixed & parts.keys() for spec in parts[exposure])
    rows, width = compared.rows(torch.ones(parts[compared.exposure][0].shape)).shape
    return rows, width


def sketch_size(rows: int, width: int, compared: Compared, masks: SecureAggregationPlan) -> int:
    """Of how many numbers a row's sketch is: the plan's are of all rows together."""
    return min(width, max(1, (masks.sketch_size or 0) // max(1, rows))) if compared.sketched else width


def default_sketch(method: Method, layout: Layout, rounds: int) -> int:
    """Of how many numbers sketches are in a run of so many rounds of training, where nobody says it: of as many as
    consents allow that do not say it either, and of no more than ``SIZE``."""
    most = SIZE
    for number in range(rounds):
        mixing = blind_method(method).mixing(method, number, rounds)
        if mixing.compared is not None and mixing.compared.sketched:
            rows, width = compared_shape(layout.model_parts(), mixing, mixing.compared)
            most = min(most, rows * int(LARGEST_SKETCH * width))
    return max(1, most)


def share_parts(silos: int) -> dict[Exposure, tuple[TensorSpec, ...]]:
    """Names and shapes of what a silo sends so that others can open their mixtures."""
    return {
        Exposure.OPENING_SHARES: (
            TensorSpec("shares", (silos - 1, ring.DEGREE, ring.WORD), "U8"),
            TensorSpec("sums", (CHECKS, ring.WORD), "U8"),
            TensorSpec("tags", (silos - 1, _TAG), "U8"),
        )
    }


def encode_upload(
    upload: Payload,
    mixing: Mixing,
    sealer: Sealer,
    keys: Mapping[str, PairKey],
    masks: SecureAggregationPlan,
    context: bytes,
    workspace: Workspace,
) -> Payload:
    """A method's update as it travels: sealed, and what gives its distance to each other silo's, sorted by their names.

    ``keys``: those that the silo shares with each other, for this attempt alone; ``context``: the plan's hash, so that
    all sketches of a run are of the same sums; ``workspace``: where what is sealed goes, piece by piece. Raises
    ``TrainingError`` for numbers without room, naming the tensor.
    """
    for exposure in _mixed(upload, mixing):
        for name, tensor in upload[exposure].tensors().items():
            if tensor.dtype != torch.float32:
                raise RefusedError(f"tensor {name} is {tensor.dtype}; only float32 can be mixed")
            check_room(tensor.numpy().reshape(-1), what=f"tensor {name}")
    pieces = [t.numpy().reshape(-1) for e in _mixed(upload, mixing) for t in upload[e].tensors().values()]
    values = np.concatenate(pieces)
    zeros = np.zeros(sealed_size(len(values)) - len(values), dtype=np.float32)

    def sealed() -> Iterator[Tensor]:
        whole = np.concatenate([values, zeros]) if len(zeros) else values
        for start in range(0, len(whole), PIECE):
            yield torch.from_numpy(
                ring.pack(sealer.seal(whole[start : start + PIECE], what="the model")).reshape(1, -1)
            )

    (part,) = workspace.write((_sealed_spec(len(values)),), 1, sealed())
    found: Payload = {Exposure.SEALED_MODEL: part}
    if mixing.compared is None:
        return found
    sent = messages(_sketched(upload, values, mixing.compared, masks, context), keys)
    hidden = np.stack([[one.hidden for one in sent[silo]] for silo in sorted(sent)])
    scalar = np.array([[one.scalar for one in sent[silo]] for silo in sorted(sent)], dtype=np.uint64)
    return {**found, Exposure.MODEL_DISTANCES: _part({"hidden": hidden, "scalar": scalar})}


def _sketched(
    upload: Payload, mixed: NDArray[np.float32], compared: Compared, masks: SecureAggregationPlan, context: bytes
) -> NDArray[np.float64]:
    """Of each row that is compared the sketch: ``[K, size]``."""
    if compared.exposure is None:
        rows = mixed.reshape(1, -1)
    else:
        rows = compared.rows(next(iter(upload[compared.exposure].tensors().values()))).numpy()
    size = sketch_size(*rows.shape, compared, masks)
    # Each row by buckets of its own, so that their errors have nothing to do with each other.
    contexts = [context] if len(rows) == 1 else [context + place.to_bytes(4) for place in range(len(rows))]
    return np.stack([sketch(row, size=size, context=named) for row, named in zip(rows, contexts, strict=True)])


def weigh(uploads: Mapping[str, Payload], mixing: Mixing, masks: SecureAggregationPlan) -> tuple[Payload, SiloWeights]:
    """Of all silos' updates (by name, sorted) the weights of their mixtures: as all are told, and for people to look
    at. They are the nearest to the method's own that keep to the plan's ``largest_isolation`` and ``minimum``."""
    silos = tuple(uploads)
    whole = rules_of(masks).nearest(whole_weights(mixing.weights(_distances(uploads, mixing)).numpy()))
    told = SiloWeights(silos, torch.from_numpy(whole / (1 << WEIGHT_BITS)))
    return {Exposure.MIXING_WEIGHTS: Part.of({"weights": torch.from_numpy(whole)})}, told


def _distances(uploads: Mapping[str, Payload], mixing: Mixing) -> Tensor:
    """``Tensor[K, N, N]``, squared."""
    silos = tuple(uploads)
    if mixing.compared is None:
        return torch.zeros(0, len(silos), len(silos), dtype=torch.float64)
    sent = {silo: _messages(uploads[silo], [other for other in silos if other != silo]) for silo in silos}
    rows = len(next(iter(next(iter(sent.values())).values())))
    squared = torch.zeros(rows, len(silos), len(silos), dtype=torch.float64)
    for row, one in enumerate(silos):
        for column, other in enumerate(silos[:row]):
            pairs = zip(sent[other][one], sent[one][other], strict=True)
            found = torch.tensor([max(squared_distance(*pair), 0.0) for pair in pairs], dtype=torch.float64)
            squared[:, row, column] = squared[:, column, row] = found
    return squared


def stated(told: Payload, digests: Sequence[bytes]) -> Payload:
    """Weights as all are told them, with the SHA-256 of every mixture, by the silos' names."""
    weights = told[Exposure.MIXING_WEIGHTS].tensors()["weights"]
    return {Exposure.MIXING_WEIGHTS: Part.of({"weights": weights, "mixtures": _bytes(b"".join(digests), _TAG)})}


def read_mix(payload: Payload, silos: tuple[str, ...], roster_sha256: bytes) -> Mix:
    """The weights ``[N, N]``, and what was stated of the mixtures, that came for these silos; raises ``RefusedError``
    for anything else."""
    part = payload.get(Exposure.MIXING_WEIGHTS)
    if set(payload) != {Exposure.MIXING_WEIGHTS} or part is None:
        raise RefusedError("the coordinator sends no weights of mixtures")
    count = len(silos)
    if part.specs != (TensorSpec("weights", (count, count), "I64"), TensorSpec("mixtures", (count, _TAG), "U8")):
        raise RefusedError(f"the coordinator's weights, and what they make, are not those of {count} silos")
    found = part.tensors()
    weights = np.asarray(found["weights"].numpy())
    return Mix.of(silos, weights, [bytes(row) for row in found["mixtures"].numpy()], roster_sha256)


def check_sums(sealed: Part, mix: Mix) -> ring.Words:
    """The check sums of what a silo has sealed."""
    found = CheckSums(mix.digest)
    for piece in _pieces(sealed):
        found.take(ring.unpack(piece))
    return found.sums


def shares_payload(shares: Mapping[str, ring.Words], sums: ring.Words, tags: Mapping[str, bytes]) -> Payload:
    """A silo's shares for the others as they travel, sorted by their names, with its check sums."""
    others = sorted(shares)
    packed = {
        "shares": torch.from_numpy(np.stack([ring.pack(shares[silo]) for silo in others])),
        "sums": torch.from_numpy(ring.pack(sums)),
        "tags": _bytes(b"".join(tags[silo] for silo in others), _TAG),
    }
    return {Exposure.OPENING_SHARES: Part.of(packed)}


def mix_sealed(
    sealed: Mapping[str, Payload], told: Payload, workspace: Workspace
) -> tuple[dict[str, Payload], list[bytes]]:
    """Each silo's mixture of all sealed models by the weights that are told, and their SHA-256; by name, sorted."""
    silos = tuple(sorted(sealed))
    weights = told[Exposure.MIXING_WEIGHTS].tensors()["weights"].numpy()
    sources = [sealed[silo][Exposure.SEALED_MODEL].source for silo in silos]
    (spec,) = sealed[silos[0]][Exposure.SEALED_MODEL].specs
    columns = ring.WORD * columns_of(len(silos))
    digests = [hashlib.sha256() for _ in silos]

    def blocks() -> Iterator[Tensor]:
        for start in range(0, spec.nbytes, columns):
            stop = min(start + columns, spec.nbytes)
            rows = {s: ring.unpack(source.read(start, stop)) for s, source in zip(silos, sources, strict=True)}
            mixed = mixtures(rows, silos, weights)
            packed = np.stack([ring.pack(mixed[silo]).reshape(-1) for silo in silos])
            for digest, row in zip(digests, packed, strict=True):
                digest.update(row)
            yield torch.from_numpy(packed)

    parts = workspace.write((spec,), len(silos), blocks())
    mixed: dict[str, Payload] = {s: {Exposure.SEALED_MIXTURE: part} for s, part in zip(silos, parts, strict=True)}
    return mixed, [digest.digest() for digest in digests]


def openers(shares: Mapping[str, Payload]) -> dict[str, Payload]:
    """Of what silos gave (by name) what each of them opens its mixture with."""
    silos = tuple(sorted(shares))
    totals = np.zeros((2, len(silos), ring.DEGREE), dtype=np.uint64)
    tags: dict[str, dict[str, Tensor]] = {silo: {} for silo in silos}
    sums = []
    for place, silo in enumerate(silos):  # one silo's in memory at a time
        found = shares[silo][Exposure.OPENING_SHARES].tensors()
        add_shares(totals, ring.unpack(found["shares"].numpy()), without=place)
        sums.append(found["sums"].clone())  # of the same bytes in memory as the shares
        for other, tag in zip((other for other in silos if other != silo), found["tags"], strict=True):
            tags[other][silo] = tag.clone()
    given: dict[str, Payload] = {}
    for place, silo in enumerate(silos):
        opener = {
            "share": torch.from_numpy(ring.pack(totals[:, place])),
            "sums": torch.stack(sums),
            "tags": torch.stack(list(tags[silo].values())),
        }
        given[silo] = {Exposure.OPENING_SHARES: Part.of(opener)}
    return given


def sums_given(payload: Payload) -> bytes:
    """The check sums that came with a mixture, which have to be the same for all silos."""
    part = payload.get(Exposure.OPENING_SHARES)
    return b"" if part is None or "sums" not in (found := part.tensors()) else found["sums"].numpy().tobytes()


def open_mixture(
    payload: Payload, sealer: Sealer, silos: Sequence[str], own: str, own_sums: ring.Words, specs: Specs
) -> Payload:
    """A silo's mixture as its method knows it, of tensors of these names and shapes; ``own_sums``: the check sums that
    it gave. Raises ``RefusedError`` where it
    does not open: then not all silos went by the same roster and weights, or something was changed on the way."""
    count = sum(spec.nbytes for spec in specs) // 4
    part, opening = payload.get(Exposure.SEALED_MIXTURE), payload.get(Exposure.OPENING_SHARES)
    expected = (
        TensorSpec("share", (ring.DEGREE, ring.WORD), "U8"),
        TensorSpec("sums", (len(silos), CHECKS, ring.WORD), "U8"),
        TensorSpec("tags", (len(silos) - 1, _TAG), "U8"),
    )
    if len(payload) != 2 or part is None or part.specs != (_sealed_spec(count),):
        raise RefusedError("the coordinator sends no sealed mixture of the model's size")
    if opening is None or opening.specs != expected:
        raise RefusedError(f"the coordinator does not send what opens a mixture among {len(silos)} silos")
    found = opening.tensors()
    others = [silo for silo in silos if silo != own]
    sums = dict(zip(silos, (ring.unpack(row) for row in found["sums"].numpy()), strict=True))
    tags = dict(zip(others, (bytes(row) for row in found["tags"].numpy()), strict=True))
    opened = sealer.open(_pieces(part), count, Opener(ring.unpack(found["share"].numpy()), sums, tags), own_sums)
    return {Exposure.PEER_DERIVED: Part(specs, MemorySource([torch.from_numpy(opened)]))}


def mixed_specs(upload: Payload, mixing: Mixing) -> tuple[TensorSpec, ...]:
    """Names and shapes of an update's tensors in the order in which they are mixed."""
    return tuple(spec for exposure in _mixed(upload, mixing) for spec in upload[exposure].specs)


def _mixed(upload: Payload, mixing: Mixing) -> list[Exposure]:
    """The classes of an update that are mixed, in the one order that all silos use."""
    return [exposure for exposure in _ORDER if exposure in mixing.mixed and exposure in upload]


def _all_compared(method: Method, rounds: int) -> list[Compared]:
    """What is compared in a run of so many rounds of training."""
    made = (blind_method(method).mixing(method, number, rounds) for number in range(rounds))
    return [mixing.compared for mixing in made if mixing.compared is not None]


def _part(words: Mapping[str, NDArray[np.uint64]]) -> Part:
    return Part.of({name: torch.from_numpy(array.view(np.int64)) for name, array in words.items()})


def _bytes(data: bytes, each: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).reshape(-1, each).copy())


def _sealed_spec(count: int) -> TensorSpec:
    return TensorSpec("words", (sealed_size(count), ring.WORD), "U8")


def _pieces(part: Part) -> Iterator[bytes | memoryview]:
    """Sealed numbers piece by piece."""
    size = ring.WORD * PIECE
    for start in range(0, part.nbytes, size):
        yield part.source.read(start, min(start + size, part.nbytes))


def _messages(upload: Payload, others: Sequence[str]) -> dict[str, list[Message]]:
    found = upload[Exposure.MODEL_DISTANCES].tensors()
    hidden, scalar = (found[name].numpy().view(np.uint64) for name in ("hidden", "scalar"))
    return {
        silo: [Message(words, int(last)) for words, last in zip(hidden[place], scalar[place], strict=True)]
        for place, silo in enumerate(others)
    }
