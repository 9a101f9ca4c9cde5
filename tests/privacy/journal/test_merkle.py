"""What the Merkle tree promises: RFC 6962's root at every size, and its proofs between any two."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import pytest

from medsilo.privacy.journal.merkle import (
    EMPTY_ROOT,
    TILE,
    MerkleTree,
    ProvingTree,
    check_consistency,
    leaf_hash,
    node_hash,
    perfect_subtrees,
)

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


MANY = [b"%d" % number * (number % 5) for number in range(70)]


def split_of(size: int) -> int:
    """The largest power of two below the size."""
    split = 1
    while split * 2 < size:
        split *= 2
    return split


def reference(leaves: list[bytes]) -> bytes:
    """The tree hash as RFC 6962, section 2.1, defines it."""
    if not leaves:
        return hashlib.sha256().digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    split = split_of(len(leaves))
    return hashlib.sha256(b"\x01" + reference(leaves[:split]) + reference(leaves[split:])).digest()


def reference_proof(first: int, leaves: list[bytes]) -> list[bytes]:
    """PROOF(m, D[n]) as RFC 6962, section 2.1.2, defines it, for 0 < m < n."""

    def subproof(m: int, part: list[bytes], whole: bool) -> list[bytes]:
        if m == len(part):
            return [] if whole else [reference(part)]
        split = split_of(len(part))
        if m <= split:
            return [*subproof(m, part[:split], whole), reference(part[split:])]
        return [*subproof(m - split, part[split:], False), reference(part[:split])]

    return subproof(first, leaves, True)


def proving(leaves: Sequence[bytes], most: int = TILE) -> ProvingTree:
    """A tree of these leaves, which asks for no more than ``most`` of them at once."""

    def again(first: int, count: int) -> Sequence[bytes]:
        assert 0 < count <= most
        return leaves[first : first + count]

    tree = ProvingTree(again)
    for leaf in leaves:
        tree.append(leaf)
    return tree


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


# Published with RFC 6962's reference implementation, for the eight leaves above: roots of every size, and proofs.
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
PROOFS = {
    (1, 1): [],
    (1, 8): [
        "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    ],
    (6, 8): [
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ],
    (2, 5): [
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    ],
}


def test_the_published_roots_are_found() -> None:
    assert [root_of(LEAVES[:size]) for size in range(1, 9)] == ROOTS


@pytest.mark.parametrize(("first", "second"), PROOFS)
def test_the_published_proofs_are_made_and_believed(first: int, second: int) -> None:
    proof = [bytes.fromhex(node) for node in PROOFS[first, second]]
    assert proving(LEAVES).consistency(first, second) == proof
    assert check_consistency(first, bytes.fromhex(ROOTS[first - 1]), second, bytes.fromhex(ROOTS[second - 1]), proof)


def test_between_any_two_sizes_the_proof_is_that_of_the_definition_and_is_believed() -> None:
    tree = proving(MANY)
    roots = [reference(MANY[:size]) for size in range(len(MANY) + 1)]
    for second in range(len(MANY) + 1):
        for first in range(second + 1):
            proof = tree.consistency(first, second)
            assert proof == (reference_proof(first, MANY[:second]) if 0 < first < second else [])
            assert check_consistency(first, roots[first], second, roots[second], proof)


def test_a_proof_with_anything_changed_is_not_believed() -> None:
    """Between any two sizes up to 33: another root on either side, and any node changed, dropped, doubled or moved."""
    leaves = MANY[:33]
    tree = proving(leaves)
    roots = [reference(leaves[:size]) for size in range(len(leaves) + 1)]
    other = hashlib.sha256(b"other").digest()
    for second in range(1, len(leaves) + 1):
        for first in range(1, second + 1):
            proof = tree.consistency(first, second)
            old, new = roots[first], roots[second]
            assert not check_consistency(first, other, second, new, proof)
            assert not check_consistency(first, old, second, other, proof)
            assert not check_consistency(second, new, first, old, proof) or first == second
            assert not check_consistency(first, old, second, new, [*proof, other])
            assert not check_consistency(first, old, second, new, [other, *proof])
            for place in range(len(proof)):
                for changed in (
                    [*proof[:place], other, *proof[place + 1 :]],
                    [*proof[:place], bytes([proof[place][0] ^ 1]) + proof[place][1:], *proof[place + 1 :]],
                    [*proof[:place], *proof[place + 1 :]],
                    [*proof[: place + 1], *proof[place:]],
                    [*proof[:place], *proof[place : place + 2][::-1], *proof[place + 2 :]],
                ):
                    if changed != proof:
                        assert not check_consistency(first, old, second, new, changed)


def test_a_tree_whose_past_was_changed_has_no_proof_that_is_believed() -> None:
    for changed in range(20):
        leaves = [*MANY[:changed], b"another", *MANY[changed + 1 : 40]]
        for second in (20, 21, 32, 40):
            proof = proving(leaves).consistency(20, second)
            assert not check_consistency(20, reference(MANY[:20]), second, reference(leaves[:second]), proof)


def test_every_tree_continues_the_empty_one_which_has_no_other_root() -> None:
    assert check_consistency(0, EMPTY_ROOT, 8, bytes.fromhex(ROOTS[7]), [])
    assert not check_consistency(0, bytes.fromhex(ROOTS[0]), 8, bytes.fromhex(ROOTS[7]), [])
    assert not check_consistency(0, EMPTY_ROOT, 8, bytes.fromhex(ROOTS[7]), [EMPTY_ROOT])


@pytest.mark.parametrize(("first", "second"), [(-1, 5), (6, 5), (3, 71), (71, 71)])
def test_there_is_no_proof_for_sizes_that_the_tree_never_had(first: int, second: int) -> None:
    with pytest.raises(ValueError, match=f"no proof from {first} to {second}"):
        proving(MANY).consistency(first, second)


def test_in_large_trees_proofs_hold_and_few_nodes_are_kept() -> None:
    numbers = random.Random(7)
    leaves = [numbers.randbytes(numbers.randrange(1, 40)) for _ in range(20_001)]
    tree, growing, roots = proving(leaves), MerkleTree(), [EMPTY_ROOT]
    for leaf in leaves:
        growing.append(leaf)
        roots.append(growing.root())
    assert tree.root() == roots[-1]
    for _ in range(300):
        first, second = sorted(numbers.choices(range(len(roots)), k=2))
        proof = tree.consistency(first, second)
        assert len(proof) <= 16
        assert check_consistency(first, roots[first], second, roots[second], proof)
    # Of 20,001 leaves: 78 perfect subtrees of 256, and what is built of them; and what the last of these and the 33
    # leaves after it are made of.
    made_of_the_last = 256 + 128 + 64 + 32 + 16 + 8 + 4 + 2
    made_of_the_newest = 33 + 16 + 8 + 4 + 2 + 1
    assert len(tree._known) == 78 + 39 + 19 + 9 + 4 + 2 + 1 + made_of_the_last + made_of_the_newest
    assert len(tree.peaks) == (20_001).bit_count()


def test_a_proof_asks_for_few_leaves() -> None:
    asked = 0

    def again(first: int, count: int) -> Sequence[bytes]:
        nonlocal asked
        asked += count
        return leaves[first : first + count]

    leaves = [b"%d" % number for number in range(5_000)]
    tree = ProvingTree(again)
    for leaf in leaves:
        tree.append(leaf)
    assert asked == 0
    for first, second in ((1, 5_000), (4_999, 5_000), (2_500, 4_097), (257, 511)):
        asked = 0
        tree.consistency(first, second)
        assert asked <= 3 * TILE


def test_the_leaves_between_two_sizes_are_told_in_perfect_subtrees() -> None:
    tree = proving(MANY)
    for end in range(len(MANY) + 1):
        for start in range(end + 1):
            shorter = MerkleTree()
            for leaf in MANY[:start]:
                shorter.append(leaf)
            pieces = tree.subtrees(start, end)
            assert sum(1 << level for level, _ in pieces) == end - start
            assert len(pieces) <= 2 * end.bit_length()
            for level, root in pieces:
                shorter.append_subtree(level, root)
            assert (shorter.size, shorter.root()) == (end, reference(MANY[:end]))


def test_perfect_subtrees_lie_side_by_side_and_are_aligned() -> None:
    for end in range(80):
        for start in range(end + 1):
            at = start
            for first, level in perfect_subtrees(start, end):
                assert first == at
                assert first % (1 << level) == 0
                at += 1 << level
            assert at == end


def test_a_tree_goes_on_from_its_peaks_and_proves_what_comes_after() -> None:
    for size in range(len(MANY)):
        whole = MerkleTree()
        for leaf in MANY[:size]:
            whole.append(leaf)
        tree = ProvingTree(lambda first, count: MANY[first : first + count], size, whole.peaks)
        assert (tree.size, tree.root()) == (size, reference(MANY[:size]))
        for leaf in MANY[size:]:
            tree.append(leaf)
        assert tree.root() == reference(MANY)
        if size:
            proof = tree.consistency(size, len(MANY))
            assert check_consistency(size, reference(MANY[:size]), len(MANY), reference(MANY), proof)


@pytest.mark.parametrize(
    ("size", "peaks"), [(1, []), (0, [bytes(32)]), (3, [bytes(32)]), (2, [bytes(32)] * 2), (1, [bytes(31)])]
)
def test_peaks_that_are_not_those_of_such_a_tree_are_refused(size: int, peaks: list[bytes]) -> None:
    with pytest.raises(ValueError, match=f"{size} leaves consist of"):
        MerkleTree(size, peaks)


def test_a_subtree_that_cannot_begin_there_is_refused() -> None:
    tree = MerkleTree()
    tree.append(b"a")
    with pytest.raises(ValueError, match="a perfect subtree of 2 leaves cannot begin at leaf 1"):
        tree.append_subtree(1, node_hash(leaf_hash(b"b"), leaf_hash(b"c")))
    assert (tree.size, tree.root()) == (1, leaf_hash(b"a"))
