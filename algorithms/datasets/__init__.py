"""Labelled images of one hospital, and the files in which they are kept."""

from medsilo.algorithms.datasets.images import (
    ImageDataset,
    Images,
    ImageSplit,
    Labels,
    Patients,
    image_hashes,
    largest_group,
    to_tensor,
)
from medsilo.algorithms.datasets.npz import load_npz, save_npz, written_whole
from medsilo.algorithms.datasets.pathmnist import PATHMNIST_MD5, load_pathmnist

__all__ = [
    "PATHMNIST_MD5",
    "ImageDataset",
    "ImageSplit",
    "Images",
    "Labels",
    "Patients",
    "image_hashes",
    "largest_group",
    "load_npz",
    "load_pathmnist",
    "save_npz",
    "to_tensor",
    "written_whole",
]
