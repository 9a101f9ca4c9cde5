"""A payload that is damaged on disk, or announced wrongly, ends in an error that a user can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from medsilo.algorithms.tensors import MemoryWorkspace, Part, Stack, combine, payload_tensors
from medsilo.algorithms.tensors.files import FileWorkspace, PayloadWriter, Spares, read_payload, write_payload
from medsilo.algorithms.tensors.transfer import read_manifest
from medsilo.privacy.errors import DataError, RefusedError
from medsilo.privacy.exposure import MODEL, TENSOR_CLASSES, Exposure
from medsilo.protos.medsilo.v1 import tensor_pb2

EXTRACTOR, CLASSIFIER = MODEL


@pytest.fixture
def written(tmp_path: Path) -> bytes:
    path = tmp_path / "whole.safetensors"
    write_payload(path, {EXTRACTOR: Part.of({"w": torch.arange(10.0)}), CLASSIFIER: Part.of({"b": torch.ones(2)})})
    return path.read_bytes()


def load(folder: Path, content: bytes) -> dict[str, torch.Tensor]:
    path = folder / "damaged.safetensors"
    path.write_bytes(content)
    return payload_tensors(read_payload(path), MODEL)


def with_header(header: object) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64)


def test_a_whole_file_is_read(tmp_path: Path, written: bytes) -> None:
    found = load(tmp_path, written)
    assert found["w"].tolist() == list(range(10))
    assert found["b"].tolist() == [1, 1]


def test_a_file_cut_short_anywhere_says_so(tmp_path: Path, written: bytes) -> None:
    for end in range(len(written)):
        with pytest.raises(DataError, match=r"damaged\.safetensors"):
            load(tmp_path, written[:end])


def entry(**changes: object) -> dict[str, object]:
    return {f"{EXTRACTOR}/w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    "header",
    [
        {"NO_CLASS/w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {"w": 1},
        entry(dtype="F16"),
        entry(dtype=None),
        entry(shape=[-2]),
        entry(shape="2"),
        entry(shape=None),
        entry(shape=["2"]),
        entry(data_offsets=[]),
        entry(data_offsets=[-8, 0]),
        entry(data_offsets=["0", "8"]),
        entry(shape=[10**6], data_offsets=[0, 4 * 10**6]),
    ],
)
def test_a_header_that_does_not_hold_together_says_so(tmp_path: Path, header: object) -> None:
    with pytest.raises(DataError, match=r"damaged\.safetensors"):
        load(tmp_path, with_header(header))


def test_a_deeply_nested_header_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"damaged\.safetensors"):
        load(tmp_path, (100_000).to_bytes(8, "little") + b"[" * 100_000)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none"):
        read_payload(tmp_path / "none")


def test_without_commit_no_file_appears_even_after_an_error(tmp_path: Path) -> None:
    parts = {EXTRACTOR: Part.of({"w": torch.zeros(4)}).specs}

    def broken_off() -> None:
        with PayloadWriter(tmp_path / "x", parts) as writer:
            writer.write(bytes(16))
            raise KeyError("the transfer broke off")

    with pytest.raises(KeyError):
        broken_off()
    assert list(tmp_path.iterdir()) == []


def test_an_aggregation_that_fails_leaves_no_files(tmp_path: Path) -> None:
    rows = [[Part.of({"w": torch.ones(5)})] for _ in range(2)]
    workspace = FileWorkspace(tmp_path / "out", Spares(tmp_path / "spare", most=0))

    def broken() -> object:
        yield torch.ones(2, 3)
        raise KeyError("half way")

    with pytest.raises(KeyError):
        workspace.write(rows[0][0].specs, 2, broken())  # type: ignore[arg-type]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("silos", [1, 3])
def test_files_and_memory_give_the_same_bits_whatever_the_parts(tmp_path: Path, silos: int) -> None:
    generator = torch.Generator().manual_seed(silos)
    rows = [
        {
            EXTRACTOR: Part.of({"a": torch.randn(70_001, generator=generator), "none": torch.empty(0)}),
            CLASSIFIER: Part.of({"scalar": torch.randn((), generator=generator)}),
        }
        for _ in range(silos)
    ]
    files = []
    for number, row in enumerate(rows):
        write_payload(tmp_path / str(number), row)
        files.append(read_payload(tmp_path / str(number)))
    weights = torch.randn(2, silos, generator=generator, dtype=torch.float64)
    one = combine(Stack.of(rows, MODEL), weights, MemoryWorkspace())
    two = combine(Stack.of(files, MODEL), weights, FileWorkspace(tmp_path / "out", Spares(tmp_path / "s", most=0)))
    for a, b in zip(one, two, strict=True):
        assert a.specs == b.specs
        assert bytes(a.source.read(0, a.nbytes)) == bytes(b.source.read(0, b.nbytes))


def announced(**changes: object) -> tensor_pb2.PartManifest:
    spec = {"name": "w", "shape": [2], "dtype": "F32", **changes}
    return tensor_pb2.PartManifest(
        exposure_class=EXTRACTOR.number,
        tensors=[tensor_pb2.TensorSpec(**spec)],  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("dtype", ["", "F16", "f32", "BF16", "I32"])
def test_a_manifest_with_an_unknown_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(RefusedError, match="tensor w has dtype"):
        read_manifest([announced(dtype=dtype)])


def test_a_manifest_that_names_a_class_twice_or_one_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(RefusedError, match="MODEL_PARAMETERS_EXTRACTOR twice"):
        read_manifest([announced(), announced()])
    for exposure in set(Exposure) - set(TENSOR_CLASSES):
        with pytest.raises(RefusedError, match=f"{exposure} twice, or it does not travel"):
            read_manifest([tensor_pb2.PartManifest(exposure_class=exposure.number)])
    with pytest.raises(RefusedError, match="exposure class 0"):
        read_manifest([tensor_pb2.PartManifest()])
