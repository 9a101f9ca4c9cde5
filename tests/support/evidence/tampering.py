"""Evidence with single edits."""

from __future__ import annotations

import base64
import copy
import json
import random
from pathlib import Path
from typing import Any

import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.audit.bundle import open_evidence
from medsilo.privacy.identity.envelope import ATTESTATION, seal, to_json
from medsilo.privacy.journal.checkpoint import Checkpoint, cosign
from medsilo.privacy.journal.merkle import MerkleTree, ProvingTree
from tests.support.evidence.exchanging import origin_of

Record = dict[str, Any]


def records_of(bundle: Path) -> list[Record]:
    return [json.loads(line) for line in open_evidence(bundle).lines]


def changed(record: Record, chance: random.Random) -> Record:
    """A record of which one value, however deep, is another."""
    found = copy.deepcopy(record)
    places: list[tuple[Any, Any]] = []

    def collect(content: Any) -> None:
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            if isinstance(value, dict | list) and value:
                collect(value)
            else:
                places.append((content, key))

    collect(found)
    content, key = chance.choice(places)
    value = content[key]
    if isinstance(value, bool):
        content[key] = not value
    elif isinstance(value, int):
        content[key] = max(0, value + chance.choice([-1, 1, 1000])) if value else 1
    elif isinstance(value, str) and value:
        at = chance.randrange(len(value))
        content[key] = value[:at] + ("1" if value[at] != "1" else "2") + value[at + 1 :]
    else:
        content[key] = "something"
    return found


def write_bundle(target: Path, records: list[Record], like: Path, **changes: Any) -> Path:
    """A bundle with these records, framed as it should be; its checkpoint is the old one unless ``changes`` says."""
    header = {**json.loads(like.read_bytes().splitlines()[1][9:-1]), **changes}
    lines = b",\n".join(rfc8785.dumps(record) for record in records)
    target.write_bytes(b'{\n"header":' + rfc8785.dumps(header) + b',\n"records":[\n' + lines + b"\n]}\n")
    return target


def resigned(target: Path, records: list[Record], like: Path, key: Ed25519PrivateKey) -> Path:
    """A bundle whose records were numbered anew, and whose checkpoint somebody has signed over what they are now."""
    records = [{**record, "index": index} for index, record in enumerate(records)]
    tree = MerkleTree()
    for record in records:
        tree.append(rfc8785.dumps(record))
    origin = records[0]["origin"] if records[0]["kind"] == "key" else "medsilo/test/silo/hospital1"
    note = Checkpoint(origin, tree.size, tree.root()).sign(key)
    return write_bundle(target, records, like, size=tree.size, count=tree.size, checkpoint=note)


class Forger:
    """An owner who rewrites his past and signs it all anew: checkpoints, attestations, cosignatures, with his key.

    ``calls``: what is to be left out of his own attestations as well.
    """

    def __init__(self, owner: Ed25519PrivateKey, identity: str) -> None:
        self._key = owner
        self._origin = origin_of(identity)

    def rewrite(self, records: list[Record], *, without_calls: frozenset[str] = frozenset()) -> list[Record]:
        """The records, each own attestation made to fit the history as it is told now."""
        written: list[Record] = []
        lines: list[bytes] = []
        tree = ProvingTree(lambda first, count: lines[first : first + count])
        sizes: dict[int, int] = {0: 0}  # how many records there are now where there were so many
        shown = 0
        last_seen = ""
        for old_index, record in enumerate(records):
            sizes[record.get("index", old_index)] = len(written)
            record = {**record, "index": len(written)}
            if record["kind"] == "message" and record.get("attestation") is not None:
                document = json.loads(base64.b64decode(record["attestation"]["payload"]))
                if record["direction"] == "received":
                    last_seen = document["checkpoint"]
                    if document["witnessed"]:
                        shown = sizes.get(document["witnessed"]["size"], shown)
                else:
                    before = copy.deepcopy(document)
                    size = min(sizes.get(int(document["checkpoint"].split("\n")[1]), tree.size), tree.size)
                    root = self._root(lines[:size])
                    document["checkpoint"] = Checkpoint(self._origin, size, root).sign(self._key)
                    first = min(shown, size)
                    document["consistency"] = {
                        "size": first,
                        "proof": [node.hex() for node in tree.consistency(first, size)],
                    }
                    document["exchanges"] = [e for e in document["exchanges"] if e["call_id"] not in without_calls]
                    # What stands before the first forgery is as true as it was, and stays.
                    if document["witnessed"] and document != before:
                        line = cosign(last_seen, self._origin, self._key, 1_800_000_000)
                        document["witnessed"]["cosignature"] = line
                    if document != before:
                        record["attestation"] = to_json(seal(document, ATTESTATION, self._key))
            lines.append(rfc8785.dumps(record))
            tree.append(lines[-1])
            written.append(record)
        return written

    @staticmethod
    def _root(lines: list[bytes]) -> bytes:
        tree = MerkleTree()
        for line in lines:
            tree.append(line)
        return tree.root()
