"""Verifies an evidence bundle without Medsilo's software: with Python's standard library and ``cryptography``.

    python verify_by_hand.py BUNDLE_OR_PROOF [PUBLIC_KEY_HEX]

It shows that the records are those that their owner signed, that no byte of a message is unaccounted for, and, in a
bundle of a whole journal, which messages have the other side's signed receipt; or that a proof, as `audit verify
--proof` writes it, is one. It ends with 0 if all of that holds.
``docs/audit.md`` says what each step means. It is short, to be read; ``audit verify`` checks more.
"""

import base64
import hashlib
import json
import sys

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


def node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def root_of(header: dict, lines: list[bytes]) -> bytes:
    """RFC 6962, section 2.1: perfect subtrees are joined as soon as two of one size stand side by side."""
    parts = [(part["level"], bytes.fromhex(part["root"])) for part in header["before"]]
    parts += [(0, hashlib.sha256(b"\x00" + line).digest()) for line in lines]
    parts += [(part["level"], bytes.fromhex(part["root"])) for part in header["behind"]]
    stack: list[tuple[int, bytes]] = []
    for level, found in parts:
        while stack and stack[-1][0] == level:
            found, level = node(stack.pop()[1], found), level + 1
        stack.append((level, found))
    root = stack.pop()[1]
    while stack:
        root = node(stack.pop()[1], root)
    return root


def check_checkpoint(note: str, public_key: bytes) -> tuple[str, int, bytes]:
    """C2SP's signed note: origin, size, root; then signature lines, each with four bytes that name the key, and the
    signature. One is the owner's; others, of witnesses, say nothing here."""
    text, _, signatures = note.partition("\n\n")
    origin, size, root = text.split("\n")
    lines = [line.removeprefix("— ").rsplit(" ", 1) for line in signatures.splitlines()]
    key_name = hashlib.sha256(origin.encode() + b"\n\x01" + public_key).digest()[:4]
    own = [base64.b64decode(encoded) for name, encoded in lines if name == origin]
    own = [blob[4:] for blob in own if blob[:4] == key_name]
    assert own, "the checkpoint has no signature of its owner with this key"
    for signature in own:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, f"{text}\n".encode())
    return origin, int(size), base64.b64decode(root)


def open_envelope(envelope: dict, public_key: bytes) -> dict:
    """DSSE: the signature is over the payload and its type, each with its length before it."""
    kind, payload = envelope["payloadType"].encode(), base64.b64decode(envelope["payload"])
    signed = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
    (signature,) = (s for s in envelope["signatures"] if s["keyid"] == hashlib.sha256(public_key).hexdigest())
    Ed25519PublicKey.from_public_bytes(public_key).verify(base64.b64decode(signature["sig"]), signed)
    found: dict = json.loads(payload)
    return found


def receipts(records: list[dict]) -> tuple[int, int]:
    """(messages sent, messages of them that the other side has put its signature to)."""
    keys: dict[str, bytes] = {}
    sent: dict[tuple[str, str], list[bytes]] = {}
    acknowledged: dict[tuple[str, str], int] = {}
    for record in records:
        if record["kind"] == "peer-key":
            keys[record["peer"]] = bytes.fromhex(record["public_key"])
        if record["kind"] != "message":
            continue
        peer = record["peer"]
        if record["direction"] == "sent":
            sent.setdefault((peer, record["call_id"]), []).append(bytes.fromhex(record["sha256"]))
        elif "attestation" in record:
            for item in open_envelope(record["attestation"], keys[peer])["exchanges"]:
                call = (peer, item["call_id"])
                if item["direction"] == "received" and call in sent:
                    digests = b"".join(sent[call][: item["messages"]])
                    assert hashlib.sha256(digests).hexdigest() == item["sha256"], f"another receipt for call {call[1]}"
                    acknowledged[call] = max(acknowledged.get(call, 0), item["messages"])
    return sum(map(len, sent.values())), sum(acknowledged.values())


def subtrees(view: dict, size: int) -> dict[tuple[int, int], bytes]:
    """RFC 6962, section 2.1.2: the hashes over records start to end from which a proof makes up the root over all."""
    found: dict[tuple[int, int], bytes] = {}
    proof = [bytes.fromhex(digest) for digest in view["proof"]]

    def walk(count: int, start: int, end: int, whole: bool) -> bytes:
        """Returns the hash over the first ``count`` of these records."""
        if count == end - start:
            found[start, end] = bytes.fromhex(view["root"]) if whole else proof.pop(0)
            return found[start, end]
        middle = start + (1 << (end - start - 1).bit_length() - 1)
        if start + count <= middle:
            first = walk(count, start, middle, whole)
            left, right = found[start, middle], proof.pop(0)
            found[middle, end] = right
        else:
            last = walk(start + count - middle, middle, end, False)
            left, right = proof.pop(0), found[middle, end]
            found[start, middle] = left
            first = node(left, last)
        found[start, end] = node(left, right)
        return first

    if 0 < view["size"] < size:
        found[0, view["size"]] = walk(view["size"], 0, size, True)
    assert not proof, "a proof has more hashes than it needs"
    return found


def check_proof(proof: dict, known_key: str | None) -> None:
    """Two signed checkpoints of one journal that cannot both be of one history."""
    party, keys = proof["party"], [proof["public_key"]]
    for change in proof["rotations"]:
        # Signed with the key before; towards each of two hospitals that may have been changed otherwise.
        document = json.loads(base64.b64decode(change["payload"]))
        known = document.get("old_key", keys[-1])
        assert known in keys, "a change of keys is from a key that is not the party's"
        document = open_envelope(change, bytes.fromhex(known))
        assert document["party"] == party
        open_envelope(change, bytes.fromhex(document["new_key"]))
        keys.append(document["new_key"])
    assert known_key is None or known_key in keys, "it is signed with another key than the one you know"
    seen = []
    for view in proof["views"]:
        text, _, signatures = view["checkpoint"].partition("\n\n")
        names = {key: hashlib.sha256(f"{text.split(chr(10))[0]}\n\1".encode() + bytes.fromhex(key)) for key in keys}
        blobs = [base64.b64decode(line.rsplit(" ", 1)[1])[:4] for line in signatures.splitlines()]
        (key,) = [key for key in keys if names[key].digest()[:4] in blobs]
        origin, size, root = check_checkpoint(view["checkpoint"], bytes.fromhex(key))
        assert f"spiffe://{origin.removeprefix('medsilo/')}" == party
        found = subtrees(view, size)
        assert found.setdefault((0, size), root) == root, "a proof does not hold for the root that was signed"
        seen.append(found)
    different = [span for span in seen[0] if seen[1].get(span, seen[0][span]) != seen[0][span]]
    assert different, "the two checkpoints can be of one history"
    start, end = min(different, key=lambda span: (span[1] - span[0], span))
    shown = " and to ".join(view["shown_to"] for view in proof["views"])
    print(f"{party} has signed two histories of its journal, shown to {shown}.")
    print(f"They differ in records {start} to {end - 1}: {seen[0][start, end].hex()}, {seen[1][start, end].hex()}")
    print(f"Key: {keys[-1]}\nits fingerprint: {hashlib.sha256(bytes.fromhex(keys[-1])).hexdigest()}")


def main(path: str, known_key: str | None) -> None:
    with open(path, "rb") as file:
        content = file.read()
    bundle = json.loads(content)
    if bundle.get("form") == "medsilo-two-histories":
        check_proof(bundle, known_key)
        return
    header, records = bundle["header"], bundle["records"]
    lines = [line.removesuffix(b",") for line in content.split(b"\n")[3:-2]]
    assert [json.loads(line) for line in lines] == records
    assert [record["index"] for record in records] == list(range(header["first"], header["first"] + header["count"]))

    # A new key signs from the second checkpoint after its record on.
    keys = [
        r["public_key"]
        for r in records
        if r["kind"] == "key" or (r["kind"] == "key-rotation" and r["index"] + 2 <= header["size"])
    ]
    public_key = bytes.fromhex(header["public_key"] or keys[-1])
    assert known_key in (None, public_key.hex()), "it is signed with another key than the one you know"
    origin, size, root = check_checkpoint(header["checkpoint"], public_key)
    assert (origin, size) == (header["origin"], header["size"])
    assert root_of(header, lines) == root, "the records are not those that were signed"
    print(f"{len(records)} of {size} records of {header['party']} give the root that was signed: {root.hex()}")
    print(f"Key: {public_key.hex()}\nits fingerprint: {hashlib.sha256(public_key).hexdigest()}")

    for record in records:
        if record["kind"] == "message":
            assert sum(record["fields"].values()) == record["length"] == sum(record["classes"].values())
    print("Every byte of every message has its field and its exposure class.")
    if header["count"] == header["size"]:
        messages, acknowledged = receipts(records)
        print(f"{acknowledged} of {messages} messages sent have the other side's signed receipt.")


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2].lower() if len(sys.argv) > 2 else None)
    except InvalidSignature:
        sys.exit("NOT SOUND: a signature does not hold")
    except (AssertionError, IndexError, KeyError, ValueError) as error:
        sys.exit(f"NOT SOUND: {error or type(error).__name__}")
