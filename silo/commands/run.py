"""``silo keys``, ``train`` and ``flower``: the hospital's daemons."""

from __future__ import annotations

import json
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from medsilo.privacy.pages.wording import readable_bytes
from medsilo.privacy.party import systemd as service_manager
from medsilo.privacy.party.commands import (
    Log,
    Rotate,
    make_keys,
    rotate_key,
)
from medsilo.privacy.party.console import out
from medsilo.privacy.party.logs import LogFormat
from medsilo.silo.commands.options import Config
from medsilo.silo.flower.config import FlowerConfig, read_party
from medsilo.silo.state.config import SiloConfig

if TYPE_CHECKING:
    from medsilo.silo.uplink.confinement import Confinement


def keys(config: Config, rotate: Rotate = False) -> None:
    """Make the hospital's keys and its certificate request, on this machine."""
    settings = read_party(config)
    if rotate:
        rotate_key(settings)
        return
    paths = make_keys(settings)
    if not isinstance(settings, SiloConfig):
        return  # a door for Flower apps needs no certificate
    out.print(
        f"Next: send {paths.request} to the federation's CA, whose operator runs\n"
        f"  coordinator ca issue {settings.name} --request {paths.request.name}\n"
        f"Put the certificate that comes back at {settings.tls_files.certificate}\n"
        f"and the CA's own certificate, ca.pem, at {settings.tls_files.ca}",
        soft_wrap=True,
    )


def train(
    config: Config,
    log: Log = LogFormat.TEXT,
    confined: Annotated[
        bool,
        typer.Option("--confined", help="Train without a network: the kernel lets nothing reach another address."),
    ] = False,
) -> None:
    """Join the coordinator's run and train to its end; the same command goes on after any crash."""
    settings = SiloConfig.read(config)
    within = _confine(settings) if confined else None
    from medsilo.silo.run import daemon  # torch and gRPC take seconds to load; the other commands need neither
    from medsilo.silo.run.display import Display

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    if within is None:
        _tell_service_manager()
    with Display(out, as_json=log is LogFormat.JSON) as display:
        outcome = daemon.train(settings, display, confined=within)
    if log is LogFormat.JSON:
        return
    results = json.loads((outcome.folder / "results.json").read_text())
    measured = results["measured"]
    out.print(f"Run {outcome.run} has ended; {readable_bytes(outcome.bytes_sent)} left in this session.")
    if measured:
        synthetic = " (synthetic data)" if results["synthetic"] else ""
        out.print(
            f"Accuracy on {results['test_images']} own test images{synthetic}: "
            f"{100 * measured[0]['accuracy']:.1f} % before, {100 * measured[-1]['accuracy']:.1f} % now."
        )
    out.print(f"The model: {outcome.folder / 'model.safetensors'}", soft_wrap=True)
    out.print(f"What left: silo report --config {config}", soft_wrap=True)


def _tell_service_manager() -> None:
    service_manager.watch(lambda: True)
    service_manager.notify("READY=1")


def _confine(settings: SiloConfig) -> Confinement:
    """From here on without a network but for the ways to the coordinator and witnesses, or to the hospital's proxy."""
    from medsilo.silo.uplink.confinement import confine

    witnesses: dict[str, list[str]] = {}
    for witness in settings.witnesses:
        witnesses.setdefault(settings.dialled(witness.address), []).append(witness.note_key.name)
    return confine(settings.dialled(settings.coordinator.address), witnesses, _tell_service_manager)


def _end(number: int, _frame: FrameType | None) -> None:
    # At once: whatever is under way, nothing is lost by it. An exception out of a handler can leave gRPC waiting for
    # ever for a call that it interrupted.
    shown = b"\x1b[?25h\n" if sys.stdout.isatty() else b""  # the cursor, which the progress bar hides
    os.write(sys.stderr.fileno(), shown + b"stopped; the same command goes on from here\n")
    os._exit(128 + number)


def flower(config: Config, log: Log = LogFormat.TEXT) -> None:
    """Be the door between a Flower SuperNode on this machine and its server: what leaves is agreed to and recorded."""
    from medsilo.privacy.party import logs
    from medsilo.silo.flower.serving import serve

    settings = FlowerConfig.read(config)
    logs.begin(log)

    def ready() -> None:
        service_manager.watch(lambda: True)
        service_manager.notify("READY=1")
        out.print(f"The door is open: flower-supernode --insecure --superlink {settings.flower.listen}", soft_wrap=True)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    serve(settings, ready)


def _stop(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
