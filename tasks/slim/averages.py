"""Turns a state dict that holds its own moving average under changed names into two: the weights and their average."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from enginesmith.tasks.slim.readers import Unsupported
from enginesmith.tasks.slim.tensors import Tensor

Role = Literal["model", "ema"]
TOP = "."  # how the file's own top level is named where a key is asked for

_WORDS = {"ema", "swa", "averaged", "average", "avg", "shadow"}
_HEAD = re.compile(r"(?:\w+_)?(?:ema|swa)(?:_model|_module)?\.(?:module\.)?|(?:ema|swa)_(?:model\.)?")


@dataclass(frozen=True)
class Candidate:
    """A state dict that a checkpoint holds.

    Attributes:
        key: where, dotted; ``.`` for the top level.
        role: trained weights or their moving average.
        tensors: by name as in the file, non-tensors left out.
        module: class name of the pickled module that it was taken from, else empty.
        leftover: names and values beside the tensors.
        broken: why it cannot be taken, a line per tensor; empty when it can.
    """

    key: str
    role: Role
    tensors: Mapping[str, Tensor | Unsupported]
    module: str
    leftover: Mapping[str, Any]
    broken: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(t.nbytes for t in self.tensors.values() if isinstance(t, Tensor))


def is_average(path: tuple[str, ...]) -> bool:
    """Whether a key says that what lies below it is a moving average: one of its words does."""
    words = {word.lower() for part in path for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part)}
    return bool(words & _WORDS)


def split_average(candidate: Candidate) -> Iterator[Candidate]:
    """The candidate, or the two that it is made of.

    Frameworks store the average of ``backbone.conv.weight`` as ``ema_backbone_conv_weight`` (dots turned to
    underscores), ``model_ema.backboneconvweight`` (dots left out) or ``ema_model.backbone.conv.weight``. The names are
    matched without dots and underscores; they must fit one to one. Buffers that such frameworks do not average
    (BatchNorm statistics) are those of the trained weights, as the frameworks themselves use them.

    Where a name of the average fits no weight, nobody can say what belongs to what: both candidates are broken. Where a
    weight has no average, only the average is.
    """
    heads = {name: found.group(0) if (found := _HEAD.match(name)) else "" for name in candidate.tensors}
    average = {name: name[len(head) :] for name, head in heads.items() if head}
    trained = [name for name, head in heads.items() if not head]
    if not average or not trained or candidate.role == "ema":
        yield candidate
        return
    by_letters: dict[str, list[str]] = {}
    for name in trained:
        for form in {name, name.partition(".")[2]} - {""}:
            by_letters.setdefault(_letters(form), []).append(name)
    mapped: dict[str, str] = {}
    strange: list[str] = []
    for name, rest in average.items():
        targets = by_letters.get(_letters(rest), [])
        tensor = candidate.tensors[name]
        if len(targets) == 1 and targets[0] not in mapped and _shape(candidate.tensors[targets[0]]) == _shape(tensor):
            mapped[targets[0]] = name
        elif _shape(tensor) != ():  # a decay, a counter
            strange.append(name)
    if not mapped:
        yield candidate
        return
    unfit = tuple(f"{name}: no such weight" for name in strange)
    bare = tuple(f"{name}: no average" for name in trained if name not in mapped and not _is_statistic(name))
    yield Candidate(
        candidate.key,
        "model",
        {name: candidate.tensors[name] for name in trained},
        candidate.module,
        candidate.leftover,
        unfit,
    )
    yield Candidate(
        "ema" if candidate.key == TOP else f"{candidate.key}.ema",
        "ema",
        {name: candidate.tensors[mapped.get(name, name)] for name in trained},
        candidate.module,
        {},
        unfit + bare,
    )


def _letters(name: str) -> str:
    return re.sub(r"[._]", "", name)


def _is_statistic(name: str) -> bool:
    return name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")


def _shape(tensor: Tensor | Unsupported) -> tuple[int, ...] | None:
    return tensor.shape if isinstance(tensor, Tensor) else None
