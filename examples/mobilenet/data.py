"""scikit-learn's handwritten digits as 96x96 RGB images, normalised as ImageNet's are."""

import numpy as np
import torch
from sklearn.datasets import load_digits

MEAN = torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1)


def calibration() -> tuple[np.ndarray, np.ndarray]:
    return _digits(slice(0, 641))


def search() -> tuple[np.ndarray, np.ndarray]:
    return _digits(slice(641, 897))


def evaluation() -> tuple[np.ndarray, np.ndarray]:
    return _digits(slice(897, 1797))


def _digits(rows: slice) -> tuple[np.ndarray, np.ndarray]:
    pixels, labels = load_digits(return_X_y=True)
    grey = torch.tensor(pixels[rows].reshape(-1, 1, 8, 8) / 16, dtype=torch.float32)
    image = torch.nn.functional.interpolate(grey, size=(96, 96), mode="bilinear")
    return ((image - MEAN) / STD).numpy(), labels[rows]
