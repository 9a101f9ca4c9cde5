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
from safetensors import SafetensorError, safe_open
from torch import Tensor

from medsilo.algorithms.tensors.files import write_tensors
from medsilo.privacy.errors import RefusedError
from medsilo.privacy.files.canonical import write_canonical
from medsilo.privacy.files.durable import write_atomically
from medsilo.privacy.secure_aggregation.blind_distances import hashed
from medsilo.privacy.secure_aggregation.mixing_rules import ROUNDS, Seen

_SIZE = 256
"""Of how many numbers a print of a model is: scalar products of prints are right within some 9 % (standard deviation)
of what they are of."""
_MOST = 2.0
"""Medians of what a number has moved by: more of a number does not count."""


class MixingHistory:
    """A run's last rounds, in a file for this silo's account alone, and beside it the model that all started from.

    How far a model has moved from that is kept as a print: each number added to one of 256 buckets with a sign, both
    drawn by the tensor's name and a context. Before that no number counts for more than twice the median of those that
    have moved: others have a part in what a silo trains from, and with large numbers in a few places, new ones in each
    round, could make all of its model look new.
    """

    def __init__(self, path: Path, context: bytes) -> None:
        self._path = path
        self._start = path.with_suffix(".safetensors")
        self._context = context
        try:
            content = json.loads(path.read_bytes())
            self._rounds: dict[int, dict[str, Any]] = {one["round"]: one for one in content["rounds"]}
        except (OSError, ValueError, KeyError, TypeError):
            self._rounds = {}

    def begin(self, initial: Mapping[str, Tensor]) -> None:
        """A run's starting model, which all silos know."""
        write_tensors(self._start, {name: t.detach().cpu() for name, t in initial.items() if t.is_floating_point()})
        self._rounds = {}
        self._write()

    def seal(self, round_number: int, model: Mapping[str, Tensor]) -> None:
        """A model is about to leave, sealed; again for a round replaces what was."""
        moves = self._moves(model)
        sizes = np.concatenate([np.abs(move[move != 0]) for move in moves.values()])
        most = _MOST * np.median(sizes) if sizes.size else 0.0
        moved = sum((self._print(name, move.clip(-most, most)) for name, move in moves.items()), np.zeros(_SIZE))
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

    def _moves(self, model: Mapping[str, Tensor]) -> dict[str, NDArray[np.float32]]:
        """A model less the starting one; where that is lost, all of the model counts as unknown."""
        values = {name: tensor.detach().cpu().float().numpy().reshape(-1) for name, tensor in model.items()}
        try:
            with safe_open(self._start, framework="numpy") as start:
                known = values.keys() & set(start.keys())
                return {n: v - start.get_tensor(n).reshape(-1) if n in known else v for n, v in values.items()}
        except (OSError, SafetensorError, ValueError):
            return values

    def _print(self, name: str, values: NDArray[np.float32]) -> NDArray[np.float64]:
        key = hashlib.sha256(b"medsilo/blind/print/v1\x00" + self._context + name.encode()).digest()
        return hashed(values, size=_SIZE, key=key)

    def _write(self) -> None:
        write_atomically(self._path, write_canonical({"rounds": list(self._rounds.values())}), mode=0o600)
