"""A silo's part in blind mixtures in one run: it seals its models, helps to open mixtures once, and opens its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from medsilo.algorithms.declarations import Mixing
from medsilo.algorithms.protection.blind import (
    check_sums,
    compared_shape,
    encode_upload,
    mixed_specs,
    mixing_of,
    open_mixture,
    read_mix,
    rules_of,
    shares_payload,
    sketch_size,
    sums_given,
)
from medsilo.algorithms.protection.masked import digest
from medsilo.algorithms.registry import make
from medsilo.algorithms.tensors import Part, Payload, TensorSpec
from medsilo.algorithms.tensors.files import PayloadWriter, read_payload
from medsilo.privacy.consent.consent import LARGEST_OVER_ROUNDS, LARGEST_SKETCH
from medsilo.privacy.consent.helped import NOT_OPENED
from medsilo.privacy.consent.withdrawal import MaskedSum
from medsilo.privacy.errors import RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.files.canonical import write_canonical
from medsilo.privacy.files.durable import fsync_folder, write_atomically
from medsilo.privacy.journal.records import MixRecord
from medsilo.privacy.secure_aggregation import ring
from medsilo.privacy.secure_aggregation.blind_mixing import Mix, Sealer
from medsilo.privacy.secure_aggregation.mask_keys import CertifiedKey, Roster
from medsilo.privacy.secure_aggregation.masking import PairKey
from medsilo.privacy.secure_aggregation.mixing_rules import Assessment, MixingRules, Seen
from medsilo.silo.run.masking import Masking
from medsilo.silo.run.mixing_history import MixingHistory

MIXES = "mixes.json"
"""In a run's folder: what was helped with in the last rounds."""


@dataclass(frozen=True)
class KeptSeal:
    """What it takes to help with, and open, the mixtures of one attempt at a round, and no more.

    Attributes:
        round: of the run, in which a model was sealed.
        context: the roster's hash.
        seed: of the secret.
        keys: shared with each other silo, for this attempt alone.
        specs: the sealed tensors, in their order.
        weights: those for which shares were given, or are about to be; None before.
        mixtures: SHA-256 of the mixtures that they were told to make.
        sums: the check sums that were given with them, as they travel.
    """

    round: int
    context: bytes
    seed: bytes
    keys: Mapping[str, PairKey]
    specs: tuple[TensorSpec, ...]
    weights: tuple[tuple[int, ...], ...] | None = None
    mixtures: tuple[bytes, ...] = ()
    sums: bytes = b""

    @classmethod
    def read(cls, path: Path) -> KeptSeal | None:
        """None where there is none that can be read: then what was sealed is lost."""
        try:
            content = json.loads(path.read_bytes())
            weights = content["weights"]
            return cls(
                round=content["round"],
                context=bytes.fromhex(content["context"]),
                seed=bytes.fromhex(content["seed"]),
                keys={name: PairKey(bytes.fromhex(key), adds) for name, (key, adds) in content["keys"].items()},
                specs=tuple(TensorSpec(name, tuple(shape)) for name, shape in content["specs"]),
                weights=None if weights is None else tuple(tuple(row) for row in weights),
                mixtures=tuple(bytes.fromhex(sha256) for sha256 in content["mixtures"]),
                sums=bytes.fromhex(content["sums"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Durably, for this silo's account alone."""
        content: dict[str, Any] = {
            "round": self.round,
            "context": self.context.hex(),
            "seed": self.seed.hex(),
            "keys": {name: [pair.key.hex(), pair.adds] for name, pair in self.keys.items()},
            "specs": [[spec.name, list(spec.shape)] for spec in self.specs],
            "weights": self.weights,
            "mixtures": [sha256.hex() for sha256 in self.mixtures],
            "sums": self.sums.hex(),
        }
        write_atomically(path, write_canonical(content), mode=0o600)

    def silos(self, own: str) -> tuple[str, ...]:
        """The roster's silos, sorted."""
        return tuple(sorted({own, *self.keys}))

    def mix(self, own: str) -> Mix | None:
        """The weights as all must have been told them."""
        if self.weights is None:
            return None
        return Mix.of(self.silos(own), np.array(self.weights, dtype=np.int64), self.mixtures, self.context)


class _OneFile:
    """Where a sealed model is written as it is made: a workspace of one file, the last one's."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, specs: tuple[TensorSpec, ...], rows: int, blocks: Iterator[Tensor]) -> list[Part]:
        assert rows == 1
        with PayloadWriter(self._path, {Exposure.SEALED_MODEL: specs}) as writer:
            for block in blocks:
                writer.write(block.numpy().tobytes())
            writer.commit()
        return [self.read()]

    def read(self) -> Part:
        """Raises ``DataError`` where it is not there any more."""
        return read_payload(self._path)[Exposure.SEALED_MODEL]

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


class Blinding(Masking):
    """Seals where ``Masking`` masks.

    The coordinator does not go back behind a round that has ended, so the secret under which a model was sealed has to
    outlive a crash: it is in ``path`` (0600) from before the model leaves until its mixture has been trained from,
    beside what was sealed (``….safetensors``), of which sums will be wanted by weights that nobody knows yet. A silo
    that is asked to seal the same model again (somebody has lost his key) takes a fresh secret, and forgets the one
    before; after it has given shares for one set of weights, which is on disk before, it neither seals that model again
    nor gives shares for others. Files may be put back to older copies, so that also goes for what the journal has on
    record: ``helped``, by round.
    """

    def __init__(self, path: Path, *arguments: Any, helped: Mapping[int, MixRecord], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._helped = {number: record.mix_sha256 for number, record in helped.items()}
        self._path = path
        self._sealed = _OneFile(path.with_suffix(".safetensors"))
        self._kept = KeptSeal.read(path)
        self._history = MixingHistory(path.with_name(MIXES), self._plan.sha256)
        self._name = self._credentials.identity.name
        self._method = make(self._plan.method.name, self._plan.method.parameters)

    def statement(self, round_number: int, received_sha256: bytes) -> CertifiedKey | None:
        """As in ``Masking``; None for a round whose mixtures this silo has helped to open."""
        if self._has_helped(round_number):
            return None
        return super().statement(round_number, received_sha256)

    def shares(self, round_number: int, given: Payload) -> Payload:
        """What others need of this silo to open their mixtures by the weights that came.

        Raises ``RefusedError``, which is a record too, for weights that break a rule of this silo's, or are others than
        those before.
        """
        kept = self._sealed_in(round_number - 1)
        try:
            mix = read_mix(given, kept.silos(self._name), kept.context)
            if self._helped.get(kept.round, mix.digest.hex()) != mix.digest.hex():
                raise RefusedError(
                    "the same models are asked for by other weights, or in another attempt, than this silo's journal "
                    "has on record: two mixtures of them may give one away"
                )
            seen = self._history.seen(kept.round, mix.weights, self._helped)
            found = [rules.check(mix, self._name, seen) for rules in self._rules()]
            sealer = Sealer(self._name, kept.keys, kept.context, seed=kept.seed, mix=kept.mix(self._name))
            shares = sealer.shares(mix)
        except RefusedError as error:
            raise self._refused(round_number, NOT_OPENED, error) from None
        sums = check_sums(self._sealed.read(), mix)
        if kept.weights is None:
            self._history.help(kept.round, mix.weights)
            told = tuple(tuple(row) for row in mix.weights.tolist())
            self._keep(replace(kept, weights=told, mixtures=mix.mixtures, sums=ring.pack(sums).tobytes()))
        self._note_help(mix, seen, found)
        return shares_payload(shares, sums, sealer.tags(mix, sums))

    def begun(self, initial: Mapping[str, Tensor]) -> None:
        """From here on models move."""
        self._history.begin(initial)

    def _note_help(self, mix: Mix, seen: Seen, found: list[Assessment]) -> None:
        """On record before shares leave, each time."""
        assert self._kept is not None
        self._door.note(
            MixRecord(
                **self._about(self._kept.round),
                roster_sha256=self._kept.context.hex(),
                mix_sha256=mix.digest.hex(),
                models=found[0].models,
                isolation=round(max(one.isolation for one in found), 4),
                isolation_over_rounds=round(max(one.over_rounds for one in found), 4),
                rounds=len(seen.weights),
            )
        )
        self._helped[self._kept.round] = mix.digest.hex()

    def received(self, given: Payload) -> str:
        """Each silo is given a mixture of its own: the same for all are the weights, what they were for, and what the
        mixtures are checked by: a silo that told two others two check sums is found out before anything else leaves."""
        mix = self._kept.mix(self._name) if self._kept is not None else None
        return digest({}).hex() if mix is None else hashlib.sha256(mix.digest + sums_given(given)).hexdigest()

    def opened(self, round_number: int, given: Payload) -> Payload:
        """This silo's mixture, opened; nothing in the first round."""
        if round_number == 0:
            if given:
                raise RefusedError("the coordinator sends a mixture before there is any model")
            return {}
        kept = self._sealed_in(round_number - 2)
        mix = kept.mix(self._name)
        if mix is None:
            raise RefusedError(f"round {round_number + 1} is to begin, and nobody asked this silo to open the last one")
        sealer = Sealer(self._name, kept.keys, kept.context, seed=kept.seed, mix=mix)
        return open_mixture(given, sealer, mix.silos, self._name, ring.unpack(kept.sums), kept.specs)

    def settled(self, round_number: int) -> None:
        """A round is trained, and kept: what opened its beginning goes."""
        if self._kept is not None and self._kept.round < round_number:
            self._path.unlink(missing_ok=True)
            self._sealed.remove()
            fsync_folder(self._path.parent)
            self._kept = None

    def _cover(
        self,
        round_number: int,
        roster: Roster,
        own: CertifiedKey,
        private: X25519PrivateKey,
        upload: Payload,
        noised: Mapping[str, Tensor] | None,
    ) -> Payload:
        del noised  # that is shared out in sums alone
        mixing = mixing_of(self._plan, self._method, round_number)
        self._check_sketch(round_number, upload, mixing)
        keys = roster.pairs(own, private)
        sealer = Sealer(self._name, keys, roster.sha256)
        sealed = encode_upload(upload, mixing, sealer, keys, self._masks, self._plan.sha256, self._sealed)
        self._history.seal(
            round_number, {n: t for e in mixing.mixed & set(upload) for n, t in upload[e].tensors().items()}
        )
        self._keep(KeptSeal(round_number, roster.sha256, sealer.seed, keys, mixed_specs(upload, mixing)))
        return sealed

    def _check_earlier(self, wanted: MaskedSum) -> None:
        if self._has_helped(wanted.round):
            raise RefusedError(
                "this silo has helped to open mixtures of that round's models: of the same models sealed once more, "
                "others could be opened, and two may give one model away"
            )
        for before in self._earlier:
            same = (before.run, before.plan_sha256, before.round) == (wanted.run, wanted.plan_sha256, wanted.round)
            if not same and before.received_sha256 == wanted.received_sha256:
                raise RefusedError(
                    f"this silo has trained in round {before.round + 1} of run {before.run} from the same models: a "
                    "second mixture of what comes of them may give one away. A run with another `seed` begins with "
                    "others"
                )
        super()._check_earlier(wanted)

    def _has_helped(self, round_number: int) -> bool:
        kept = self._kept
        return round_number in self._helped or (
            kept is not None and kept.round == round_number and kept.weights is not None
        )

    def _sealed_in(self, round_number: int) -> KeptSeal:
        if self._kept is None or self._kept.round != round_number:
            raise RefusedError(f"this silo has sealed no model in round {round_number + 1}, or what opens it is lost")
        return self._kept

    def _rules(self) -> list[MixingRules]:
        """The plan's, and those of all consents that hold; of what mixtures tell over rounds a plan says nothing."""
        demanded = [consent.secure_aggregation for consent in self._consents()]
        said = [
            MixingRules(
                minimum=one.minimum - 1,
                largest_isolation=one.largest_isolation,
                colluders=one.colluders,
                over_rounds=one.largest_isolation_over_rounds,
            )
            for one in demanded
            if one is not None
        ]
        promised = rules_of(self._masks)
        return [promised, *said] if said else [replace(promised, over_rounds=LARGEST_OVER_ROUNDS)]

    def _check_sketch(self, round_number: int, upload: Payload, mixing: Mixing) -> None:
        """A hospital that works with the coordinator learns the sketch."""
        if mixing.compared is None or not mixing.compared.sketched:
            return
        parts = {exposure: part.specs for exposure, part in upload.items()}
        rows, width = compared_shape(parts, mixing, mixing.compared)
        numbers, size = rows * width, rows * sketch_size(rows, width, mixing.compared, self._masks)
        demanded = [consent.secure_aggregation for consent in self._consents()]
        for most in (LARGEST_SKETCH if one is None else one.largest_sketch for one in demanded or [None]):
            if size > most * numbers:
                error = RefusedError(
                    f"largest_sketch: distances are to be taken of {size} numbers of the {numbers} that are compared, "
                    f"and {most:g} of them is the most (`sketch_size:` at the coordinator, or `secure_aggregation: "
                    "largest_sketch:` in the consent)"
                )
                raise self._refused(round_number, "sealed", error)

    def _keep(self, kept: KeptSeal) -> None:
        kept.write(self._path)
        self._kept = kept
