"""`leantron data build` and `show`, and the commands of docs/data.md."""

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest

from train.data.cli import add_arguments, run

ROOT = Path(__file__).parents[2]


def call(*words: str) -> int:
    """Parse `words` as those after `leantron data` and run them."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(words))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with the inputs that the documentation speaks of."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    for i in range(4):
        (tmp_path / "notes" / f"{i}.txt").write_text(f"note {i}: naïve\n", encoding="utf-8")
    lines = [json.dumps({"text": f"page {i}", "content": f"content {i}"}) for i in range(6)]
    (tmp_path / "pages.jsonl").write_text("\n".join([*lines, '{"text": "", "content": ""}']))
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"content": ["a", "b", "c"]}), tmp_path / "table.parquet")
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Backend(models.BPE({c: i for i, c in enumerate(sorted(alphabet))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_build_then_show(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("build", "notes", "pages.jsonl", "--output", "sets/mine") == 0
    out = capsys.readouterr().out
    assert re.search(r"^sets/mine: 10 documents, 106 tokens of byte, 96 bytes of text from 5 files in [\d.]+ s$", out, re.M)
    assert "left out: 1 empty documents, 0 files that are not UTF-8 text" in out
    for prefix in ("sets/mine", "sets/mine.idx"):
        assert call("show", prefix, "--verify") == 0
        out = capsys.readouterr().out
        assert "10 documents, 106 tokens (uint16)" in out and "first text:\nnote 0: naïve" in out and "verified" in out


def test_show_of_a_file_tokenizer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("build", "notes", "--output", "mine", "--tokenizer", "tokenizer.json") == 0
    capsys.readouterr()
    assert call("show", "mine") == 0
    assert "first ids (name the tokenizer's file with --tokenizer to read them): [" in capsys.readouterr().out
    assert call("show", "mine", "--tokenizer", "tokenizer.json") == 0
    assert "note 0" in capsys.readouterr().out
    assert call("show", "mine", "--tokenizer", "byte") == 2
    assert "expected a data set of tokenizer byte (257 ids), found hf:" in capsys.readouterr().err


def test_show_of_a_foreign_data_set(write_documents, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_documents([[72, 105, 256]])
    assert call("show", prefix) == 0
    assert "built by another tool" in capsys.readouterr().out
    assert call("show", prefix, "--tokenizer", "byte") == 0
    assert "first text:\nHi" in capsys.readouterr().out
    assert call("show", prefix, "--verify") == 2


def test_damage_shows_as_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("build", "notes", "--output", "mine") == 0
    with open("mine.bin", "r+b") as file:
        file.write(b"\x01")
    capsys.readouterr()
    assert call("show", "mine") == 0  # one wrong byte needs the whole file read
    assert call("show", "mine", "--verify") == 2
    assert re.fullmatch(r"error: mine\.bin: expected sha256 \w{16}, found \w{16}; the tokens are damaged: .*\n", capsys.readouterr().err)
    assert call("build", "notes", "--output", "mine") == 2
    assert call("build", "nothing", "--output", "other") == 2
    assert call("build", "notes", "--output", "other", "--workers", "0") == 2
    assert capsys.readouterr().err.count("\n") == 3
    assert call("build", "notes", "--output", "mine", "--force") == 0
    assert call("show", "mine", "--verify") == 0


def test_the_documentations_commands_run(folder: Path) -> None:
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, re.M | re.S)
    commands = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.startswith("leantron data ")]
    assert len(commands) >= 5
    for command in commands:
        assert call(*shlex.split(command, comments=True)[2:]) == 0, command


def test_the_documentations_python_runs(folder: Path) -> None:
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert call("build", "pages.jsonl", "--output", "sets/pages") == 0
    assert blocks
    for block in blocks:
        exec(compile(block, "docs/data.md", "exec"), {})
