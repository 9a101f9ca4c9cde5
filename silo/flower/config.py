"""A hospital's configuration file for Flower apps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from medsilo.privacy.exposure import Exposure
from medsilo.privacy.files.configuration import FilePath, StrictModel
from medsilo.privacy.identity.endpoint import Address, is_loopback
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.party.party import PartyConfig
from medsilo.silo.state.config import CoordinatorAddress, SiloConfig

_NOT_DECLARED = (Exposure.PROTOCOL, Exposure.IDENTITY, Exposure.MASKED_UPDATE)


def _telling(exposure: Exposure) -> Exposure:
    if exposure in _NOT_DECLARED:
        raise ValueError("is not for what an app computes from patients' data; give the class that says what it is")
    return exposure


Declared = Annotated[Exposure, AfterValidator(_telling)]
"""The class of an array or number that an app computes."""


class FlowerApp(StrictModel):
    """What of a Flower app passes the door.

    ``python``: the interpreter of the environment in which ``flwr`` is installed. ``listen``: where the SuperNode finds
    the door, on this machine alone. ``records``: by the name of a record in the app's replies, the exposure class of
    each array, metric or configuration value in it, by its name; ``*`` stands for any characters, and the longest
    name that fits counts. What is not declared does not leave.
    """

    python: FilePath
    listen: Address = "127.0.0.1:9092"
    records: dict[str, dict[str, Declared]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _on_this_machine(self) -> FlowerApp:
        if not is_loopback(self.listen):
            raise ValueError(
                f"`listen` should be an address of this machine alone, such as 127.0.0.1:9092, not {self.listen}"
            )
        return self

    @property
    def classes(self) -> tuple[Exposure, ...]:
        """The classes that the declarations name."""
        named = {exposure for record in self.records.values() for exposure in record.values()}
        return tuple(exposure for exposure in Exposure if exposure in named)


class FlowerConfig(PartyConfig):
    """``hospitalN-flower.yaml``: a door for a Flower app (`silo flower`). Relative paths: from the file's folder.

    ``coordinator``: Flower's server (SuperLink): the address of its Fleet API, and the hospital's own name for it,
    which stands in consent and journal. ``ca``: the certificates (PEM) that the server's is checked with; the system's
    by default. ``state``: folder for key and journal; keep it on a disk that is backed up. ``consent``: the consent
    file; without one nothing may leave. ``tls``: not used; the server knows the SuperNode by its own key. ``insecure``:
    plain text, only to a server on this machine. ``flower``: what of the app passes.
    """

    role = "silo"

    coordinator: CoordinatorAddress
    ca: FilePath | None = None
    consent: FilePath | None = None
    flower: FlowerApp

    @model_validator(mode="after")
    def _loopback(self) -> FlowerConfig:
        if self.insecure and not is_loopback(self.coordinator.address):
            raise ValueError(f"`insecure: true` is for loopback addresses only, not {self.coordinator.address}")
        if self.tls is not None:
            raise ValueError("`tls` is not used here; the certificates to check the server's with go under `ca`")
        return self

    @property
    def coordinator_identity(self) -> Identity:
        """The server, as consent and journal name it."""
        return Identity(self.federation, "coordinator", self.coordinator.name)


def read_party(path: Path) -> SiloConfig | FlowerConfig:
    """A hospital's file of either kind: one for Flower apps has the key ``flower:``.

    Raises ``ConfigurationError`` naming the file and every key that is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []  # what is wrong with it, reading it says
    return (FlowerConfig if any(line.startswith("flower:") for line in lines) else SiloConfig).read(path)
