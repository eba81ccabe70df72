"""Documents out of files: text (one document a file), JSON lines, Parquet, and folders of them, in a fixed order."""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from train.data.errors import DataError

KINDS = ("auto", "text", "jsonl", "parquet")


@dataclass
class ReadCounts:
    """What reading met, for the progress and the summary."""

    files: int = 0
    """Files read."""
    bytes: int = 0
    """Bytes passed so far, as they lie on the disk."""
    empty: int = 0
    """Documents without text, left out."""
    not_text: list[str] = field(default_factory=list)
    """Files of a walked folder that are not UTF-8 text, left out."""


@dataclass(frozen=True)
class InputFile:
    """A file to read: its path, its kind, and whether a folder's walk found it (then it may be left out when it is not text)."""

    path: Path
    kind: str
    walked: bool


def kind_of(path: Path) -> str:
    """Return the kind that the suffix of `path` says: `jsonl`, `parquet`, else `text`."""
    name = path.name.lower().removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson")):
        return "jsonl"
    return "parquet" if name.endswith(".parquet") else "text"


def find_files(inputs: Sequence[str | Path], kind: str = "auto") -> list[InputFile]:
    """Return the files of `inputs`, folders walked in sorted order; hidden files and folders are left out.

    Raises:
        DataError: if an input does not exist or a folder holds no file.
    """
    files = []
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path)))
            if not found:
                raise DataError(path, "a folder with files", "none", "give a folder or files that hold text")
            files += [InputFile(p, kind_of(p) if kind == "auto" else kind, True) for p in found]
        elif path.is_file():
            files.append(InputFile(path, kind_of(path) if kind == "auto" else kind, False))
        else:
            raise DataError(path, "a file or folder", "nothing there", "correct the path")
    if not files:
        raise DataError("inputs", "at least one file or folder", "none", "name what to read")
    return files


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def read_documents(file: InputFile, text_key: str, counts: ReadCounts) -> Iterator[str]:
    """Yield the documents of one file, possibly empty ones.

    Raises:
        DataError: naming the file (and line or column) that cannot be read.
    """
    end = counts.bytes + file.path.stat().st_size
    if file.kind == "text":
        text = _read_text(file, counts)
        if text is not None:
            counts.files += 1
            yield text
    else:
        counts.files += 1
        yield from (_read_jsonl if file.kind == "jsonl" else _read_parquet)(file.path, text_key, counts)
    counts.bytes = end


@contextmanager
def _open(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file, unpacked when its name ends in .gz; give the stream to read and the one whose position is that on the disk."""
    try:
        with open(path, "rb") as raw:
            if path.suffix == ".gz":
                with gzip.open(raw, "rb") as unpacked:
                    yield cast(IO[bytes], unpacked), raw
            else:
                yield raw, raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(path, "a whole gzip file", str(error), "fetch or compress it again") from None


def _read_text(file: InputFile, counts: ReadCounts) -> str | None:
    """Return the file's text, or None when a walk met a file that is not text."""
    try:
        with _open(file.path) as (stream, _):
            return stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if file.walked:
            counts.not_text.append(str(file.path))
            return None
        found = f"byte 0x{error.object[error.start]:02x} at {error.start}"
        raise DataError(file.path, "UTF-8 text", found, "convert it to UTF-8") from None


def _read_jsonl(path: Path, text_key: str, counts: ReadCounts) -> Iterator[str]:
    """Yield the string under `text_key` of each line; blank lines are passed over."""
    begin = counts.bytes
    with _open(path) as (stream, raw):
        for number, line in enumerate(stream, 1):
            counts.bytes = begin + raw.tell()
            if not line.strip():
                continue
            try:
                record: Any = json.loads(line)
            except ValueError as error:
                raise DataError(path, f"JSON on line {number}", str(error), "correct the line") from None
            if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
                if not isinstance(record, dict):
                    found = type(record).__name__
                elif text_key in record:
                    found = f"{type(record[text_key]).__name__} there"
                else:
                    found = f"the keys {sorted(record)[:8]}"
                expected = f"an object with a string under {text_key!r} on line {number}"
                raise DataError(path, expected, found, "name the key of the text with --text-key")
            yield record[text_key]


def _read_parquet(path: Path, text_key: str, counts: ReadCounts) -> Iterator[str]:
    """Yield the strings of column `text_key`, batch by batch; null counts as an empty document."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(path, "the package pyarrow to read Parquet", "no such package", "pip install pyarrow") from None
    begin, size, done = counts.bytes, path.stat().st_size, 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            schema, total = table.schema_arrow, table.metadata.num_rows
            if text_key not in schema.names:
                raise DataError(path, f"a column {text_key!r}", f"the columns {schema.names[:8]}", "name the column with --text-key")
            kind = schema.field(text_key).type
            value = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if not (pyarrow.types.is_string(value) or pyarrow.types.is_large_string(value) or pyarrow.types.is_string_view(value)):
                raise DataError(path, f"strings in column {text_key!r}", str(kind), "name a column of text with --text-key")
            for batch in table.iter_batches(batch_size=256, columns=[text_key]):
                for text in batch.column(0).to_pylist():
                    yield text or ""
                done += batch.num_rows
                counts.bytes = begin + size * done // max(total, 1)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(path, "a whole Parquet file of UTF-8 text", str(error), "write it again") from None
