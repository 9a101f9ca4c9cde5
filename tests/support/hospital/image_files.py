"""Picture and DICOM files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

from medsilo.algorithms.datasets import ImageDataset
from medsilo.silo.data.preparing import Form, assemble, listed


def picture(path: Path, shade: int = 0, *, size: tuple[int, int] = (12, 12), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, shade if mode == "L" else (shade, shade, shade)).save(path)
    return path


def dicom(path: Path, pixels: np.ndarray[Any, Any], **fields: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.7"
    meta.MediaStorageSOPInstanceUID = generate_uid()
    made = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    made.PatientName, made.PatientID = "Curie^Marie", "MRN-1867"
    made.Rows, made.Columns = pixels.shape[:2]
    made.SamplesPerPixel, made.PhotometricInterpretation = 1, "MONOCHROME2"
    made.BitsAllocated = made.BitsStored = pixels.dtype.itemsize * 8
    made.HighBit, made.PixelRepresentation = made.BitsStored - 1, int(pixels.dtype.kind == "i")
    if pixels.ndim == 3:
        made.SamplesPerPixel, made.PhotometricInterpretation, made.PlanarConfiguration = 3, "RGB", 0
    made.PixelData = pixels.tobytes()
    for name, value in fields.items():
        setattr(made, name, value)
    made.save_as(path)
    return path


def made(folder: Path, labels: Path | None = None, **options: Any) -> ImageDataset:
    return assemble(listed(folder, labels=labels), Form(4), name="h", **options)
