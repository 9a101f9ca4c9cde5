"""What a silo keeps of mixtures that it has helped to open in a run: the weights of the last rounds, and how far its
own models moved in them.

Mixtures of different rounds can be compared: of models that hardly change, rows of weights that do can be solved for
single ones. A silo knows by how much its own models have changed, and takes it that the others', which train by the
same plan, have changed as much.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from medsilo.privacy.errors import RefusedError
from medsilo.privacy.files.canonical import write_canonical
from medsilo.privacy.files.durable import write_atomically
from medsilo.privacy.secure_aggregation.blind_distances import hashed
from medsilo.privacy.secure_aggregation.mixing_rules import ROUNDS, Seen

_SIZE = 256
"""Of how many numbers a print of a model is: scalar products of prints are right within some 9 % (standard deviation)
of what they are of."""


class MixingHistory:
    """A run's last rounds, in a file for this silo's account alone.

    A model is kept as a print: each number added to one of 256 buckets with a sign, both drawn by the tensor's name and
    a context. Prints are linear, so the one of what training has changed is the difference of two.
    """

    def __init__(self, path: Path, context: bytes) -> None:
        self._path = path
        self._context = context
        try:
            content = json.loads(path.read_bytes())
            self._start = {name: np.array(numbers) for name, numbers in content["start"].items()}
            self._rounds: dict[int, dict[str, Any]] = {one["round"]: one for one in content["rounds"]}
        except (OSError, ValueError, KeyError, TypeError):
            # Without the starting model's print all of a model counts as unknown, and its moves as smaller.
            self._start, self._rounds = {}, {}

    def begin(self, initial: Mapping[str, Tensor]) -> None:
        """A run's starting model, which all silos know."""
        floats = {name: tensor for name, tensor in initial.items() if tensor.is_floating_point()}
        self._start = {name: self._print(name, tensor) for name, tensor in floats.items()}
        self._rounds = {}
        self._write()

    def seal(self, round_number: int, model: Mapping[str, Tensor]) -> None:
        """A model is about to leave, sealed; again for a round replaces what was."""
        moved = sum(
            (self._print(name, tensor) - self._start.get(name, 0.0) for name, tensor in model.items()), np.zeros(_SIZE)
        )
        self._rounds[round_number] = {"round": round_number, "moved": moved.tolist(), "weights": None}
        self._write()

    def help(self, round_number: int, weights: NDArray[np.int64]) -> None:
        """Shares are about to leave for mixtures by these weights, of what was sealed in that round."""
        self._rounds[round_number]["weights"] = weights.tolist()
        latest = sorted(self._rounds)[-ROUNDS:]
        self._rounds = {number: self._rounds[number] for number in latest}
        self._write()

    def seen(self, round_number: int, weights: NDArray[np.int64], helped: Iterable[int]) -> Seen:
        """What recipients would have of this silo's models, with mixtures by these weights in that round. Raises
        ``RefusedError`` where it is lost what was sealed in it, or what was ``helped`` with in the rounds before."""
        earlier = sorted(number for number in helped if number < round_number)[-(ROUNDS - 1) :]
        known = {number for number, one in self._rounds.items() if one["weights"] is not None}
        if round_number not in self._rounds or not known.issuperset(earlier):
            raise RefusedError(f"what this silo has kept of the run's mixtures ({self._path.name}) is lost")
        before = [
            one
            for number, one in sorted(self._rounds.items())
            if number < round_number and one["weights"] is not None and len(one["weights"]) == len(weights)
        ][-(ROUNDS - 1) :]
        moved = np.array([one["moved"] for one in (*before, self._rounds[round_number])])
        given = [np.array(one["weights"], dtype=np.int64) for one in before]
        return Seen((*given, weights), moved @ moved.T)

    def _print(self, name: str, tensor: Tensor) -> NDArray[np.float64]:
        key = hashlib.sha256(b"medsilo/blind/print/v1\x00" + self._context + name.encode()).digest()
        return hashed(tensor.detach().cpu().float().numpy().reshape(-1), size=_SIZE, key=key)

    def _write(self) -> None:
        content = {
            "start": {name: numbers.tolist() for name, numbers in self._start.items()},
            "rounds": list(self._rounds.values()),
        }
        write_atomically(self._path, write_canonical(content), mode=0o600)
