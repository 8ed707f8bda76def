"""Turns a pickle into plain values and inert records of what it would have built, without building any of it.

The opcodes (parsed by the standard library's pickletools) are followed on a stack of our own. Nothing is imported and
nothing is called: a class or function stays its name, a call stays a `Record` of the name and the arguments. Only the
following become values: numbers, strings, bytes, containers, and tensors, through a function that the caller gives.

This is stricter than `torch.load(weights_only=True)`, which calls the functions on its list, and it reads more: an
object in a part of the checkpoint that nobody needs does no harm. Calls of functions that no checkpoint needs are
refused by name all the same (see `is_harmless`), because a file that asks for them was not made by a training run.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import IO, Any, cast

from enginesmith.tasks.slim.tensors import Malformed, MappedFile

MAX_STEPS = 4_000_000  # about three seconds and at most some 300 MB; a checkpoint with 90 000 tensors needs 3 million

_LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class Global:
    """A class or function, by name only."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Record:
    """An object that the pickle would have built.

    Attributes:
        type: the class, or the function that returns the object.
        args: what it is called with.
        state: what BUILD gives to it, None without.
        entries: what is set by key.
        items: what is appended.
        called: it comes from a call (REDUCE) and not from plain object creation.
    """

    type: Global
    args: tuple[Any, ...]
    called: bool
    state: Any = None
    entries: dict[Any, Any] = field(default_factory=dict)
    items: list[Any] = field(default_factory=list)


# What REDUCE may name: constructors of plain values. They are recorded, not called.
_HARMLESS = re.compile(
    r"""
    ( collections\.(OrderedDict|defaultdict|Counter|deque)
    | (builtins|__builtin__)\.(set|frozenset|list|dict|tuple|bytearray|bytes|complex|slice|range|object)
    | (builtins|__builtin__)\.(int|float|str|bool)
    | numpy\.(_core|core)\.multiarray\.(scalar|_reconstruct)
    | numpy\.(_core|core)\.numeric\._frombuffer
    | numpy\.(dtype|ndarray)
    | numpy\.dtypes\.\w+DType
    | _codecs\.encode
    | copyreg\._reconstructor | copy_reg\._reconstructor
    | pathlib\.(\w+\.)?(Pure)?(Posix|Windows)?Path
    | datetime\.(datetime|date|time|timedelta|timezone)
    | decimal\.Decimal | fractions\.Fraction | uuid\.UUID | argparse\.Namespace
    | torch\.(device|Size|dtype|Generator)
    | torch\.serialization\._get_layout
    | torch\._utils\._rebuild_\w+
    | torch\._tensor\._rebuild_from_type_v2
    | torch\.storage\._load_from_bytes
    | torch\.nn\.parameter\.(Parameter|Buffer)
    )""",
    re.VERBOSE,
)


@lru_cache(maxsize=4096)
def is_harmless(name: Global) -> bool:
    """Whether a checkpoint may call this class or function: it makes a plain value."""
    return _HARMLESS.fullmatch(str(name)) is not None


@dataclass(frozen=True)
class Unpickled:
    """What one pickle holds.

    Attributes:
        value: the object.
        end: position just behind the pickle in the mapped file.
        foreign: classes and functions that are not harmless, sorted.
        forbidden: those of them that it would call, sorted.
    """

    value: Any
    end: int
    foreign: tuple[str, ...]
    forbidden: tuple[str, ...]


def read_pickle(
    file: MappedFile,
    start: int,
    end: int,
    *,
    load: Callable[[Any], Any],
    call: Callable[[Global, tuple[Any, ...]], Any],
) -> Unpickled:
    """Read the pickle that starts at one position of a file.

    Args:
        file: the file.
        start: first byte.
        end: the pickle lies before this position.
        load: turns a persistent id (torch: a storage) into a value.
        call: turns a call into a value, or returns NotImplemented, so that it stays a record.

    Raises:
        Malformed: no valid pickle, or one of absurd length.
    """
    window = _Window(file, start, end)
    machine = _Machine(load, call)
    try:
        for steps, (opcode, argument, _) in enumerate(pickletools.genops(cast("IO[bytes]", window))):
            if steps + machine.copied > MAX_STEPS:
                raise Malformed(f"its pickle takes more than {MAX_STEPS} steps")
            machine.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise Malformed(f"its pickle is broken near byte {window.tell()}: {error}") from error
    foreign = tuple(sorted(str(g) for g in machine.foreign))
    return Unpickled(machine.result, start + window.tell(), foreign, tuple(sorted(str(g) for g in machine.forbidden)))


class _Window:
    """The part of a mapped file that pickletools may read; a missing line end cannot make it read everything."""

    def __init__(self, file: MappedFile, start: int, end: int) -> None:
        self.file = file
        self.start = start
        self.end = end
        self.position = start

    def read(self, size: int) -> bytes:
        stop = min(self.position + size, self.end)
        data = self.file.map[self.position : stop]
        self.position = stop
        return data

    def readline(self) -> bytes:
        found = self.file.map.find(b"\n", self.position, min(self.position + _LINE_BYTES, self.end))
        return self.read(found + 1 - self.position) if found >= 0 else b""

    def tell(self) -> int:
        return self.position - self.start


_MARK = object()


class _Machine:
    """The pickle virtual machine, reduced to data."""

    def __init__(self, load: Callable[[Any], Any], call: Callable[[Global, tuple[Any, ...]], Any]) -> None:
        self.load = load
        self.call = call
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.result: Any = None
        self.copied = 0
        self.foreign: set[Global] = set()
        self.forbidden: set[Global] = set()

    def step(self, name: str, argument: Any) -> None:
        handler = _HANDLERS.get(name)
        if handler is None:
            raise Malformed(f"its pickle uses {name}, which no checkpoint needs")
        handler(self, argument)

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("stack underflow")
        return value

    def pop_to_mark(self) -> list[Any]:
        for index in range(len(self.stack) - 1, -1, -1):
            if self.stack[index] is _MARK:
                items = self.stack[index + 1 :]
                del self.stack[index:]
                return items
        raise ValueError("no mark")

    def top(self) -> Any:
        if self.stack[-1] is _MARK:
            raise ValueError("stack underflow")
        return self.stack[-1]

    def name(self, module: Any, name: Any) -> Global:
        if not isinstance(module, str) or not isinstance(name, str):
            raise Malformed("its pickle names a class by something that is no string")
        return Global(module, name)

    def reduce(self, function: Any, args: Any) -> Any:
        if not isinstance(args, tuple):
            raise TypeError("arguments that are no tuple")
        if not isinstance(function, Global):
            raise Malformed(f"its pickle calls {_kind(function)}, which is no name of a class or function")
        if not is_harmless(function):
            self.foreign.add(function)
            self.forbidden.add(function)
        known = str(function)
        if known in ("collections.OrderedDict", "builtins.dict", "__builtin__.dict"):
            return self._dict(args)
        if known in ("copyreg._reconstructor", "copy_reg._reconstructor") and args:
            return self.create(args[0], args[1:])
        if known in _COLLECTIONS and len(args) == 1 and isinstance(args[0], list | tuple):
            self.copied += len(args[0])
            return _COLLECTIONS[known](args[0])
        value = self.call(function, args)
        return Record(function, args, called=True) if value is NotImplemented else value

    def create(self, kind: Any, args: Any) -> Record:
        if not isinstance(kind, Global) or not isinstance(args, tuple):
            raise Malformed(f"its pickle builds an object of {_kind(kind)}, which is no class")
        if not is_harmless(kind):
            self.foreign.add(kind)
        return Record(kind, args, called=False)

    def _dict(self, args: tuple[Any, ...]) -> dict[Any, Any]:
        if not args:
            return {}
        pairs = list(args[0].items()) if isinstance(args[0], dict) else args[0]
        self.copied += len(pairs)
        return {_key(key): value for key, value in pairs}

    def set_entries(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, Record):
            target = target.entries
        if not isinstance(target, dict):
            raise TypeError("entries set in what is no dictionary")
        for index in range(0, len(items) - 1, 2):
            target[_key(items[index])] = items[index + 1]

    def append(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, Record):
            target = target.items
        if not isinstance(target, list):
            raise TypeError("items appended to what is no list")
        target.extend(items)

    def build(self, state: Any) -> None:
        target = self.top()
        if isinstance(target, Record):
            target.state = state
        # An OrderedDict may carry attributes (torch: _metadata); they hold no weights.


def _key(value: Any) -> Any:
    """A key that can be hashed whatever the pickle says: a deeply nested tuple would overflow the C stack."""
    plain = value is None or isinstance(value, str | bytes | int | float | complex | Global | Record)
    return value if plain else Record(Global("builtins", type(value).__name__), (value,), called=False)


def _hashed(kind: Callable[[Iterable[Any]], Any]) -> Callable[[Iterable[Any]], Any]:
    return lambda items: kind(map(_key, items))


def _kind(value: Any) -> str:
    return f"a value of type {type(value).__name__}"


def _global(machine: _Machine, argument: Any) -> None:
    module, _, name = argument.partition(" ")
    machine.push(machine.name(module, name))


def _stack_global(machine: _Machine, _: Any) -> None:
    name, module = machine.pop(), machine.pop()
    machine.push(machine.name(module, name))


def _tuple_of(count: int) -> Callable[[_Machine, Any], None]:
    def handler(machine: _Machine, _: Any) -> None:
        items = [machine.pop() for _ in range(count)]
        machine.push(tuple(reversed(items)))

    return handler


def _reduce(machine: _Machine, _: Any) -> None:
    args, function = machine.pop(), machine.pop()
    machine.push(machine.reduce(function, args))


def _newobj(machine: _Machine, _: Any) -> None:
    args, kind = machine.pop(), machine.pop()
    machine.push(machine.create(kind, args))


def _newobj_ex(machine: _Machine, _: Any) -> None:
    machine.pop()
    _newobj(machine, _)


def _inst(machine: _Machine, argument: Any) -> None:
    module, _, name = argument.partition(" ")
    args = tuple(machine.pop_to_mark())
    machine.push(machine.reduce(machine.name(module, name), args))


def _obj(machine: _Machine, _: Any) -> None:
    kind, *args = machine.pop_to_mark()
    machine.push(machine.reduce(kind, tuple(args)))


def _build(machine: _Machine, _: Any) -> None:
    machine.build(machine.pop())


def _set_item(machine: _Machine, _: Any) -> None:
    value, key = machine.pop(), machine.pop()
    machine.set_entries(machine.top(), [key, value])


def _set_items(machine: _Machine, _: Any) -> None:
    items = machine.pop_to_mark()
    machine.set_entries(machine.top(), items)


def _append(machine: _Machine, _: Any) -> None:
    item = machine.pop()
    machine.append(machine.top(), [item])


def _appends(machine: _Machine, _: Any) -> None:
    items = machine.pop_to_mark()
    machine.append(machine.top(), items)


def _add_items(machine: _Machine, _: Any) -> None:
    items = machine.pop_to_mark()
    target = machine.top()
    if not isinstance(target, set):
        raise TypeError("items added to what is no set")
    target.update(map(_key, items))


def _dict(machine: _Machine, _: Any) -> None:
    items = machine.pop_to_mark()
    value: dict[Any, Any] = {}
    machine.set_entries(value, items)
    machine.push(value)


def _persid(machine: _Machine, argument: Any) -> None:
    machine.push(machine.load(machine.pop() if argument is None else argument))


def _memoize(machine: _Machine, _: Any) -> None:
    machine.memo[len(machine.memo)] = machine.top()


def _put(machine: _Machine, argument: Any) -> None:
    machine.memo[argument] = machine.top()


def _pop(machine: _Machine, _: Any) -> None:
    machine.stack.pop()


def _pop_mark(machine: _Machine, _: Any) -> None:
    machine.pop_to_mark()


def _stop(machine: _Machine, _: Any) -> None:
    machine.result = machine.pop()


def _pushing(make: Callable[[], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.push(make())


def _literal(machine: _Machine, argument: Any) -> None:
    machine.push(argument)


_COLLECTIONS: dict[str, Callable[[Any], Any]] = {
    f"{module}.{name}": make
    for module in ("builtins", "__builtin__")
    for name, make in {"set": _hashed(set), "frozenset": _hashed(frozenset), "list": list, "tuple": tuple}.items()
}

_LITERALS = [
    "INT",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG",
    "LONG1",
    "LONG4",
    "FLOAT",
    "BINFLOAT",
    "STRING",
    "BINSTRING",
    "SHORT_BINSTRING",
    "UNICODE",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
    "BYTEARRAY8",
]

_HANDLERS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(_LITERALS, _literal),
    "PROTO": lambda _machine, _argument: None,
    "FRAME": lambda _machine, _argument: None,
    "STOP": _stop,
    "MARK": _pushing(lambda: _MARK),
    "POP": _pop,
    "POP_MARK": _pop_mark,
    "DUP": lambda machine, _: machine.push(machine.top()),
    "NONE": _pushing(lambda: None),
    "NEWTRUE": _pushing(lambda: True),
    "NEWFALSE": _pushing(lambda: False),
    "EMPTY_LIST": _pushing(list),
    "EMPTY_DICT": _pushing(dict),
    "EMPTY_SET": _pushing(set),
    "EMPTY_TUPLE": _pushing(tuple),
    "LIST": lambda machine, _: machine.push(machine.pop_to_mark()),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_to_mark())),
    "FROZENSET": lambda machine, _: machine.push(frozenset(map(_key, machine.pop_to_mark()))),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "DICT": _dict,
    "APPEND": _append,
    "APPENDS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "ADDITEMS": _add_items,
    "GET": lambda machine, argument: machine.push(machine.memo[argument]),
    "BINGET": lambda machine, argument: machine.push(machine.memo[argument]),
    "LONG_BINGET": lambda machine, argument: machine.push(machine.memo[argument]),
    "PUT": _put,
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "MEMOIZE": _memoize,
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "INST": _inst,
    "OBJ": _obj,
    "NEWOBJ": _newobj,
    "NEWOBJ_EX": _newobj_ex,
    "REDUCE": _reduce,
    "BUILD": _build,
    "PERSID": _persid,
    "BINPERSID": _persid,
}


def parts_of(value: Any) -> Collection[Any]:
    """What a container or record holds; nothing for any other value."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, Record):
        return [value.state, *value.args, *value.items, *value.entries.values()]
    return ()
