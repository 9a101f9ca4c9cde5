"""The Merkle tree of RFC 6962 (section 2.1) that makes the proofs between its roots, and what proofs bind a tree to.

What checks them is the verifier's (``medsilo.privacy.verify.merkle``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from medsilo.privacy.verify.merkle import (
    EMPTY_ROOT,
    MerkleTree,
    check_consistency,
    leaf_hash,
    node_hash,
    perfect_subtrees,
    root_of,
)

__all__ = [
    "EMPTY_ROOT",
    "TILE",
    "TILE_LEVEL",
    "MerkleTree",
    "ProvingTree",
    "check_consistency",
    "leaf_hash",
    "node_hash",
    "perfect_subtrees",
    "proven_beginning",
    "proven_subtrees",
    "root_of",
]

TILE_LEVEL = 8
TILE = 1 << TILE_LEVEL
"""How many leaves a ``ProvingTree`` asks for at once."""


class ProvingTree(MerkleTree):
    """A tree that also makes proofs; in memory it keeps about three bytes a leaf: the perfect subtrees from 256 leaves,
    and of the newest leaves (256 to 512), about which most proofs are, all.

    ``leaves(first, count)`` gives at most 256 leaves again, from wherever they lie. A tree that goes on from ``peaks``
    has no proofs that reach into what lies before them.
    """

    def __init__(
        self, leaves: Callable[[int, int], Sequence[bytes]], size: int = 0, peaks: Sequence[bytes] = ()
    ) -> None:
        super().__init__(size, peaks)
        self._leaves = leaves
        levels = [level for level in reversed(range(size.bit_length())) if size >> level & 1]
        self._known = {(level, (size >> level) - 1): peak for level, peak in zip(levels, peaks, strict=True)}
        self._newest = -(-size // TILE) * TILE
        """From this leaf on, every perfect subtree is known."""

    def consistency(self, first: int, second: int) -> list[bytes]:
        """The proof that the tree of ``second`` leaves begins with that of ``first`` (RFC 6962, section 2.1.2).

        Raises ``ValueError`` unless 0 <= first <= second <= size.
        """
        if not 0 <= first <= second <= self.size:
            raise ValueError(f"no proof from {first} to {second} leaves in a tree of {self.size}")
        if first in (0, second):
            return []
        return self._subproof(first, 0, second, whole=True)

    def append_tile(self, root: bytes) -> None:
        """Adds a tile's leaves at the right end, of which only their root is known."""
        self.append_subtree(TILE_LEVEL, root)
        self._newest = self.size

    def tiles(self) -> list[bytes]:
        """The roots of all whole tiles, from the left."""
        return [self._known[TILE_LEVEL, number] for number in range(self.size >> TILE_LEVEL)]

    def subtrees(self, start: int, end: int) -> list[tuple[int, bytes]]:
        """The perfect subtrees that leaves ``start`` to ``end`` consist of, as (level, root), in their order.

        Appended by ``append_subtree`` to a tree of ``start`` leaves they make it one of ``end`` leaves.
        """
        return [(level, self._root(at, at + (1 << level))) for at, level in perfect_subtrees(start, end)]

    def _complete(self, level: int, number: int, root: bytes) -> None:
        self._known[level, number] = root
        if level == TILE_LEVEL:
            self._forget(number - 1)
            self._newest = max(self._newest, number * TILE)

    def _forget(self, tile: int) -> None:
        for level in range(TILE_LEVEL):
            width = 1 << (TILE_LEVEL - level)
            for number in range(tile * width, (tile + 1) * width):
                self._known.pop((level, number), None)

    def _subproof(self, first: int, start: int, end: int, *, whole: bool) -> list[bytes]:
        if first == end - start:
            return [] if whole else [self._root(start, end)]
        middle = start + _split(end - start)
        if start + first <= middle:
            return [*self._subproof(first, start, middle, whole=whole), self._root(middle, end)]
        return [*self._subproof(first - (middle - start), middle, end, whole=False), self._root(start, middle)]

    def _root(self, start: int, end: int) -> bytes:
        size = end - start
        level = size.bit_length() - 1
        if size == 1 << level and (root := self._known.get((level, start >> level))) is not None:
            return root
        if size > TILE or (size > 1 and start >= self._newest):
            middle = start + _split(size)
            return node_hash(self._root(start, middle), self._root(middle, end))
        tree = MerkleTree()
        for leaf in self._leaves(start, size):
            tree.append(leaf)
        return tree.root()


def proven_beginning(first: int, second: int, second_root: bytes, proof: Sequence[bytes]) -> bytes | None:
    """The root over the first leaves to which a consistency proof binds the tree of ``second`` leaves with that root;
    None if it is no proof of that tree's, or ``first`` is a power of two (whose proof does not hold it)."""
    if not 0 < first < second or not first & (first - 1):
        return None
    try:
        found = proven_subtrees(first, b"", second, proof)
    except ValueError:
        return None
    if found[0, second] != second_root:
        return None
    return root_of([found[start, start + (1 << level)] for start, level in perfect_subtrees(0, first)])


def proven_subtrees(first: int, first_root: bytes, second: int, proof: Sequence[bytes]) -> dict[tuple[int, int], bytes]:
    """The hashes over leaves start to end, by (start, end), to which a consistency proof binds the tree of ``second``
    leaves, the tree's own root among them.

    Whoever sees a tree grow from proof to proof comes to know every range of it in perfect subtrees: two who were
    shown trees that differ in one leaf have been given different hashes of one range around it, as soon as both
    have a proof from a size beyond. Raises ``ValueError`` for what is no proof; whether the root is the tree's is to be
    asked of ``check_consistency``.
    """
    if not 0 < first < second:
        raise ValueError(f"there is no proof from {first} to {second} leaves")
    found: dict[tuple[int, int], bytes] = {}
    nodes = iter(proof)

    def walk(count: int, start: int, end: int, *, whole: bool) -> bytes:
        if count == end - start:
            root = first_root if whole else next(nodes, b"")
        else:
            middle = start + _split(end - start)
            if start + count <= middle:
                left = walk(count, start, middle, whole=whole)
                right = found[middle, end] = next(nodes, b"")
            else:
                right = walk(start + count - middle, middle, end, whole=False)
                left = found[start, middle] = next(nodes, b"")
            root = node_hash(left, right)
        found[start, end] = root
        return root

    walk(first, 0, second, whole=True)
    if next(nodes, None) is not None or b"" in found.values():
        raise ValueError(f"the proof from {first} to {second} leaves has another length")
    return found


def _split(size: int) -> int:
    """The largest power of two below ``size``."""
    return 1 << ((size - 1).bit_length() - 1)
