"""What blind mixing costs, and what it changes in the models.

Cost: seconds and bytes of one silo and of the coordinator, for several sizes of model and numbers of silos, each beside
today's masks (`masking.mask`) in the same run. Processor time of one thread, the least of some repeats; the mixture of
large models is timed on the first 2^20 numbers and scaled (named so).

    python benchmarks/blind_mixing.py cost [--sizes 44641 1000000] [--silos 3 20 100] [--repeats 3] [--out FILE.json]

Models: federated training in the simulation, whose coordinator mixes plainly, or blind with sketches of so many numbers
(0: as many as the model has, so that distances are exact). Every step of the protocol is done, in one process. Beside
accuracies: how far a blind mixture lies from the plain one of the same uploads, as a share of what mixing moves.

    python benchmarks/blind_mixing.py models [--data FILE.npz] [--seeds 1 2 3] [--rounds 12] [--sketches 0 512]
                                             [--out FILE.json]

Without --data on generated images, of which accuracies say nothing about real tissue.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from medsilo.algorithms.datasets import ImageDataset, load_npz
from medsilo.algorithms.diversifed import DiversiFed
from medsilo.algorithms.families.tethered import Tethered, pairwise_distances, squared_distances
from medsilo.algorithms.fedamp import FedAMP, attention
from medsilo.algorithms.method import CoordinatorSide, Downloads, Method, Round
from medsilo.algorithms.tensors import Part, Stack, combine
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.privacy.exposure import MODEL, Exposure
from medsilo.privacy.secure_aggregation import blind_mixing, ring
from medsilo.privacy.secure_aggregation.blind_distances import SIZE, messages, sketch, squared_distance
from medsilo.privacy.secure_aggregation.blind_mixing import WEIGHT_BITS, Mix, Sealer, mixtures, share_of, whole_weights
from medsilo.privacy.secure_aggregation.masking import PairKey, mask, pair_keys
from medsilo.privacy.secure_aggregation.mixing_rules import isolation
from medsilo.privacy.secure_aggregation.ring import DEGREE
from medsilo.silo.data.settings import PracticalGroups
from medsilo.silo.data.sharding import cut
from medsilo.silo.data.synthetic import generate_tissue
from medsilo.simulation.federation import Simulation

SCALED = 1 << 20


def keys_of(names: tuple[str, ...]) -> dict[str, dict[str, PairKey]]:
    """What each silo shares with each other one."""
    private = {name: X25519PrivateKey.generate() for name in names}
    public = {name: key.public_key().public_bytes_raw() for name, key in private.items()}
    found = {}
    for name in names:
        others = {other: key for other, key in public.items() if other != name}
        found[name] = dict(zip(others, pair_keys(name, private[name], others, bytes(32)), strict=True))
    return found


def blind(models: Mapping[str, NDArray[np.float32]], weights_of: Callable[[Any], Any], size: int) -> Any:
    """What silos open in one round of the whole protocol, and the whole weights."""
    names = tuple(models)
    keys = keys_of(names)
    silos = {name: Sealer(name, keys[name], b"benchmark") for name in names}
    sealed = {name: silos[name].seal(models[name], what=name) for name in names}
    sent = {n: messages(sketch(models[n], size=size, context=b"benchmark"), keys[n]) for n in names}
    squared = np.zeros((len(names), len(names)))
    for i, one in enumerate(names):
        for j, other in enumerate(names[:i]):
            squared[i, j] = squared[j, i] = max(0.0, squared_distance(sent[one][other], sent[other][one]))
    mix = Mix(names, whole_weights(weights_of(torch.from_numpy(squared)).numpy()), b"benchmark")
    shares = [silos[name].shares(mix) for name in names]
    mixed = mixtures(sealed, mix)
    return {name: silos[name].open(mixed[name], share_of(name, shares)) for name in names}, mix


def cost(size: int, count: int, repeats: int) -> dict[str, Any]:
    """One silo's and the coordinator's seconds and bytes."""
    names = tuple(f"silo-{number:03}" for number in range(count))
    private = X25519PrivateKey.generate()
    public = {name: X25519PrivateKey.generate().public_key().public_bytes_raw() for name in names[1:]}
    pairs = dict(zip(public, pair_keys(names[0], private, public, bytes(32)), strict=True))
    model = np.random.default_rng(0).normal(0, 0.1, size).astype(np.float32)
    whole = whole_weights(np.full((count, count), 1 / count))
    mix = Mix(names, whole, b"benchmark")
    part = min(size, SCALED)
    rows = {name: np.random.default_rng(1).integers(0, 2**61, part, dtype=np.uint64) for name in names}
    integers = model.astype(np.float64).view(np.uint64)
    sealer = Sealer(names[0], pairs, b"benchmark")
    # A mixture of its own model alone takes as long to open as any, and needs nothing of the others but their pads.
    alone = Mix(names, np.eye(count, dtype=np.int64) << WEIGHT_BITS, b"alone")
    opener = Sealer(names[0], pairs, b"benchmark")
    mixture = ring.scaled(opener.seal(model, what="the model"), 1 << WEIGHT_BITS)
    opener.shares(alone)
    pads = [{names[0]: blind_mixing._pad(pairs[name], alone, name, names[0])} for name in names[1:]]
    share = share_of(names[0], pads)
    tasks: dict[str, Callable[[], object]] = {
        "silo_seals": lambda: Sealer(names[0], pairs, b"benchmark").seal(model, what="the model"),
        "silo_sketches": lambda: messages(sketch(model, size=SIZE, context=b"benchmark"), pairs),
        "silo_shares": lambda: sealer.shares(mix),
        "silo_opens": lambda: opener.open(mixture, share),
        "coordinator_mixes": lambda: mixtures(rows, mix),
        "silo_masks_for_a_sum": lambda: mask(integers, pairs.values()),
    }
    least: dict[str, float] = {}
    for _ in range(repeats):
        for name, task in tasks.items():
            began = time.process_time()
            task()
            least[name] = min(least.get(name, float("inf")), time.process_time() - began)
    least["coordinator_mixes"] *= size / part
    silo = sum(least[name] for name in ("silo_seals", "silo_sketches", "silo_shares", "silo_opens"))
    up = 8 * size + (count - 1) * (8 * min(size, SIZE) + 8 + 8 * DEGREE)
    down = 8 * size + 8 * DEGREE + 8 * count * count
    return {
        "parameters": size,
        "silos": count,
        "seconds": {name: round(value, 4) for name, value in least.items()},
        "mixes_scaled_from": part if part < size else None,
        "silo_to_masks": round(silo / least["silo_masks_for_a_sum"], 2),
        "bytes": {"up": up, "down": down, "plain_up": 4 * size, "plain_down": 4 * size, "masked_up": 8 * size},
        "bytes_to_plain": round((up + down) / (8 * size), 2),
    }


class BlindCoordinator(CoordinatorSide):
    """Mixes what a method mixes, blind, and remembers by how much that differs from mixing plainly."""

    size: ClassVar[int] = 0
    errors: ClassVar[list[float]] = []
    isolations: ClassVar[list[float]] = []

    def aggregate(self, ended: Round) -> Downloads:
        """One mixture a participant."""
        method: Any = self.method
        stack = Stack.of(list(ended.uploads.values()), MODEL)
        names = tuple(ended.uploads)
        weights_of = weights_by_squared(method)
        distances = pairwise_distances(stack.map(squared_distances), len(names))
        plain = combine(stack, weights_of(distances.square()), ended.workspace)
        models = {name: flat(row) for name, row in zip(names, stack_rows(ended), strict=True)}
        opened, mix = blind(models, weights_of, self.size or next(iter(models.values())).size)
        own = {}
        for place, (name, part) in enumerate(zip(names, plain, strict=True)):
            true = flat(part)
            move = np.linalg.norm(true - models[name])
            self.errors.append(float(np.linalg.norm(opened[name] - true) / move))
            self.isolations.append(max(isolation(mix.weights, place, (i,)) for i in range(len(names)) if i != place))
            own[name] = {Exposure.PEER_DERIVED: shaped(opened[name], part)}
        return Downloads(own=own)


def weights_by_squared(method: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A method's weights as a function of squared distances."""
    if isinstance(method, FedAMP):
        return lambda squared: attention(squared, sigma=method.sigma, step_size=method.step_size)
    return lambda squared: method.weights(squared.sqrt())


def stack_rows(ended: Round) -> list[Part]:
    """The models of a round, one part each."""
    (rows,) = {tuple(e for e in MODEL if e in upload) for upload in ended.uploads.values()}
    return [
        Part.of({name: t for e in rows for name, t in upload[e].tensors().items()}) for upload in ended.uploads.values()
    ]


def flat(part: Part) -> NDArray[np.float32]:
    return np.concatenate([tensor.numpy().reshape(-1) for tensor in part.tensors().values()])


def shaped(values: NDArray[np.float32], like: Part) -> Part:
    found, start = {}, 0
    for name, tensor in like.tensors().items():
        found[name] = torch.from_numpy(values[start : start + tensor.numel()].reshape(tensor.shape).copy())
        start += tensor.numel()
    return Part.of(found)


def models(shards: list[ImageDataset], method: Method, size: int | None, rounds: int, seed: int) -> dict[str, float]:
    """Accuracies after some rounds; ``size`` None: mixed plainly."""
    first = shards[0]
    kind = type(method)
    if size is not None:
        coordinator = type("Blind", (BlindCoordinator,), {"size": size, "errors": [], "isolations": []})
        kind = dataclasses.dataclass(frozen=True)(type(kind.__name__, (kind,), {"coordinator": coordinator}))
    chosen = kind(**method.parameters())
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
    simulation = Simulation(plan, chosen, shards, device=torch.device("cpu"))
    for _ in range(rounds):
        simulation.step()
    accuracies = [m.accuracy for m in simulation.finish().values() if m is not None]
    found = {"accuracy": round(100 * float(np.mean(accuracies)), 2)}
    if size is not None:
        made: Any = chosen.coordinator
        errors, isolated = made.errors, made.isolations
        found |= {"error_of_move_median": float(np.median(errors)), "error_of_move_largest": float(np.max(errors))}
        found |= {"isolation_median": float(np.median(isolated)), "isolation_largest": float(np.max(isolated))}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "models"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[44_641, 1_000_000])
    parser.add_argument("--silos", type=int, nargs="+", default=[3, 20, 100])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sketches", type=int, nargs="+", default=[0, 512])
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

    if options.what == "cost":
        for size in options.sizes:
            for count in options.silos:
                add(cost(size, count, options.repeats))
        return
    data = load_npz(options.data) if options.data else generate_tissue(seed=0, train=8000, test=2000)
    dominant = ((0, 1), (2, 3)) if data.num_classes == 4 else ((0, 1, 2), (3, 4, 5))
    setting = PracticalGroups(groups=(10, 10), dominant=dominant, share=0.8, train_per_silo=160, test_per_silo=36)
    methods: list[Tethered] = [
        DiversiFed(temperature=0.5),
        DiversiFed(variant="bounded", proximal_weight=0.1),
        FedAMP(),
    ]
    for seed in options.seeds:
        shards = cut(data, setting, seed=seed)
        for method in methods:
            for size in (None, *options.sketches):
                found = models(shards, method, size, options.rounds, seed)
                variant = f" {method.variant}" if isinstance(method, DiversiFed) else ""
                add({"method": f"{method.name}{variant}", "seed": seed, "sketch": size, **found})


if __name__ == "__main__":
    main()
