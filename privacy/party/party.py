"""What every party's configuration says alike: who it is, and where it keeps its keys and its journal."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import PrivateAttr

from medsilo.privacy.files.configuration import FilePath, Name, StrictModel, load
from medsilo.privacy.identity.endpoint import TlsFiles
from medsilo.privacy.identity.identity import Identity, Role
from medsilo.privacy.identity.revocation import LiveCredentials


class PartyConfig(StrictModel):
    """A party's configuration file.

    ``federation``, ``name``: as in the party's certificate. ``state``: folder for everything the party keeps. ``tls``:
    certificate and key, by default the files in ``state/keys``. ``insecure``: plain text, which either role's
    configuration allows on loopback alone.
    """

    role: ClassVar[Role]

    federation: Name
    name: Name
    state: FilePath
    tls: TlsFiles | None = None
    insecure: bool = False
    _file: Path | None = PrivateAttr(default=None)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ``ConfigurationError`` naming the file and every key that is wrong."""
        config = load(path, cls)
        config._file = path
        return config

    @property
    def identity(self) -> Identity:
        """Who this party is."""
        return Identity(self.federation, self.role, self.name)

    @property
    def keys(self) -> Path:
        """The folder of the party's own keys."""
        return self.state / "keys"

    @property
    def journal(self) -> Path:
        """The folder of the party's journal."""
        return self.state / "journal"

    @property
    def journal_origin(self) -> str:
        """The name of the party's journal in its checkpoints."""
        return f"medsilo/{self.federation}/{self.role}/{self.name}"

    @property
    def tls_files(self) -> TlsFiles:
        """Where certificate and key are."""
        return self.tls or TlsFiles.beside(self.keys)

    def open_credentials(self) -> LiveCredentials | None:
        """The party's certificate and key, read and checked; None with ``insecure: true``.

        Raises ``IdentityError`` if they are missing, damaged, expired or another party's.
        """
        return None if self.insecure else LiveCredentials(self.tls_files, self.identity)
