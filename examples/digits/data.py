"""scikit-learn's handwritten digits: the first half to train and calibrate, the second to judge."""

import numpy as np
from sklearn.datasets import load_digits

HALF = 897


def calibration() -> tuple[np.ndarray, np.ndarray]:
    return _digits(slice(0, HALF))


def evaluation() -> tuple[np.ndarray, np.ndarray]:
    return _digits(slice(HALF, None))


def _digits(rows: slice) -> tuple[np.ndarray, np.ndarray]:
    pixels, labels = load_digits(return_X_y=True)
    return (pixels[rows].reshape(-1, 1, 8, 8) / 16).astype(np.float32), labels[rows]
