"""The Merkle tree hash of RFC 6962 (section 2.1), kept up to date as leaves are appended.

>>> tree = MerkleTree()
>>> tree.root().hex()[:16]
'e3b0c44298fc1c14'
"""

from __future__ import annotations

import hashlib


def leaf_hash(leaf: bytes) -> bytes:
    """SHA-256(0x00 ‖ leaf)."""
    return hashlib.sha256(b"\x00" + leaf).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """SHA-256(0x01 ‖ left ‖ right)."""
    return hashlib.sha256(b"\x01" + left + right).digest()


class MerkleTree:
    """The roots of the perfect subtrees that make up a tree of ``size`` leaves: at most log2(size) hashes."""

    def __init__(self) -> None:
        self.size = 0
        self._peaks: list[bytes] = []

    def append(self, leaf: bytes) -> None:
        """Adds a leaf at the right end."""
        carry = leaf_hash(leaf)
        size = self.size
        while size & 1:
            carry = node_hash(self._peaks.pop(), carry)
            size >>= 1
        self._peaks.append(carry)
        self.size += 1

    def root(self) -> bytes:
        """The tree's root hash, 32 bytes; of the empty tree, SHA-256 of nothing."""
        if not self._peaks:
            return hashlib.sha256(b"").digest()
        root = self._peaks[-1]
        for peak in reversed(self._peaks[:-1]):
            root = node_hash(peak, root)
        return root
