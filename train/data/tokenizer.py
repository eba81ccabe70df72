"""Tokenizers behind one protocol: bytes (built in), a Hugging Face `tokenizer.json`, and tiktoken.

    >>> byte = load_tokenizer("byte")
    >>> byte.encode("é"), byte.decode([195, 169]), byte.eod
    ([195, 169], 'é', 256)

A tokenizer's `name` says what it does, not where it lies: a file's name carries a hash of its content, so that a data set built with
another file of the same path is recognised.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from train.config.errors import ConfigError

_KEY = "data.tokenizer"
_EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eod|>", "[SEP]")


class Tokenizer(Protocol):
    """What the rest of the project asks of a tokenizer."""

    name: str
    """Identity, written beside each data set and compared when it is read."""
    vocab_size: int
    """One more than the largest id."""
    eod: int
    """Id that ends each document."""
    token_bytes: NDArray[np.int64]
    """(vocab_size,) bytes of UTF-8 text that each token stands for; 0 for special tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without eod; special tokens that occur in the text are encoded as plain text."""
        ...

    def encode_array(self, text: str) -> NDArray[np.integer]:
        """Return `encode(text)` as a 1-D array."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; special tokens are left out, broken UTF-8 becomes U+FFFD."""
        ...


def clean_text(text: str) -> str:
    """Return `text` with lone surrogates (legal in JSON, not in UTF-8) replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class ByteTokenizer:
    """UTF-8 bytes: ids 0..255 and eod 256."""

    def __init__(self) -> None:
        self.name = "byte"
        self.vocab_size = 257
        self.eod = 256
        self.token_bytes = np.append(np.ones(256, np.int64), 0)

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text`."""
        return list(self._bytes(text))

    def encode_array(self, text: str) -> NDArray[np.integer]:
        """Return the bytes of `text` as a uint8 array."""
        return np.frombuffer(self._bytes(text), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids below 256."""
        return bytes(i for i in map(int, ids) if i < 256).decode("utf-8", "replace")

    @staticmethod
    def _bytes(text: str) -> bytes:
        try:
            return text.encode("utf-8")
        except UnicodeEncodeError:
            return clean_text(text).encode("utf-8")


class HuggingFaceTokenizer:
    """A `tokenizer.json`, through the `tokenizers` package.

    eod is the `eos_token` of a `tokenizer_config.json` beside the file, else the first of the usual names that the vocabulary holds.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Backend

        raw = path.read_bytes()
        try:
            spec = json.loads(raw)
            self._backend = Backend.from_buffer(raw)
        except Exception as error:  # the package raises bare Exception
            raise ConfigError(
                _KEY, path, f"not a readable tokenizer.json ({error})", "give a file saved by Hugging Face tokenizers"
            ) from None
        # Files saved from a fine-tuning set-up may truncate or pad, and would silently cut documents.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ConfigError(_KEY, path, "the vocabulary is empty", "give a trained tokenizer")
        self.name = f"hf:{hashlib.sha256(raw).hexdigest()[:16]}"
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod = self._find_eod(path, vocabulary)
        self.token_bytes = _hf_token_bytes(spec, vocabulary, self.vocab_size)
        self.token_bytes[self.eod] = 0

    @staticmethod
    def _find_eod(path: Path, vocabulary: dict[str, int]) -> int:
        """Return the id of the end-of-document token or raise a ConfigError."""
        settings = path.with_name("tokenizer_config.json")
        names = list(_EOD_NAMES)
        if settings.is_file():
            try:
                eos = json.loads(settings.read_text(encoding="utf-8")).get("eos_token")
            except (ValueError, AttributeError) as error:
                raise ConfigError(_KEY, settings, f"not readable JSON ({error})", "correct or remove the file") from None
            if isinstance(eos, dict):
                eos = eos.get("content")
            if eos is not None:
                names = [eos]
        for name in names:
            if name in vocabulary:
                return vocabulary[name]
        raise ConfigError(
            _KEY, path, f"no end-of-document token among {names}", "name one as eos_token in a tokenizer_config.json beside it"
        )  # fmt: skip

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` without special tokens."""
        try:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        except (UnicodeEncodeError, TypeError):
            return list(self._backend.encode(clean_text(text), add_special_tokens=False).ids)

    def encode_array(self, text: str) -> NDArray[np.integer]:
        """Return `encode(text)` as an int64 array."""
        return np.array(self.encode(text), dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` without special tokens."""
        return str(self._backend.decode([int(i) for i in ids], skip_special_tokens=True))


def _hf_token_bytes(spec: dict[str, Any], vocabulary: dict[str, int], vocab_size: int) -> NDArray[np.int64]:
    """Return the (vocab_size,) bytes of each token, read from how the file's decoder writes tokens as text.

    Byte-level vocabularies hold one printable character for each byte, SentencePiece ones write a space as U+2581 and a lone byte as
    `<0xNN>`, WordPiece marks what continues a word by a prefix and stands for a space and the word otherwise.
    """
    kinds = {str(part["type"]) for part in _parts(spec, "decoder") + _parts(spec, "pre_tokenizer")}
    byte_level, word_piece = "ByteLevel" in kinds, "WordPiece" in kinds
    prefix = (spec.get("model") or {}).get("continuing_subword_prefix") or "##"
    added = {entry["id"]: entry for entry in spec.get("added_tokens") or []}
    sizes = np.zeros(vocab_size, np.int64)
    for token, index in vocabulary.items():
        if index in added:
            sizes[index] = 0 if added[index].get("special") else len(token.encode("utf-8", "replace"))
        elif byte_level:
            sizes[index] = len(token)
        elif word_piece:
            sizes[index] = len(token.removeprefix(prefix).encode()) if token.startswith(prefix) else 1 + len(token.encode())
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            sizes[index] = 1
        else:
            sizes[index] = len(token.replace("\u2581", " ").encode())
    return sizes


def _parts(spec: dict[str, Any], field: str) -> list[dict[str, Any]]:
    """Return the leaves of a `tokenizer.json` component, which may be one, a sequence, or null."""
    part = spec.get(field)
    if not part:
        return []
    for nested in ("decoders", "pretokenizers"):
        if nested in part:
            return [leaf for leaf in part[nested] if "type" in leaf]
    return [part]


class TiktokenTokenizer:
    """A tiktoken encoding; eod is `<|endoftext|>`."""

    def __init__(self, encoding: Any, name: str) -> None:
        self._encoding = encoding
        self.name = name
        self.eod = int(encoding.eot_token)
        self.vocab_size = int(encoding.n_vocab)
        self.token_bytes = np.zeros(self.vocab_size, np.int64)
        for raw, index in encoding._mergeable_ranks.items():
            self.token_bytes[index] = len(raw)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens in it are plain text."""
        return list(self._encoding.encode_ordinary(text))

    def encode_array(self, text: str) -> NDArray[np.integer]:
        """Return `encode(text)` as an int64 array."""
        return np.array(self.encode(text), dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` without special tokens."""
        plain = [i for i in map(int, ids) if i < self.vocab_size and self.token_bytes[i] > 0]
        return str(self._encoding.decode(plain, errors="replace"))


# The pattern of the GPT-4 encoding: what splits text in a `.tiktoken` file is not part of the file.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip


def _load_tiktoken_file(path: Path) -> TiktokenTokenizer:
    """Return the tokenizer of a `.tiktoken` file (lines of base64 token and rank), split by the GPT-4 pattern."""
    import base64
    import binascii

    import tiktoken

    raw, ranks = path.read_bytes(), {}
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ConfigError(_KEY, path, f"line {number} is not `base64 rank`", "give a file in tiktoken's format") from None
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    if missing or sorted(ranks.values()) != list(range(len(ranks))):
        raise ConfigError(
            _KEY, path, "needs the 256 single bytes and ranks 0..n-1 without gaps", "give a complete file in tiktoken's format"
        )
    special = {"<|endoftext|>": len(ranks)}
    encoding = tiktoken.Encoding(path.stem, pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    return TiktokenTokenizer(encoding, f"tiktoken-file:{hashlib.sha256(raw).hexdigest()[:16]}")


def _load_tiktoken(name: str) -> TiktokenTokenizer:
    """Return the tokenizer of `tiktoken:<encoding>`; an encoding that is neither cached nor downloadable is a ConfigError."""
    import tiktoken

    encoding = name.removeprefix("tiktoken:")
    known = tiktoken.list_encoding_names()
    if encoding not in known:
        raise ConfigError(_KEY, name, f"no such encoding, tiktoken knows {', '.join(known)}", "give one of these or a local .tiktoken file")
    try:
        loaded = tiktoken.get_encoding(encoding)
    except Exception as error:  # requests, SSL, file system: tiktoken wraps none of them
        raise ConfigError(
            _KEY, name, f"the encoding is not cached and could not be downloaded ({type(error).__name__})",
            "set TIKTOKEN_CACHE_DIR to a folder that holds it, or give a local .tiktoken file",
        ) from None  # fmt: skip
    return TiktokenTokenizer(loaded, name)


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer called `name`: `byte`, a path to a `tokenizer.json` or `.tiktoken` file, or `tiktoken:<encoding>`.

    Raises:
        ConfigError: in one line, when there is no such tokenizer, file or package, or when the file is damaged.
    """
    if name == "byte":
        return ByteTokenizer()
    try:
        if name.startswith("tiktoken:"):
            return _load_tiktoken(name)
        path = Path(name).expanduser()
        if path.is_dir():
            path = path / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(_KEY, name, "no such tokenizer or file", "give `byte`, a path to a tokenizer.json, or `tiktoken:<encoding>`")
        return _load_tiktoken_file(path) if path.suffix == ".tiktoken" else HuggingFaceTokenizer(path)
    except ImportError as error:
        raise ConfigError(_KEY, name, f"the package {error.name} is not installed", f"pip install {error.name}") from None
