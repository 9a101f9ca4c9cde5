"""One picture or DICOM file as 8-bit pixels of a model's size.

    read_image(Path("slide.png"), channels=3, height=28, width=28)   # uint8 [28, 28, 3]

``silo prepare`` and ``silo predict`` read with the same function, so a model sees at work what it was trained on. Of a
DICOM file the pixels are read and what it takes to show them; names, dates and the like are not parsed at all.
"""

from __future__ import annotations

import math
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from medsilo.algorithms.datasets import Images
from medsilo.algorithms.scope import beyond, file_kind
from medsilo.privacy.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from pydicom import Dataset

PICTURES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
DICOM = (".dcm", ".dicom")
_MOST_PIXELS = 50_000_000
# What Pillow and pydicom have been seen to raise for damaged files.
_UNREADABLE = (
    *(OSError, SyntaxError, ValueError, TypeError, EOFError, LookupError, ArithmeticError, MemoryError, struct.error),
    *(UnidentifiedImageError, Image.DecompressionBombError, NotImplementedError, AttributeError, RuntimeError),
)
# Nothing else of a DICOM file is parsed. None of these says whose the image is.
_SHOWN_BY = [
    *("SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames", "Rows", "Columns"),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PixelData", "BurnedInAnnotation"),
    *("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence", "WindowCenter", "WindowWidth", "VOILUTFunction"),
    *("VOILUTSequence", "RedPaletteColorLookupTableDescriptor", "GreenPaletteColorLookupTableDescriptor"),
    *("BluePaletteColorLookupTableDescriptor", "RedPaletteColorLookupTableData", "GreenPaletteColorLookupTableData"),
    *("BluePaletteColorLookupTableData", "SOPClassUID"),
]
_SEGMENTATION = "1.2.840.10008.5.1.4.1.1.66.4"


class OutOfScopeError(Exception):
    """What a file is that Medsilo does not work on."""


Window = tuple[float, float]
"""Centre and width of the values of a DICOM image, after rescaling, that are shown from black to white."""


def is_image(path: Path) -> bool:
    """Whether a file is one to read, by its name; a file without a suffix, by its first bytes (DICOM)."""
    if path.suffix:
        return path.suffix.lower() in (*PICTURES, *DICOM)
    return _is_dicom(path) and path.name.upper() != "DICOMDIR"


@dataclass(frozen=True, eq=False)
class Read:
    """``pixels``: uint8 ``[height, width, channels]``, as wanted. What the file had: ``size``, width and height;
    ``grey``, whether there was no colour in it."""

    pixels: Images
    size: tuple[int, int]
    grey: bool


def read_image(path: Path, *, channels: int, height: int, width: int, window: Window | None = None) -> Images:
    """A file's pixels, scaled to the given size; see ``read_picture``."""
    return read_picture(path, channels=channels, height=height, width=width, window=window).pixels


def read_picture(path: Path, *, channels: int, height: int, width: int, window: Window | None = None) -> Read:
    """A file's pixels, scaled to the given size.

    The picture is stretched to the size (bicubic, with anti-aliasing), colour becomes grey or grey three equal
    channels as ``channels`` (1 or 3) says.

    A monochrome DICOM image is rescaled as it says (modality LUT), then what lies in ``window`` is shown from black to
    white; without one, in the file's own first window or VOI LUT; and if it has neither, from its smallest to its
    largest value (PS3.3, C.11.1 and C.11.2). MONOCHROME1 is turned round, so that small is black everywhere.

    Raises ``DataError`` naming the file if it cannot be read, says that it has more than 50 million pixels, is none of
    what Medsilo works on (a volume or film, a mask, a picture with more than 8 bits a channel), or says that something
    is written into the image (BurnedInAnnotation).
    """
    if channels not in (1, 3):
        raise DataError(f"pictures have 1 or 3 channels; this model takes {channels}: give an .npz")
    if (kind := file_kind(path)) is not None:
        raise DataError(f"{path}: {beyond(f'it is {kind}')}")
    dicom = path.suffix.lower() in DICOM or (not path.suffix and _is_dicom(path))
    try:
        picture = _dicom(path, window) if dicom else _picture(path)
        coloured = picture.convert("RGB").resize((width, height))
        scaled = picture.convert("L").resize((width, height)) if channels == 1 else coloured
    except OutOfScopeError as error:
        raise DataError(f"{path}: {beyond(str(error))}") from None
    except _UNREADABLE as error:
        raise DataError(f"{path}: cannot be read as a picture: {error}") from None
    pixels = np.asarray(scaled, dtype=np.uint8).reshape(height, width, channels)
    return Read(pixels, picture.size, is_grey(np.asarray(coloured, dtype=np.uint8)))


def is_grey(images: Images) -> bool:
    """Whether there is no colour in images, ``[..., channels]``."""
    return images.shape[-1] == 1 or bool((images[..., :1] == images).all())


def read_patient(path: Path) -> str:
    """The patient id that a DICOM file tells; raises ``DataError`` naming a file that tells none."""
    try:
        found = _pydicom().dcmread(_checked(path), stop_before_pixels=True, specific_tags=["PatientID"])
        patient = str(found.get("PatientID") or "").strip()
    except _UNREADABLE as error:
        raise DataError(f"{path}: cannot be read as DICOM: {error}") from None
    if not patient:
        raise DataError(f"{path}: tells no patient (PatientID); list the files with their patients in a CSV")
    return patient


def _picture(path: Path) -> Image.Image:
    with Image.open(path) as picture:
        # A small file can say that it is a very large picture, and unpacked it is one.
        _check_size(*picture.size)
        # A camera's JPEG may have a preview beside the picture.
        if (pages := getattr(picture, "n_frames", 1)) > 1 and picture.format != "MPO":
            raise OutOfScopeError(f"it holds {pages} pictures (a volume, a film, or a slide in several sizes)")
        if picture.mode == "F":
            raise OutOfScopeError("its pixels are fractions, whose range and meaning Medsilo does not know")
        # Of colours with 16 bits Pillow's mode is the one of 8; what is in the file, its decoder is told.
        deep = any(";16" in str(tile.args) for tile in picture.tile) or 16 in _bits(picture)
        if deep or picture.mode.startswith("I"):
            raise OutOfScopeError(f"its pixels have more than 8 bits a channel (Pillow's mode {picture.mode})")
        upright = ImageOps.exif_transpose(picture)
        upright.load()
        return upright


def _bits(picture: Image.Image) -> tuple[int, ...]:
    """Bits of each channel, as a TIFF tells them; nothing of another picture."""
    told = getattr(picture, "tag_v2", {}).get(258, ())
    return told if isinstance(told, tuple) else (told,)


def _check_size(width: int, height: int) -> None:
    if math.prod((width, height)) > _MOST_PIXELS:
        raise ValueError(f"{width} × {height} pixels are more than {_MOST_PIXELS:,}")


def _is_dicom(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(132)[128:] == b"DICM"
    except OSError:
        return False


def _checked(path: Path) -> Path:
    if not _is_dicom(path):
        raise ValueError("it is no DICOM file")
    return path


def _pydicom() -> Any:
    try:
        import pydicom  # an extra: most hospitals' images come as pictures
    except ImportError:
        raise ConfigurationError("DICOM files need the package pydicom: pip install 'medsilo[dicom]'") from None
    return pydicom


def _dicom(path: Path, window: Window | None) -> Image.Image:
    pydicom = _pydicom()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a file of another make does differently; what counts is checked here
        found = pydicom.dcmread(_checked(path), specific_tags=_SHOWN_BY)
        for needed in ("Rows", "Columns", "PhotometricInterpretation", "BitsAllocated", "PixelData"):
            if needed not in found:
                raise ValueError(f"it is DICOM without {needed}, so no image")
        _check_size(found.Columns, found.Rows)
        if (frames := int(found.get("NumberOfFrames") or 1)) != 1:
            raise OutOfScopeError(f"it holds {frames} frames (a volume or a film)")
        if found.get("SOPClassUID") == _SEGMENTATION or found.BitsAllocated == 1:
            raise OutOfScopeError("it is a mask (a DICOM segmentation)")
        if found.get("BurnedInAnnotation") == "YES":
            raise ValueError(
                "it says that something is written into the image (BurnedInAnnotation), which may be a name; blank it "
                "and say NO there"
            )
        pixels = pydicom.pixels.pixel_array(found)
        if found.PhotometricInterpretation == "PALETTE COLOR":
            pixels = pydicom.pixels.apply_color_lut(pixels, found)
            bits = found.RedPaletteColorLookupTableDescriptor[2]
            pixels = (pixels >> (bits - 8)).astype(np.uint8)
        elif found.PhotometricInterpretation in ("MONOCHROME1", "MONOCHROME2"):
            pixels = _shown(pixels, found, window)
        elif pixels.dtype != np.uint8:
            raise OutOfScopeError(f"its pixels are {found.PhotometricInterpretation} with more than 8 bits a channel")
        elif pixels.shape[2:] != (3,):
            raise ValueError(
                f"its pixels are {found.PhotometricInterpretation} of shape {list(pixels.shape)}; export grey or RGB"
            )
    return Image.fromarray(pixels)


def _shown(pixels: npt.NDArray[Any], found: Dataset, window: Window | None) -> npt.NDArray[np.uint8]:
    """Monochrome pixels as they are shown: 0 is black, 255 white."""
    from pydicom.pixels.processing import apply_modality_lut, apply_voi, apply_windowing

    values = apply_modality_lut(pixels, found)
    # From here on the values stand for themselves; windows map them to 0 … 255.
    for applied in ("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence"):
        if applied in found:
            delattr(found, applied)
    found.BitsStored, found.PixelRepresentation = 8, 0
    if window is not None:
        found.WindowCenter, found.WindowWidth = window
        found.VOILUTFunction = "LINEAR"
    if found.get("WindowCenter") is not None and found.get("WindowWidth") is not None:
        shown = apply_windowing(values, found)
    elif found.get("VOILUTSequence"):
        top = 2 ** found.VOILUTSequence[0].LUTDescriptor[2] - 1
        shown = apply_voi(values.astype(np.int64), found) * (255 / top)
    else:
        low, high = float(values.min()), float(values.max())
        shown = (values.astype(np.float64) - low) * (255 / (high - low or 1.0))
    grey: npt.NDArray[np.uint8] = np.clip(np.rint(shown), 0, 255).astype(np.uint8)
    return 255 - grey if found.PhotometricInterpretation == "MONOCHROME1" else grey
