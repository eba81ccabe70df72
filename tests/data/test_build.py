"""Building data sets: every kind of input, whole or not at all, and each unreadable input named."""

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from train.data.build import build_dataset
from train.data.errors import DataError
from train.data.indexed import IndexedFile
from train.data.manifest import Manifest
from train.data.tokenizer import load_tokenizer

TEXTS = ["one\n", "zwei é", "", "三 🙂", "<|endoftext|>"]
KEPT = [text for text in TEXTS if text]
BYTE = load_tokenizer("byte")
ROOT = Path(__file__).parents[2]


def texts_of(prefix: str | Path) -> list[str]:
    """Return the documents of a byte data set, each checked to end with eod and to hold no other."""
    data = IndexedFile(prefix)
    out = []
    for i in range(len(data)):
        ids = data.document(i).tolist()
        assert ids[-1] == 256 and 256 not in ids[:-1]
        out.append(BYTE.decode(ids))
    return out


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    """Write one object a line, with a blank line in between, gzip when the name says so."""
    raw = "\n\n".join(json.dumps({"id": i, key: text}) for i, text in enumerate(texts)).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def write_parquet(path: Path, texts: list[str | None], key: str = "text") -> Path:
    """Write a table of two columns in row groups of two."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"n": list(range(len(texts))), key: pa.array(texts, pa.string())}), path, row_group_size=2)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson", "a.parquet"])
def test_jsonl_and_parquet(tmp_path: Path, name: str) -> None:
    source = (write_parquet if name.endswith("parquet") else write_jsonl)(tmp_path / name, TEXTS, "body")
    manifest = build_dataset([source], tmp_path / "out/set", "byte", text_key="body")
    assert texts_of(tmp_path / "out/set") == KEPT
    assert (manifest.documents, manifest.empty_documents, manifest.files) == (4, 1, 1)
    assert manifest.bytes == sum(len(text.encode()) for text in KEPT) == manifest.tokens - 4
    assert Manifest.read(tmp_path / "out/set") == manifest
    manifest.check_content(tmp_path / "out/set")


def test_text_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "b" / "two.md").write_text("two")
    (folder / "a.txt").write_text("\ufeffone", encoding="utf-8")
    (folder / "z.txt.gz").write_bytes(gzip.compress(b"zipped"))
    (folder / "empty.txt").write_text("")
    (folder / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (folder / ".hidden" / "no.txt").write_text("no")
    write_jsonl(folder / "c.jsonl", ["three", "four"])
    manifest = build_dataset([folder], folder / "set", "byte")
    assert texts_of(folder / "set") == ["one", "two", "three", "four", "zipped"]
    assert (manifest.documents, manifest.empty_documents, manifest.files, manifest.not_text) == (5, 1, 5, 1)
    # The output lies in the walked folder: building again must not read it.
    assert build_dataset([folder], folder / "set", "byte", overwrite=True) == manifest


def test_a_kind_overrules_the_suffix(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["x"])
    build_dataset([source], tmp_path / "set", "byte", kind="text")
    assert texts_of(tmp_path / "set") == [source.read_text()]


def test_null_in_parquet_is_an_empty_document(tmp_path: Path) -> None:
    manifest = build_dataset([write_parquet(tmp_path / "a.parquet", ["x", None, "y"])], tmp_path / "set", "byte")
    assert texts_of(tmp_path / "set") == ["x", "y"] and manifest.empty_documents == 1


def test_lone_surrogates_in_json(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d b"}')
    build_dataset([tmp_path / "a.jsonl"], tmp_path / "set", "byte")
    assert texts_of(tmp_path / "set") == ["a\ufffd b"]


def test_the_number_of_workers_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.data.build._CHUNK_CHARACTERS", 1 << 12)
    texts = [f"document {i} " + "é" * (i % 700) for i in range(400)]  # 30 chunks and more: the queue fills
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    assert build_dataset([source], tmp_path / "one", "byte") == build_dataset([source], tmp_path / "two", "byte", workers=2)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl.gz", ["word " * 100_000] * 9)
    seen: list[tuple[int, int, int]] = []
    manifest = build_dataset([source], tmp_path / "set", "byte", progress=lambda *at: seen.append(at))
    assert len(seen) >= 3 and seen == sorted(seen)
    assert seen[-1] == (source.stat().st_size, source.stat().st_size, manifest.tokens)


def test_progress_passes_from_file_to_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.data.build._CHUNK_CHARACTERS", 10)
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("ten letters")
    seen: list[int] = []
    build_dataset([tmp_path], tmp_path / "set", "byte", progress=lambda done, total, tokens: seen.append(done))
    assert seen == [0, 11, 22, 33]  # the file that is being read does not count yet


REFUSALS = {
    "missing": ([], "found nothing there"),
    "empty_folder": ([], "a folder with files, found none"),
    "only_empty": ([("a.txt", b"")], r"at least one document with text, found 1 files, 1 empty documents"),
    "not_utf8": ([("a.txt", b"ab\xff")], r"a.txt: expected UTF-8 text, found byte 0xff at 2"),
    "bad_json": ([("a.jsonl", b'{"text": "x"}\n{"text"')], "a.jsonl: expected JSON on line 2"),
    "no_key": ([("a.jsonl", b'{"body": "x"}')], r"'text' on line 1, found the keys \['body'\]; name the key of the text with --text-key"),
    "not_a_string": ([("a.jsonl", b'{"text": 5}')], "found int there"),
    "not_an_object": ([("a.jsonl", b"[1]")], "found list"),
    "bad_gzip": ([("a.jsonl.gz", b"not gzip")], "a whole gzip file"),
    "cut_gzip": ([("a.txt.gz", gzip.compress(os.urandom(5000))[:-9])], "a whole gzip file"),
    "bad_parquet": ([("a.parquet", b"PAR1 and no more")], "a whole Parquet file"),
    "empty_parquet": ([("a.parquet", b"")], "a whole Parquet file"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_in_one_line_and_nothing_left(tmp_path: Path, case: str) -> None:
    files, message = REFUSALS[case]
    for name, raw in files:
        (tmp_path / name).write_bytes(raw)
    if case == "empty_folder":
        (tmp_path / "folder").mkdir()
    inputs = [tmp_path / name for name, _ in files] or [tmp_path / "folder"]
    with pytest.raises(DataError, match=message) as caught:
        build_dataset(inputs, tmp_path / "out" / "set", "byte")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "out").glob("*"))


def test_parquet_columns_are_checked(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "a.parquet", ["x"], "body")
    with pytest.raises(DataError, match=r"a column 'text', found the columns \['n', 'body'\]"):
        build_dataset([source], tmp_path / "set", "byte")
    with pytest.raises(DataError, match="strings in column 'n', found int64"):
        build_dataset([source], tmp_path / "set", "byte", text_key="n")


def test_a_data_set_is_not_replaced_unasked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    build_dataset([tmp_path / "a.txt"], tmp_path / "set", "byte")
    (tmp_path / "a.txt").write_text("new")
    with pytest.raises(DataError, match="no data set there yet"):
        build_dataset([tmp_path / "a.txt"], tmp_path / "set", "byte")
    assert texts_of(tmp_path / "set") == ["old"]
    build_dataset([tmp_path / "a.txt"], tmp_path / "set", "byte", overwrite=True)
    assert texts_of(tmp_path / "set") == ["new"]


def test_a_failed_replacement_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    build_dataset([tmp_path / "a.txt"], tmp_path / "set", "byte")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{')
    with pytest.raises(DataError):
        build_dataset([tmp_path / "b.jsonl"], tmp_path / "set", "byte", overwrite=True)
    assert texts_of(tmp_path / "set") == ["old"]


def test_a_killed_build_leaves_no_data_set(tmp_path: Path) -> None:
    """SIGKILL while the ids are being written: no index, so the next reader says that the build is unfinished."""
    code = f"""
import os, sys
from train.data.build import build_dataset
source = {str(tmp_path / "a.jsonl")!r}
def stop(done, total, tokens):
    print("begun", flush=True)
    sys.stdin.read()
build_dataset([source], {str(tmp_path / "set")!r}, "byte", progress=stop)
"""
    write_jsonl(tmp_path / "a.jsonl", ["word " * 100_000] * 6)
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None and child.stdout.readline() == "begun\n"
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=30)
    assert not (tmp_path / "set.idx").exists() and not (tmp_path / "set.bin").exists()
    with pytest.raises(DataError, match="no such file"):
        IndexedFile(tmp_path / "set")
    build_dataset([tmp_path / "a.jsonl"], tmp_path / "set", "byte")
    assert len(IndexedFile(tmp_path / "set")) == 6


def test_building_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    code = f"""
import sys
from train.data import build_dataset
from train.data.dataset import BatchSource
build_dataset([{str(tmp_path / "a.txt")!r}], {str(tmp_path / "set")!r}, "byte")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
