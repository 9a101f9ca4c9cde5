"""Records with COSE receipts (RFC 9942): that each is in the journal, in the form that SCITT's tools read.

The journal's tree is RFC 9162's (as RFC 6962's), so a receipt is a view of it: the inclusion proof, and the audit key's
signature over the root that the journal's last checkpoint has. Needs the package ``scitt-cose`` (the extra ``cose``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization

from medsilo.privacy.errors import ConfigurationError, JournalError
from medsilo.privacy.files.durable import write_atomically
from medsilo.privacy.identity.envelope import key_id
from medsilo.privacy.identity.keys import load_audit_key
from medsilo.privacy.journal.checkpoint import read_note
from medsilo.privacy.journal.journal import last_checkpoint, read_lines
from medsilo.privacy.journal.merkle import MerkleTree


def write_receipts(journal: Path, key: Path, numbers: Sequence[int], folder: Path) -> list[Path]:
    """Writes ``record-N.json``, the record's exact bytes, and ``record-N.cose``, its receipt, for each number.

    ``key``: the owner's audit key. Raises ``ConfigurationError`` if the package is not installed or a record is not
    under the last checkpoint, ``JournalError`` if nothing is signed or the journal is not what was signed.
    """
    try:
        build: Any = import_module("scitt_cose").build_receipt
    except ImportError:
        raise ConfigurationError(
            "--receipts needs the package scitt-cose: pip install 'medsilo[cose]' (or leave the option out)"
        ) from None
    note = last_checkpoint(journal)
    if note is None:
        raise JournalError(f"{journal}: there is no signed journal yet; the daemon begins one")
    checkpoint = read_note(note)
    lines = list(itertools.islice(read_lines(journal), checkpoint.size))
    tree = MerkleTree()
    for line in lines:
        tree.append(line)
    if tree.root() != checkpoint.root:
        raise JournalError(f"{journal}: is not what was signed; `audit verify` says where")
    missing = [number for number in numbers if number >= len(lines)]
    if missing:
        raise ConfigurationError(f"{journal}: record {missing[0]} is not under the last signed checkpoint yet")
    private = load_audit_key(key)
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    entries = [line.hex() for line in lines]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number in numbers:
        receipt = build(
            leaf_entry_hex=entries[number],
            leaf_index=number,
            tree_entries_hex=entries,
            alg="EdDSA",
            log_private_key_pem=pem,
            iss=checkpoint.origin,
            sub=f"{checkpoint.origin}#{number}",
            kid=bytes.fromhex(key_id(private.public_key().public_bytes_raw())),
        )
        for path, content in ((f"record-{number}.json", lines[number]), (f"record-{number}.cose", receipt)):
            write_atomically(folder / path, content)
            written.append(folder / path)
    return written
