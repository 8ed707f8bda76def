"""Turns the files of Fashion-MNIST into 96x96 RGB images, normalised as ImageNet's are: the data of benchmarks/int8.py.

The environment variable FASHION_MNIST names the folder of the four idx files.
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

Samples = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]

MEAN = torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1)


def calibration() -> Samples:
    """The first 2000 training images, on which the linear probe is fitted too."""
    return _images("train", slice(0, 2000))


def search() -> Samples:
    """1000 test images that the search decides on."""
    return _images("t10k", slice(1000, 2000))


def evaluation() -> Samples:
    """1000 other test images, for the verdict."""
    return _images("t10k", slice(0, 1000))


def _images(part: str, rows: slice) -> Samples:
    """Images [n, 3, 96, 96] and their labels [n]."""
    folder = Path(os.environ["FASHION_MNIST"])
    pixels = np.frombuffer(gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    labels = np.frombuffer(gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    grey = torch.from_numpy(pixels.reshape(-1, 1, 28, 28)[rows] / np.float32(255))
    image = torch.nn.functional.interpolate(grey, size=(96, 96), mode="bilinear")
    return ((image - MEAN) / STD).numpy(), labels[rows].astype(np.int64)
