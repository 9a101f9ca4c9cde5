"""What blind mixing changes in the models.

Federated training in the simulation, whose coordinator mixes plainly, or blind with sketches of so many numbers
(0: as many as the model has, so that distances are exact). Every step of the protocol is done, in one process. Beside
accuracies: how far a blind mixture lies from the plain one of the same uploads, as a share of what mixing moves.

    python benchmarks/blind_mixing.py [--data FILE.npz] [--seeds 1 2 3] [--rounds 12] [--sketches 0 512]
                                      [--methods diversifed bounded fedamp pfedsim] [--dirichlet 0.5]
                                      [--blind-only]
                                      [--out FILE.json]

Twenty silos in two groups of practical shares of classes, or of Dirichlet's label distributions. A sketch is never
larger than the methods' default.

Without --data on generated images, of which accuracies say nothing about real tissue.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from medsilo.algorithms.datasets import ImageDataset, load_npz
from medsilo.algorithms.declarations import Mixing
from medsilo.algorithms.method import PERSONAL, CoordinatorSide, Downloads, Method, Round
from medsilo.algorithms.models import Layout, build
from medsilo.algorithms.protection.blind import (
    blind_method,
    check_sums,
    default_sketch,
    encode_upload,
    mix_sealed,
    mixed_specs,
    open_mixture,
    openers,
    read_mix,
    rules_of,
    shares_payload,
    stated,
    weigh,
)
from medsilo.algorithms.registry import make
from medsilo.algorithms.tensors import MemoryWorkspace, Payload, TensorSpec
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, SecureAggregationPlan, TrainingPlan
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.secure_aggregation.blind_mixing import FRACTION_BITS, Sealer, whole_weights
from medsilo.privacy.secure_aggregation.masking import PairKey, pair_keys
from medsilo.privacy.secure_aggregation.mixing_rules import as_far, isolation
from medsilo.silo.data.settings import Dirichlet, PracticalGroups, Setting
from medsilo.silo.data.sharding import cut
from medsilo.silo.data.synthetic import generate_tissue
from medsilo.simulation.federation import Simulation


def keys_of(names: tuple[str, ...]) -> dict[str, dict[str, PairKey]]:
    """What each silo shares with each other one."""
    private = {name: X25519PrivateKey.generate() for name in names}
    public = {name: key.public_key().public_bytes_raw() for name, key in private.items()}
    found = {}
    for name in names:
        others = {other: key for other, key in public.items() if other != name}
        found[name] = dict(zip(others, pair_keys(name, private[name], others, bytes(32)), strict=True))
    return found


class BlindCoordinator(CoordinatorSide):
    """Mixes what a method mixes, blind, with what silos and coordinators do in daemons, and remembers by how much that
    differs from mixing plainly; what hospitals would have seen of it, too."""

    masks: ClassVar[SecureAggregationPlan]
    start: ClassVar[Mapping[str, torch.Tensor]]
    errors: ClassVar[list[float]] = []
    changed: ClassVar[list[bool]] = []
    rounds: ClassVar[list[Mixed]] = []

    def aggregate(self, ended: Round) -> Downloads:
        """One mixture a participant."""
        names = tuple(ended.uploads)
        mixing = blind_method(self.method).mixing(self.method, ended.number, self.federation.rounds)
        keys = keys_of(names)
        silos = {name: Sealer(name, keys[name], b"benchmark") for name in names}
        sealed = {
            name: encode_upload(
                ended.uploads[name], mixing, silos[name], keys[name], self.masks, b"benchmark", MemoryWorkspace()
            )
            for name in names
        }
        told, _ = weigh(sealed, mixing, self.masks)
        mixed, digests = mix_sealed(sealed, told, ended.workspace)
        mix = read_mix(stated(told, digests), names, b"benchmark")
        sums = {name: check_sums(sealed[name][Exposure.SEALED_MODEL], mix) for name in names}
        shares = {
            name: shares_payload(silos[name].shares(mix), sums[name], silos[name].tags(mix, sums[name]))
            for name in names
        }
        given = openers(shares)
        specs = mixed_specs(ended.uploads[names[0]], mixing)
        own = {
            name: open_mixture({**mixed[name], **given[name]}, silos[name], names, name, sums[name], specs)
            for name in names
        }
        self._note(ended, mixing, mix.weights, own, specs)
        return Downloads(own=own)

    def _note(
        self,
        ended: Round,
        mixing: Mixing,
        whole: NDArray[np.int64],
        own: Mapping[str, Payload],
        specs: tuple[TensorSpec, ...],
    ) -> None:
        named = [spec.name for spec in specs]
        models = []
        for upload in ended.uploads.values():
            tensors = {
                name: t for exposure in mixing.mixed & set(upload) for name, t in upload[exposure].tensors().items()
            }
            models.append(torch.cat([tensors[name].double().reshape(-1) for name in named]))
        stacked = torch.stack(models)
        weights = mixing.weights(exact_distances(ended.uploads, mixing, stacked))
        plain = weights @ stacked
        opened = torch.stack(
            [
                torch.cat([t.reshape(-1) for t in own[n][Exposure.PEER_DERIVED].tensors().values()])
                for n in ended.uploads
            ]
        )
        moves = (plain - stacked).norm(dim=1)
        self.errors.extend(((opened - plain).norm(dim=1) / moves)[moves > 0].tolist())
        wanted = whole_weights(weights.numpy())
        self.changed.extend((rules_of(self.masks).nearest(wanted) != wanted).any(axis=1).tolist())
        start = torch.cat([self.start[name].double().reshape(-1) for name in named])
        shared = min(stacked.shape[1], sum(s.nbytes // 4 for s in self.federation.layout.extractor))
        self.rounds.append(Mixed(whole, (stacked - start)[:, :shared].numpy()))


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Of a round: the whole weights, and each silo's model [N, D] less the starting one (extractors come first)."""

    weights: NDArray[np.int64]
    moved: NDArray[np.float64]


def exact_distances(uploads: Mapping[str, Payload], mixing: Mixing, models: torch.Tensor) -> torch.Tensor:
    """Squared, of what is compared: ``[K, N, N]``."""
    if mixing.compared is None:
        return torch.zeros(0, len(models), len(models), dtype=torch.float64)
    rows = models[None]
    if (exposure := mixing.compared.exposure) is not None:
        tensors = [next(iter(upload[exposure].tensors().values())) for upload in uploads.values()]
        rows = torch.stack([mixing.compared.rows(tensor) for tensor in tensors], dim=1)
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()


def over_rounds(rounds: list[Mixed], window: int, others: float | None) -> list[float]:
    """For each round the largest isolation of any model in what any other silo was given in the last rounds, where the
    others are taken to have moved ``others`` times as far as the model's own silo; None: as they did."""
    found = []
    for last in range(1, len(rounds) + 1):
        seen = rounds[max(0, last - window) : last]
        moved = np.stack([one.moved for one in seen])
        grams = np.einsum("snd,tnd->nst", moved, moved)
        most = 0.0
        for own in range(len(grams)):
            weights = [one.weights for one in seen]
            like = np.stack([as_far(grams[own], others)] * len(grams)) if others is not None else grams
            for recipient in range(len(grams)):
                if recipient != own:
                    most = max(most, isolation(weights, own, (recipient,), moves=grams[own], others=like))
        found.append(most)
    return found


def models(shards: list[ImageDataset], method: Method, size: int | None, rounds: int, seed: int) -> dict[str, Any]:
    """Accuracies after some rounds; ``size`` None: mixed plainly, 0: of exact distances."""
    first = shards[0]
    kind = type(method)
    plan = RunPlan(
        federation="bench",
        coordinator="coordinator",
        run="blind",
        method=MethodPlan(name=method.name, parameters=method.parameters()),
        model=ModelPlan(name="diversifed-cnn", input_shape=first.image_shape, classes=first.num_classes),
        training=TrainingPlan(epochs=10, batch_size=100, optimizer="adam", learning_rate=0.001),
        rounds=rounds,
        seed=seed,
        required=method.required,
    )
    if size is not None:
        layout = Layout.of(build(plan.model, seed=seed))
        masks = SecureAggregationPlan(
            mode="blind",
            minimum=3,
            fraction_bits=FRACTION_BITS,
            rounds=2 * rounds,
            sketch_size=min(size, default_sketch(method, layout, rounds)) or 1 << 20,
            largest_isolation=1.0,
        )
        made: dict[str, Any] = {"masks": masks, "errors": [], "changed": [], "rounds": []}
        coordinator: Any = type("Blind", (BlindCoordinator, method.coordinator), made)
        statements = {"coordinator": coordinator, "under_blind": method.under_blind}
        kind = dataclasses.dataclass(frozen=True)(type(kind.__name__, (kind,), statements))
    chosen = kind(**method.parameters())
    simulation = Simulation(plan, chosen, shards, device=torch.device("cpu"))
    if size is not None:
        coordinator.start = next(iter(simulation.silos.values())).memory[PERSONAL]
    for _ in range(rounds):
        simulation.step()
    accuracies = [m.accuracy for m in simulation.finish().values() if m is not None]
    found: dict[str, Any] = {"accuracy": round(100 * float(np.mean(accuracies)), 2)}
    if size is not None:
        found |= {"sketch": masks.sketch_size} | seen_of(chosen.coordinator)
    return found


def seen_of(made: Any) -> dict[str, Any]:
    """What a blind coordinator has remembered."""
    errors, single = made.errors, over_rounds(made.rounds, 1, 1.0)
    found = {
        "error_of_move_median": float(np.median(errors)),
        "error_of_move_largest": float(np.max(errors)),
        "rows_changed_by_rules": float(np.mean(made.changed)),
        "isolation": [round(one, 3) for one in single],
    }
    for window in (2, 4, 8):
        for others in (1.0, 0.5, 0.0, None):
            name = f"isolation_{window}_rounds_others_{'true' if others is None else others}"
            found[name] = [round(one, 3) for one in over_rounds(made.rounds, window, others)]
    lengths = np.stack([np.linalg.norm(b.moved - a.moved, axis=1) for a, b in itertools.pairwise(made.rounds)])
    found["shortest_move_to_longest"] = [round(float(m.min() / m.max()), 3) for m in lengths]
    sizes = np.stack([np.linalg.norm(one.moved, axis=1) for one in made.rounds])
    found["move_to_all"] = [round(float(x), 3) for x in np.median(lengths / sizes[1:], axis=1)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sketches", type=int, nargs="+", default=[0, 512])
    parser.add_argument("--methods", nargs="+", default=["diversifed", "bounded", "fedamp", "pfedsim"])
    parser.add_argument("--dirichlet", type=float)
    parser.add_argument("--blind-only", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.out:
            data = options.data.stem if options.data else "synthetic"
            options.out.write_text(json.dumps({"machine": machine, "data": data, "rows": rows}, indent=2) + "\n")

    data = load_npz(options.data) if options.data else generate_tissue(seed=0, train=8000, test=2000)
    dominant = ((0, 1), (2, 3)) if data.num_classes == 4 else ((0, 1, 2), (3, 4, 5))
    setting: Setting = PracticalGroups(
        groups=(10, 10), dominant=dominant, share=0.8, train_per_silo=160, test_per_silo=36
    )
    if options.dirichlet is not None:
        setting = Dirichlet(20, options.dirichlet, train_per_silo=160, test_per_silo=100)
    known: dict[str, Method] = {
        "diversifed": make("diversifed", {"temperature": 0.5}),
        "bounded": make("diversifed", {"variant": "bounded", "proximal_weight": 0.1}),
        "fedamp": make("fedamp", {}),
        "pfedsim": make("pfedsim", {"warmup_share": 0.34}),
    }
    for seed in options.seeds:
        shards = cut(data, setting, seed=seed)
        for name in options.methods:
            for size in (*([] if options.blind_only else [None]), *options.sketches):
                found = models(shards, known[name], size, options.rounds, seed)
                add({"method": name, "seed": seed, "sketch": size, **found})


if __name__ == "__main__":
    main()
