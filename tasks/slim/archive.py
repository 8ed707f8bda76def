"""Turns a zip file into the places of its uncompressed records, without unpacking anything."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass

from enginesmith.tasks.slim.tensors import Malformed, MappedFile

_DIRECTORY_BYTES = 16 << 20  # some 200 000 records; reading more takes longer than an error may
_TEXT_BYTES = 16 << 20
_LOCAL_HEADER = 30
_END = b"PK\x05\x06"
_END64 = b"PK\x06\x06"
_ENCRYPTED = 0x1


@dataclass(frozen=True)
class Record:
    """One record: where its bytes lie. `start` is None when it is compressed, so that it cannot be mapped."""

    start: int | None
    size: int


@dataclass(frozen=True)
class Archive:
    """A zip file's records by name, without the one leading folder that PyTorch gives them all."""

    file: MappedFile
    records: Mapping[str, Record]
    start: int
    end: int

    def place(self, name: str) -> tuple[int, int]:
        """First byte and size of a record that must be stored uncompressed.

        Raises:
            Malformed: it is missing or compressed.
        """
        record = self.records.get(name)
        if record is None:
            raise Malformed(f"its record {name!r} is missing")
        if record.start is None:
            raise Malformed(f"its record {name!r} is compressed; PyTorch never compresses tensors")
        return record.start, record.size

    def read(self, name: str) -> bytes:
        """A small record's bytes, unpacked when it is compressed.

        Raises:
            Malformed: it is missing, damaged, or larger than 16 MB.
        """
        record = self.records.get(name)
        if record is None or record.size > _TEXT_BYTES:
            raise Malformed(f"its record {name!r} is {'missing' if record is None else 'absurdly large'}")
        if record.start is not None:
            return self.file.map[record.start : record.start + record.size]
        with zipfile.ZipFile(_Stream(self.file, self.start, self.end)) as archive:
            wanted = next(i for i in archive.infolist() if _inner(i.filename) == name)
            try:
                with archive.open(wanted) as stream:
                    return stream.read(_TEXT_BYTES)
            except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError) as error:
                raise Malformed(f"its record {name!r} cannot be unpacked: {error}") from error


class _Stream(io.RawIOBase):
    """A part of a mapped file, as a file of its own."""

    def __init__(self, file: MappedFile, start: int, end: int) -> None:
        self.file, self.start, self.end, self.position = file, start, end, start

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move, relative to the part's start, the position, or the part's end."""
        base = (self.start, self.position, self.end)[whence]
        if base + offset < self.start:
            raise OSError("a position before the file's start")
        self.position = base + offset
        return self.position - self.start

    def tell(self) -> int:
        """The position in the part."""
        return self.position - self.start

    def read(self, size: int | None = -1) -> bytes:
        """At most so many bytes."""
        stop = self.end if size is None or size < 0 else min(self.position + size, self.end)
        data = self.file.map[self.position : stop] if stop > self.position else b""
        self.position += len(data)
        return data


def open_archive(file: MappedFile, start: int = 0, end: int | None = None) -> Archive:
    """Read the directory of a zip file, or of one that lies uncompressed in a part of a file.

    Raises:
        Malformed: no valid zip, records outside the file or over one another, encrypted or repeated ones.
    """
    end = file.size if end is None else end
    _check_directory(file, start, end)
    try:
        with zipfile.ZipFile(_Stream(file, start, end)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise Malformed(f"the zip directory is broken ({error}); is the file truncated?") from error
    records: dict[str, Record] = {}
    behind = 0
    for entry in sorted(entries, key=lambda e: e.header_offset):
        place = _data_start(file, start, entry)
        if entry.header_offset < behind:
            raise Malformed(f"record {entry.filename!r} overlaps another one")
        behind = place + entry.compress_size - start
        if behind > end - start:
            raise Malformed(f"record {entry.filename!r} reaches beyond the end of the file")
        if entry.flag_bits & _ENCRYPTED:
            raise Malformed(f"record {entry.filename!r} is encrypted")
        stored = entry.compress_type == zipfile.ZIP_STORED
        if stored and entry.compress_size != entry.file_size:
            raise Malformed(f"record {entry.filename!r} is stored, yet has two sizes")
        name = _inner(entry.filename)
        if name in records:
            raise Malformed(f"record {entry.filename!r} is there twice")
        records[name] = Record(place if stored else None, entry.file_size)
    return Archive(file, records, start, end)


def _inner(name: str) -> str:
    """A record's name without the archive's own leading folder."""
    return name.partition("/")[2] or name


def _check_directory(file: MappedFile, start: int, stop: int) -> None:
    """Refuse a directory so long that listing it would take many seconds."""
    end = file.map.rfind(_END, max(start, stop - (1 << 16) - 22), stop)
    if end < 0 or end + 22 > stop:
        raise Malformed("the zip directory is missing; the file is truncated")
    size = int.from_bytes(file.map[end + 12 : end + 16], "little")
    if size == 0xFFFFFFFF:
        end64 = file.map.rfind(_END64, max(start, end - (1 << 16)), end)
        size = int.from_bytes(file.map[end64 + 40 : end64 + 48], "little") if end64 >= 0 else size
    if size > min(stop - start, _DIRECTORY_BYTES):
        raise Malformed(f"the zip directory claims {size} bytes")


def _data_start(file: MappedFile, start: int, entry: zipfile.ZipInfo) -> int:
    """Position of a record's bytes, behind its local header."""
    at = start + entry.header_offset
    header = file.map[at : at + _LOCAL_HEADER] if entry.header_offset >= 0 else b""
    if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise Malformed(f"record {entry.filename!r} has no header")
    name, extra = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    return start + entry.header_offset + _LOCAL_HEADER + name + extra
