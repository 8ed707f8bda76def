"""Turns a zip file into the places of its uncompressed records, without unpacking anything."""

from __future__ import annotations

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
        with zipfile.ZipFile(self.file.path) as archive:
            wanted = next(i for i in archive.infolist() if _inner(i.filename) == name)
            try:
                with archive.open(wanted) as stream:
                    return stream.read(_TEXT_BYTES)
            except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError) as error:
                raise Malformed(f"its record {name!r} cannot be unpacked: {error}") from error


def open_archive(file: MappedFile) -> Archive:
    """Read a zip file's directory.

    Raises:
        Malformed: no valid zip, records outside the file or over one another, encrypted or repeated ones.
    """
    _check_directory(file)
    try:
        with zipfile.ZipFile(file.path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise Malformed(f"the zip directory is broken ({error}); is the file truncated?") from error
    records: dict[str, Record] = {}
    behind = 0
    for entry in sorted(entries, key=lambda e: e.header_offset):
        start = _data_start(file, entry)
        if entry.header_offset < behind:
            raise Malformed(f"record {entry.filename!r} overlaps another one")
        behind = start + entry.compress_size
        if behind > file.size:
            raise Malformed(f"record {entry.filename!r} reaches beyond the end of the file")
        if entry.flag_bits & _ENCRYPTED:
            raise Malformed(f"record {entry.filename!r} is encrypted")
        stored = entry.compress_type == zipfile.ZIP_STORED
        if stored and entry.compress_size != entry.file_size:
            raise Malformed(f"record {entry.filename!r} is stored, yet has two sizes")
        name = _inner(entry.filename)
        if name in records:
            raise Malformed(f"record {entry.filename!r} is there twice")
        records[name] = Record(start if stored else None, entry.file_size)
    return Archive(file, records)


def _inner(name: str) -> str:
    """A record's name without the archive's own leading folder."""
    return name.partition("/")[2] or name


def _check_directory(file: MappedFile) -> None:
    """Refuse a directory so long that listing it would take many seconds."""
    end = file.map.rfind(_END, max(0, file.size - (1 << 16) - 22))
    if end < 0 or end + 22 > file.size:
        raise Malformed("the zip directory is missing; the file is truncated")
    size = int.from_bytes(file.map[end + 12 : end + 16], "little")
    if size == 0xFFFFFFFF:
        end64 = file.map.rfind(_END64, max(0, end - (1 << 16)), end)
        size = int.from_bytes(file.map[end64 + 40 : end64 + 48], "little") if end64 >= 0 else size
    if size > min(file.size, _DIRECTORY_BYTES):
        raise Malformed(f"the zip directory claims {size} bytes")


def _data_start(file: MappedFile, entry: zipfile.ZipInfo) -> int:
    """Position of a record's bytes, behind its local header."""
    header = file.map[entry.header_offset : entry.header_offset + _LOCAL_HEADER]
    if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise Malformed(f"record {entry.filename!r} has no header")
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return entry.header_offset + _LOCAL_HEADER + name + extra
