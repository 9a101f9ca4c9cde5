"""The Merkle tree of RFC 6962 (section 2.1): roots as leaves are appended, and checks of the proofs between roots.

>>> tree = MerkleTree()
>>> tree.root().hex()[:16]
'e3b0c44298fc1c14'
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

EMPTY_ROOT = hashlib.sha256(b"").digest()


def leaf_hash(leaf: bytes) -> bytes:
    """SHA-256(0x00 ‖ leaf)."""
    return hashlib.sha256(b"\x00" + leaf).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """SHA-256(0x01 ‖ left ‖ right)."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def root_of(peaks: Sequence[bytes]) -> bytes:
    """The root hash of a tree by the roots of the perfect subtrees that it consists of, largest first."""
    if not peaks:
        return EMPTY_ROOT
    root = peaks[-1]
    for peak in reversed(peaks[:-1]):
        root = node_hash(peak, root)
    return root


class MerkleTree:
    """The roots of the perfect subtrees that make up a tree of ``size`` leaves: at most log2(size) hashes.

    ``peaks``: those of a tree of ``size`` leaves to go on from, largest subtree first; ``ValueError`` if they are
    not as many as such a tree has.
    """

    def __init__(self, size: int = 0, peaks: Sequence[bytes] = ()) -> None:
        if len(peaks) != size.bit_count() or any(len(peak) != 32 for peak in peaks):
            raise ValueError(f"{size} leaves consist of {size.bit_count()} perfect subtrees of 32 bytes each")
        self.size = size
        self._peaks = list(peaks)

    @property
    def peaks(self) -> tuple[bytes, ...]:
        """The roots of the perfect subtrees, largest first."""
        return tuple(self._peaks)

    def append(self, leaf: bytes) -> None:
        """Adds a leaf at the right end."""
        self.append_subtree(0, leaf_hash(leaf))

    def append_subtree(self, level: int, root: bytes) -> None:
        """Adds 2^level leaves at the right end, of which only their root is known.

        Raises ``ValueError`` if the tree's size is not a multiple of 2^level.
        """
        if self.size & ((1 << level) - 1):
            raise ValueError(f"a perfect subtree of {1 << level} leaves cannot begin at leaf {self.size}")
        size = self.size + (1 << level)
        above = self.size >> level
        self._complete(level, above, root)
        while above & 1:
            root = node_hash(self._peaks.pop(), root)
            above >>= 1
            level += 1
            self._complete(level, above, root)
        self._peaks.append(root)
        self.size = size

    def root(self) -> bytes:
        """The tree's root hash, 32 bytes; of the empty tree, SHA-256 of nothing."""
        return root_of(self._peaks)

    def _complete(self, level: int, number: int, root: bytes) -> None:
        """Called for every perfect subtree as it becomes complete: the ``number``-th of 2^level leaves, from 0."""


def check_consistency(first: int, first_root: bytes, second: int, second_root: bytes, proof: Sequence[bytes]) -> bool:
    """Whether the proof shows that the tree with the second root begins with the one with the first (RFC 9162,
    section 2.1.4.2)."""
    if first > second:
        return False
    if first == 0:
        return not proof and first_root == EMPTY_ROOT
    if first == second:
        return not proof and first_root == second_root
    path = list(proof) if first & (first - 1) else [first_root, *proof]
    if not path:
        return False
    node, last = first - 1, second - 1
    while node & 1:
        node >>= 1
        last >>= 1
    old = new = path[0]
    for sibling in path[1:]:
        if last == 0:
            return False
        if node & 1 or node == last:
            old, new = node_hash(sibling, old), node_hash(sibling, new)
            while node and not node & 1:
                node >>= 1
                last >>= 1
        else:
            new = node_hash(new, sibling)
        node >>= 1
        last >>= 1
    return last == 0 and old == first_root and new == second_root


def perfect_subtrees(start: int, end: int) -> Iterator[tuple[int, int]]:
    """(first leaf, level) of the perfect subtrees that leaves ``start`` to ``end`` consist of, from left to right."""
    while start < end:
        level = (end - start).bit_length() - 1
        if start:
            level = min(level, (start & -start).bit_length() - 1)
        yield start, level
        start += 1 << level
