"""The steps of ``init`` that all parties share: each leaves its result whole or not at all, and overwrites nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.files.configuration import Model, load
from medsilo.privacy.files.durable import fsync_folder, write_atomically
from medsilo.privacy.files.state_folder import writing_privately
from medsilo.privacy.identity.keys import create_keys
from medsilo.privacy.party.party import PartyConfig


def quoted(text: object) -> str:
    """Any text as one YAML value."""
    return json.dumps(str(text), ensure_ascii=False)


def aligned(text: str) -> str:
    """A configuration's text with the comments behind its values below each other."""
    lines = []
    for line in text.split("\n"):
        value, separator, comment = line.partition("  # ")
        behind = separator and value.strip() and not value.startswith("#")
        lines.append(f"{value.rstrip():<40}  # {comment}" if behind else line)
    return "\n".join(lines)


def place_new(path: Path, text: str, model: type[Model]) -> Model:
    """Writes a new configuration file, once it is seen to be one; raises ``ConfigurationError`` if there is one."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(draft, text.encode())
        try:
            load(draft, model)
        except ConfigurationError as error:
            raise ConfigurationError(str(error).replace(str(draft), str(path))) from None
        os.link(draft, path)  # unlike a renaming, it never takes another file's place
    except FileExistsError:
        raise ConfigurationError(f"{path}: exists already and is not overwritten") from None
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        draft.unlink(missing_ok=True)
    fsync_folder(path.parent)
    return load(path, model)


def make_whole(folder: Path, make: Callable[[Path], object]) -> bool:
    """Has a folder made beside its place and then put there, so that no half of it is ever seen; False if there is "
    "one."""
    if folder.exists():
        return False
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(mode=0o700)
        make(partial)
        partial.rename(folder)
    except OSError as error:
        raise ConfigurationError(f"{folder}: cannot be made: {error.strerror}") from None
    fsync_folder(folder.parent)
    return True


def make_keys_once(party: PartyConfig) -> bool:
    """Makes a party's keys and certificate request where there are none; False if they are there.

    Raises ``IdentityError`` for a folder of keys from which one is missing.
    """
    with writing_privately():
        if make_whole(party.keys, lambda folder: create_keys(folder, party.identity)):
            return True
        if not all((party.keys / name).exists() for name in ("tls.key", "audit.key", "tls.csr")):
            create_keys(party.keys, party.identity)
    return False
