"""Tensors in transit: what arrives is what was sent, or it is refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load_file

from medsilo.algorithms.families.tethered import pairwise_distances, squared_distances
from medsilo.algorithms.tensors import BLOCK, MemoryWorkspace, Part, Payload, Stack, combine
from medsilo.algorithms.tensors import stack as stacks
from medsilo.algorithms.tensors.files import FileWorkspace, PayloadWriter, Spares, read_payload, write_payload
from medsilo.algorithms.tensors.transfer import (
    MemorySink,
    Receiver,
    check_finite,
    check_parts,
    chunk_message,
    manifest,
    read_manifest,
    send,
)
from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.door.door import Call, Door
from medsilo.privacy.errors import DataError, RefusedError
from medsilo.privacy.exposure import MODEL, Exposure
from medsilo.privacy.journal.journal import Journal
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.nonces import nonce

EXTRACTOR, CLASSIFIER = MODEL


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    with Journal(tmp_path / "journal", key=Ed25519PrivateKey.generate(), origin="medsilo/t/silo/a") as journal:
        yield Door(journal, identity="spiffe://t/silo/a", federation="t", gate=PlanGate(Exposure))


def a_payload() -> Payload:
    generator = torch.Generator().manual_seed(0)
    return {
        EXTRACTOR: Part.of({
            "big": torch.randn(700, 999, generator=generator),
            "empty": torch.empty(0, 3),
            "steps": torch.tensor(5),
        }),
        CLASSIFIER: Part.of({"w": torch.randn(9, 84, generator=generator), "b": torch.randn(9, generator=generator)}),
        Exposure.SAMPLE_COUNT: Part.of({"n": torch.tensor(123)}),
    }  # fmt: skip


def same(one: Payload, other: Payload) -> bool:
    return list(one) == list(other) and all(
        one[e].specs == other[e].specs
        and all(torch.equal(a, b) for a, b in zip(one[e].tensors().values(), other[e].tensors().values(), strict=True))
        for e in one
    )


def transfer(door: Door, payload: Payload) -> tuple[list[bytes], Payload]:
    header = wire.SubmitUpdateRequest(update=wire.Update(nonce=nonce(), parts=manifest(payload)))
    sent = list(send(partial(door.release, call=Call("SubmitUpdate", "p", "", "test")), header, payload))
    messages = [wire.SubmitUpdateRequest.FromString(data) for data in sent]
    parts = read_manifest(messages[0].update.parts)
    sink = MemorySink(parts)
    receiver = Receiver(parts, sink)
    for message in messages[1:]:
        receiver.take(message.chunk)
    receiver.finish()
    return sent, sink.payload()


def test_what_arrives_is_what_was_sent_in_messages_below_a_mebibyte(door: Door) -> None:
    payload = a_payload()
    sent, arrived = transfer(door, payload)
    assert same(payload, arrived)
    assert len(sent) == 1 + 3 + 1 + 1
    assert max(map(len, sent)) <= 1 << 20


def test_tensors_that_arrive_lie_in_the_received_bytes_unless_these_are_out_of_step(door: Door) -> None:
    marks = {"marks": torch.tensor([1, 2, 3], dtype=torch.uint8)}
    weights = {"w": torch.randn(9, 84, generator=torch.Generator().manual_seed(1)), "b": torch.tensor(0.5)}
    _, arrived = transfer(door, {CLASSIFIER: Part.of(weights), Exposure.PARAMETER_MASK: Part.of(marks)})
    tensors = arrived[CLASSIFIER].tensors()
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors.values()} == {tensors["w"].data_ptr()}
    # After three bytes the numbers would lie across the processor's words.
    _, arrived = transfer(door, {Exposure.PARAMETER_MASK: Part.of(marks), CLASSIFIER: Part.of(weights)})
    assert all(torch.equal(tensor, weights[name]) for name, tensor in arrived[CLASSIFIER].tensors().items())


def test_a_payload_without_tensors_arrives_too(door: Door) -> None:
    assert transfer(door, {})[1] == {}


def receiver_for(payload: Payload) -> Receiver:
    parts = read_manifest(manifest(payload))
    return Receiver(parts, MemorySink(parts))


@pytest.mark.parametrize(
    ("exposure", "data", "words"),
    [
        (CLASSIFIER, bytes(8), "not what the manifest announced"),
        (EXTRACTOR, bytes(16), "not what the manifest announced"),
        (EXTRACTOR, b"", "without bytes"),
        (EXTRACTOR, bytes(3), "splits a number"),
        (EXTRACTOR, np.array([1, np.nan], np.float32).tobytes(), "NaN or infinite"),
        (EXTRACTOR, np.array([-np.inf, 1], np.float32).tobytes(), "NaN or infinite"),
    ],
)
def test_chunks_that_do_not_belong_are_refused(exposure: Exposure, data: bytes, words: str) -> None:
    receiver = receiver_for({EXTRACTOR: Part.of({"a": torch.zeros(3)}), CLASSIFIER: Part.of({"b": torch.zeros(2)})})
    with pytest.raises(RefusedError, match=words):
        receiver.take(chunk_message(wire.SubmitUpdateRequest, exposure, data, nonce()).chunk)
    with pytest.raises(RefusedError, match="12 bytes short in MODEL_PARAMETERS_EXTRACTOR"):
        receiver.finish()


def test_very_large_numbers_are_still_numbers() -> None:
    receiver = receiver_for({EXTRACTOR: Part.of({"a": torch.zeros(2)})})
    data = np.array([3e38, -3e38], np.float32).tobytes()
    receiver.take(chunk_message(wire.SubmitUpdateRequest, EXTRACTOR, data, nonce()).chunk)
    receiver.finish()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none_are_found_by_name(bad: float) -> None:
    tensor = torch.zeros(BLOCK + 10)
    tensor[-1] = bad
    with pytest.raises(RefusedError, match="tensor late holds NaN"):
        check_finite({EXTRACTOR: Part.of({"early": torch.ones(3), "late": tensor, "count": torch.tensor(1)})})


def test_what_differs_from_the_expected_is_named() -> None:
    expected = {e: part.specs for e, part in a_payload().items()}
    check_parts(expected, expected)
    changed = {**expected, CLASSIFIER: Part.of({"w": torch.zeros(9, 83), "b": torch.zeros(9)}).specs}
    with pytest.raises(RefusedError, match=r"w is F32 \[9, 83\]; F32 \[9, 84\] was expected"):
        check_parts(changed, expected)
    with pytest.raises(RefusedError, match="SAMPLE_COUNT is missing"):
        check_parts({e: s for e, s in expected.items() if e != Exposure.SAMPLE_COUNT}, expected)
    with pytest.raises(RefusedError, match="LABEL_COUNTS was not asked for"):
        check_parts({**expected, Exposure.LABEL_COUNTS: ()}, expected)
    with pytest.raises(RefusedError, match="tensor b is missing"):
        check_parts({**expected, CLASSIFIER: expected[CLASSIFIER][:1]}, expected)


def test_a_file_gives_back_what_was_written_and_is_safetensors(tmp_path: Path) -> None:
    payload = a_payload()
    path = tmp_path / "payload.safetensors"
    write_payload(path, payload)
    assert same(read_payload(path), payload)
    assert torch.equal(load_file(path)[f"{CLASSIFIER}/w"], payload[CLASSIFIER].tensors()["w"])


def test_an_unfinished_file_leaves_nothing_and_harms_nothing(tmp_path: Path) -> None:
    payload = a_payload()
    path = tmp_path / "payload.safetensors"
    write_payload(path, payload)
    with PayloadWriter(path, {e: p.specs for e, p in payload.items()}) as writer:
        writer.write(b"half")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert same(read_payload(path), payload)


def test_a_file_written_over_an_old_one_holds_nothing_of_it(tmp_path: Path) -> None:
    spares = Spares(tmp_path / "spare", most=1)
    for count in (9000, 9000, 10):
        write_payload(tmp_path / "old", {EXTRACTOR: Part.of({"x": torch.full((count,), 7.0)})})
        spares.give(tmp_path / "old")
    assert len(list((tmp_path / "spare").iterdir())) == 1
    new = Part.of({"y": torch.ones(20)})
    with PayloadWriter(tmp_path / "new", {EXTRACTOR: new.specs}, spares=spares) as writer:
        writer.write(new.source.read(0, new.nbytes))
        writer.commit()
    assert (tmp_path / "new").stat().st_size == writer.start + 80
    assert torch.equal(load_file(tmp_path / "new")[f"{EXTRACTOR}/y"], torch.ones(20))
    assert list((tmp_path / "spare").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"\x05", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}"[:9], b"\x02\0\0\0\0\0\0\0[]"])
def test_a_damaged_file_says_so(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.safetensors"):
        read_payload(path)


def test_mixing_gives_the_same_bits_in_files_and_in_memory_and_is_right(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    models = torch.randn(4, 2 * BLOCK + 77, generator=generator)
    weights = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    in_memory = [[Part.of({"a": row[: BLOCK + 5], "b": row[BLOCK + 5 :]})] for row in models]
    on_disk = []
    for index, parts in enumerate(in_memory):
        write_payload(tmp_path / str(index), {EXTRACTOR: parts[0]})
        on_disk.append([read_payload(tmp_path / str(index))[EXTRACTOR]])
    spares = Spares(tmp_path / "spare", most=0)
    one = combine(Stack(in_memory), weights, MemoryWorkspace())
    two = combine(Stack(on_disk), weights, FileWorkspace(tmp_path / "out", spares))
    expected = (weights @ models.to(torch.float64)).to(torch.float32)
    for row, (a, b) in enumerate(zip(one, two, strict=True)):
        flat = torch.cat([tensor.reshape(-1) for tensor in a.tensors().values()])
        assert torch.equal(flat, torch.cat([tensor.reshape(-1) for tensor in b.tensors().values()]))
        torch.testing.assert_close(flat, expected[row])


def test_models_of_different_shapes_are_not_mixed() -> None:
    with pytest.raises(RefusedError, match="different shapes"):
        Stack([[Part.of({"a": torch.zeros(3)})], [Part.of({"a": torch.zeros(4)})]])


def mixed(models: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    stack = Stack([[Part.of({"w": row})] for row in models])
    return [part.tensors()["w"] for part in combine(stack, weights, MemoryWorkspace())]


@pytest.mark.parametrize("silos", [3, 40])
def test_a_mixture_has_the_same_bits_whatever_the_block(silos: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of whole numbers this small every sum is exact, in any order: only a number lost or misplaced makes a difference.
    generator = torch.Generator().manual_seed(1)
    models = torch.randint(-1000, 1000, (silos, 5000), generator=generator).to(torch.float32)
    weights = torch.randint(-8, 8, (2, silos), generator=generator).to(torch.float64)
    expected = (weights @ models.to(torch.float64)).to(torch.float32)
    distances = pairwise_distances([squared_distances(models.to(torch.float64))], silos)
    for block in (1 << 17, 4999, 77):
        monkeypatch.setattr(stacks, "BLOCK", block)
        assert torch.equal(torch.stack(mixed(models, weights)), expected)
        stack = Stack([[Part.of({"w": row})] for row in models])
        assert torch.equal(pairwise_distances(stack.map(squared_distances), silos), distances)


def test_a_block_takes_no_more_memory_with_a_thousand_silos_than_with_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_THREADS", 1)  # each works on one block
    one = Part.of({"w": torch.ones(BLOCK)})
    for silos in (1, 32, 33, 250, 1000):
        stack = Stack([[one]] * silos)
        tracemalloc.start()
        sizes = list(stack.map(lambda block: block.shape))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert sum(columns for _, columns in sizes) == BLOCK
        assert all(rows == silos for rows, _ in sizes)
        assert max(rows * columns for rows, columns in sizes) * 8 <= 32 << 20
        assert peak < 40 << 20, f"{silos} silos: {peak} bytes"
