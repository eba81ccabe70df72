"""The indexed format: the same bytes as Megatron-core's, and every damage named."""

import hashlib
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from train.data.errors import DataError
from train.data.indexed import HEADER_BYTES, IndexedFile, IndexedWriter, token_dtype

# Importing core warns of what its own modules deprecate.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.filterwarnings("ignore::UserWarning:megatron")]


def test_round_trip(write_documents, documents) -> None:
    data = IndexedFile(write_documents(documents))
    assert [data.document(i).tolist() for i in range(len(data))] == documents
    assert data.total_tokens == sum(map(len, documents))
    assert data.starts.dtype == data.lengths.dtype == np.int64


@pytest.mark.parametrize("vocab_size", [257, 70_000])
def test_core_reads_what_we_write(write_documents, documents, vocab_size: int) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    core = IndexedDataset(write_documents(documents, vocab_size=vocab_size))
    assert core.index.dtype is token_dtype(vocab_size)
    assert [core[i].tolist() for i in range(len(core))] == documents
    assert core.document_indices.tolist() == list(range(len(documents) + 1))


@pytest.mark.parametrize("vocab_size", [257, 70_000])
def test_we_read_what_core_writes_and_the_bytes_are_equal(tmp_path: Path, write_documents, documents, vocab_size: int) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    theirs = tmp_path / "core"
    builder = IndexedDatasetBuilder(f"{theirs}.bin", dtype=DType.optimal_dtype(vocab_size))
    for ids in documents:
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(f"{theirs}.idx")
    data = IndexedFile(theirs)
    assert [data.document(i).tolist() for i in range(len(data))] == documents
    ours = write_documents(documents, vocab_size=vocab_size)
    for suffix in (".bin", ".idx"):
        assert Path(f"{ours}{suffix}").read_bytes() == Path(f"{theirs}{suffix}").read_bytes()


def test_documents_of_several_sequences_and_empty_ones(tmp_path: Path) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "core.bin"), dtype=np.int32)
    builder.add_document(torch.tensor([1, 2, 3, 4, 5]), [2, 3])
    builder.end_document()  # a document without sequences
    builder.add_document(torch.tensor([6]), [1])
    builder.finalize(str(tmp_path / "core.idx"))
    data = IndexedFile(tmp_path / "core")
    assert [data.document(i).tolist() for i in range(len(data))] == [[1, 2, 3, 4, 5], [6]]


def test_offsets_beyond_two_gibibytes(tmp_path: Path) -> None:
    """A sparse .bin of 5 GB with an index to match: positions must not wrap at 2^31 bytes or tokens."""
    length, count = 2**30, 3
    lengths = np.full(count, length, np.int32)
    pointers = np.arange(count, dtype=np.int64) * length * 2
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1)
    (tmp_path / "big.idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + np.arange(count + 1, dtype=np.int64).tobytes())
    with open(tmp_path / "big.bin", "wb") as file:
        file.seek(2 * length * count - 4)
        file.write(np.array([7, 9], np.uint16).tobytes())
    data = IndexedFile(tmp_path / "big")
    assert data.document(2)[-2:].tolist() == [7, 9]
    assert data.total_tokens == length * count


def test_written_offsets_beyond_two_gibibytes(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "big.bin", 257) as writer:
        writer._lengths.extend([2**30] * 3)  # as if so many tokens had been written
        writer.finish(tmp_path / "big.idx")
    pointers = np.frombuffer((tmp_path / "big.idx").read_bytes(), np.int64, count=3, offset=HEADER_BYTES + 4 * 3)
    assert pointers.tolist() == [0, 2**31, 2**32]


def test_the_written_hash_is_that_of_the_file(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a.bin", 257) as writer:
        writer.add_document(np.arange(100))
        writer.add_document(np.arange(7))
        writer.finish(tmp_path / "a.idx")
    assert writer.sha256 == hashlib.sha256((tmp_path / "a.bin").read_bytes()).hexdigest()


def edit(path: Path, at: int, raw: bytes) -> None:
    """Overwrite bytes of a file in place."""
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(raw)


def cut(path: Path, size: int) -> None:
    """Truncate a file to `size` bytes, from the end when negative."""
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size + size if size < 0 else size)


DAMAGES = {
    "bin_truncated": (lambda b, i: cut(b, -2), ".bin", r"expected \d+ bytes .* found \d+ bytes"),
    "bin_longer": (lambda b, i: edit(b, b.stat().st_size, b"xx"), ".bin", r"expected \d+ bytes"),
    "bin_empty": (lambda b, i: cut(b, 0), ".bin", "found 0 bytes"),
    "bin_missing": (lambda b, i: b.unlink(), ".bin", "found only data.idx"),
    "idx_missing": (lambda b, i: i.unlink(), ".idx", r"found only data.bin \(an unfinished build\?\)"),
    "idx_empty": (lambda b, i: cut(i, 0), ".idx", "header of 34 bytes, found 0 bytes"),
    "idx_truncated": (lambda b, i: cut(i, -8), ".idx", r"expected \d+ bytes \(40 sequences, 40 documents\), found \d+ bytes"),
    "idx_longer": (lambda b, i: edit(i, i.stat().st_size, b"x"), ".idx", r"expected \d+ bytes"),
    "magic": (lambda b, i: edit(i, 0, b"X"), ".idx", "the magic .*MMIDIDX.* found .*XMIDIDX"),
    "version": (lambda b, i: edit(i, 9, struct.pack("<Q", 2)), ".idx", "version 1, found version 2"),
    "dtype_float": (lambda b, i: edit(i, 17, b"\x07"), ".idx", "integer dtype code .* found code 7"),
    "dtype_other_width": (lambda b, i: edit(i, 17, b"\x04"), ".idx", "sequences that follow each other"),
    "huge_count": (lambda b, i: edit(i, 18, struct.pack("<Q", 2**62)), ".idx", "expected .* bytes"),
    "negative_length": (lambda b, i: edit(i, HEADER_BYTES, struct.pack("<i", -5)), ".idx", "lengths of 0 or more, found -5"),
    "wrong_offset": (lambda b, i: edit(i, HEADER_BYTES + 4 * 40 + 8, struct.pack("<q", 3)), ".idx", "follow each other"),
    "wrong_bound": (lambda b, i: edit(i, i.stat().st_size - 8, struct.pack("<q", 3)), ".idx", "bounds from 0 to 40"),
    "falling_bound": (lambda b, i: edit(i, i.stat().st_size - 24, struct.pack("<q", 99)), ".idx", "rising document bounds"),
    "multimodal": (lambda b, i: edit(i, i.stat().st_size, bytes(40)), ".idx", "multimodal"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_in_one_line(write_documents, documents, damage: str) -> None:
    prefix = write_documents(documents)
    apply, suffix, message = DAMAGES[damage]
    apply(Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))
    with pytest.raises(DataError, match=message) as caught:
        IndexedFile(prefix)
    text = str(caught.value)
    assert text.startswith(f"{prefix}{suffix}: expected ") and "\n" not in text and "; " in text


def test_another_index_is_named(write_documents, documents) -> None:
    ours, other = write_documents(documents, "a"), write_documents(documents[:-3], "b")
    shutil.copy(f"{other}.idx", f"{ours}.idx")
    with pytest.raises(DataError, match=r"a\.bin: expected \d+ bytes .* belongs to another index"):
        IndexedFile(ours)


def test_no_document_is_named(write_documents) -> None:
    with pytest.raises(DataError, match="at least one document with a token, found 0 documents"):
        IndexedFile(write_documents([]))
    with pytest.raises(DataError, match="no such file"):
        IndexedFile("/nowhere/at/all")


def test_the_error_survives_a_process_boundary() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(DataError("a.bin", "x", "y", "z")))
    assert str(error) == "a.bin: expected x, found y; z"
