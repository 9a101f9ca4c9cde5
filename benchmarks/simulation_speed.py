"""One round of a simulated federation: this project's engines beside a bare PyTorch loop over the silos.

All ways train the same silos for one round from the same start, in turn, several times over in the same run; what is
reported is the median and the least time of each way, and the ratios of both to the bare loop's. The bare loop is what
one would write without this project: all PyTorch threads, fused Adam, one silo after the other.

    python benchmarks/simulation_speed.py [--shape SHAPE] [--only WAY] [--device cpu|cuda] [--repeats 5] [--out FILE]

On a GPU the bare loop runs on that GPU as well. ``cnn``: the medical setting of the DiversiFed paper (20 silos with 500
images of 28×28×3, ten epochs, batches of 100). ``mlp``: 40 silos with 300 images of 28×28×1, MLP-64. ``fedpdc``: the
network of FedPDC, 10 silos with 200 images of 32×32×3. Images are random noise: time does not depend on what they show.
Every way also trains with the proximal pull that DiversiFed has from its second round on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from medsilo.algorithms.datasets import ImageDataset, ImageSplit
from medsilo.algorithms.local import Local
from medsilo.algorithms.method import Correction
from medsilo.algorithms.models import build, state_of
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.silo.training.site import LocalSite
from medsilo.simulation.batched import Fit, InLanes, InThreads, Stacked

SHAPES = {
    "cnn": ("diversifed-cnn", 20, 500, (3, 28, 28), 9),
    "mlp": ("mlp-64", 40, 300, (1, 28, 28), 10),
    "fedpdc": ("fedpdc-cnn", 10, 200, (3, 32, 32), 10),
}
STRENGTH = 0.5
REFERENCE = "bare loop, all threads"


def make_sites(shape: str, device: torch.device, first: int = 0, step: int = 1) -> list[LocalSite]:
    model, silos, images, (channels, height, width), classes = SHAPES[shape]
    plan = RunPlan(
        federation="bench",
        coordinator="c",
        run="r",
        method=MethodPlan(name="local", parameters={}),
        model=ModelPlan(name=model, input_shape=(channels, height, width), classes=classes),
        training=TrainingPlan(epochs=10, batch_size=100, learning_rate=1e-3),
        rounds=1,
        seed=1,
        required=Local().required,
    )
    sites = []
    for number in range(first, silos, step):
        draw = np.random.default_rng(number)
        pixels = draw.integers(0, 256, (images, height, width, channels), dtype=np.uint8)
        labels = draw.integers(0, classes, images)
        split = ImageSplit(pixels, labels.astype(np.int64))
        dataset = ImageDataset(
            f"silo{number:02d}", "noise", True, tuple(str(c) for c in range(classes)), split, None, split
        )
        sites.append(LocalSite(dataset.name, dataset, build(plan.model, seed=1), plan, device=device))
    return sites


def fits_of(sites: list[LocalSite], start: dict[str, torch.Tensor]) -> list[Fit]:
    return [Fit(site, start, 1, correction=Correction(STRENGTH, start)) for site in sites]


def bare(sites: list[LocalSite], start: dict[str, torch.Tensor]) -> None:
    """A bare loop: no engine, no site's fit, no checks."""
    for site in sites:
        model = site.model
        model.load_state_dict(start)
        images, labels = site.train_data()
        centre = [start[name].to(images.device) for name, _ in model.named_parameters()]
        parameters = list(model.parameters())
        optimizer = torch.optim.Adam(parameters, lr=1e-3, fused=True)
        for _ in range(10):
            for index in torch.randperm(len(labels)).to(labels.device).split(100):
                optimizer.zero_grad()
                F.cross_entropy(model(images[index]), labels[index]).backward()
                with torch.no_grad():
                    for parameter, towards in zip(parameters, centre, strict=True):
                        parameter.grad.add_(parameter - towards, alpha=STRENGTH)
                optimizer.step()


def worker(shape: str, first: int, step: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    sites = make_sites(shape, torch.device("cpu"), first, step)
    start = state_of(sites[0].model)
    pipe.send("ready")
    with contextlib.suppress(EOFError):  # the benchmark was ended
        while pipe.recv() == "go":
            for fit in fits_of(sites, start):
                fit.alone()
            pipe.send("done")


class Processes:
    """Sites shared out among processes of one PyTorch thread each."""

    def __init__(self, shape: str, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes = []
        for number in range(count):
            here, there = context.Pipe()
            context.Process(target=worker, args=(shape, number, count, there), daemon=True).start()
            self.pipes.append(here)
        for pipe in self.pipes:
            pipe.recv()

    def __call__(self) -> None:
        for pipe in self.pipes:
            pipe.send("go")
        for pipe in self.pipes:
            pipe.recv()

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send("stop")


class Calls(TorchDispatchMode):
    """Counts calls of PyTorch's operators but views: on a GPU, where a small model's step is waiting for such calls,
    they say more than anything else that a CPU can."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, called, _types, arguments=(), named=None):
        found = called(*arguments, **(named or {}))
        self.count += not (called.is_view or "_record_function" in str(called))
        return found


def calls(work: Callable[[], object]) -> int:
    with Calls() as counted:
        work()
    return counted.count


def measure(shape: str, device: torch.device, repeats: int, only: str) -> dict[str, object]:
    cores = os.cpu_count() or 1
    begun_under = os.getloadavg()
    sites = make_sites(shape, device)
    start = state_of(sites[0].model)

    def with_threads(count: int, work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            before = torch.get_num_threads()
            torch.set_num_threads(count)
            work()
            torch.set_num_threads(before)

        return run

    def alone() -> None:
        for fit in fits_of(sites, start):
            fit.alone()

    ways: dict[str, Callable[[], object]] = {
        REFERENCE: with_threads(cores, lambda: bare(sites, start)),
        "LocalSite.fit in turn, all threads": with_threads(cores, alone),
        "Stacked, all threads": with_threads(cores, lambda: Stacked().train(fits_of(sites, start))),
    }
    processes = None
    if device.type == "cpu":
        processes = Processes(shape, cores)
        ways |= {
            "LocalSite.fit in turn, one thread": with_threads(1, alone),
            f"LocalSite.fit, {cores} processes": processes,
            f"InThreads({cores})": lambda: InThreads(cores).train(fits_of(sites, start)),
            f"InLanes({cores})": lambda: InLanes(cores).train(fits_of(sites, start)),
            "Stacked, one thread": with_threads(1, lambda: Stacked().train(fits_of(sites, start))),
        }
    ways = {name: way for name, way in ways.items() if only in name or name == REFERENCE}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if repeat:  # the first time warms up
                seconds[name].append(time.perf_counter() - begun)
    if processes is not None:
        processes.close()
    reference = seconds[REFERENCE]
    return {
        "shape": shape,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{cores} cores, {platform.machine()}",
        "torch": torch.__version__,
        "operator_calls_a_round": {
            "bare loop": len(sites) * calls(lambda: bare(sites[:1], start)),
            "Stacked": calls(lambda: Stacked().train(fits_of(sites, start))),
        },
        "load_of_the_machine": [round(one, 1) for one in (*begun_under, *os.getloadavg())],
        "ways": {
            name: {
                "median_s": round(statistics.median(times), 3),
                "least_s": round(min(times), 3),
                "ratio_of_medians": round(statistics.median(times) / statistics.median(reference), 3),
                "ratio_of_least": round(min(times) / min(reference), 3),
                "all_s": [round(one, 3) for one in times],
            }
            for name, times in seconds.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--only", default="", help="a part of a way's name; beside the bare loop")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    for shape in SHAPES if options.shape == "all" else (options.shape,):
        found.append(measure(shape, torch.device(options.device), options.repeats, options.only))
        print(json.dumps(found[-1], indent=2), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
