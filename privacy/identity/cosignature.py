"""What witnesses put under checkpoints: keys, cosignature lines and policies.

Bytes in, findings out: it needs nothing of this project, and of others the package ``cryptography`` alone, so that a
verifier that shall be read in an afternoon can take it as it is. Sources: C2SP's signed-note, tlog-checkpoint and
tlog-cosignature (cosignature/v1, Ed25519, signature type 0x04).

>>> key = Ed25519PrivateKey.from_private_bytes(bytes(32))
>>> witness = read_key(key_text("ethics.example.org/w1", key.public_key().public_bytes_raw(), COSIGNATURE))
>>> note = "example.org/log\\n0\\n47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=\\n\\n"
>>> cosigned_at(note + cosign(note, witness.name, key, 1_700_000_000) + "\\n", witness)
1700000000
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

ED25519, COSIGNATURE = 0x01, 0x04
"""Signature types of notes: a log's own signature; a witness's, which names a time."""
_KEY_BYTES = 32
_BLOB_BYTES = 4 + 8 + 64
_MOST_SIGNATURES = 64
_LATEST = 1 << 40


class CosignatureError(ValueError):
    """A key that cannot be read, or a signature by a known key that does not hold."""


@dataclass(frozen=True)
class NoteKey:
    """A key that signs notes, as its text names it: ``name+hash+key``. ``kind``: the signature type."""

    name: str
    kind: int
    public_key: bytes

    @property
    def hash(self) -> bytes:
        """The four bytes by which a signature line names the key."""
        return key_hash(self.name, self.public_key, self.kind)

    @property
    def text(self) -> str:
        """It as others are given it."""
        return key_text(self.name, self.public_key, self.kind)


@dataclass(frozen=True)
class Policy:
    """Whose word is asked for: ``needed`` of ``keys`` (of different names). ``fresh_seconds``: within how long after it
    says that it was written each record is to have been seen by so many; None for ever."""

    keys: tuple[NoteKey, ...]
    needed: int
    fresh_seconds: int | None = None

    def __post_init__(self) -> None:
        names = {key.name for key in self.keys}
        if not 1 <= self.needed <= len(names):
            raise CosignatureError(f"{self.needed} of {len(names)} witnesses cannot be asked for")


@dataclass(frozen=True)
class Cosigned:
    """A witness's word: by ``time`` (seconds since 1970) it had seen the log's first ``size`` records, with that root,
    and that they continue all that it had seen before."""

    witness: str
    origin: str
    size: int
    root: bytes
    time: int


def key_hash(name: str, public_key: bytes, kind: int) -> bytes:
    """The four bytes by which signature lines name a key."""
    return hashlib.sha256(name.encode() + b"\n" + bytes([kind]) + public_key).digest()[:4]


def key_text(name: str, public_key: bytes, kind: int) -> str:
    """A public key (Ed25519, 32 bytes) as signed-note writes it: ``name+hash+key``; raises ``CosignatureError`` for a
    name that such a text cannot hold."""
    if not name or "+" in name or any(sign.isspace() or not sign.isprintable() for sign in name):
        raise CosignatureError(f"{name!r:.100} cannot name a key: no spaces, no plus sign")
    encoded = base64.b64encode(bytes([kind]) + public_key).decode()
    return f"{name}+{key_hash(name, public_key, kind).hex()}+{encoded}"


def read_key(text: str) -> NoteKey:
    """The key of ``name+hash+key``; raises ``CosignatureError`` for anything else."""
    name, _, rest = text.strip().partition("+")
    _, _, encoded = rest.partition("+")
    try:
        content = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        content = b""
    if len(content) != 1 + _KEY_BYTES or content[0] not in (ED25519, COSIGNATURE):
        raise CosignatureError(f"{text!r:.200} is no key in the form name+hash+key, of Ed25519")
    found = NoteKey(name, content[0], content[1:])
    if found.text != text.strip():
        raise CosignatureError(f"{text!r:.200}: the hash is not the key's, or it is not in canonical form")
    return found


def cosigned_text(note: str, time: int) -> bytes:
    """What a witness signs of a note, at ``time``."""
    body, _, _ = note.partition("\n\n")
    return f"cosignature/v1\ntime {time}\n{body}\n".encode()


def cosign(note: str, name: str, key: Ed25519PrivateKey, time: int) -> str:
    """A witness's signature line, without its line break."""
    public = key.public_key().public_bytes_raw()
    blob = key_hash(name, public, COSIGNATURE) + time.to_bytes(8, "big") + key.sign(cosigned_text(note, time))
    return f"— {name} {base64.b64encode(blob).decode()}"


def cosigned_at(note: str, key: NoteKey) -> int | None:
    """When a witness saw a note, in seconds since 1970; None if the note has no line by that key.

    Raises ``CosignatureError`` if it has one that does not hold. Of several the latest counts.
    """
    times = []
    for name, blob in signature_lines(note):
        if name != key.name or blob[:4] != key.hash:
            continue
        time = int.from_bytes(blob[4:12], "big")
        if key.kind != COSIGNATURE or len(blob) != _BLOB_BYTES or not 0 < time < _LATEST:
            raise CosignatureError(f"the cosignature of {key.name} is not in form")
        try:
            Ed25519PublicKey.from_public_bytes(key.public_key).verify(blob[12:], cosigned_text(note, time))
        except InvalidSignature:
            raise CosignatureError(f"the cosignature of {key.name} does not hold for this checkpoint") from None
        times.append(time)
    return max(times, default=None)


def signed_by(note: str, key: NoteKey) -> bool:
    """Whether a note has the log's own signature (type 0x01) with that key; raises ``CosignatureError`` if it has one
    that does not hold."""
    found = False
    for name, blob in signature_lines(note):
        if name != key.name or blob[:4] != key.hash or key.kind != ED25519:
            continue
        try:
            Ed25519PublicKey.from_public_bytes(key.public_key).verify(blob[4:], f"{note.partition(_GAP)[0]}\n".encode())
        except (InvalidSignature, ValueError):
            raise CosignatureError(f"the signature of {key.name} does not hold for this checkpoint") from None
        found = True
    return found


_GAP = "\n\n"


def signature_lines(note: str) -> list[tuple[str, bytes]]:
    """(name, key hash and signature) of each signature line of a note; raises ``CosignatureError`` for what is none."""
    _, gap, rest = note.partition(_GAP)
    if not gap or (rest and not rest.endswith("\n")):
        raise CosignatureError("the note does not end with signature lines")
    lines = rest[:-1].split("\n") if rest else []
    if len(lines) > _MOST_SIGNATURES:
        raise CosignatureError(f"the note has {len(lines)} signatures; {_MOST_SIGNATURES} are the most")
    found = []
    for line in lines:
        name, _, encoded = line.removeprefix("— ").rpartition(" ")
        try:
            blob = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            blob = b""
        if not line.startswith("— ") or not name or len(blob) < 5 or base64.b64encode(blob).decode() != encoded:
            raise CosignatureError("the note has a line that is no signature")
        found.append((name, blob))
    return found


def words_of(note: str, keys: Iterable[NoteKey]) -> list[Cosigned]:
    """What the witnesses of these keys have put under a note.

    Raises ``CosignatureError`` for a line by one of them that does not hold, or a note that is no checkpoint.
    """
    lines = note.split("\n", 3)
    try:
        origin, size, root = lines[0], int(lines[1]), base64.b64decode(lines[2], validate=True)
        good = len(lines) == 4 and len(root) == 32 and str(size) == lines[1] and size >= 0 and bool(origin)
    except (IndexError, ValueError):
        good = False
    if not good:
        raise CosignatureError("the note is no checkpoint")
    times = {key: cosigned_at(note, key) for key in keys}
    return [Cosigned(key.name, origin, size, root, time) for key, time in times.items() if time is not None]


@dataclass(frozen=True)
class Standing:
    """How a log stands with a policy's witnesses. ``covered``: how many records as many of them have seen as are asked
    for, and ``time``: by when they all had; ``last``: each witness's latest size and time, by name."""

    covered: int
    time: int
    last: Mapping[str, tuple[int, int]]


def standing(policy: Policy, words: Iterable[Cosigned]) -> Standing:
    """What the words of a policy's witnesses come to; of other witnesses they count for nothing."""
    names = {key.name for key in policy.keys}
    last: dict[str, tuple[int, int]] = {}
    for word in words:
        if word.witness in names:
            last[word.witness] = max(last.get(word.witness, (0, 0)), (word.size, word.time))
    if len(last) < policy.needed:
        return Standing(0, 0, last)
    best = sorted(last.values(), reverse=True)[: policy.needed]
    return Standing(min(size for size, _ in best), max(time for _, time in best), last)


def stretches(policy: Policy, words: Sequence[Cosigned]) -> list[tuple[int, int, int]]:
    """Records by when as many witnesses as a policy asks for had seen them: (first, end, time in seconds since 1970),
    from the first record on, as far as so many have."""
    earliest: dict[str, list[tuple[int, int]]] = {key.name: [] for key in policy.keys}
    for word in sorted(words, key=lambda word: (-word.size, word.time)):
        if (known := earliest.get(word.witness)) is not None and (not known or word.time < known[-1][1]):
            known.append((word.size, word.time))  # by falling size, and time
    found, first = [], 0
    for end in sorted({size for known in earliest.values() for size, _ in known}):
        seen = [[time for size, time in known if size >= end] for known in earliest.values()]
        times = sorted(min(times, default=_LATEST) for times in seen)
        if end > first and times[policy.needed - 1] < _LATEST:
            found.append((first, end, times[policy.needed - 1]))
        first = max(first, end)
    return found


def missing(policy: Policy, found: Standing, *, last_time: float) -> list[str]:
    """What a policy finds wanting, in words; nothing if it is met. ``last_time``: of the last record, in seconds since
    1970."""
    of = f"{policy.needed} of {len({key.name for key in policy.keys})} witnesses"
    if not found.covered:
        seen = listed(sorted(found.last)) or "none of them"
        return [f"{of} are asked for, and its checkpoints were cosigned by {seen}"]
    if policy.fresh_seconds is not None and last_time - found.time > policy.fresh_seconds:
        hours = (last_time - found.time) / 3600
        return [
            f"{of} are to have seen it within {policy.fresh_seconds / 3600:g} hours, and the last record is "
            f"{hours:.1f} hours younger than what so many have seen"
        ]
    return []


def contradicting(words: Sequence[Cosigned], origin: str, roots: Mapping[int, bytes], size: int) -> list[str]:
    """Where witnesses' words contradict a log of ``size`` records with these ``roots`` (by size): in words."""
    found = []
    for word in words:
        if word.origin != origin:
            found.append(f"{word.witness} has cosigned {word.origin}, another log")
        elif word.size > size:
            found.append(
                f"{word.witness} has seen {word.size} records of it, and {size} are here: later records are withheld, "
                "or it was put back to an earlier state"
            )
        elif (root := roots.get(word.size)) is not None and root != word.root:
            found.append(
                f"{word.witness} has seen another history: its first {word.size} records had another root when it "
                "cosigned them"
            )
    return found


def listed(names: Sequence[str]) -> str:
    """Names in a sentence."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
