"""What Medsilo works on today, in one sentence, and what other data are called when they are refused.

Data of another kind are refused as what they are. They could often be forced into the form that is read (the first of
several labels, the high byte of 16 bits, a slice of a volume); a model of that would be about something else than the
images, and which part counts is for those to say who know them. So no message proposes it.
"""

from __future__ import annotations

from pathlib import Path

SCOPE = "Medsilo does single-label classification of 2-D images with 8 bits a channel today"

_FILES = {
    "a NIfTI volume": (".nii", ".nii.gz"),
    "a volume": (".hdr", ".mha", ".mhd", ".nrrd", ".nhdr", ".mgh", ".mgz", ".mnc"),
    "a whole-slide image": (".svs", ".ndpi", ".mrxs", ".scn", ".vsi", ".czi"),
    "a film": (".avi", ".mp4", ".mov", ".mpg", ".mpeg", ".mkv", ".wmv"),
}


def beyond(what: str) -> str:
    """``what`` the data are, and that Medsilo does not do that."""
    return f"{what}. {SCOPE}, and nothing else"


def file_kind(path: Path | str) -> str | None:
    """What a file is by its name if that is known and not what Medsilo reads, such as "a NIfTI volume"; else None."""
    name = Path(path).name.lower()
    return next((kind for kind, suffixes in _FILES.items() if name.endswith(suffixes)), None)
