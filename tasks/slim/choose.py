"""Turns a checkpoint's content into the one state dict that is wanted, and says what was left out and by which rule."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.slim.pickled import MAX_STEPS, Record, parts_of
from enginesmith.tasks.slim.readers import Checkpoint, Unsupported
from enginesmith.tasks.slim.tensors import Tensor

Role = Literal["model", "ema"]
TOP = "."  # how the file's own top level is named where a key is asked for

# Which entries of a checkpoint are no weights, by name (lower case; * stands for anything).
ENTRY_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("optimizer", ("opt", "optim", "optims", "optimizer*", "*_optimizer", "*_optimizers", "optim_*", "*_optim")),
    ("scheduler", ("*scheduler", "*schedulers", "*scheduler_state*", "sched", "lr_sched*")),
    ("scaler", ("scaler", "*_scaler", "scaler_*", "amp", "amp_*", "loss_scale*")),
    ("FP32 masters", ("fp32_groups*", "fp32_from_fp16*", "*fp32_master*", "*master_param*", "*master_weight*")),
    ("loss", ("loss", "losses", "*_loss", "*_losses", "loss_*", "criterion", "criterion_*")),
    ("callback", ("callback", "callbacks", "hooks", "loops")),
    ("RNG state", ("rng", "*rng_state*", "*random_state*", "*_rng", "rng_*")),
    ("hash", ("hash", "*_hash", "md5*", "sha*sum", "sha1", "sha256", "checksum*")),
)
# Which names inside a state dict are no weights of the model.
NAME_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("loss", ("loss.*", "losses.*", "loss_fn.*", "loss_func.*", "*_loss.*", "criterion.*", "criterion_*.*")),
    ("EMA counter", ("n_averaged",)),
)
# Names that wrappers put in front of every name: DistributedDataParallel and DataParallel, torch.compile, FSDP,
# activation checkpointing, DeepSpeed, and what Lightning modules call the model they wrap.
WRAPPERS = (
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_fpw_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
    "model",
    "net",
    "network",
)
_EMA_WORDS = {"ema", "swa", "averaged", "shadow"}
_DEPTH = 4
_LOOKS = 4 * MAX_STEPS
_HOLDERS = (dict, list, tuple, set, frozenset, Record, Tensor, Unsupported)


@dataclass(frozen=True)
class Candidate:
    """A state dict that a checkpoint holds.

    Attributes:
        key: where, dotted; ``.`` for the top level.
        role: trained weights or their moving average.
        tensors: by name as in the file, non-tensors left out.
        module: class name of the pickled module that it was taken from, else empty.
        leftover: names and values beside the tensors.
    """

    key: str
    role: Role
    tensors: Mapping[str, Tensor | Unsupported]
    module: str
    leftover: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(t.nbytes for t in self.tensors.values() if isinstance(t, Tensor))


@dataclass(frozen=True)
class Left:
    """Something that was left out, by which rule, and the tensors in it with their bytes."""

    key: str
    rule: str
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class Choice:
    """The wanted state dict.

    Attributes:
        chosen: the candidate.
        candidates: all of them, in the file's order.
        tensors: what is kept, by the name it gets.
        sources: kept name to name in the file.
        prefix: leading names that were taken off, dotted and with a dot at the end; empty without.
        left: everything that was left out.
    """

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    tensors: Mapping[str, Tensor]
    sources: Mapping[str, str]
    prefix: str
    left: tuple[Left, ...]


@dataclass(frozen=True)
class Drops:
    """The user's additions to the rules: patterns of names to leave out, and with ``!`` in front, names to keep."""

    patterns: tuple[str, ...]

    def rule(self, name: str, rules: Sequence[tuple[str, tuple[str, ...]]]) -> str:
        """The rule that leaves a name out, empty when none does."""
        if any(fnmatchcase(name, p[1:]) for p in self.patterns if p.startswith("!")):
            return ""
        for pattern in self.patterns:
            if fnmatchcase(name, pattern):
                return f"model.drop: {pattern}"
        lower = name.lower()
        return next((rule for rule, patterns in rules if any(fnmatchcase(lower, p) for p in patterns)), "")

    def check(self, names: Sequence[str]) -> None:
        """Refuse a pattern that matches nothing.

        Raises:
            EnginesmithError: it names the pattern.
        """
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern.removeprefix("!")) for name in names):
                raise EnginesmithError(
                    f"{pattern!r} matches no key of the checkpoint",
                    key="model.drop",
                    hint="patterns match whole keys, as in loss_head.*",
                )


class _Inventory:
    """What is left out, and how much of the content was looked at: a pickle can hold the same list a million times."""

    def __init__(self, drops: Drops) -> None:
        self.drops = drops
        self.left: list[Left] = []
        self.steps = 0

    def leave(self, key: str, rule: str, value: Any) -> None:
        tensors = {t.identity: t.nbytes for t in self.tensors(value) if isinstance(t, Tensor)}
        self.left.append(Left(key, rule, len(tensors), sum(tensors.values())))

    def tensors(self, value: Any) -> list[Tensor | Unsupported]:
        """All tensors inside a value, each object once.

        Raises:
            EnginesmithError: the content repeats itself so often that looking at all of it would take very long.
        """
        found: list[Tensor | Unsupported] = []
        todo = [value]
        seen: set[int] = set()
        while todo:
            current = todo.pop()
            if isinstance(current, Tensor | Unsupported):
                found.append(current)
            elif id(current) not in seen:
                seen.add(id(current))
                parts = parts_of(current)
                self.steps += 1 + len(parts)
                if self.steps > _LOOKS:
                    raise EnginesmithError("the checkpoint repeats its content without end", key="model.checkpoint")
                todo += [part for part in parts if isinstance(part, _HOLDERS)]
        return found

    def why(self, value: Any) -> str:
        """The rule for a value that is no state dict."""
        if value is None:
            return "empty"
        return "tensors without names" if self.tensors(value) else "not a tensor"


def choose(content: Checkpoint, weights: str, drop: tuple[str, ...], allow_pickle: bool) -> Choice:
    """Find the candidates, take the wanted one, leave out what is no weight, take wrappers' prefixes off.

    Raises:
        EnginesmithError: no candidate, several with `weights` ``auto``, none of the asked name, a pickled module
            without `allow_pickle`, or tensors that cannot be kept.
    """
    drops = Drops(drop)
    inventory = _Inventory(drops)
    found = list(_candidates(content.root, (), inventory))
    candidates = tuple(part for candidate in found for part in _split_ema(candidate))
    chosen = _pick(candidates, weights, content)
    if chosen.module and not allow_pickle:
        raise EnginesmithError(
            f"{_shown(chosen.key)} is a pickled object of class {chosen.module}, not a state dict",
            key="model.checkpoint",
            hint="save model.state_dict() instead; or set model.allow_pickle: true to take the weights out of the "
            "object (its code is not run)",
        )
    for other in candidates:
        if other is not chosen:
            inventory.leave(other.key, "not the chosen weights", dict(other.tensors))
    for name, value in chosen.leftover.items():
        inventory.leave(_join(chosen.key, name), "not a tensor", value)
    kept: dict[str, Tensor] = {}
    for name, tensor in chosen.tensors.items():
        rule = drops.rule(name, NAME_RULES)
        if rule:
            inventory.leave(_join(chosen.key, name), rule, tensor)
        elif isinstance(tensor, Unsupported):
            raise EnginesmithError(
                f"{name} cannot be kept: it is {tensor.reason}",
                key="model.checkpoint",
                hint="save it as a plain dense tensor, or leave it out with model.drop",
            )
        else:
            kept[name] = tensor
    drops.check(
        [*(c for entry in inventory.left for c in (entry.key, entry.key.removeprefix(f"{chosen.key}."))), *kept]
    )
    if not kept:
        raise EnginesmithError(f"{_shown(chosen.key)} holds no tensor", key="model.weights")
    prefix = _prefix(kept)
    return Choice(
        chosen,
        candidates,
        {name.removeprefix(prefix): tensor for name, tensor in kept.items()},
        {name.removeprefix(prefix): name for name in kept},
        prefix,
        tuple(inventory.left),
    )


def _candidates(value: Any, path: tuple[str, ...], inventory: _Inventory) -> Iterator[Candidate]:
    """State dicts in a value, outermost first; what holds none is left out."""
    key = ".".join(path) or TOP
    role: Role = "ema" if any(_EMA_WORDS & set(re.split(r"[._]", part.lower())) for part in path) else "model"
    if isinstance(value, Record) and _is_module(value):
        state: dict[str, Tensor | Unsupported] = {}
        _module_state(value, "", state, set())
        yield Candidate(key, role, state, str(value.type), {})
        return
    if isinstance(value, Record) and value.entries and all(isinstance(n, str) for n in value.entries):
        value = value.entries
    if not isinstance(value, dict):
        inventory.leave(key, inventory.why(value), value)
        return
    own = {n: v for n, v in value.items() if isinstance(n, str) and isinstance(v, Tensor | Unsupported)}
    rest = {n: v for n, v in value.items() if n not in own}
    inner: list[Candidate] = []
    beside: dict[str, Any] = {}
    for name, item in rest.items():
        rule = inventory.drops.rule(str(name), ENTRY_RULES) if isinstance(name, str) else "not a name"
        if rule:
            inventory.leave(_join(key, str(name)), rule, item)
        elif isinstance(item, dict | Record) and len(path) < _DEPTH:
            inner += _candidates(item, (*path, str(name)), inventory)
        elif own and not inventory.tensors(item):
            beside[str(name)] = item
        else:
            inventory.leave(_join(key, str(name)), inventory.why(item), item)
    loose = bool(inner) or not any("." in name for name in own)
    for name in list(own):
        rule = inventory.drops.rule(name, ENTRY_RULES) if loose else ""
        tensor = own[name]
        if not rule and inner and isinstance(tensor, Tensor) and not tensor.shape:
            rule = "a number beside the weights"
        if rule:
            inventory.leave(_join(key, name), rule, own.pop(name))
    if own:
        yield Candidate(key, role, own, "", beside)
    else:
        for name, item in beside.items():
            inventory.leave(_join(key, name), inventory.why(item), item)
    yield from inner


def _is_module(value: Record) -> bool:
    return isinstance(value.state, dict) and {"_parameters", "_buffers", "_modules"} <= set(value.state)


def _module_state(module: Record, prefix: str, state: dict[str, Tensor | Unsupported], above: set[int]) -> None:
    """What `state_dict()` of a pickled module would hold: parameters, persistent buffers, then its children's."""
    if id(module) in above or len(above) > 200:
        raise EnginesmithError(
            f"the pickled module {module.type} contains itself", where=prefix, key="model.checkpoint"
        )
    hidden = module.state.get("_non_persistent_buffers_set") or ()
    for table in ("_parameters", "_buffers"):
        entries = module.state[table]
        for name, value in entries.items() if isinstance(entries, dict) else ():
            if isinstance(value, Tensor | Unsupported) and not (table == "_buffers" and name in hidden):
                state[f"{prefix}{name}"] = value
    children = module.state["_modules"]
    for name, child in children.items() if isinstance(children, dict) else ():
        if isinstance(child, Record) and _is_module(child):
            _module_state(child, f"{prefix}{name}.", state, above | {id(module)})


def _pick(candidates: tuple[Candidate, ...], weights: str, content: Checkpoint) -> Candidate:
    if not candidates:
        held = type(content.root).__name__ if not isinstance(content.root, Record) else str(content.root.type)
        raise EnginesmithError(
            "the checkpoint holds no state dict",
            key="model.checkpoint",
            hint=f"its content is a {held}" + (" without tensors" if isinstance(content.root, dict) else ""),
        )
    listing = [_line(c) for c in candidates]
    exact = [c for c in candidates if c.key == weights]
    if exact:
        return exact[0]
    if weights == "auto":
        fitting = list(candidates)
    elif weights in ("model", "ema"):
        fitting = [c for c in candidates if c.role == weights]
    else:
        fitting = []
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise EnginesmithError(
            f"the checkpoint holds {len(fitting)} sets of weights, and weights is {weights!r}",
            key="model.weights",
            details=listing,
            hint=f"choose one by its key, as in weights: {fitting[0].key}",
        )
    raise EnginesmithError(
        f"the checkpoint holds no weights {weights!r}",
        key="model.weights",
        details=listing,
        hint=f"choose one by its key, as in weights: {candidates[0].key}",
    )


def _line(candidate: Candidate) -> str:
    kind = f", a pickled {candidate.module}" if candidate.module else ""
    size = candidate.nbytes
    shown = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size} B"
    return f"{candidate.key}: {len(candidate.tensors)} tensors, {shown}, {candidate.role}{kind}"


def _shown(key: str) -> str:
    return "the checkpoint" if key == TOP else repr(key)


def _join(key: str, name: str) -> str:
    return name if key == TOP else f"{key}.{name}"


# --- a moving average stored among the weights themselves ----------------------------------------------------------


def _split_ema(candidate: Candidate) -> Iterator[Candidate]:
    """A state dict that holds its own moving average under changed names, as two candidates.

    Frameworks store the average of ``backbone.conv.weight`` as ``ema_backbone_conv_weight`` (dots turned to
    underscores), ``model_ema.backboneconvweight`` (dots left out) or ``ema_model.backbone.conv.weight``. The names are
    matched without dots and underscores; they must fit one to one. Buffers that such frameworks do not average
    (BatchNorm statistics) are those of the trained weights, as the frameworks themselves use them.

    Raises:
        EnginesmithError: only some of the names fit, so that nobody can say what they are.
    """
    heads = {name: _ema_head(name) for name in candidate.tensors}
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
        elif _shape(tensor) != ():
            strange.append(name)
    if not mapped:
        yield candidate
        return
    missing = [n for n in trained if n not in mapped and not _is_statistic(n)]
    if strange or missing:
        raise EnginesmithError(
            f"{_shown(candidate.key)} mixes weights and a moving average whose names do not fit one another",
            key="model.checkpoint",
            details=[f"{n}: no such weight" for n in strange] + [f"{n}: no average" for n in missing],
            hint="store the two sets under keys of their own",
        )
    kind = candidate.key
    yield Candidate(kind, "model", {n: candidate.tensors[n] for n in trained}, candidate.module, candidate.leftover)
    yield Candidate(
        "ema" if kind == TOP else f"{kind}.ema",
        "ema",
        {n: candidate.tensors[mapped.get(n, n)] for n in trained},
        candidate.module,
        {},
    )


def _ema_head(name: str) -> str:
    """The leading part of a name that marks a moving average, empty when there is none."""
    found = re.match(r"(?:\w+_)?(?:ema|swa)(?:_model|_module)?\.(?:module\.)?|(?:ema|swa)_(?:model\.)?", name)
    return found.group(0) if found else ""


def _letters(name: str) -> str:
    return re.sub(r"[._]", "", name)


def _is_statistic(name: str) -> bool:
    return name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")


def _shape(tensor: Tensor | Unsupported) -> tuple[int, ...] | None:
    return tensor.shape if isinstance(tensor, Tensor) else None


def _prefix(names: Mapping[str, Tensor]) -> str:
    """Wrappers' names, as far as every name starts with them and something is left behind them."""
    prefix = ""
    while True:
        heads = {name[len(prefix) :].partition(".")[0] for name in names}
        head = next(iter(heads))
        if len(heads) != 1 or head not in WRAPPERS or any(name == prefix + head for name in names):
            return prefix
        prefix += f"{head}."
