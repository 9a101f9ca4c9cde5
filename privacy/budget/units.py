"""Whose the charges of a privacy ledger are: keyed hashes of images and patients, kept beside the accounts.

A data set's fingerprint changes with every corrected label, added image, other order or other split; what has been
learnt about an image does not. So each version of a data set has, for each split, a file of hashes in the ledger's
folder: one for each image's pixels (no label, no place, no name) and, where the shard says whose the images are, one
for each patient's name. Versions that hold the same image or the same patient are found by them, whatever else changed.

The hashes are keyed BLAKE2b under a random key that never leaves the folder (``units.key``, 0600): who gets hold of the
hashes alone cannot try out an image or a name. They cannot be made again without that key, so a lost one is an error
with a way out, never a fresh budget.

Images of another shape cannot be compared by their pixels: a version with such images counts as holding everyone. What
cannot be seen is an image that was changed in its old shape: it is another one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from medsilo.privacy.budget.ledger import Subject
from medsilo.privacy.errors import BudgetError
from medsilo.privacy.files.canonical import write_canonical
from medsilo.privacy.files.durable import on_disk, write_atomically

KEY = "units.key"
SUFFIX = ".units"
_HASH = 16
"""Bytes: two of 10⁹ images have the same with a probability below 10⁻²⁰, and would then count for each other."""
_KEY_BYTES = 32
_MOST_GROUPS = 12
"""Of more groups of units than this the whole is reckoned as one unit that is in every account: more, never less."""
_HEX = re.compile(r"[0-9a-f]{16}")
_HASHED = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, eq=False)
class Content:
    """What one split of a version holds.

    Attributes:
        images: ``uint8 [n, …]``.
        patients: whose each is, ``str [n]``; None where the shard does not say.
    """

    images: npt.NDArray[np.uint8]
    patients: npt.NDArray[np.str_] | None


@dataclass(frozen=True, eq=False)
class Members:
    """The hashes of one split.

    Attributes:
        shape: of each image.
        images: one hash for each, ``S16 [n]``.
        patients: one for each image's patient, ``S16 [n]``, or None where that is unknown.
        key: the name of the key under which they were made; those of two keys cannot be compared.
        blank: those of images of one colour throughout, which are nobody's, as far as it was written down.
    """

    shape: tuple[int, ...]
    images: npt.NDArray[np.bytes_]
    patients: npt.NDArray[np.bytes_] | None
    key: str
    blank: npt.NDArray[np.bytes_]

    @functools.cached_property
    def has_groups(self) -> bool:
        """Whether a patient has several images, as far as is known."""
        return self.patients is None or len(np.unique(self.patients)) < len(self.images)


@dataclass(frozen=True)
class Share:
    """How a unit is in an account.

    ``units``: so many of the account's units are, at most, one of ours; None where that is not known. ``in_groups``:
    ours is an image, and the account's unit a patient with other images too.
    """

    units: int | None = 1
    in_groups: bool = False


Group = Mapping[Subject, Share]
"""The accounts in which some units are, all of them in the same ones."""


class Units:
    """The files of hashes in a ledger's folder. Whoever writes holds the folder's lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[tuple[str, str], Members] = {}
        self._passing = secrets.token_bytes(_KEY_BYTES)
        self._hashed: dict[tuple[str, str], tuple[bytes, Members]] = {}
        """What was hashed here, and under which key."""
        self._kept: set[str] = set()

    def find(self, data_sha256: str, split: str, content: Content | None) -> Members | None:
        """The members of a version's split: from its file or, where there is none yet, from its content; None without
        either. Raises ``BudgetError`` for a file that cannot be relied on."""
        if (data_sha256, split) not in self._read:
            path = self._path(data_sha256, split)
            if not path.exists():
                # Nothing is written by who only looks: without a key there is no other file to be compared with. It is
                # not kept either, for another process may make the key.
                if content is None:
                    return None
                return self._hash(data_sha256, split, content, self._key() or self._passing)
            self._read[data_sha256, split] = self._open(path, data_sha256, split)
        return self._read[data_sha256, split]

    def hash_of(self, patient: str) -> bytes:
        """The hash of a patient's name under the folder's key."""
        return _digest(patient.encode(errors="surrogatepass"), self._key() or self._passing, b"patient")

    def keep(self, data_sha256: str, contents: Mapping[str, Content]) -> None:
        """Makes a version's hashes durable, split by split, and before that the key. Raises ``BudgetError`` if the key
        is lost, ``DiskError`` if they cannot be kept."""
        if data_sha256 in self._kept:
            return
        with on_disk(self._folder):
            key = self._key()
            for split, content in contents.items():
                path = self._path(data_sha256, split)
                if path.exists():
                    self._read[data_sha256, split] = self._open(path, data_sha256, split)
                    continue
                if key is None:
                    key = secrets.token_bytes(_KEY_BYTES)
                    write_atomically(self._folder / KEY, key, mode=0o600)
                members = self._hash(data_sha256, split, content, key)
                body = members.images.tobytes() + (b"" if members.patients is None else members.patients.tobytes())
                header = {
                    "v": 1,
                    "kind": "units",
                    "data_sha256": data_sha256,
                    "split": split,
                    "key": _name_of(key),
                    "images": len(members.images),
                    "shape": list(members.shape),
                    "patients": members.patients is not None,
                    "blank": [one.hex() for one in _bytes(members.blank)],
                    "sha256": hashlib.sha256(body).hexdigest(),
                }
                write_atomically(path, write_canonical(header) + b"\n" + body, mode=0o600)
                self._read[data_sha256, split] = members
        self._kept.add(data_sha256)

    def _hash(self, data_sha256: str, split: str, content: Content, key: bytes) -> Members:
        made = self._hashed.get((data_sha256, split))
        if made is None or made[0] != key:
            made = self._hashed[data_sha256, split] = key, _hashed(content, key)
        return made[1]

    def _key(self) -> bytes | None:
        """The folder's key; None where there is none, and nothing was made with one."""
        path = self._folder / KEY
        made_with = set(self._names())
        way_out = (
            f"Look whether {KEY} was only moved, and put that one there. If it is lost, delete the files *{SUFFIX} "
            "there, and show each version's shard again (`silo budget --shard FILE`): until then its account counts "
            "for all images. For a version whose shard is lost as well, only a backup of the key helps"
        )
        try:
            key = path.read_bytes()
        except FileNotFoundError:
            if made_with:
                raise BudgetError(
                    f"{path}: it is gone, and without it nobody can tell which images and patients have been paid for "
                    f"in other versions of the data set. {way_out}"
                ) from None
            return None
        if len(key) != _KEY_BYTES or made_with - {_name_of(key)}:
            raise BudgetError(f"{path}: it is not the key with which the hashes beside it were made. {way_out}")
        return key

    def _names(self) -> Iterator[str]:
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            with path.open("rb") as file:
                yield str(_header(path, file.readline()).get("key"))

    def _path(self, data_sha256: str, split: str) -> Path:
        return self._folder / f"{data_sha256}-{split}{SUFFIX}"

    def _open(self, path: Path, data_sha256: str, split: str) -> Members:
        line, _, body = path.read_bytes().partition(b"\n")
        header = _header(path, line)
        count, named, shape = header.get("images"), header.get("patients"), header.get("shape")
        blank = header.get("blank", [])  # not in the first files
        if (
            (header.get("v"), header.get("kind")) != (1, "units")
            or (header.get("data_sha256"), header.get("split")) != (data_sha256, split)
            or type(count) is not int
            or type(named) is not bool
            or not (isinstance(shape, list) and all(type(length) is int for length in shape))
            or not _HEX.fullmatch(str(header.get("key")))
            or not (isinstance(blank, list) and all(_HASHED.fullmatch(str(one)) for one in blank))
            or len(body) != count * _HASH * (1 + named)
            or hashlib.sha256(body).hexdigest() != header.get("sha256")
        ):
            raise _damaged(path)
        rows = np.frombuffer(body, dtype=f"S{_HASH}")
        patients = rows[count:] if named else None
        return Members(tuple(shape), rows[:count], patients, header["key"], _rows(map(bytes.fromhex, blank)))


def groups(subject: Subject, accounts: Mapping[Subject, Members | None]) -> list[Group]:
    """The units of a subject, by the accounts in which they are: the groups to which no other adds an account.

    ``accounts`` are all of the folder, the subject's own among them. One whose members are not known, were hashed under
    another key, or are images of another shape, counts as holding every unit, apart from the other split of the same
    version: no accuracy of a private run leaves where a unit is in both. Each group's shares are the largest of any
    unit's in the account.
    """
    always, known = _told_apart(subject, accounts)
    own = accounts[subject]
    if own is None or not known:
        return [always]
    names = list(known)
    if subject.unit == "image":
        shares, held = _by_image(own, known)
    else:
        units, _ = _by_patient(own, known)
        shares, held = dict(zip(names, map(Share, units.max(axis=0).tolist()), strict=True)), units > 0
    found = {
        frozenset(other for other, here in zip(names, pattern, strict=True) if here)
        for pattern in np.unique(held, axis=0)
    }
    largest = [one for one in found if not any(one < other for other in found)]
    if len(largest) > _MOST_GROUPS:
        largest = [frozenset(other for one in largest for other in one)]
    return [{**always, **{other: shares[other] for other in names if other in one}} for one in largest]


def groups_of_patients(subject: Subject, accounts: Mapping[Subject, Members | None]) -> dict[bytes, Group]:
    """For each patient of a subject whose unit is the patient, by its hash, the accounts in which it is, each with that
    patient's own share. Empty where it is not known whose the images are."""
    always, known = _told_apart(subject, accounts)
    own = accounts[subject]
    if own is None or own.patients is None:
        return {}
    patients, first = np.unique(own.patients, return_index=True)
    if not known:
        return dict.fromkeys(_bytes(patients), always)
    units, row = _by_patient(own, known)
    return {
        patient: {
            **always,
            **{other: Share(count) for other, count in zip(known, units[row[at]].tolist(), strict=True) if count},
        }
        for patient, at in zip(_bytes(patients), first.tolist(), strict=True)
    }


def _told_apart(
    subject: Subject, accounts: Mapping[Subject, Members | None]
) -> tuple[dict[Subject, Share], dict[Subject, Members]]:
    """The accounts that count as holding every unit, and those of which it is known whom they hold."""
    own = accounts[subject]
    others = {other: members for other, members in accounts.items() if other != subject}
    always: dict[Subject, Share] = {subject: Share()}
    known: dict[Subject, Members] = {}
    for other, members in others.items():
        if own is not None and members is not None and (own.shape, own.key) == (members.shape, members.key):
            known[other] = members
        elif other.data_sha256 != subject.data_sha256 or other.split == subject.split:
            always[other] = _unknown(subject, other)
    return always, known


def _by_image(own: Members, known: Mapping[Subject, Members]) -> tuple[dict[Subject, Share], npt.NDArray[np.bool_]]:
    """How each known account's units are shared, and which of our images are in each (a row of ours, a column of
    theirs).

    An image that stands twice in our version counts as two there; one that stands more often in another bears more
    there.
    """
    images, copies = np.unique(own.images, return_counts=True)
    shares, held = {}, []
    for other, members in known.items():
        theirs, found = np.unique(members.images, return_inverse=True)
        if other.unit == "patient" and members.patients is not None:
            names, patient = np.unique(members.patients, return_inverse=True)
            found = np.unique(found * len(names) + patient) // len(names)
        units = np.bincount(found, minlength=len(theirs))
        units[np.isin(theirs, np.concatenate([own.blank, members.blank]))] = 1
        _, ours, there = np.intersect1d(images, theirs, assume_unique=True, return_indices=True)
        most = int(np.max(-(-units[there] // copies[ours]), initial=1))
        held.append(np.isin(images, theirs))
        shares[other] = Share(units=most, in_groups=other.unit == "patient" and members.has_groups)
    return shares, np.stack(held, axis=1)


def _by_patient(own: Members, known: Mapping[Subject, Members]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """As how many units each of our patients stands in each known account, at most (a row of ours, a column of theirs),
    and the row of each of our images.

    A patient is a name and its images together: whoever shares one of them, under whatever name, is the same.

    Images of which no version says whose they are may be anybody's, all of them one patient's.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    everyone = [own, *known.values()]
    images, place = np.unique(np.concatenate([one.images for one in everyone]), return_inverse=True)
    where = np.split(place, np.cumsum([len(one.images) for one in everyone])[:-1])
    named = [(rows, one.patients) for rows, one in zip(where, everyone, strict=True) if one.patients is not None]
    count = total = len(images)
    ends: tuple[Any, Any] = (np.empty(0, np.int64), np.empty(0, np.int64))
    if named:
        names, patient = np.unique(np.concatenate([patients for _, patients in named]), return_inverse=True)
        ends, total = (np.concatenate([rows for rows, _ in named]), count + patient), count + len(names)
    graph = coo_array((np.ones(len(ends[0]), bool), ends), shape=(total, total))
    person = connected_components(graph, directed=False)[1]
    blank = np.isin(images, np.concatenate([one.blank for one in everyone]))
    nobodys = ~np.isin(person[:count], person[count:]) & ~blank
    ours, row = np.unique(person[where[0]], return_inverse=True)
    units = []
    for (other, members), rows in zip(known.items(), where[1:], strict=True):
        theirs = np.bincount(person[rows], minlength=person.max() + 1)[ours] + int(nobodys[rows].sum())
        if other.unit == "patient" and own.patients is not None and members.patients is not None:
            most = _most_names((own.patients, where[0]), (members.patients, rows), person, blank)
            theirs = np.where(theirs > 0, max(most, 1), 0)
        units.append(theirs)
    return np.stack(units, axis=1), row


def _most_names(
    own: tuple[npt.NDArray[np.bytes_], npt.NDArray[np.int64]],
    other: tuple[npt.NDArray[np.bytes_], npt.NDArray[np.int64]],
    person: npt.NDArray[np.int32],
    blank: npt.NDArray[np.bool_],
) -> int:
    """As how many patients one of ours stands in another version: as all of whom our version knows one alone. Of those
    whom it tells apart, though names and images join them, as all who share an image with that one.

    Each version is given by its rows' patients and images; ``person`` and ``blank`` are those of every image.
    """
    from scipy.sparse import coo_array

    here, there = (np.unique(patients, return_inverse=True)[1] for patients, _ in (own, other))
    named_here, named_there = (
        np.bincount(np.unique(np.stack([person[rows], patient]), axis=1)[0], minlength=person.max() + 1)
        for (_, rows), patient in ((own, here), (other, there))
    )
    alone = int(np.max(named_there[named_here == 1], initial=0))
    shape = len(blank)
    of_ours = coo_array((np.ones(len(here), np.int64), (here, own[1])), shape=(here.max() + 1, shape)).tocsc()
    of_theirs = coo_array((np.ones(len(there), np.int64), (other[1], there)), shape=(shape, there.max() + 1)).tocsr()
    shared = of_ours[:, ~blank] @ of_theirs[~blank]
    return max(alone, int(np.max((shared > 0).sum(axis=1), initial=0)))


def _unknown(subject: Subject, other: Subject) -> Share:
    if subject.unit == other.unit:
        return Share()
    return Share(units=None) if subject.unit == "patient" else Share(in_groups=True)


def _hashed(content: Content, key: bytes) -> Members:
    images = _rows(_digest(np.ascontiguousarray(one).data, key, b"image") for one in content.images)
    order = np.argsort(images, kind="stable")  # so that the file does not keep the order
    shape = content.images.shape[1:]
    blank = np.unique(images[[bool((one == one.reshape(-1, one.shape[-1])[0]).all()) for one in content.images]])
    patients = None
    if content.patients is not None:
        names = {
            name: _digest(name.encode(errors="surrogatepass"), key, b"patient")
            for name in set(content.patients.tolist())
        }
        patients = _rows(names[name] for name in content.patients.tolist())[order]
    return Members(shape, images[order], patients, _name_of(key), blank)


def _digest(data: bytes | memoryview, key: bytes, person: bytes) -> bytes:
    return hashlib.blake2b(data, key=key, person=person, digest_size=_HASH).digest()


def _bytes(rows: npt.NDArray[np.bytes_]) -> list[bytes]:
    """Whole ones: NumPy's own way leaves out zeros at the end."""
    whole = rows.tobytes()
    return [whole[at : at + _HASH] for at in range(0, len(whole), _HASH)]


def _rows(digests: Iterator[bytes]) -> npt.NDArray[np.bytes_]:
    return np.frombuffer(b"".join(digests), dtype=f"S{_HASH}")


def _name_of(key: bytes) -> str:
    return hashlib.sha256(b"medsilo units key" + key).hexdigest()[:16]


def _header(path: Path, line: bytes) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise _damaged(path)
    return header


def _damaged(path: Path) -> BudgetError:
    return BudgetError(
        f"{path}: it is damaged, so which images and patients its version of the data set has is not known. Delete it, "
        "and show that version's shard again (`silo budget --shard FILE`): until then its charges count for all "
        "images. If the shard is lost as well, a backup of the file, with the key beside it, helps"
    )
