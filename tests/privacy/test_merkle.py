"""What the Merkle tree promises: RFC 6962's root, at every size."""

from __future__ import annotations

import hashlib

import pytest

from privacy.merkle import MerkleTree

LEAVES = [
    bytes.fromhex(leaf)
    for leaf in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]


def reference(leaves: list[bytes]) -> bytes:
    """The tree hash as RFC 6962, section 2.1, defines it."""
    if not leaves:
        return hashlib.sha256().digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    return hashlib.sha256(b"\x01" + reference(leaves[:split]) + reference(leaves[split:])).digest()


def root_of(leaves: list[bytes]) -> str:
    tree = MerkleTree()
    for leaf in leaves:
        tree.append(leaf)
    assert tree.size == len(leaves)
    return tree.root().hex()


def test_the_empty_trees_root_is_the_hash_of_nothing() -> None:
    assert root_of([]) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_the_reference_leaves_give_the_reference_root() -> None:
    assert root_of(LEAVES) == "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"


@pytest.mark.parametrize("size", range(71))
def test_the_root_is_that_of_the_definition(size: int) -> None:
    leaves = [b"%d" % number * (number % 5) for number in range(size)]
    assert root_of(leaves) == reference(leaves).hex()


def test_asking_for_the_root_changes_nothing() -> None:
    tree = MerkleTree()
    for count, leaf in enumerate(LEAVES):
        tree.append(leaf)
        assert tree.root() == tree.root() == reference(LEAVES[: count + 1])


def test_order_and_content_of_leaves_matter() -> None:
    assert root_of(LEAVES) != root_of([LEAVES[1], LEAVES[0], *LEAVES[2:]])
    assert root_of([b"a", b"b"]) != root_of([b"ab"])
    # A leaf cannot pass for an inner node.
    assert root_of([b"a", b"b"]) != root_of([hashlib.sha256(b"\0a").digest() + hashlib.sha256(b"\0b").digest()])
