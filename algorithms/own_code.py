"""Code of this machine that a plan or an experiment names by its path."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any

from medsilo.privacy.errors import ConfigurationError


def load(what: str, path: str, trusted: Collection[str], *, untrusted: str) -> Any:
    """What ``package.module:attribute`` names; loading it runs the module, so the path must stand in ``trusted``.

    Raises ``ConfigurationError`` with the reason ``untrusted`` for one that does not, and for one that names nothing.
    ``what`` it is for, such as a model, both messages say first.
    """
    if path not in trusted:
        raise ConfigurationError(f"{what} {path!r} is code of this machine{untrusted}")
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"{what} {path!r} cannot be loaded: {error}. Its module's folder must be on PYTHONPATH"
        ) from error
