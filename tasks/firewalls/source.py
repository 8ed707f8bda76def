"""Turns a module's source into the places where Python decides by a tensor's value or by a dynamic size.

Only code that forward reaches is read: forward is interpreted over labels instead of values (does this come from a
tensor, from a dynamic size, from a tensor read as a number?), through the module's own methods, its submodules and the
functions it calls, torch's own code excepted. Where a test is decided by the module itself (`self.training`, an option
given to its constructor), only the branch taken is read.

What it finds are suspicions. torch.export and the experiment decide; a suspicion says where to look.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from enginesmith.tasks.firewalls.dims import symbolic_shape
from enginesmith.tasks.firewalls.findings import Finding, is_tooling, readable_path
from enginesmith.tasks.settings import InputSettings

if TYPE_CHECKING:
    from torch import nn

TENSOR, SIZE, NUMBER = "tensor", "size", "number"
Labels = frozenset[str]
NONE: Labels = frozenset()
VALUE: Labels = frozenset({TENSOR, NUMBER})

_UNKNOWN = object()
_STEPS = 200_000
_DEPTH = 40

_STATIC_ATTRIBUTES = {"ndim", "dtype", "device", "is_cuda", "requires_grad", "layout", "is_sparse", "is_quantized"}
_STATIC_METHODS = {
    "dim", "ndimension", "type", "is_floating_point", "is_complex", "get_device", "element_size", "is_contiguous",
}  # fmt: skip
_SIZE_METHODS = {"size", "numel", "nelement", "stride", "__len__"}
_NUMBER_METHODS = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__"}
_ITERATING = (enumerate, zip, reversed, list, tuple, sorted)
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip

_HINTS = {
    "control-flow/branch-on-value": "compute both and choose with torch.where, or use torch.cond",
    "control-flow/loop-on-value": "run a fixed number of steps and mask those that are too many",
    "control-flow/loop-over-size": "use an operation over the whole dimension (sum, cumsum, einsum, an RNN layer)",
    "control-flow/branch-on-size": "both sides have to be right for every size in the declared range",
    "shape/value-as-number": "keep it a tensor: item(), float(), int() and numpy() read it once, while exporting",
    "shape/size-as-number": "use x.shape[i] or x.size(i) without int(), len() or numpy: they are read while exporting",
}


@dataclass(frozen=True)
class Value:
    """What is known of a Python value.

    Attributes:
        labels: where it comes from.
        object: the value itself when it does not depend on inputs; `_UNKNOWN` otherwise.
        shape: declared shape when it is an input of the model.
    """

    labels: Labels = NONE
    object: Any = _UNKNOWN
    shape: tuple[int | str, ...] | None = None

    @property
    def known(self) -> bool:
        """Whether the value itself is known."""
        return self.object is not _UNKNOWN


_ANY = Value()
_TENSOR = Value(frozenset({TENSOR}))


class _Return(Exception):  # noqa: N818 - leaves a function, as in Python
    pass


class _TooLongError(Exception):
    pass


def check_source(module: nn.Module, inputs: Mapping[str, InputSettings], roots: Sequence[Path] = ()) -> list[Finding]:
    """Suspicions in the source that forward reaches, as warnings.

    `control-flow/branch-on-value`, `control-flow/loop-on-value`, `control-flow/loop-over-size`,
    `control-flow/branch-on-size`, `shape/value-as-number`, `shape/size-as-number`; see `_HINTS`.

    Args:
        module: the model, in eval mode.
        inputs: declared inputs; a size that they fix is a number and no suspicion.
        roots: the user's folders, for places in findings.
    """
    reader = _Reader(tuple(roots))
    with contextlib.suppress(_TooLongError, RecursionError):
        reader.enter_module(module, [], {n: _input(d) for n, d in inputs.items()}, path="")
    return list(dict.fromkeys(reader.findings))


def _input(declared: InputSettings) -> Value:
    return Value(frozenset({TENSOR}), shape=symbolic_shape(declared))


@dataclass
class _Frame:
    """One function being read."""

    names: dict[str, Value]
    function: FunctionType
    file: str
    module: str
    returned: list[Value] = field(default_factory=list)


class _Reader:
    def __init__(self, roots: tuple[Path, ...]) -> None:
        self.roots = roots
        self.findings: list[Finding] = []
        self.seen: dict[tuple[object, ...], Value] = {}
        self.steps = 0
        self.depth = 0

    # --- functions and modules

    def enter_module(
        self, module: nn.Module, args: Sequence[Value], kwargs: Mapping[str, Value], *, path: str
    ) -> Value:
        """Read forward of a module."""
        from torch import nn

        if isinstance(module, nn.Sequential):
            value = args[0] if args else _TENSOR
            for name, inner in module.named_children():
                value = self.enter_module(inner, [value], {}, path=f"{path}.{name}" if path else name)
            return value
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or is_tooling(forward.__code__.co_filename):
            return _merged([*args, *kwargs.values()], tensor=True)
        parameters = list(inspect.signature(forward).parameters)[1:]
        if kwargs and not set(kwargs) <= set(parameters):  # the model's own inputs, bound by position
            args, kwargs = [*args, *kwargs.values()], {}
        return self.enter(forward, [Value(object=module), *args], kwargs, path=path)

    def enter(self, function: FunctionType, args: Sequence[Value], kwargs: Mapping[str, Value], *, path: str) -> Value:
        """Read one function with these arguments; what it returns."""
        key = (function.__code__, path, *((a.labels, a.shape, id(a.object)) for a in [*args, *kwargs.values()]))
        if key in self.seen or self.depth >= _DEPTH:
            return self.seen.get(key, _merged([*args, *kwargs.values()]))
        self.seen[key] = _merged([*args, *kwargs.values()])
        definition = _parse(function)
        if definition is None:
            return _merged([*args, *kwargs.values()])
        frame = _Frame(_bound(function, definition, args, kwargs), function, function.__code__.co_filename, path)
        self.depth += 1
        try:
            if isinstance(definition, ast.Lambda):
                result = self.value(definition.body, frame)
            else:
                self.block(definition.body, frame)
                result = _merged(frame.returned)
        except _Return:
            result = _merged(frame.returned)
        finally:
            self.depth -= 1
        self.seen[key] = result
        return result

    # --- statements

    def block(self, statements: Iterable[ast.stmt], frame: _Frame) -> None:
        for statement in statements:
            self.statement(statement, frame)

    def statement(self, node: ast.stmt, frame: _Frame) -> None:
        match node:
            case ast.Return():
                frame.returned.append(self.value(node.value, frame) if node.value else Value(object=None))
                raise _Return
            case ast.Assign():
                value = self.value(node.value, frame)
                for target in node.targets:
                    self.assign(target, value, frame)
            case ast.AnnAssign() if node.value is not None:
                self.assign(node.target, self.value(node.value, frame), frame)
            case ast.AugAssign():
                value = _merged([self.value(_loaded(node.target), frame), self.value(node.value, frame)])
                self.assign(node.target, value, frame)
            case ast.If():
                self.branch(node, frame)
            case ast.While():
                test = self.value(node.test, frame)
                self.suspect("control-flow/loop-on-value", test.labels & VALUE, node.test, frame, "while")
                self.maybe(node.body, frame)
            case ast.For():
                self.loop(node, frame)
            case ast.Assert():
                test = self.value(node.test, frame)
                self.suspect("control-flow/branch-on-value", test.labels & VALUE, node, frame, "assert")
            case ast.Expr():
                self.value(node.value, frame)
            case ast.With():
                for item in node.items:
                    self.value(item.context_expr, frame)
                self.block(node.body, frame)
            case ast.Try():
                self.maybe(node.body, frame)
                self.maybe(node.orelse, frame)
                self.maybe(node.finalbody, frame)
            case ast.Raise():
                raise _Return
            case _:
                pass

    def branch(self, node: ast.If, frame: _Frame) -> None:
        test = self.value(node.test, frame)
        if test.known and not test.labels:
            self.block(node.body if _truth(test.object) else node.orelse, frame)
            return
        if not _only_raises(node):
            self.suspect("control-flow/branch-on-value", test.labels & VALUE, node.test, frame, "if")
            if not test.labels & VALUE:
                self.suspect("control-flow/branch-on-size", test.labels & {SIZE}, node.test, frame, "if")
        elif test.labels & VALUE:
            self.suspect("control-flow/branch-on-value", test.labels & VALUE, node.test, frame, "if")
        before = dict(frame.names)
        left = self.maybe(node.body, frame)
        taken, frame.names = frame.names, before
        right = self.maybe(node.orelse, frame)
        if left and right:
            raise _Return
        if left:
            return
        frame.names = taken if right else _joined(taken, frame.names)

    def maybe(self, statements: Iterable[ast.stmt], frame: _Frame) -> bool:
        """Read a block that may or may not run; whether it always leaves the function."""
        try:
            self.block(statements, frame)
        except _Return:
            return True
        return False

    def loop(self, node: ast.For, frame: _Frame) -> None:
        over = self.value(node.iter, frame)
        if _is_modules(over.object) or (isinstance(over.object, Sequence) and not isinstance(over.object, str)):
            for item in list(over.object)[:256]:
                self.assign(node.target, Value(object=item), frame)
                if self.maybe(node.body, frame):
                    break
            return
        self.suspect("control-flow/loop-on-value", over.labels & {NUMBER}, node.iter, frame, "for")
        if not over.labels & {NUMBER}:
            tensor = over.labels & {TENSOR} and not (over.shape and isinstance(over.shape[0], int))
            self.suspect("control-flow/loop-over-size", over.labels & {SIZE} or tensor, node.iter, frame, "for")
        self.assign(node.target, Value(over.labels), frame)
        self.maybe(node.body, frame)
        self.maybe(node.orelse, frame)

    def assign(self, target: ast.expr, value: Value, frame: _Frame) -> None:
        match target:
            case ast.Name():
                frame.names[target.id] = value
            case ast.Tuple() | ast.List():
                for index, part in enumerate(target.elts):
                    self.assign(part, _item(value, index), frame)
            case _:
                pass

    # --- expressions

    def value(self, node: ast.expr, frame: _Frame) -> Value:
        self.steps += 1
        if self.steps > _STEPS:
            raise _TooLongError
        match node:
            case ast.Constant():
                return Value(object=node.value)
            case ast.Name():
                return frame.names.get(node.id) or _global(frame.function, node.id)
            case ast.Attribute():
                return self.attribute(self.value(node.value, frame), node.attr)
            case ast.Call():
                return self.call(node, frame)
            case ast.Subscript():
                return self.subscript(node, frame)
            case ast.BoolOp():
                return self.boolean(node, frame)
            case ast.Compare():
                return self.compare(node, frame)
            case ast.UnaryOp():
                inner = self.value(node.operand, frame)
                if isinstance(node.op, ast.Not) and inner.known and not inner.labels:
                    return Value(object=not _truth(inner.object))
                return Value(inner.labels)
            case ast.IfExp():
                test = self.value(node.test, frame)
                if test.known and not test.labels:
                    return self.value(node.body if _truth(test.object) else node.orelse, frame)
                self.suspect("control-flow/branch-on-value", test.labels & VALUE, node.test, frame, "if")
                return _merged([self.value(node.body, frame), self.value(node.orelse, frame)])
            case ast.Tuple() | ast.List():
                parts = [self.value(part, frame) for part in node.elts]
                if all(part.known and not part.labels for part in parts):
                    return Value(object=tuple(part.object for part in parts))
                return Value(_merged(parts).labels)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                for generator in node.generators:
                    over = self.value(generator.iter, frame)
                    self.assign(generator.target, Value(over.labels), frame)
                return self.value(node.elt, frame)
            case ast.Lambda():
                return _ANY
            case ast.NamedExpr():
                named = self.value(node.value, frame)
                self.assign(node.target, named, frame)
                return named
            case _:
                parts = [self.value(part, frame) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
                return Value(_merged(parts).labels)

    def boolean(self, node: ast.BoolOp, frame: _Frame) -> Value:
        values: list[Value] = []
        for part in node.values:
            value = self.value(part, frame)
            if value.known and not value.labels:
                decides = _truth(value.object) != isinstance(node.op, ast.And)
                if decides:
                    return _merged([*values, value]) if values else value
                continue
            values.append(value)
        return _merged(values) if values else Value(object=isinstance(node.op, ast.And))

    def compare(self, node: ast.Compare, frame: _Frame) -> Value:
        sides = [self.value(side, frame) for side in (node.left, *node.comparators)]
        if any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops) and not all(s.known for s in sides):
            if len(sides) == 2 and any(TENSOR in s.labels for s in sides) and any(s.object is None for s in sides):
                return Value(object=isinstance(node.ops[0], ast.IsNot))
            return _ANY
        if len(sides) == 2 and all(side.known and not side.labels for side in sides):
            try:
                return Value(object=_OPERATORS[type(node.ops[0])](sides[0].object, sides[1].object))
            except Exception:  # whatever the user's objects raise
                return _ANY
        return Value(_merged(sides).labels)

    def attribute(self, owner: Value, name: str) -> Value:
        if owner.known and not owner.labels:
            try:
                found = inspect.getattr_static(owner.object, name) if _is_property(owner.object, name) else None
                return _ANY if found is not None else _of(getattr(owner.object, name))
            except Exception:  # whatever the user's objects raise
                return _ANY
        if TENSOR in owner.labels:
            if name == "shape":
                if owner.shape is not None and all(isinstance(size, int) for size in owner.shape):
                    return Value(object=owner.shape)  # declared fixed, or a weight's: plain numbers
                return Value(frozenset({SIZE}), shape=owner.shape)
            return Value(NONE if name in _STATIC_ATTRIBUTES else owner.labels)
        return Value(owner.labels)

    def subscript(self, node: ast.Subscript, frame: _Frame) -> Value:
        owner, index = self.value(node.value, frame), self.value(node.slice, frame)
        if SIZE in owner.labels and owner.shape is not None and isinstance(index.object, int):
            return _dimension(owner.shape, index.object)
        if owner.known and index.known and not owner.labels:
            try:
                return _of(owner.object[index.object])
            except Exception:  # whatever the user's objects raise
                return _ANY
        return Value(owner.labels | (index.labels & {NUMBER}))

    def call(self, node: ast.Call, frame: _Frame) -> Value:
        args = [self.value(a.value if isinstance(a, ast.Starred) else a, frame) for a in node.args]
        kwargs = {k.arg or "": self.value(k.value, frame) for k in node.keywords}
        every = [*args, *kwargs.values()]
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value, frame)
            if TENSOR in owner.labels or SIZE in owner.labels:
                return self.method(node, owner, node.func.attr, every, frame)
        function = self.value(node.func, frame)
        if not function.known:
            return Value(_merged([function, *every]).labels)
        called = function.object
        first = every[0] if every else _ANY
        if called in (int, float, bool, complex) and first.labels:
            rule = "shape/size-as-number" if not first.labels & VALUE else "shape/value-as-number"
            self.suspect(rule, first.labels & {TENSOR, SIZE}, node, frame, f"{called.__name__}()")
            return Value(frozenset({NUMBER}) if first.labels & VALUE else first.labels)
        if called is len and first.labels:
            if first.shape is not None and isinstance(first.shape[0], int):
                return Value(object=first.shape[0])
            self.suspect("shape/size-as-number", first.labels & {TENSOR}, node, frame, "len()")
            return Value(frozenset({SIZE}) if TENSOR in first.labels else NONE)
        if called is range and every and all(v.known and not v.labels for v in every):
            return Value(object=range(*[v.object for v in every]))
        if called in _ITERATING:
            return _iterated(called, every)
        return self.enter_callable(called, args, kwargs, node, frame)

    def enter_callable(
        self, called: Any, args: Sequence[Value], kwargs: Mapping[str, Value], node: ast.Call, frame: _Frame
    ) -> Value:
        from torch import nn

        every = [*args, *kwargs.values()]
        if isinstance(called, nn.Module):
            return self.enter_module(called, args, kwargs, path=_path(node.func, frame.module))
        if isinstance(called, MethodType) and isinstance(called.__func__, FunctionType):
            if is_tooling(called.__func__.__code__.co_filename):
                return _merged(every, tensor=bool(_merged(every).labels & {TENSOR}))
            return self.enter(called.__func__, [Value(object=called.__self__), *args], kwargs, path=frame.module)
        if isinstance(called, FunctionType) and not is_tooling(called.__code__.co_filename):
            return self.enter(called, args, kwargs, path=frame.module)
        name = str(getattr(called, "__name__", ""))
        labels = _merged(every).labels
        if _is_numpy(called) and labels & {TENSOR, SIZE}:
            rule = "shape/value-as-number" if TENSOR in labels else "shape/size-as-number"
            self.suspect(rule, labels, node, frame, f"numpy.{name}()")
            return Value(frozenset({NUMBER if TENSOR in labels else SIZE}))
        if called in (isinstance, hasattr, callable, type, issubclass) or name.startswith("is_"):
            return _ANY
        return Value(frozenset({TENSOR}) if TENSOR in labels else labels)

    def method(self, node: ast.Call, owner: Value, name: str, args: Sequence[Value], frame: _Frame) -> Value:
        if TENSOR not in owner.labels:
            return Value(owner.labels)
        if name in _STATIC_METHODS:
            return _ANY
        if name in _SIZE_METHODS:
            if name == "size" and owner.shape is not None and args and isinstance(args[0].object, int):
                return _dimension(owner.shape, args[0].object)
            return Value(frozenset({SIZE}), shape=owner.shape if name == "size" and not args else None)
        if name in _NUMBER_METHODS:
            self.suspect("shape/value-as-number", owner.labels & {TENSOR}, node, frame, f"{name}()")
            return Value(frozenset({NUMBER}))
        return Value(owner.labels | _merged(args).labels & {NUMBER} if args else owner.labels)

    def suspect(self, rule: str, labels: Iterable[str] | bool, node: ast.AST, frame: _Frame, word: str) -> None:
        """Note a suspicion when there are labels that make it one."""
        if not labels:
            return
        what = "a dynamic size" if rule.endswith(("size", "size-as-number")) else "a tensor's value"
        code = ast.unparse(node) if not isinstance(node, ast.Assert) else ast.unparse(node.test)
        self.findings.append(
            Finding(
                rule=rule,
                severity="warning",
                message=f"{word} depends on {what}: {code[:120]}",
                file=readable_path(frame.file, self.roots),
                line=getattr(node, "lineno", 0),
                module=frame.module,
                hint=_HINTS[rule],
            )
        )


def _parse(function: FunctionType) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None:
    """The definition of a function in its file; None when there is no source to read."""
    code = function.__code__
    for node in _definitions(code.co_filename):
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
        if (
            first == code.co_firstlineno
            and getattr(node, "name", "<lambda>") == code.co_name
            and arguments == list(code.co_varnames[: code.co_argcount])
        ):
            return node
    return None


@functools.lru_cache(maxsize=64)
def _definitions(file: str) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def _bound(
    function: FunctionType,
    definition: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
    args: Sequence[Value],
    kwargs: Mapping[str, Value],
) -> dict[str, Value]:
    """Parameters by name; what is not given has its default."""
    names = [a.arg for a in (*definition.args.posonlyargs, *definition.args.args)]
    bound = {n: _of(p.default) for n, p in inspect.signature(function).parameters.items() if p.default is not p.empty}
    bound.update(zip(names, args, strict=False))
    if definition.args.vararg is not None:
        bound[definition.args.vararg.arg] = Value(_merged(args[len(names) :]).labels)
    if definition.args.kwarg is not None:
        bound[definition.args.kwarg.arg] = Value(_merged(list(kwargs.values())).labels)
    bound.update({name: value for name, value in kwargs.items() if name})
    return bound


def _global(function: FunctionType, name: str) -> Value:
    """A name from the function's closure, module or builtins."""
    for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        if free == name:
            try:
                return _of(cell.cell_contents)
            except ValueError:
                return _ANY
    builtins = function.__globals__.get("__builtins__", {})
    scope = builtins if isinstance(builtins, dict) else vars(builtins)
    if name in function.__globals__:
        return _of(function.__globals__[name])
    return _of(scope[name]) if name in scope else _ANY


def _of(thing: Any) -> Value:
    """A Python object that exists already. Parameters and buffers are constants of the graph: their sizes are known."""
    import torch

    if isinstance(thing, torch.Tensor):
        return Value(frozenset({TENSOR}), shape=tuple(thing.shape))
    return Value(object=thing)


def _merged(values: Sequence[Value], *, tensor: bool = False) -> Value:
    """One value that may be any of these."""
    if len(values) == 1 and not tensor:
        return values[0]
    labels = frozenset(label for value in values for label in value.labels)
    return Value(labels | {TENSOR} if tensor else labels)


def _joined(left: Mapping[str, Value], right: Mapping[str, Value]) -> dict[str, Value]:
    """Names after two branches."""
    joined: dict[str, Value] = {}
    for name in {**left, **right}:
        a, b = left.get(name), right.get(name)
        joined[name] = a if a == b and a is not None else _merged([v for v in (a, b) if v is not None], tensor=False)
        if a is not None and b is not None and a != b:
            joined[name] = Value(a.labels | b.labels)
    return joined


def _item(value: Value, index: int) -> Value:
    """One part of a value that is unpacked."""
    if SIZE in value.labels and value.shape is not None:
        return _dimension(value.shape, index)
    if isinstance(value.object, tuple | list) and index < len(value.object):
        return _of(value.object[index])
    return Value(value.labels)


def _dimension(shape: tuple[int | str, ...], index: int) -> Value:
    """One size of a known shape: a number where it is fixed."""
    if not -len(shape) <= index < len(shape):
        return Value(frozenset({SIZE}))
    size = shape[index]
    return Value(object=size) if isinstance(size, int) else Value(frozenset({SIZE}))


def _iterated(called: Any, values: Sequence[Value]) -> Value:
    """What zip, enumerate and their like give."""
    if values and all(v.known and not v.labels for v in values):
        try:
            return Value(object=tuple(called(*[v.object for v in values])))
        except Exception:  # whatever the user's objects raise
            return _ANY
    return Value(_merged(values).labels)


def _is_numpy(called: Any) -> bool:
    """Whether it is a function of numpy, which knows neither tensors nor symbolic sizes."""
    return str(getattr(called, "__module__", None) or type(called).__module__).partition(".")[0] == "numpy"


def _is_modules(thing: Any) -> bool:
    from torch import nn

    return isinstance(thing, nn.ModuleList | nn.Sequential)


def _is_property(owner: Any, name: str) -> bool:
    """Whether reading the attribute would run the user's code."""
    return isinstance(inspect.getattr_static(type(owner), name, None), property)


def _truth(thing: Any) -> bool:
    try:
        return bool(thing)
    except Exception:  # whatever the user's objects raise
        return False


def _only_raises(node: ast.If) -> bool:
    return all(isinstance(statement, ast.Raise) for statement in node.body) and not node.orelse


def _loaded(target: ast.expr) -> ast.expr:
    """An assignment's target as an expression that is read."""
    return ast.parse(ast.unparse(target), mode="eval").body


def _path(node: ast.expr, module: str) -> str:
    """Module path of what is called: `self.block.conv` in module `stem` is `stem.block.conv`."""
    parts = ast.unparse(node).split(".")
    below = ".".join(parts[1:]) if parts[0] == "self" else ""
    return ".".join(part for part in (module, below) if part)
