"""Turns a checkpoint file of any known format into its content: plain values, and tensors that stay in the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.slim.archive import Archive, open_archive
from enginesmith.tasks.slim.pickled import Global, Record, read_pickle
from enginesmith.tasks.slim.tensors import DTYPES, Malformed, MappedFile, Storage, Tensor, contiguous_strides

KEY = "model.checkpoint"

_HEADER_BYTES = 16 << 20  # some 150 000 tensors; parsing safetensors' own limit, 100 MB, can fill gigabytes
_PICKLE_MAGIC = 0x1950A86A20F9469CFC6C  # torch.serialization.MAGIC_NUMBER
_INDEX_BYTES = 16 << 20

# PyTorch's storage classes and dtypes, and safetensors' name for the same bits; None: no plain numbers.
_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
}
_TORCH_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
# torch._export.serde.schema.ScalarType, as written into a .pt2 archive
_PT2_DTYPES = {
    1: "U8", 2: "I8", 3: "I16", 4: "I32", 5: "I64", 6: "F16", 7: "F32", 8: "F64", 10: "C64", 12: "BOOL", 13: "BF16",
    28: "U16", 29: "F8_E4M3", 30: "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class Unsupported:
    """A tensor that cannot be kept, with the reason (sparse, quantized, on several devices)."""

    reason: str


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds.

    Attributes:
        format: what kind of file it is, in words.
        root: its content: dictionaries, lists, numbers, strings, `Tensor`, `Record`.
        size: bytes of the file, of all shards when it is an index.
        foreign: classes and functions of the user's that the file names; nothing of them was run.
        forbidden: those that loading the file with `pickle` would call.
    """

    format: str
    root: Any
    size: int
    foreign: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()


def read_checkpoint(path: Path) -> Checkpoint:
    """Read any known checkpoint format. Nothing in the file is executed, and no tensor is copied into memory.

    Raises:
        EnginesmithError: the file is missing, empty, truncated, of no known format, or not what it claims to be.
    """
    try:
        if path.suffix == ".json":
            return _read_index(path)
        return _read(MappedFile(path))
    except Malformed as error:
        raise EnginesmithError(
            f"the checkpoint cannot be read: {error}",
            where=str(path),
            key=KEY,
            hint="readable are .pt and .pth (also TorchScript and .pt2, of which only the weights are read), .ckpt, "
            ".safetensors and a shard index (.index.json)",
        ) from error
    except OSError as error:
        raise EnginesmithError(f"the checkpoint cannot be read: {error.strerror}", where=str(path), key=KEY) from error


def shard_paths(index: Path) -> list[Path]:
    """The files that a shard index names, sorted; each lies in the index's own folder.

    Raises:
        EnginesmithError: it is no index, or it names something outside its folder.
    """
    try:
        return [index.parent / name for name in sorted(set(_read_weight_map(index).values()))]
    except Malformed as error:
        raise EnginesmithError(f"the shard index cannot be read: {error}", where=str(index), key=KEY) from error


def _read(file: MappedFile) -> Checkpoint:
    head = file.map[:16]
    if head.startswith(b"PK\x03\x04"):
        return _read_zip(file)
    if head.startswith(b"PK"):
        raise Malformed("an empty zip file")
    if len(head) >= 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _HEADER_BYTES:
        return Checkpoint("safetensors", read_safetensors(file)[0], file.size)
    if head[:1] == b"\x80":
        return _read_legacy(file)
    if head.startswith(b"\x1f\x8b") or file.map[257:262] == b"ustar":
        raise Malformed("a tar or gzip file; unpack it, or load and save it again with PyTorch 1.6 or newer")
    if head.startswith(b"\x89HDF"):
        raise Malformed("an HDF5 (Keras) file, not a PyTorch checkpoint")
    if head.startswith(b"version https://git-lfs"):
        raise Malformed("a Git LFS pointer, not the file itself; fetch it with git lfs pull")
    raise Malformed(f"no known format (it starts with {head[:8]!r})")


# --- safetensors ---------------------------------------------------------------------------------------------------


def read_safetensors(file: MappedFile) -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors by name, and the metadata, of one .safetensors file.

    Raises:
        Malformed: a header that is no valid one, or tensors that overlap, leave gaps or reach outside the file.
    """
    if file.size < 8:
        raise Malformed("shorter than a safetensors header")
    length = int.from_bytes(file.map[:8], "little")
    if length > min(_HEADER_BYTES, file.size - 8):
        raise Malformed(f"its header claims {length} bytes, the file has {file.size} (is it truncated?)")
    header = _load_json(file.map[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    base = 8 + length
    tensors: dict[str, Any] = {}
    for name, entry in header.items():
        try:
            dtype, shape, (first, last) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise Malformed(f"tensor {name!r} has no dtype, shape or data_offsets") from error
        if not all(type(n) is int and n >= 0 for n in (first, last)) or last < first:
            raise Malformed(f"tensor {name!r} has offsets that are no range of bytes")
        storage = Storage(file, base + first, last - first)
        if dtype not in DTYPES:
            tensors[name] = Unsupported(f"element type {dtype}")
            continue
        tensor = Tensor(dtype, shape, contiguous_strides(shape), storage)
        if tensor.nbytes != storage.size:
            raise Malformed(f"tensor {name!r} of shape {shape} {dtype} has {storage.size} bytes")
        tensors[name] = tensor
    behind = base
    for entry in sorted(header.values(), key=lambda e: e["data_offsets"]):
        if base + entry["data_offsets"][0] != behind:
            raise Malformed("its tensors overlap or leave gaps")
        behind = base + entry["data_offsets"][1]
    if behind != file.size:
        raise Malformed(f"{file.size - behind} bytes behind the last tensor")
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Malformed("its metadata is no table of strings")
    return tensors, metadata


def _read_index(path: Path) -> Checkpoint:
    """A sharded checkpoint: every name from the shard that the index gives it."""
    names = _read_weight_map(path)
    size = path.stat().st_size
    shards: dict[str, Checkpoint] = {}
    for shard in sorted(set(names.values())):
        place = path.parent / shard
        if not place.is_file():
            raise Malformed(f"shard {shard!r} is missing")
        # A hub's cache keeps the index and its shards as links into one other folder; any other link is a trick.
        if place.resolve().parent not in (path.parent.resolve(), path.resolve().parent):
            raise Malformed(f"shard {shard!r} is a link to a file in another folder")
        try:
            shards[shard] = _read(MappedFile(place))
        except Malformed as error:
            raise Malformed(f"shard {shard!r}: {error}") from error
        if not isinstance(shards[shard].root, dict):
            raise Malformed(f"shard {shard!r} holds no table of tensors")
        size += shards[shard].size
    root: dict[str, Any] = {}
    for name, shard in sorted(names.items()):
        if name not in shards[shard].root:
            raise Malformed(f"tensor {name!r} is not in shard {shard!r}")
        root[name] = shards[shard].root[name]
    unlisted = {n for s in shards.values() for n in s.root} - set(names)
    if unlisted:
        raise Malformed(f"its shards hold {len(unlisted)} tensors that the index does not list, as {min(unlisted)!r}")
    owners: dict[str, str] = {}
    for shard, content in shards.items():
        for name in content.root:
            if name in owners:
                raise Malformed(f"tensor {name!r} is in two shards, {owners[name]!r} and {shard!r}")
            owners[name] = shard
    kinds = sorted({c.format for c in shards.values()})
    return Checkpoint(
        f"{' and '.join(kinds)} in {len(shards)} shards",
        root,
        size,
        tuple(sorted({g for c in shards.values() for g in c.foreign})),
        tuple(sorted({g for c in shards.values() for g in c.forbidden})),
    )


def _read_weight_map(path: Path) -> dict[str, str]:
    if path.stat().st_size > _INDEX_BYTES:
        raise Malformed("an absurdly large index")
    names = _load_json(path.read_bytes()).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(v, str) for v in names.values()):
        raise Malformed("it has no weight_map; a .json file is read as a shard index")
    for shard in set(names.values()):
        if shard in ("", ".", "..") or "\\" in shard or "\0" in shard or PurePosixPath(shard).name != shard:
            raise Malformed(f"shard {shard!r} is not a plain file name in the index's folder")
        if shard.endswith(".json"):
            raise Malformed(f"shard {shard!r} is an index itself")
    return names


def _load_json(data: bytes) -> dict[str, Any]:
    """A JSON object; the same key twice is an error, not a choice."""

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise Malformed(f"{twice!r} stands twice in its JSON header")
        return result

    try:
        value = json.loads(data, object_pairs_hook=table)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"its JSON header is broken: {error}") from error
    if not isinstance(value, dict):
        raise Malformed("its JSON header is no object")
    return value


# --- PyTorch's zip format ------------------------------------------------------------------------------------------


def _read_zip(file: MappedFile) -> Checkpoint:
    archive = open_archive(file)
    names = archive.records
    if "archive_format" in names:
        return _read_pt2(archive)
    if "serialized_exported_program.json" in names:
        return _read_inner(archive, "serialized_state_dict.pt")
    if "data.pkl" not in names:
        kind = "a NumPy .npz" if any(n.endswith(".npy") for n in names) else "no PyTorch checkpoint"
        raise Malformed(f"a zip file, but {kind}: it has no data.pkl")
    return _read_pickled(archive)


def _read_pickled(archive: Archive) -> Checkpoint:
    file, names = archive.file, archive.records
    if "byteorder" in names and archive.read("byteorder").strip() == b"big":
        raise Malformed("it was saved on a big-endian machine")
    start, size = archive.place("data.pkl")
    reader = _Tensors(lambda key, nbytes: _record_storage(archive, key, nbytes))
    found = read_pickle(file, start, start + size, load=reader.load, call=reader.call)
    if "constants.pkl" in names and any(n.startswith("code/") for n in names):
        return Checkpoint("TorchScript (weights only)", _script_state(archive, found.value), file.size)
    return Checkpoint("PyTorch zip", found.value, file.size, found.foreign, found.forbidden)


def _record_storage(archive: Archive, key: str, nbytes: int) -> Storage:
    start, size = archive.place(f"data/{key}")
    if size < nbytes:
        raise Malformed(f"storage {key!r} has {size} bytes, {nbytes} are claimed")
    return Storage(archive.file, start, nbytes)


class _Tensors:
    """Turns torch's persistent ids into storages, and its rebuild calls into tensors."""

    def __init__(self, find: Callable[[str, int], Storage]) -> None:
        self.find = find
        self.storages: dict[str, Storage] = {}

    def load(self, identity: Any) -> Any:
        """``('storage', class, key, location, numel)``; legacy files add a view of a larger storage."""
        if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
            raise Malformed("a persistent id that is no storage")
        kind, key, numel = identity[1], identity[2], identity[4]
        view = identity[5] if len(identity) > 5 else None
        if not isinstance(kind, Global) or not isinstance(key, str) or type(numel) is not int or numel < 0:
            raise Malformed("a storage whose description is broken")
        dtype = "U8" if kind.name == "UntypedStorage" else _STORAGES.get(kind.name, "")
        if not dtype:
            return Unsupported(f"storage class {kind}")
        if view is not None:
            return Unsupported("a view of another storage (PyTorch before 0.4)")
        if key not in self.storages:
            self.storages[key] = self.find(key, numel * DTYPES[dtype].itemsize)
        storage = self.storages[key]
        if storage.size < numel * DTYPES[dtype].itemsize:
            raise Malformed(f"storage {key!r} is claimed with two sizes")
        return _Typed(storage, dtype)

    def call(self, function: Global, args: tuple[Any, ...]) -> Any:
        """The tensor that a rebuild function of torch would return; NotImplemented for all else."""
        if function.module == "torch._utils" and function.name.startswith("_rebuild_"):
            return self._rebuild(function.name, args)
        if str(function) == "torch._tensor._rebuild_from_type_v2":
            inner, kind, inner_args, _ = args
            plain = isinstance(kind, Global) and str(kind) in ("torch.Tensor", "torch.nn.parameter.Parameter")
            value = self.call(inner, inner_args) if isinstance(inner, Global) else NotImplemented
            return value if plain and value is not NotImplemented else Unsupported(f"tensor subclass {kind}")
        if str(function) == "torch.storage._load_from_bytes":
            return Unsupported("a storage pickled without torch.save")
        return NotImplemented

    def _rebuild(self, name: str, args: tuple[Any, ...]) -> Any:
        if name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
            return args[0]
        if name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            typed, offset, shape, strides = args[:4]
            if isinstance(typed, Unsupported):
                return typed
            if not isinstance(typed, _Typed):
                raise Malformed("a tensor without a storage")
            dtype: str | None = typed.dtype
            if name == "_rebuild_tensor_v3":
                dtype = _TORCH_DTYPES.get(args[6].name) if isinstance(args[6], Global) else None
                if dtype is None:
                    return Unsupported(f"element type {args[6]}")
            elif len(args) > 6 and args[6]:
                return Unsupported("a lazily conjugated or negated tensor")
            return Tensor(str(dtype), _sizes(shape), _sizes(strides), typed.storage, offset)
        return Unsupported(name.removeprefix("_rebuild_").replace("_", " "))


@dataclass(frozen=True)
class _Typed:
    """A storage as a pickle refers to it, with the element type of its class."""

    storage: Storage
    dtype: str


def _sizes(value: Any) -> tuple[int, ...]:
    if isinstance(value, Record) and str(value.type) == "torch.Size" and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, tuple | list):
        raise Malformed("a tensor whose shape is no list of numbers")
    return tuple(value)


# --- PyTorch's format before 1.6 -----------------------------------------------------------------------------------


def _read_legacy(file: MappedFile) -> Checkpoint:
    """Magic number, protocol, system, the object, and the storages' keys: five pickles; then the storages' bytes."""

    def no_storage(_: Any) -> Any:
        raise Malformed("a plain pickle, which holds no tensors of its own; save it with torch.save")

    position = 0
    head = []
    for _ in range(3):
        found = read_pickle(file, position, file.size, load=no_storage, call=lambda *_: NotImplemented)
        head.append(found.value)
        position = found.end
        if head[0] != _PICKLE_MAGIC:
            raise Malformed("a pickle, but not one that torch.save wrote")
    if not isinstance(head[2], dict) or head[2].get("little_endian") is not True:
        raise Malformed("it was saved on a big-endian machine")
    claimed: dict[str, int] = {}

    def note(key: str, nbytes: int) -> Storage:
        claimed[key] = nbytes
        return Storage(file, 0, 0)

    first = _Sizes(note)
    keys_at = read_pickle(file, position, file.size, load=first.load, call=lambda *_: NotImplemented).end
    keys = read_pickle(file, keys_at, file.size, load=no_storage, call=lambda *_: NotImplemented)
    if not isinstance(keys.value, list) or set(keys.value) != set(claimed) or len(keys.value) != len(claimed):
        raise Malformed("the list of its storages does not fit its content")
    places: dict[str, Storage] = {}
    behind = keys.end
    for key in keys.value:
        numel = int.from_bytes(file.map[behind : behind + 8], "little")
        nbytes = claimed[key]
        if numel != first.numel[key]:
            raise Malformed(f"storage {key!r} has {numel} elements, {first.numel[key]} are claimed (is it truncated?)")
        places[key] = Storage(file, behind + 8, nbytes)
        behind += 8 + nbytes
    reader = _Tensors(lambda key, _: places[key])
    found = read_pickle(file, position, file.size, load=reader.load, call=reader.call)
    return Checkpoint("PyTorch legacy", found.value, file.size, found.foreign, found.forbidden)


class _Sizes(_Tensors):
    """Finds out how large each storage is, before their places can be known."""

    def __init__(self, note: Callable[[str, int], Storage]) -> None:
        super().__init__(note)
        self.numel: dict[str, int] = {}

    def load(self, identity: Any) -> Any:
        if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
            raise Malformed("a persistent id that is no storage")
        kind, key, numel = identity[1], identity[2], identity[4]
        if not isinstance(kind, Global) or not isinstance(key, str) or type(numel) is not int or numel < 0:
            raise Malformed("a storage whose description is broken")
        itemsize = _LEGACY_ITEMSIZE.get(kind.name)
        if itemsize is None:
            raise Malformed(f"a storage of class {kind}")
        self.numel[key] = numel
        self.find(key, numel * itemsize)
        return None


_LEGACY_ITEMSIZE = {name: DTYPES[dtype].itemsize for name, dtype in _STORAGES.items()} | {
    "QInt8Storage": 1,
    "QUInt8Storage": 1,
    "QInt32Storage": 4,
    "ComplexDoubleStorage": 16,
}


# --- TorchScript and torch.export archives: programs, of which only the weights are read ---------------------------


def _script_state(archive: Archive, root: Any) -> dict[str, Any]:
    """The state dict of a TorchScript module: its object tree is data, and each class's text lists its tensors."""
    names: dict[Global, tuple[str, ...]] = {}
    state: dict[str, Any] = {}
    todo: list[tuple[str, Any]] = [("", root)]
    seen = 0
    while todo:
        prefix, value = todo.pop()
        seen += 1
        if not isinstance(value, Record) or not isinstance(value.state, dict) or seen > 100_000:
            raise Malformed("a TorchScript file that holds no module")
        if value.type not in names:
            names[value.type] = _script_names(archive, value.type)
        for name, item in value.state.items():
            if isinstance(item, Record) and isinstance(item.state, dict):
                todo.append((f"{prefix}{name}.", item))
            elif name in names[value.type] and item is not None:
                state[f"{prefix}{name}"] = item
    return state


def _script_names(archive: Archive, kind: Global) -> tuple[str, ...]:
    """Attributes that a TorchScript class declares as parameters and buffers."""
    record = f"code/{kind.module.replace('.', '/')}.py"
    if record not in archive.records:
        return ()
    text = archive.read(record).decode("utf-8", "replace")
    body = re.search(rf"^class {re.escape(kind.name)}\(Module\):\n((?:[ \t].*\n|\n)*)", text, re.MULTILINE)
    lists = re.findall(r"^  __(?:parameters|buffers)__ = \[(.*)\]$", body.group(1), re.MULTILINE) if body else []
    return tuple(name for found in lists for name in re.findall(r'"([^"]*)"', found))


_PT2 = "torch.export archive (weights only)"


def _read_pt2(archive: Archive) -> Checkpoint:
    """The state dict of a torch.export archive: raw bytes described by JSON, or (PyTorch 2.8) a .pt in it.

    An archive of several programs has a state dict for each, by the program's name.
    """
    found: dict[str, Any] = {}
    foreign: set[str] = set()
    forbidden: set[str] = set()
    for name in archive.records:
        described = re.fullmatch(r"data/weights/(.+)_weights_config\.json", name)
        inner = re.fullmatch(r"data/weights/(?!weight_\d+$)(.+)\.pt", name)
        if described:
            found[described[1]] = _described_weights(archive, name)
        elif inner:
            content = _read_inner(archive, name)
            found[inner[1]] = content.root
            foreign |= set(content.foreign)
            forbidden |= set(content.forbidden)
    if not found:
        raise Malformed("a torch.export archive without weights; save it again with torch.export.save")
    root = next(iter(found.values())) if len(found) == 1 else found
    return Checkpoint(_PT2, root, archive.file.size, tuple(sorted(foreign)), tuple(sorted(forbidden)))


def _read_inner(archive: Archive, name: str) -> Checkpoint:
    """A .pt file that lies in an archive, as PyTorch before 2.9 wrote a program's state dict."""
    start, size = archive.place(name)
    content = _read_pickled(open_archive(archive.file, start, start + size))
    return Checkpoint(_PT2, content.root, archive.file.size, content.foreign, content.forbidden)


def _described_weights(archive: Archive, config: str) -> dict[str, Any]:
    table = _load_json(archive.read(config)).get("config")
    if not isinstance(table, Mapping):
        raise Malformed("its weights are not described")
    state: dict[str, Any] = {}
    for name, entry in table.items():
        try:
            meta = entry["tensor_meta"]
            shape, strides = (tuple(n["as_int"] for n in meta[k]) for k in ("sizes", "strides"))
            offset, dtype = meta["storage_offset"]["as_int"], _PT2_DTYPES.get(meta["dtype"])
            record, pickled = entry["path_name"], entry["use_pickle"]
        except (KeyError, TypeError) as error:
            raise Malformed(f"weight {name!r} is not described") from error
        if pickled or dtype is None:
            state[name] = Unsupported("a tensor subclass" if pickled else f"element type {meta['dtype']}")
            continue
        start, size = archive.place(f"data/weights/{record}")
        state[name] = Tensor(dtype, shape, strides, Storage(archive.file, start, size), offset)
    return state
