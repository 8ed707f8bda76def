"""Turns a training checkpoint into weights.safetensors: the wanted weights, bit for bit, and nothing else."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import BaseModel

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.slim.choose import Choice, Left, choose
from enginesmith.tasks.slim.numerics import dead_channels
from enginesmith.tasks.slim.readers import KEY, Checkpoint, read_checkpoint, shard_paths
from enginesmith.tasks.slim.tensors import Tensor
from enginesmith.tasks.slim.write import Written, verify, write_weights
from enginesmith.tasks.stage import SourceFile, Stage
from enginesmith.tasks.store import sha256_file
from enginesmith.tasks.weights import WEIGHTS

_SLACK_BYTES = 64 << 20


class CandidateReport(BaseModel):
    """A set of weights that the checkpoint holds."""

    key: str
    role: str
    tensors: int
    bytes: int
    chosen: bool


class DroppedReport(BaseModel):
    """Something that was left out, and why."""

    key: str
    rule: str
    tensors: int
    bytes: int


class TensorReport(BaseModel):
    """A kept tensor: its name here and in the checkpoint, and the SHA-256 of its bytes."""

    name: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    sha256: str
    tied_to: str = ""


class NumericsReport(BaseModel):
    """Elements of a tensor that make trouble later. Shares are of all its elements."""

    name: str
    nonfinite: int = 0
    beyond_fp16: int = 0
    tiny_fp16_share: float = 0.0
    subnormal_share: float = 0.0
    zero_gain_channels: int = 0
    zero_variance_channels: int = 0
    channels: int = 0


class SlimReport(BaseModel):
    """What slimming did."""

    format: str
    bytes_before: int
    bytes_after: int
    weights: str
    candidates: tuple[CandidateReport, ...]
    prefix: str
    dropped: tuple[DroppedReport, ...]
    kept: tuple[TensorReport, ...]
    numerics: tuple[NumericsReport, ...]
    warnings: tuple[str, ...]


def checkpoint_source(path: Path, *, key: str = KEY) -> SourceFile:
    """A checkpoint as a stage's input: for a shard index, the digest covers the index and every shard.

    Raises:
        EnginesmithError: a file is missing, or the index names something outside its folder.
    """
    source = SourceFile.of(path, key=key)
    if path.suffix != ".json":
        return source
    digests = [source.sha256, *(sha256_file(shard) for shard in _existing(shard_paths(path), path))]
    return SourceFile(path, hashlib.sha256("\n".join(digests).encode()).hexdigest())


def slim_checkpoint(
    out: Path,
    *,
    checkpoint: SourceFile,
    weights: str = "auto",
    dtype: str | None = None,
    allow_pickle: bool = False,
    drop: tuple[str, ...] = (),
    allow_nonfinite: tuple[str, ...] = (),
) -> SlimReport:
    """Write `out`/weights.safetensors.

    Args:
        out: folder to write into.
        checkpoint: .pt, .pth, .ckpt, TorchScript, .pt2, .safetensors, or a shard index (see `checkpoint_source`).
        weights: ``auto`` (the only candidate), ``model``, ``ema``, or the dotted key of a candidate.
        dtype: ``float32`` or ``float16`` converts floating-point tensors, except BatchNorm statistics; None keeps them.
        allow_pickle: take weights out of pickled module objects, and tolerate names of functions that are no plain
            constructors. Nothing in the file is run either way.
        drop: patterns of further names to leave out; with ``!`` in front, names to keep.
        allow_nonfinite: patterns of tensors that may hold NaN or infinity.

    Raises:
        EnginesmithError: anything that keeps the weights from coming through exactly; it says what and where.
    """
    content = read_checkpoint(checkpoint.path)
    try:
        return _slim(out / WEIGHTS, content, weights, dtype, allow_pickle, drop, allow_nonfinite)
    except EnginesmithError as error:
        if not error.where:
            error.where = str(checkpoint.path)
        raise


SLIM = Stage("slim", version=2, run=slim_checkpoint, tools=("ml-dtypes", "numpy"))


def _slim(
    path: Path,
    content: Checkpoint,
    weights: str,
    dtype: str | None,
    allow_pickle: bool,
    drop: tuple[str, ...],
    allow_nonfinite: tuple[str, ...],
) -> SlimReport:
    if content.forbidden and not allow_pickle:
        raise EnginesmithError(
            f"loading the checkpoint would call {', '.join(content.forbidden[:3])}",
            key=KEY,
            details=content.forbidden[3:],
            hint="nothing was run; if you know where the file comes from, model.allow_pickle: true reads its weights "
            "(and runs nothing either)",
        )
    choice = choose(content, weights, drop, allow_pickle)
    _check_size(choice, content.size)
    written = write_weights(path, choice.tensors, choice.prefix, dtype)
    _check_finite(written, allow_nonfinite)
    _check_range(written)
    wrong = verify(path, choice.tensors, written)
    if wrong:
        raise EnginesmithError(
            "the written weights do not read back as they were meant", where=str(path), details=wrong, hint="run again"
        )
    return SlimReport(
        format=content.format,
        bytes_before=content.size,
        bytes_after=path.stat().st_size,
        weights=choice.chosen.key,
        candidates=tuple(
            CandidateReport(key=c.key, role=c.role, tensors=len(c.tensors), bytes=c.nbytes, chosen=c is choice.chosen)
            for c in choice.candidates
        ),
        prefix=choice.prefix,
        dropped=tuple(_dropped(choice.left)),
        kept=tuple(
            TensorReport(
                name=w.name,
                source=choice.sources[w.name],
                dtype=w.dtype,
                shape=w.shape,
                bytes=w.nbytes,
                sha256=w.sha256,
                tied_to=w.alias_of,
            )
            for w in written
        ),
        numerics=tuple(_numerics(written, choice)),
        warnings=tuple(_warnings(content, choice)),
    )


def _check_size(choice: Choice, size: int) -> None:
    """Refuse tensors that claim far more bytes than the file has: broadcast views, or the same bytes many times."""
    unique = {tensor.identity: tensor.nbytes for tensor in choice.tensors.values()}
    total = sum(unique.values())
    if total > 4 * size + _SLACK_BYTES:
        largest = max(choice.tensors, key=lambda n: choice.tensors[n].nbytes)
        raise EnginesmithError(
            f"its tensors claim {total} bytes, the file has {size}",
            key=KEY,
            details=[f"{largest} alone claims {choice.tensors[largest].nbytes}"],
            hint="it holds views that repeat the same bytes; save contiguous tensors, or leave them out (model.drop)",
        )


def _check_finite(written: list[Written], allowed: tuple[str, ...]) -> None:
    names = [w.name for w in written]
    for index, pattern in enumerate(allowed):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise EnginesmithError(
                f"{pattern!r} matches no tensor",
                key=f"model.allow_nonfinite.{index}",
                hint=f"patterns match whole names as they are written, as in {names[0]}",
            )
    waived = {w.alias_of or w.name for w in written if any(fnmatchcase(w.name, p) for p in allowed)}
    bad = [w for w in written if w.counts.nonfinite and w.name not in waived]
    if bad:
        raise EnginesmithError(
            f"NaN or infinity in {len(bad)} tensor{'s' if len(bad) > 1 else ''} of the checkpoint",
            key=KEY,
            details=[f"{w.name}: {w.counts.nonfinite} of {math.prod(w.shape)} elements" for w in bad],
            hint="take an earlier checkpoint; where it is meant (a mask), name the tensor in model.allow_nonfinite",
        )


def _check_range(written: list[Written]) -> None:
    bad = [w for w in written if w.overflow > 0]
    if bad:
        raise EnginesmithError(
            f"dtype float16 would turn values of {len(bad)} tensors into infinity",
            key="model.dtype",
            details=[f"{w.name}: {w.overflow} elements" for w in bad],
            hint="leave model.dtype out; precision is chosen later, per layer",
        )


def _dropped(left: Iterable[Left]) -> Iterable[DroppedReport]:
    for entry in sorted(left, key=lambda e: e.key):
        yield DroppedReport(key=entry.key, rule=entry.rule, tensors=entry.tensors, bytes=entry.nbytes)


def _numerics(written: list[Written], choice: Choice) -> Iterable[NumericsReport]:
    for w in written:
        counts, numel = w.counts, max(1, _numel(choice.tensors[w.name]))
        if counts.nonfinite or counts.beyond_fp16 or counts.tiny_fp16 or counts.subnormal:
            yield NumericsReport(
                name=w.name,
                nonfinite=counts.nonfinite,
                beyond_fp16=counts.beyond_fp16,
                tiny_fp16_share=counts.tiny_fp16 / numel,
                subnormal_share=counts.subnormal / numel,
            )
    for dead in dead_channels(choice.tensors):
        yield NumericsReport(
            name=dead.norm,
            channels=dead.channels,
            zero_gain_channels=dead.zero_gain,
            zero_variance_channels=dead.zero_variance,
        )


def _numel(tensor: Tensor) -> int:
    return tensor.numel


def _warnings(content: Checkpoint, choice: Choice) -> Iterable[str]:
    if choice.chosen.module:
        yield f"the weights were taken out of a pickled {choice.chosen.module}; its code was not run"
    if content.forbidden:
        yield f"loading the file with pickle would call {', '.join(content.forbidden)}; nothing was run"


def _existing(paths: list[Path], index: Path) -> list[Path]:
    for path in paths:
        if not path.is_file():
            raise EnginesmithError(f"shard {path.name!r} is missing", where=str(index), key=KEY)
    return paths
