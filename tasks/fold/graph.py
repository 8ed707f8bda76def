"""The stage fold for a model that arrives as ONNX: the same arithmetic on BatchNormalization nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

from enginesmith.tasks.data import load_dataset
from enginesmith.tasks.fold.feeds import make_feeds
from enginesmith.tasks.graph import io
from enginesmith.tasks.graph.batchnorm import fold_graph
from enginesmith.tasks.graph.names import UniqueNodeNames
from enginesmith.tasks.settings import FoldSettings, InputSettings
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Artifact


class GraphFoldReport(BaseModel):
    """What folding did to a graph.

    Attributes:
        summary: one line.
        folds: by BatchNormalization node, what it went into.
        kept: by BatchNormalization node, why it was not folded.
        clamped: channels whose variance was raised, by node.
        constant_channels: output channels that became constant, by node.
        flushed_subnormals: values that FP32 could hold only as subnormal numbers, now zero.
        outputs: largest difference of each output, in units of its range.
    """

    summary: str
    folds: dict[str, str]
    kept: dict[str, str]
    clamped: dict[str, int]
    constant_channels: dict[str, tuple[int, ...]]
    flushed_subnormals: int
    outputs: dict[str, float]


def fold_onnx(
    out: Path, *, model: Artifact, data: Artifact, inputs: Mapping[str, InputSettings], settings: FoldSettings
) -> GraphFoldReport:
    """Write `out`/model.onnx without the BatchNormalization nodes that fold.

    Args:
        out: folder to write into.
        model: the adopted ONNX file.
        data: the data artifact; its calibration set feeds the comparison.
        inputs: declared inputs of the model.
        settings: clamp policy, tolerance, and nodes to leave alone.

    Raises:
        EnginesmithError: outputs that are not finite, or a fold that changes the model.
    """
    graph = io.load(model.path)
    feeds = make_feeds(load_dataset(data, "calibration"), inputs)
    found = fold_graph(graph, [{name: t.numpy() for name, t in feed.items()} for feed in feeds], settings)
    UniqueNodeNames()(graph)
    io.save(graph, out)
    clamped = sum(len(channels) for channels in found.clamped.values())
    return GraphFoldReport(
        summary=f"{len(found.folds)} BatchNorms folded, {len(found.kept)} kept; {clamped} channels clamped",
        folds={fold.norm: ", ".join(fold.into) for fold in found.folds},
        kept={norm.norm: norm.reason for norm in found.kept},
        clamped={name: len(channels) for name, channels in found.clamped.items()},
        constant_channels=dict(found.constants),
        flushed_subnormals=found.flushed,
        outputs=dict(found.differences),
    )


FOLD_GRAPH = Stage("fold", version=1, run=fold_onnx, tools=("numpy", "onnx-ir", "onnxruntime"))
