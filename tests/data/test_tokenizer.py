"""Tokenizers: round trips, end of document, bytes of each token, and refusals in one line."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.config.errors import ConfigError
from train.data.tokenizer import Tokenizer, load_tokenizer

TEXT = "def f(x):\n\treturn x  # naïve café 日本語 🙂\n" * 20
AWKWARD = ["", "a", "日本語", "🙂 é", "\x00\x7f", "<|endoftext|> in the text", "trailing  \n\n", "\ufeffbom"]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a byte-level BPE `tokenizer.json` as GPT-2's, made to truncate and pad as some published files do."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>", "<|pad|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([TEXT], trainer)
    backend.enable_truncation(5)
    backend.enable_padding(length=64, pad_id=1, pad_token="<|pad|>")
    path = tmp_path_factory.mktemp("byte_level") / "tokenizer.json"
    backend.save(str(path))
    return path


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a BPE `tokenizer.json` with U+2581 for spaces and byte fallback, as Llama 2's."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for piece in ("a", "b", "é", "\u2581", "ab", "\u2581ab"):
        vocabulary[piece] = len(vocabulary)
    merges = [("a", "b"), ("\u2581", "ab")]
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    path = tmp_path_factory.mktemp("sentence_piece") / "tokenizer.json"
    backend.save(str(path))
    return path


@pytest.fixture(scope="module")
def tiktoken_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a `.tiktoken` file of the single bytes and three merges."""
    tokens = [bytes([b]) for b in range(256)] + [b"re", b"ret", b"return"[:4]]
    path = tmp_path_factory.mktemp("tiktoken") / "small.tiktoken"
    path.write_text("".join(f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens)))
    return path


@pytest.fixture(params=["byte", "byte_level", "sentence_piece", "tiktoken_file"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Return each kind of tokenizer in turn."""
    return load_tokenizer("byte" if request.param == "byte" else str(request.getfixturevalue(request.param)))


@pytest.mark.parametrize("text", [*AWKWARD, TEXT])
def test_round_trip_and_bytes(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_array(text).tolist() == ids
    assert tokenizer.eod not in ids and all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.token_bytes[tokenizer.eod] == 0 and tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    assert tokenizer.decode([*ids, tokenizer.eod]) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_any_text_round_trips_through_bytes(text: str) -> None:
    byte = load_tokenizer("byte")
    assert byte.decode(byte.encode(text)) == text


def test_lone_surrogates_become_replacement_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_byte_vocabulary() -> None:
    byte = load_tokenizer("byte")
    assert (byte.vocab_size, byte.eod, byte.name) == (257, 256, "byte")
    assert byte.encode("é") == [195, 169] and byte.token_bytes.sum() == 256
    assert byte.decode([195]) == "\ufffd"


def test_a_truncating_file_does_not_cut_or_pad(byte_level: Path) -> None:
    tokenizer = load_tokenizer(str(byte_level))
    assert len(tokenizer.encode(TEXT)) > 64 and len(tokenizer.encode("a")) == 1


def test_eod_from_the_settings_beside_the_file(byte_level: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(byte_level.read_bytes())
    default = load_tokenizer(str(copy))
    assert default.eod == 0
    for setting in ("<|pad|>", {"content": "<|pad|>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": setting}))
        assert load_tokenizer(str(tmp_path)).eod == 1  # a folder stands for its tokenizer.json
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<none>"}))
    with pytest.raises(ConfigError, match="no end-of-document token among"):
        load_tokenizer(str(copy))


def test_the_name_follows_the_content(byte_level: Path, sentence_piece: Path, tmp_path: Path) -> None:
    copy = tmp_path / "other_name.json"
    copy.write_bytes(byte_level.read_bytes())
    assert load_tokenizer(str(copy)).name == load_tokenizer(str(byte_level)).name
    assert load_tokenizer(str(sentence_piece)).name != load_tokenizer(str(byte_level)).name


def test_word_piece_bytes(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    backend = Backend(models.WordPiece({"[UNK]": 0, "[SEP]": 1, "play": 2, "##ing": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[UNK]", "[SEP]"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer.token_bytes.tolist() == [0, 0, 5, 3] and tokenizer.eod == 1


def test_eod_has_no_bytes_though_the_file_does_not_call_it_special(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    Backend(models.BPE({"a": 0, "</s>": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer.eod == 1 and tokenizer.token_bytes.tolist() == [1, 0]


REFUSALS = {
    "no_such_name": ("bytes", "no such tokenizer or file"),
    "no_such_file": ("/nowhere/tokenizer.json", "no such tokenizer or file"),
    "no_such_encoding": ("tiktoken:gpt5", "no such encoding, tiktoken knows"),
    "not_json": ("{tmp}/bad.json", "not a readable tokenizer.json"),
    "other_json": ("{tmp}/other.json", "not a readable tokenizer.json"),
    "bad_tiktoken": ("{tmp}/bad.tiktoken", "line 1 is not `base64 rank`"),
    "short_tiktoken": ("{tmp}/short.tiktoken", "needs the 256 single bytes"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_in_one_line(case: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "bad.tiktoken").write_text("???\n")
    (tmp_path / "short.tiktoken").write_text("YQ== 0\n")
    name, message = REFUSALS[case]
    with pytest.raises(ConfigError, match=message) as caught:
        load_tokenizer(name.replace("{tmp}", str(tmp_path)))
    text = str(caught.value)
    assert text.startswith("data.tokenizer=") and "\n" not in text and "; " in text


def test_an_encoding_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    def fail(name: str) -> None:
        raise OSError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    with pytest.raises(
        ConfigError, match=r"data.tokenizer=tiktoken:gpt2: the encoding is not cached and could not be downloaded \(OSError\)"
    ):
        load_tokenizer("tiktoken:gpt2")


def test_ids_of_numpy_types_decode(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(np.array(tokenizer.encode("ab ab"), dtype=np.int64)) == "ab ab"
