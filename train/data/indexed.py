"""Megatron's indexed format (`<prefix>.bin` with the token ids, `<prefix>.idx` with the lengths), read and written with numpy alone.

Why not `megatron.core.datasets.indexed_dataset`: importing it brings torch and the whole of core (7 s, 700 MiB), which the command line,
each tokenising process and every refusal of a bad file would pay; its reader also checks by bare `assert`. A test holds both
to the same bytes: core reads what is written here, and this reads what core writes.

The index, little-endian: 9 bytes `MMIDIDX\\0\\0`, uint64 version 1, uint8 dtype code, uint64 sequences n, uint64 document bounds m,
int32[n] tokens of each sequence, int64[n] byte offset of each sequence, int64[m] first sequence of each document and a last bound n.
"""

import hashlib
import os
import struct
from array import array
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from train.data.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER_BYTES = 34
_CODES: dict[int, type[np.integer]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_MAX_LENGTH = 2**31 - 1  # lengths are int32 in the format
_REBUILD = "build it again with `leantron data build`"


def token_dtype(vocab_size: int) -> type[np.integer]:
    """Return the dtype that Megatron stores ids of such a vocabulary in: uint16 below 65,500, else int32."""
    return np.uint16 if vocab_size < 65500 else np.int32


class IndexedWriter:
    """Writes documents to `bin_path`; `finish` writes the index. The caller makes it atomic, by renaming."""

    def __init__(self, bin_path: str | Path, vocab_size: int) -> None:
        self.dtype = token_dtype(vocab_size)
        self.tokens = 0
        self._lengths = array("i")
        self._digest = hashlib.sha256()
        self._file = open(bin_path, "wb")  # noqa: SIM115 (closed by finish or close)

    @property
    def documents(self) -> int:
        """Number of documents written so far."""
        return len(self._lengths)

    @property
    def sha256(self) -> str:
        """Hex digest of the bytes written so far."""
        return self._digest.hexdigest()

    def add_document(self, ids: NDArray[np.integer]) -> None:
        """Append one document: a 1-D array of token ids, each within the vocabulary that the dtype was chosen for."""
        data = np.ascontiguousarray(ids, dtype=self.dtype)
        if data.size > _MAX_LENGTH:
            raise DataError(self._file.name, f"documents of at most {_MAX_LENGTH} tokens", f"{data.size}", "cut the document into several")
        raw = data.tobytes()
        self._file.write(raw)
        self._digest.update(raw)
        self._lengths.append(data.size)
        self.tokens += data.size

    def finish(self, idx_path: str | Path) -> None:
        """Flush the ids to the disk and write the index, flushed too."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.empty(0, np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * np.dtype(self.dtype).itemsize
        code = next(code for code, dtype in _CODES.items() if dtype is self.dtype)
        with open(idx_path, "wb") as file:
            file.write(MAGIC + struct.pack("<QBQQ", VERSION, code, lengths.size, lengths.size + 1))
            file.write(lengths.tobytes())
            file.write(np.concatenate([[0], ends[:-1]]).astype(np.int64).tobytes() if lengths.size else b"")
            file.write(np.arange(lengths.size + 1, dtype=np.int64).tobytes())
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Close the file without an index (after an error)."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class IndexedFile:
    """One indexed data set, memory-mapped and checked as a whole when opened (not each token: ids are checked as they are read).

    Attributes:
        prefix: path without suffix.
        tokens: (total,) memory map of all ids.
        lengths: (documents,) int64 tokens of each non-empty document.
        starts: (documents,) int64 position of each document's first token in `tokens`.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self.idx_path, self.bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path, other in ((self.idx_path, self.bin_path), (self.bin_path, self.idx_path)):
            if not path.is_file():
                found = f"only {other.name} (an unfinished build?)" if other.is_file() else "no such file"
                raise DataError(path, f"the {path.suffix} of an indexed data set", found, f"{_REBUILD}, or correct the prefix")
        dtype, lengths, bounds = self._read_index()
        self.dtype = np.dtype(dtype)
        total = int(lengths.sum(dtype=np.int64))
        size, want = self.bin_path.stat().st_size, total * self.dtype.itemsize
        if size != want:
            raise DataError(
                self.bin_path, f"{want} bytes ({total} tokens of {self.dtype} by {self.idx_path.name})", f"{size} bytes",
                f"the file is truncated or belongs to another index: {_REBUILD}",
            )  # fmt: skip
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])[bounds]
        document_lengths = np.diff(ends)
        kept = document_lengths > 0
        self.lengths: NDArray[np.int64] = document_lengths[kept]
        self.starts: NDArray[np.int64] = ends[:-1][kept]
        if not self.lengths.size:
            raise DataError(self.idx_path, "at least one document with a token", f"{document_lengths.size} documents, 0 tokens", _REBUILD)
        self.tokens: NDArray[np.integer] = np.asarray(np.memmap(self.bin_path, dtype=self.dtype, mode="r"))

    def _read_index(self) -> tuple[type[np.integer], NDArray[np.int32], NDArray[np.int64]]:
        """Return dtype, tokens of each sequence and document bounds, or raise a DataError that names the index."""
        path, size = self.idx_path, self.idx_path.stat().st_size
        if size < HEADER_BYTES:
            raise DataError(path, f"a header of {HEADER_BYTES} bytes", f"{size} bytes", f"the file is empty or truncated: {_REBUILD}")
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
        if header[:9] != MAGIC:
            raise DataError(path, f"the magic {MAGIC!r}", repr(header[:9]), f"this is no Megatron index: {_REBUILD}")
        version, code, sequences, bounds_count = struct.unpack("<QBQQ", header[9:])
        if version != VERSION:
            raise DataError(path, f"version {VERSION}", f"version {version}", _REBUILD)
        if code not in _CODES:
            raise DataError(path, f"an integer dtype code of {sorted(_CODES)}", f"code {code}", _REBUILD)
        if bounds_count < 1:
            raise DataError(path, "at least one document bound", "none", _REBUILD)
        want = HEADER_BYTES + 12 * sequences + 8 * bounds_count
        if size == want + sequences and sequences:
            raise DataError(path, "a data set of text", "a multimodal one (a mode for each sequence)", "give one without modes")
        if size != want:
            found = f"{size} bytes"
            raise DataError(
                path, f"{want} bytes ({sequences} sequences, {bounds_count - 1} documents)", found, f"the file is damaged: {_REBUILD}"
            )
        mapped = np.memmap(path, dtype=np.uint8, mode="r")
        at = HEADER_BYTES
        lengths = mapped[at : at + 4 * sequences].view(np.int32)
        at += 4 * sequences
        pointers = mapped[at : at + 8 * sequences].view(np.int64)
        bounds = mapped[at + 8 * sequences :].view(np.int64)
        if sequences and int(lengths.min()) < 0:
            raise DataError(path, "sequence lengths of 0 or more", f"{int(lengths.min())}", f"the file is damaged: {_REBUILD}")
        itemsize = np.dtype(_CODES[code]).itemsize
        ends = np.cumsum(lengths, dtype=np.int64) * itemsize
        if sequences and (pointers[0] != 0 or not np.array_equal(pointers[1:], ends[:-1])):
            raise DataError(path, "sequences that follow each other in the .bin", "other byte offsets", f"the file is damaged: {_REBUILD}")
        if bounds[0] != 0 or bounds[-1] != sequences or (np.diff(bounds) < 0).any():
            found = f"bounds from {int(bounds[0])} to {int(bounds[-1])}"
            raise DataError(path, f"rising document bounds from 0 to {sequences}", found, f"the file is damaged: {_REBUILD}")
        return _CODES[code], lengths, bounds

    def __len__(self) -> int:
        """Return the number of non-empty documents."""
        return int(self.lengths.size)

    @property
    def total_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.tokens.size)

    def document(self, index: int) -> NDArray[np.integer]:
        """Return document `index` (int, 0-based) as a view of its ids."""
        start = int(self.starts[index])
        return self.tokens[start : start + int(self.lengths[index])]
