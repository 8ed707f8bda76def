"""What the comparison with the training pipeline says of the usual differences in preprocessing."""

from __future__ import annotations

import numpy as np
import pytest

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.firewalls.preprocessing import check_preprocessing, load_reference

MEAN = np.array([0.485, 0.456, 0.406], np.float32).reshape(1, 3, 1, 1)
STD = np.array([0.229, 0.224, 0.225], np.float32).reshape(1, 3, 1, 1)


@pytest.fixture(scope="module")
def pixels():
    """Eight images of 0..255 with structure: random 4x4 blocks of 8 pixels, other ones per channel."""
    blocks = np.random.default_rng(0).integers(0, 256, (8, 3, 4, 4)).astype(np.float32)
    return blocks.repeat(8, 2).repeat(8, 3)


def found(theirs, ours):
    return [(f.rule, f.severity, f.message) for f in check_preprocessing({"x": theirs}, {"x": ours}, "calibration")]


def test_equal_tensors_in_another_order_are_fine(pixels):
    assert found(pixels, pixels[::-1]) == []
    assert found(pixels, pixels * np.float32(1 + 1e-7)) == []


def test_bytes_against_unit_range_is_a_scale_of_one_255th(pixels):
    ((rule, severity, message),) = found(pixels / 255, pixels)
    assert (rule, severity) == ("preprocessing/values", "error")
    assert "training = 0.00392157 · this" in message
    assert "0..1 in training, 0..255 here" in message


def test_missing_normalisation_is_a_line_per_channel(pixels):
    ((_, _, message),) = found((pixels / 255 - MEAN) / STD, pixels / 255)
    assert "mean or standard deviation differ" in message
    for scale, offset in ((1 / 0.229, 0.485 / 0.229), (1 / 0.225, 0.406 / 0.225)):
        assert f"training = {scale:.6g} · this - {offset:.4g}" in message


def test_reversed_channels_are_recognised(pixels):
    ((_, _, message),) = found(pixels, pixels[:, ::-1])
    assert "channel order is reversed" in message
    assert "too" not in message


def test_layout_is_recognised_and_the_values_are_compared_all_the_same(pixels):
    ((rule, _, message),) = found(pixels.transpose(0, 2, 3, 1), pixels)
    assert rule == "preprocessing/form"
    assert message == "x (calibration): channels are elsewhere: [32, 32, 3] in training, [3, 32, 32] here"
    assert [r for r, *_ in found((pixels / 255).transpose(0, 2, 3, 1), pixels)] == [
        "preprocessing/form",
        "preprocessing/values",
    ]


def test_float64_is_another_form(pixels):
    ((rule, _, message),) = found(pixels, pixels.astype(np.float64))
    assert (rule, message) == ("preprocessing/form", "x (calibration): training feeds float32, this set float64")


def test_another_resize_is_said_with_its_largest_difference(pixels):
    smooth = (pixels + np.roll(pixels, 1, 3)) / 2
    ((_, _, message),) = found(pixels, smooth)
    assert f"differ by {np.abs(pixels - smooth).max():.4g} at most" in message
    assert "another resize, crop or decoder" in message


def test_other_samples_are_compared_by_their_spread():
    """Calibrated on 0..255, run on a standard normal."""
    rng = np.random.default_rng(1)
    normal, other = rng.standard_normal((2, 16, 3, 16, 16)).astype(np.float32)
    assert found(normal, other) == []
    ((_, severity, message),) = found(normal, rng.integers(0, 256, normal.shape).astype(np.float32))
    assert severity == "warning"
    assert "this set 12" in message


def test_reference_is_read_from_files_and_refused_when_it_does_not_fit(tmp_path, pixels):
    np.save(tmp_path / "r.npy", pixels)
    assert np.array_equal(load_reference("r.npy", tmp_path, {"x": None})["x"], pixels)
    np.savez(tmp_path / "r.npz", y=pixels)
    with pytest.raises(EnginesmithError, match="the inputs are x"):
        load_reference("r.npz", tmp_path, {"x": None})
    with pytest.raises(EnginesmithError, match="cannot be read"):
        load_reference("gone.npy", tmp_path, {"x": None})
