"""What blind mixing costs: seconds, bytes and memory of a silo and of the coordinator, beside plain mixing and masks.

For several sizes of model and numbers of silos the whole protocol is done once, with files as in daemons, each step in
a process of its own: its processor time, and by how much its memory grew at most. Beside it, in the same run, plain
mixing of the same models, and the masks of a masked sum (`masking.mask`). What is opened is held against the mixture of
the models. Sealed models and mixtures lie in --folder: 24 bytes a parameter and silo, and 8 for plain mixing.

    OPENBLAS_NUM_THREADS=1 python benchmarks/blind_cost.py [--sizes 44641 1000000] [--silos 3 20 100] [--folder FOLDER]
                                                           [--out FILE.json]
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blind_mixing import keys_of
from numpy.typing import NDArray

from medsilo.algorithms.protection.blind import (
    blind_method,
    check_sums,
    encode_upload,
    mix_sealed,
    open_mixture,
    openers,
    read_mix,
    shares_payload,
    stated,
)
from medsilo.algorithms.registry import make
from medsilo.algorithms.tensors import Part, Payload, Stack, combine
from medsilo.algorithms.tensors.files import FileWorkspace, Spares, read_payload, write_payload
from medsilo.privacy.consent.plan import SecureAggregationPlan
from medsilo.privacy.exposure import MODEL, Exposure
from medsilo.privacy.secure_aggregation import ring
from medsilo.privacy.secure_aggregation.blind_distances import SIZE
from medsilo.privacy.secure_aggregation.blind_mixing import FRACTION_BITS, WEIGHT_BITS, Mix, Sealer, whole_weights
from medsilo.privacy.secure_aggregation.masking import mask

MASKS = SecureAggregationPlan.model_validate(
    {
        "mode": "blind",
        "minimum": 3,
        "fraction_bits": FRACTION_BITS,
        "rounds": 2,
        "sketch_size": SIZE,
        "largest_isolation": 1.0,
    }
)
METHOD = make("fedamp", {})
MIXING = blind_method(METHOD).mixing(METHOD, 0, 1)


def shared(sealer: Sealer, sealed: Payload, mix: Mix) -> Payload:
    """What a silo gives so that others can open their mixtures."""
    sums = check_sums(sealed[Exposure.SEALED_MODEL], mix)
    return shares_payload(sealer.shares(mix), sums, sealer.tags(mix, sums))


@dataclasses.dataclass
class Measured:
    """What a step cost: processor seconds, and by how many MB its memory grew."""

    seconds: float
    megabytes: float


def measured(task: Callable[[], object]) -> Measured:
    """Does a step in a process of its own, of which nothing is left but what it has written."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        began, start = time.process_time(), _resident()
        task()
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        os.write(theirs, json.dumps([time.process_time() - began, max(0.0, most - start)]).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        told = pipe.read()
    if os.waitpid(child, 0)[1] != 0:
        raise SystemExit("a step has failed")
    return Measured(*json.loads(told))


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Costs:
    """One round of so many silos with models of so many numbers."""

    def __init__(self, size: int, count: int, folder: Path) -> None:
        self.size, self.folder = size, folder
        self.spares = Spares(folder / "spare", most=0)
        self.names = tuple(f"silo-{number:03}" for number in range(count))
        self.keys = keys_of(self.names)
        self.silos = {name: Sealer(name, self.keys[name], b"benchmark") for name in self.names}
        self.steps: dict[str, Measured] = {}
        for place, name in enumerate(self.names):
            values = np.random.default_rng(place).normal(0, 0.1, size).astype(np.float32)
            write_payload(
                folder / f"plain-{name}.safetensors", {MODEL[0]: Part.of({"model": torch.from_numpy(values)})}
            )

    def row(self) -> dict[str, Any]:
        """All that is measured."""
        first = self.names[0]
        for name in self.names:
            step = measured(lambda name=name: self.seal(name))  # type: ignore[misc]
            if name == first:
                self.steps["silo_seals"] = step
        even = whole_weights(np.full((len(self.names),) * 2, 1 / len(self.names)))
        told: Payload = {Exposure.MIXING_WEIGHTS: Part.of({"weights": torch.from_numpy(even)})}
        self.steps["coordinator_mixes"] = measured(lambda: self.mix(told))
        digests = [sha256_of(self.read("mixture", name)) for name in self.names]
        mix = read_mix(stated(told, digests), self.names, b"benchmark")
        for name in self.names:
            step = measured(lambda name=name: self.share(name, mix))  # type: ignore[misc]
            if name == first:
                self.steps["silo_shares"] = step
        self.steps["coordinator_passes_on"] = measured(self.pass_on)
        self.silos[first].shares(mix)
        self.steps["silo_opens"] = measured(lambda: self.open(first, mix))
        self.steps["coordinator_mixes_plainly"] = measured(lambda: self.mix_plainly(even))
        values = np.zeros(self.size, dtype=np.uint64)
        self.steps["silo_masks_for_a_sum"] = measured(lambda: mask(values, self.keys[first].values()))
        return self.summary()

    def summary(self) -> dict[str, Any]:
        """Seconds, memory and bytes."""
        silo = sum(self.steps[name].seconds for name in ("silo_seals", "silo_shares", "silo_opens"))
        first, count = self.names[0], len(self.names)
        up = sum(self.path(what, first).stat().st_size for what in ("sealed", "distances", "shares"))
        down = sum(self.path(what, first).stat().st_size for what in ("mixture", "opener"))
        down += count * (8 * count + hashlib.sha256().digest_size)
        return {
            "parameters": self.size,
            "silos": count,
            "seconds": {name: round(step.seconds, 3) for name, step in self.steps.items()},
            "megabytes": {name: round(step.megabytes, 1) for name, step in self.steps.items()},
            "silo_seconds": round(silo, 3),
            "bytes": {"up": up, "down": down, "plain": 8 * self.size, "masked": 12 * self.size},
            "bytes_to_plain": round((up + down) / (8 * self.size), 2),
        }

    def path(self, what: str, name: str) -> Path:
        """Where something of a silo lies."""
        return self.folder / f"{what}-{name}.safetensors"

    def read(self, what: str, name: str) -> Part:
        """Of one class."""
        (part,) = read_payload(self.path(what, name)).values()
        return part

    def write(self, what: str, name: str, payload: Payload) -> None:
        """For a later step."""
        write_payload(self.path(what, name), payload)

    def files(self, what: str) -> FileWorkspace:
        """Of a step."""
        return FileWorkspace(self.folder / what, self.spares)

    def seal(self, name: str) -> None:
        """A silo seals its model, and tells of its distances."""
        update, keys = read_payload(self.path("plain", name)), self.keys[name]
        sealed = dict(encode_upload(update, MIXING, self.silos[name], keys, MASKS, b"benchmark", self.files(name)))
        source: Any = sealed.pop(Exposure.SEALED_MODEL).source
        source.path.replace(self.path("sealed", name))
        self.write("distances", name, sealed)

    def mix(self, told: Payload) -> None:
        """The coordinator mixes."""
        sealed = {name: {Exposure.SEALED_MODEL: self.read("sealed", name)} for name in self.names}
        mixed, _ = mix_sealed(sealed, told, self.files("mixed"))
        for name, payload in mixed.items():
            source: Any = payload[Exposure.SEALED_MIXTURE].source
            source.path.replace(self.path("mixture", name))

    def share(self, name: str, mix: Mix) -> None:
        """A silo helps others to open theirs."""
        sealer = Sealer(name, self.keys[name], b"benchmark", seed=self.silos[name].seed)
        self.write("shares", name, shared(sealer, {Exposure.SEALED_MODEL: self.read("sealed", name)}, mix))

    def pass_on(self) -> None:
        """The coordinator adds shares."""
        given = openers({name: read_payload(self.path("shares", name)) for name in self.names})
        for name, payload in given.items():
            self.write("opener", name, payload)

    def open(self, name: str, mix: Mix) -> None:
        """A silo opens its mixture; it has to be the mean of all models."""
        payload = {Exposure.SEALED_MIXTURE: self.read("mixture", name), **read_payload(self.path("opener", name))}
        sealer = Sealer(name, self.keys[name], b"benchmark", seed=self.silos[name].seed, mix=mix)
        sums = ring.unpack(read_payload(self.path("shares", name))[Exposure.OPENING_SHARES].tensors()["sums"].numpy())
        opened = open_mixture(payload, sealer, self.names, name, sums, self.read("plain", name).specs)
        found = np.frombuffer(opened[Exposure.PEER_DERIVED].source.read(0, 4000), dtype="<f4")
        models = [np.frombuffer(self.read("plain", other).source.read(0, 4000), dtype="<f4") for other in self.names]
        expected = mix.row(name) / (1 << WEIGHT_BITS) @ np.stack(models)
        if np.abs(found - expected).max() > 1e-4:
            raise SystemExit("what was opened is not the mixture of the models")

    def mix_plainly(self, weights: NDArray[np.int64]) -> None:
        """What the coordinator does where it sees the models."""
        updates = [read_payload(self.path("plain", name)) for name in self.names]
        combine(Stack.of(updates, MODEL), torch.from_numpy(weights / (1 << WEIGHT_BITS)), self.files("plain"))


def sha256_of(part: Part) -> bytes:
    """Of a mixture as it travels."""
    found = hashlib.sha256()
    for chunk in part.chunks(1 << 20):
        found.update(chunk)
    return found.digest()


def cost(size: int, count: int, folder: Path | None) -> dict[str, Any]:
    """One silo's and the coordinator's seconds, bytes and memory."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        return Costs(size, count, Path(place)).row()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[44_641, 1_000_000])
    parser.add_argument("--silos", type=int, nargs="+", default=[3, 20, 100])
    parser.add_argument("--folder", type=Path, help="where models lie meanwhile")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    rows = []
    for size in options.sizes:
        for count in options.silos:
            rows.append(cost(size, count, options.folder))
            print(json.dumps(rows[-1]), flush=True)
            if options.out:
                options.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
