"""Turns byte ranges of a mapped file into tensors whose values are read block by block, never all at once."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_MAX_AXES = 64  # PyTorch's own limit
_ABSURD = 1 << 62

BLOCK_BYTES = 1 << 20  # stays in the CPU's second-level cache while it is digested, examined and written

# safetensors' names (https://github.com/huggingface/safetensors, `Dtype`) and the numpy type that holds the same bits.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "C64": np.dtype("<c8"),
}
FLOATS = ("F16", "BF16", "F32", "F64")


class Malformed(Exception):  # noqa: N818 - becomes an EnginesmithError where the file's name is known
    """The file is not what its format promises; the message says how."""


class MappedFile:
    """A file mapped into memory, read-only. Pages that were read can be given back, so that they do not pile up.

    Args:
        path: a file that is not empty.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            try:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise Malformed("the file is empty") from error
        self.path = path
        self.size = len(self.map)

    def release(self, start: int, size: int) -> None:
        """Give back the whole pages inside a byte range; they are read again when needed again."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self.map.madvise(mmap.MADV_DONTNEED, first, last - first)


@dataclass(frozen=True, eq=False)
class Storage:
    """A byte range of a mapped file. Two tensors are tied when they show the same elements of the same storage."""

    file: MappedFile
    start: int
    size: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.size < 0 or self.start + self.size > self.file.size:
            raise Malformed(
                f"bytes {self.start} to {self.start + self.size} are said to hold a tensor, "
                f"the file has {self.file.size} (is it truncated?)"
            )


@dataclass(frozen=True, eq=False)
class Tensor:
    """A strided view of a storage.

    Attributes:
        dtype: safetensors' name of the element type.
        shape: sizes.
        strides: steps between elements along each axis, in elements.
        storage: where the bytes are.
        offset: first element, counted in elements from the storage's start.

    Raises:
        Malformed: it reaches outside its storage, or a size, stride or offset is negative.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: Storage
    offset: int = 0

    def __post_init__(self) -> None:
        check_shape(self.shape)
        numbers = (*self.strides, self.offset)
        if not all(type(n) is int and 0 <= n < _ABSURD for n in numbers) or len(self.shape) != len(self.strides):
            raise Malformed(f"a tensor of shape {self.shape} with an impossible stride or offset")
        if self.numel:
            last = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
            if (last + 1) * self.itemsize > self.storage.size:
                raise Malformed(
                    f"a tensor of shape {self.shape} {self.dtype} needs {(last + 1) * self.itemsize} bytes, "
                    f"its storage has {self.storage.size}"
                )

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, each counted once per position."""
        return self.numel * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in the storage in row-major order without gaps."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for tensors that show the same elements in the same places: tied weights."""
        strides = tuple(step for size, step in zip(self.shape, self.strides, strict=True) if size != 1)
        start = self.storage.start + self.offset * self.itemsize
        place = (id(self.storage.file), start) if self.numel else ()
        return (self.dtype, self.shape, strides, place)

    def blocks(self) -> Iterator[Array]:
        """All elements in row-major order, as one-dimensional arrays of at most about BLOCK_BYTES; pages are released.

        A tensor that is not contiguous comes in blocks of whole rows of some axis, each a copy.
        """
        if not self.numel:
            return
        start = self.storage.start + self.offset * self.itemsize
        if self.is_contiguous:
            step = BLOCK_BYTES // self.itemsize * self.itemsize
            for position in range(0, self.nbytes, step):
                size = min(step, self.nbytes - position)
                yield np.frombuffer(self.storage.file.map, DTYPES[self.dtype], size // self.itemsize, start + position)
                self.storage.file.release(start + position, size)
            return
        for part in _parts(self._view(start)):
            yield np.ascontiguousarray(part).reshape(-1)
        self.storage.file.release(self.storage.start, self.storage.size)

    def _view(self, start: int) -> Array:
        flat = np.frombuffer(self.storage.file.map, np.uint8, self.storage.start + self.storage.size - start, start)
        flat = flat[: flat.size // self.itemsize * self.itemsize].view(DTYPES[self.dtype])
        strides = tuple(step * self.itemsize for step in self.strides)
        return np.lib.stride_tricks.as_strided(flat, self.shape, strides, writeable=False)


def _parts(array: Array) -> Iterator[Array]:
    """An array in row-major order, in slices of at most BLOCK_BYTES."""
    if array.nbytes <= BLOCK_BYTES:
        yield array
        return
    rows = BLOCK_BYTES // (array.nbytes // len(array))
    if rows == 0:
        for row in array:
            yield from _parts(row)
        return
    for first in range(0, len(array), rows):
        yield array[first : first + rows]


def check_shape(shape: tuple[int, ...]) -> None:
    """Refuse what is no shape.

    Raises:
        Malformed: more than 64 axes, or sizes that are no numbers, negative or absurd.
    """
    if len(shape) > _MAX_AXES:
        raise Malformed(f"a tensor with {len(shape)} axes")
    for size in shape:
        if type(size) is not int or not 0 <= size < _ABSURD:
            shown = size if isinstance(size, int) and abs(size) < _ABSURD else "no possible number"
            raise Malformed(f"a tensor of which an axis has size {shown}")


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements.

    Raises:
        Malformed: it is no shape.
    """
    check_shape(shape)
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
