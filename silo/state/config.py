"""A hospital's configuration file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from medsilo.privacy.door.archive import SentArchive
from medsilo.privacy.files.configuration import FilePath, Name, StrictModel
from medsilo.privacy.identity.endpoint import Address, is_loopback
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.party.party import PartyConfig
from medsilo.privacy.witness.config import MOST_WITNESSES, WitnessAddress
from medsilo.silo.state.proxy import ProxyConfig


class CoordinatorAddress(StrictModel):
    """Whom the silo calls.

    ``address``: where the coordinator listens, as ``host:port``. ``name``: its name in the federation.
    """

    address: Address
    name: Name = "coordinator"


class SiloConfig(PartyConfig):
    """``hospitalN.yaml``. Relative paths are taken from the file's folder.

    ``coordinator``: whom the silo calls. ``proxy``: the hospital's HTTP proxy, if the coordinator is reached through
    one; the environment's is not followed. ``state``: folder for keys, journal and models; keep it on a disk that is
    backed up. ``shard``: the hospital's images (MedMNIST's ``.npz`` form). ``consent``: the consent file; without one
    nothing may leave. ``tls``: by default the files in ``state/keys``. ``device``: auto, cpu, cuda or cuda:N; or a
    list, for example [cuda:0, cuda:1], whose devices train each batch together, each in a process of its own.
    ``precision``: in which numbers training computes: float32, or bfloat16, which many GPUs compute faster; simulation
    and daemons give the same bits with float32 alone, and a run with differential privacy is refused otherwise.
    ``threads``: CPU threads of training, of each process; PyTorch's choice by default, which several processes share.
    ``insecure``: plain text, only to a loopback address. ``trusted_models``: own model factories that a plan may name.
    ``weights``: files of weights, or folders of such, for runs whose weights every hospital brings itself; a plan finds
    its own by SHA-256.
    ``keep_sent_days``: keep what was sent, encrypted with the silo's own key, for so many days (`silo audit open`); by
    default nothing is kept. ``ledger``: folder of the privacy ledgers, ``state/ledger`` by default; several silos that
    train on the same images (in several federations) must share one. ``witnesses``: who is asked to cosign the
    journal's checkpoints; the consent names them too.
    """

    role = "silo"

    coordinator: CoordinatorAddress
    proxy: ProxyConfig | None = None
    shard: FilePath
    consent: FilePath | None = None
    device: str | tuple[str, ...] = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    threads: int | None = Field(default=None, ge=1)
    trusted_models: tuple[str, ...] = ()
    weights: tuple[FilePath, ...] = ()
    keep_sent_days: float | None = Field(default=None, gt=0)
    ledger: FilePath | None = None
    witnesses: tuple[WitnessAddress, ...] = Field(default=(), max_length=MOST_WITNESSES)

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(device, str):
            kind, _, index = device.partition(":")
            if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
                raise ValueError("should be auto, cpu, cuda or cuda:N, or a list")
            return device
        gpus = all(re.fullmatch(r"cuda:\d+", name) for name in device) and len(set(device)) == len(device)
        if not device or not (gpus or set(device) == {"cpu"}):
            raise ValueError("a list should name different GPUs, as [cuda:0, cuda:1], or the CPU again and again")
        return device

    @model_validator(mode="after")
    def _loopback(self) -> SiloConfig:
        if self.insecure and not is_loopback(self.coordinator.address):
            raise ValueError(f"`insecure: true` is for loopback addresses only, not {self.coordinator.address}")
        if self.insecure and self.proxy is not None:
            raise ValueError("`insecure: true` and `proxy` do not go together: the proxy would read everything")
        return self

    @property
    def devices(self) -> tuple[str, ...]:
        """One or several."""
        return (self.device,) if isinstance(self.device, str) else self.device

    def dialled(self, address: str) -> str:
        """The address to which a connection to ``address`` is made: the proxy's, if there is one."""
        return address if self.proxy is None else self.proxy.address

    @property
    def coordinator_identity(self) -> Identity:
        """Whom it speaks to."""
        return Identity(self.federation, "coordinator", self.coordinator.name)

    @property
    def sent_archive(self) -> SentArchive:
        """What was sent, as far as it is kept."""
        return SentArchive(self.state / "sent", self.keys / "sent.key")

    @property
    def ledgers(self) -> Path:
        """The folder of the privacy ledgers."""
        return self.ledger or self.state / "ledger"

    @property
    def fork_proof(self) -> Path:
        """The file that proves that the coordinator has shown two journals, if this silo has found out."""
        return self.state / "fork-proof.json"

    @property
    def runs(self) -> Path:
        """The folder of what training leaves: models and measurements, a folder a run."""
        return self.state / "runs"

    @property
    def features(self) -> Path:
        """The folder of what fixed extractors made of the images."""
        return self.state / "features"

    @property
    def last_plan(self) -> Path:
        """The plan that this silo was shown last."""
        return self.state / "plan.json"

    @property
    def withdrawal(self) -> Path:
        """The file that exists while the consent is withdrawn; a daemon looks for it before every message."""
        return self.state / "withdrawal.json"

    @property
    def approval(self) -> Path:
        """The file in which ``silo approve`` leaves the hash of an approved plan for the daemon."""
        return self.state / "approval.json"
