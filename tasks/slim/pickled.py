"""Turns a pickle into plain values and inert records of what it would have built, without building any of it.

The opcodes (of the standard library's pickletools) are followed on a stack of our own. Nothing is imported and
nothing is called: a class or function stays its name, a call stays a `Record` of the name and the arguments. Only the
following become values: numbers, strings, bytes, containers, and tensors, through a function that the caller gives.

This is stricter than `torch.load(weights_only=True)`, which calls the functions on its list, and it reads more: an
object in a part of the checkpoint that nobody needs does no harm. Calls of functions that no checkpoint needs are
refused by name all the same (see `is_harmless`), because a file that asks for them was not made by a training run.

Time and memory are bounded by one budget of steps; what takes more memory costs more of them. Long texts and bytes stay
in the file, and what could be made to collide in a hash table is never a key.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

from enginesmith.tasks.slim.tensors import Malformed, MappedFile

MAX_STEPS = 3_000_000  # under a second and at most some 300 MB; a checkpoint with 80 000 tensors needs as many

_LINE_BYTES = 1 << 16
_TEXT_BYTES = 1 << 16  # longer ones are values that no weight's name or description has
_LONG_BYTES = 1 << 10
_OBJECT_COST = 5  # an empty record or set takes as much memory as so many of the cheapest things on the stack
_TEXT_COST = 64  # bytes per step
_PLAIN_INT = 1 << 60  # beyond it, different numbers can have one hash


@dataclass(frozen=True)
class Global:
    """A class or function, by name only."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Blob:
    """A text or bytes too long to be part of a description; it stays in the file."""

    start: int
    size: int


@dataclass(eq=False, slots=True)
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
    max_steps: int = MAX_STEPS,
) -> Unpickled:
    """Read the pickle that starts at one position of a file.

    Args:
        file: the file.
        start: first byte.
        end: the pickle lies before this position.
        load: turns a persistent id (torch: a storage) into a value.
        call: turns a call into a value, or returns NotImplemented, so that it stays a record.
        max_steps: how much work it may make.

    Raises:
        Malformed: no valid pickle, or one of absurd length.
    """
    window = _Window(file, start, end)
    machine = _Machine(load, call)
    try:
        machine.run(window, max_steps)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise Malformed(f"its pickle is broken near byte {window.tell()}: {_short(error)}") from error
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
        stop = min(self.position + max(size, 0), self.end)
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
        self.cost = 0
        self.stopped = False
        self.foreign: set[Global] = set()
        self.forbidden: set[Global] = set()

    def run(self, window: _Window, max_steps: int) -> None:
        """Follow the opcodes up to STOP. One loop, because a million of them must not take a second."""
        data, end, position, steps = window.file.map, window.end, window.position, 0
        while not self.stopped:
            if position >= end:
                raise ValueError("it ends before its last instruction")
            code = data[position]
            position += 1
            steps += 1
            if steps + self.cost > max_steps:
                window.position = position
                raise Malformed(f"its pickle takes more than {max_steps} steps")
            handler, reader = _TABLE[code]
            if reader is None:
                handler(self, code)
            else:
                window.position = position
                argument = reader(window)
                position = window.position
                if type(argument) in _TEXTS:
                    self.cost += len(argument) // _TEXT_COST
                handler(self, argument)
        window.position = position

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
            self.cost += len(args[0])
            return _COLLECTIONS[known](args[0])
        self.cost += _OBJECT_COST
        value = self.call(function, args)
        return Record(function, args, called=True) if value is NotImplemented else value

    def create(self, kind: Any, args: Any) -> Record:
        if not isinstance(kind, Global) or not isinstance(args, tuple):
            raise Malformed(f"its pickle builds an object of {_kind(kind)}, which is no class")
        if not is_harmless(kind):
            self.foreign.add(kind)
        self.cost += _OBJECT_COST
        return Record(kind, args, called=False)

    def _dict(self, args: tuple[Any, ...]) -> dict[Any, Any]:
        if not args:
            return {}
        pairs = list(args[0].items()) if isinstance(args[0], dict) else args[0]
        self.cost += len(pairs)
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
    """A key that can be hashed whatever the pickle says.

    A deeply nested tuple would overflow the C stack; of integers and complex numbers any number can have the same hash.
    """
    plain = value is None or isinstance(value, str | bytes | float | Global | Record)
    plain = plain or (isinstance(value, int) and -_PLAIN_INT < value < _PLAIN_INT)
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
    if not 0 <= argument < 1 << 32:
        raise ValueError(f"memo entry {_short(argument)}")
    machine.memo[argument] = machine.top()


def _pop(machine: _Machine, _: Any) -> None:
    machine.stack.pop()


def _pop_mark(machine: _Machine, _: Any) -> None:
    machine.pop_to_mark()


def _stop(machine: _Machine, _: Any) -> None:
    machine.result = machine.pop()
    machine.stopped = True


def _pushing(make: Callable[[], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.push(make())


def _empty_set(machine: _Machine, _: Any) -> None:
    machine.cost += _OBJECT_COST
    machine.push(set())


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
    "EMPTY_SET": _empty_set,
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


def _length_prefixed(width: int, make: Callable[[bytes], Any]) -> Callable[[_Window], Any]:
    """Reads a text or bytes behind its length of `width` bytes; a long one is not copied."""

    def reader(window: _Window) -> Any:
        size = int.from_bytes(window.read(width), "little")
        start = window.position
        if start + size > window.end:
            raise ValueError(f"a text of {size} bytes")
        if size > _TEXT_BYTES:
            window.position += size
            return Blob(start, size)
        return make(window.read(size))

    return reader


def _number(width: int) -> Callable[[_Window], Any]:
    return lambda window: int.from_bytes(_exactly(window, width), "little")


def _long(width: int) -> Callable[[_Window], Any]:
    def reader(window: _Window) -> int:
        size = int.from_bytes(_exactly(window, width), "little")
        if size > _LONG_BYTES:
            raise ValueError(f"a number of {size} bytes")
        return int.from_bytes(_exactly(window, size), "little", signed=True)

    return reader


def _exactly(window: _Window, size: int) -> bytes:
    data = window.read(size)
    if len(data) < size:
        raise ValueError("it ends within a number")
    return data


def _utf8(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _latin1(data: bytes) -> str:
    return data.decode("latin-1")


# Readers of arguments that are quicker than pickletools' own, or that do not copy whatever length the file claims.
_READERS: dict[str, Callable[[_Window], Any]] = {
    **{name: _number(1) for name in ("BININT1", "BINPUT", "BINGET", "PROTO")},
    **{name: _number(2) for name in ("BININT2",)},
    **{name: _number(4) for name in ("LONG_BINPUT", "LONG_BINGET")},
    "LONG1": _long(1),
    "LONG4": _long(4),
    "SHORT_BINUNICODE": _length_prefixed(1, _utf8),
    "BINUNICODE": _length_prefixed(4, _utf8),
    "BINUNICODE8": _length_prefixed(8, _utf8),
    "SHORT_BINSTRING": _length_prefixed(1, _latin1),
    "BINSTRING": _length_prefixed(4, _latin1),
    "SHORT_BINBYTES": _length_prefixed(1, bytes),
    "BINBYTES": _length_prefixed(4, bytes),
    "BINBYTES8": _length_prefixed(8, bytes),
    "BYTEARRAY8": _length_prefixed(8, bytes),
}
_TEXTS = (str, bytes)


def _refuse(_: _Machine, argument: Any) -> None:
    code = argument if isinstance(argument, int) else 0
    raise Malformed(f"its pickle holds instruction {code:#x}, which no checkpoint needs")


def _entry(code: int) -> tuple[Callable[[_Machine, Any], None], Callable[[_Window], Any] | None]:
    """The handler of an opcode and the reader of its argument, None without argument."""
    opcode = _OPCODES.get(code)
    if opcode is None or opcode.name not in _HANDLERS:
        return _refuse, None
    if opcode.arg is None:
        # PERSID's handler tells the two kinds of persistent id apart by their argument.
        handler = _HANDLERS[opcode.name]
        return (lambda machine, _: handler(machine, None)) if opcode.name == "BINPERSID" else handler, None
    own = _READERS.get(opcode.name)
    return _HANDLERS[opcode.name], own or cast("Callable[[_Window], Any]", opcode.arg.reader)


_OPCODES = {ord(opcode.code): opcode for opcode in pickletools.opcodes}
_TABLE = [_entry(code) for code in range(256)]


def _short(value: object) -> str:
    """A value's text, cut; a number may have a million digits."""
    try:
        text = str(value)
    except ValueError:
        return "an enormous number"
    return text if len(text) <= 200 else f"{text[:200]}..."


def parts_of(value: Any) -> Collection[Any]:
    """What a container or record holds; nothing for any other value."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, Record):
        return [value.state, *value.args, *value.items, *value.entries.values()]
    return ()
