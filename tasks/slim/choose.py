"""Turns a checkpoint's content into the one state dict that is wanted, and says what was left out and by which rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.slim.averages import TOP, Candidate, Role, is_average, split_average
from enginesmith.tasks.slim.pickled import MAX_STEPS, Record, parts_of
from enginesmith.tasks.slim.readers import Checkpoint, Unsupported
from enginesmith.tasks.slim.rules import Drops
from enginesmith.tasks.slim.tensors import Tensor

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
_DEPTH = 4
_LOOKS = MAX_STEPS
_LEAVE_COST = 16
_HOLDERS = (dict, list, tuple, set, frozenset, Record, Tensor, Unsupported)


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


class _Inventory:
    """What is left out, and how much of the content was looked at: a pickle can hold the same list a million times."""

    def __init__(self, drops: Drops) -> None:
        self.drops = drops
        self.left: list[Left] = []
        self.steps = 0
        self.barren: set[int] = set()

    def leave(self, key: str, rule: str, value: Any) -> None:
        self.steps += _LEAVE_COST
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
            elif id(current) not in seen and id(current) not in self.barren:
                seen.add(id(current))
                parts = parts_of(current)
                self.steps += 1 + len(parts)
                if self.steps > _LOOKS:
                    raise EnginesmithError("the checkpoint repeats its content without end", key="model.checkpoint")
                todo += [part for part in parts if isinstance(part, _HOLDERS)]
        if not found:
            self.barren |= seen
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
    parts = [part for one in _roles(found) for part in split_average(_without_dropped(one, inventory))]
    candidates = tuple(_distinct(parts, inventory))
    chosen = _pick(candidates, weights, content, inventory)
    if chosen.broken:
        raise EnginesmithError(
            f"{_shown(chosen.key)} mixes weights and a moving average whose names do not fit one another",
            key="model.checkpoint",
            details=chosen.broken,
            hint="store the two sets under keys of their own, or leave names out with model.drop",
        )
    if chosen.module and not allow_pickle:
        raise EnginesmithError(
            f"{_shown(chosen.key)} is a pickled object of class {chosen.module}, not a state dict",
            key="model.checkpoint",
            hint="save model.state_dict() instead; or set model.allow_pickle: true (--allow-pickle) to take the "
            "weights out of the object (its code is not run)",
        )
    for other in candidates:
        if other is not chosen:
            inventory.leave(other.key, "not the chosen weights", dict(other.tensors))
    for name, value in chosen.leftover.items():
        inventory.leave(_join(chosen.key, name), "not a tensor", value)
    kept: dict[str, Tensor] = {}
    for name, tensor in chosen.tensors.items():
        rule = drops.for_name(name)
        if rule:
            inventory.leave(_join(chosen.key, name), rule, tensor)
        elif isinstance(tensor, Unsupported):
            raise EnginesmithError(
                f"{name} cannot be kept: it is {tensor.reason}",
                key="model.checkpoint",
                hint="save it as a plain dense tensor, or leave it out with model.drop",
            )
        else:
            kept[_checked(name)] = tensor
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


def _checked(name: str) -> str:
    """A name that a .safetensors file can hold.

    Raises:
        EnginesmithError: it cannot.
    """
    try:
        name.encode()
        wrong = name == "__metadata__"
    except UnicodeEncodeError:
        wrong = True
    if wrong:
        raise EnginesmithError(
            f"no tensor can be called {name!r} in a .safetensors file",
            key="model.checkpoint",
            hint="rename it, or leave it out with model.drop",
        )
    return name


def _without_dropped(candidate: Candidate, inventory: _Inventory) -> Candidate:
    """A candidate without the names that the user leaves out: they must not count when averages are told apart."""
    dropped = {n: rule for n in candidate.tensors if (rule := inventory.drops.by_user(n))}
    if not dropped:
        return candidate
    for name, rule in dropped.items():
        inventory.leave(_join(candidate.key, name), rule, candidate.tensors[name])
    return replace(candidate, tensors={n: t for n, t in candidate.tensors.items() if n not in dropped})


def _roles(candidates: list[Candidate]) -> Iterator[Candidate]:
    """Candidates with the roles that only their neighbours tell.

    Lightning's WeightAveraging puts the average where the weights were (``state_dict``) and the trained weights beside
    it (``current_model_state``).
    """
    keys = {c.key for c in candidates}
    for candidate in candidates:
        above, _, last = candidate.key.rpartition(".")
        beside = f"{above}.current_model_state" if above else "current_model_state"
        yield replace(candidate, role="ema") if last == "state_dict" and beside in keys else candidate


def _distinct(candidates: list[Candidate], inventory: _Inventory) -> Iterator[Candidate]:
    """Candidates that differ: what shows the very same tensors under the same names needs no choice."""
    seen: dict[object, str] = {}
    for candidate in candidates:
        if not candidate.tensors:
            continue
        what = frozenset((n, t.identity if isinstance(t, Tensor) else id(t)) for n, t in candidate.tensors.items())
        first = seen.setdefault(what, candidate.key)
        if first == candidate.key:
            yield candidate
        else:
            inventory.leave(candidate.key, f"the same tensors as {first}", dict(candidate.tensors))


def _candidates(value: Any, path: tuple[str, ...], inventory: _Inventory) -> Iterator[Candidate]:
    """State dicts in a value, outermost first; what holds none is left out."""
    key = ".".join(path) or TOP
    role: Role = "ema" if is_average(path) else "model"
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
        rule = inventory.drops.for_entry(name) if isinstance(name, str) else "not a name"
        if rule == "callback":
            inner += _averages_in(item, (*path, str(name)), inventory)
        elif rule:
            inventory.leave(_join(key, str(name)), rule, item)
        elif isinstance(item, dict | Record) and len(path) < _DEPTH:
            inner += _candidates(item, (*path, str(name)), inventory)
        elif own and not inventory.tensors(item):
            beside[str(name)] = item
        else:
            inventory.leave(_join(key, str(name)), inventory.why(item), item)
    loose = bool(inner) or not any("." in name for name in own)
    for name in list(own):
        rule = inventory.drops.for_entry(name) if loose else ""
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


def _averages_in(value: Any, path: tuple[str, ...], inventory: _Inventory) -> list[Candidate]:
    """Moving averages of the weights that a callback keeps; everything else in it is left out."""
    aside = _Inventory(inventory.drops)
    aside.steps, aside.barren = inventory.steps, inventory.barren
    found = [
        c
        for c in (_candidates(value, path, aside) if isinstance(value, dict) else ())
        if c.role == "ema" and any("." in name for name in c.tensors)
    ]
    inventory.steps = aside.steps
    taken = {id(tensor) for candidate in found for tensor in candidate.tensors.values()}
    rest = [t for t in inventory.tensors(value) if id(t) not in taken]
    inventory.leave(".".join(path), "callback", rest)
    return found


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


def _pick(candidates: tuple[Candidate, ...], weights: str, content: Checkpoint, inventory: _Inventory) -> Candidate:
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
    nameless = [e for e in inventory.left if e.rule == "tensors without names" and is_average((e.key,))]
    if weights in ("auto", "ema") and nameless and not any(c.role == "ema" for c in candidates):
        raise EnginesmithError(
            "the checkpoint also holds a moving average whose tensors have no names, so they match no weights",
            key="model.weights",
            details=[*listing, *(f"{e.key}: {e.tensors} tensors without names, {_size(e.nbytes)}" for e in nameless)],
            hint="take the trained weights by their key, as in weights: "
            f"{candidates[0].key}; or save the average as a state dict",
        )
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise EnginesmithError(
            f"the checkpoint holds {len(fitting)} sets of weights, and weights is {weights!r}",
            key="model.weights",
            details=listing,
            hint=f"choose one by its key, as in weights: {fitting[0].key} (--weights {fitting[0].key})",
        )
    raise EnginesmithError(
        f"the checkpoint holds no weights {weights!r}",
        key="model.weights",
        details=listing,
        hint=f"choose one by its key, as in weights: {candidates[0].key} (--weights {candidates[0].key})",
    )


def _line(candidate: Candidate) -> str:
    kind = f", a pickled {candidate.module}" if candidate.module else ""
    count = len(candidate.tensors)
    shown = f"{count} tensor{'s' if count != 1 else ''}, {_size(candidate.nbytes)}"
    return f"{candidate.key}: {shown}, {candidate.role}{kind}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes} B"


def _shown(key: str) -> str:
    return "the checkpoint" if key == TOP else repr(key)


def _join(key: str, name: str) -> str:
    return name if key == TOP else f"{key}.{name}"


def _prefix(names: Mapping[str, Tensor]) -> str:
    """Wrappers' names, as far as every name starts with them and something is left behind them."""
    prefix = ""
    while True:
        heads = {name[len(prefix) :].partition(".")[0] for name in names}
        head = next(iter(heads))
        if len(heads) != 1 or head not in WRAPPERS or any(name == prefix + head for name in names):
            return prefix
        prefix += f"{head}."
