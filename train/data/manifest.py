"""What `<prefix>.json` says of a data set: who tokenised it, how much it holds, and the hashes of its files."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from train.data.errors import DataError

_AGAIN = "build the data set again"


def hash_file(path: str | Path) -> str:
    """Return the sha256 hex digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The fields of `<prefix>.json`."""

    tokenizer: str
    """The tokenizer's name."""
    vocab_size: int
    """Its vocabulary."""
    eod: int
    """The id that ends each document."""
    documents: int
    """Documents, none of them empty."""
    tokens: int
    """Tokens, eod included."""
    bytes: int
    """Bytes of UTF-8 text."""
    empty_documents: int
    """Documents without text, left out."""
    files: int
    """Files read."""
    not_text: int
    """Files of walked folders that are not UTF-8 text, left out."""
    bin_sha256: str
    """Hash of the `.bin`."""
    idx_sha256: str
    """Hash of the `.idx`."""
    format: int = 1
    """Version of this description."""

    def dumps(self) -> str:
        """Return the file's text."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, prefix: str | Path) -> Self | None:
        """Return the manifest beside `prefix`, or None when there is none (a data set that Megatron's own tools built).

        Raises:
            DataError: if the file is damaged or of another format.
        """
        path = Path(f"{prefix}.json")
        if not path.is_file():
            return None
        try:
            manifest = cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise DataError(path, "the description of a data set", str(error), _AGAIN) from None
        if manifest.format != 1:
            raise DataError(path, "format 1", f"format {manifest.format}", _AGAIN)
        return manifest

    def check_files(self, prefix: str | Path, documents: int, tokens: int) -> None:
        """Compare with what the index holds; the index's hash too, the `.bin`'s not (see `check_content`).

        Raises:
            DataError: if the files are of different builds.
        """
        path, idx = f"{prefix}.json", Path(f"{prefix}.idx")
        if (self.documents, self.tokens) != (documents, tokens):
            expected = f"{self.documents} documents and {self.tokens} tokens in {idx.name}"
            raise DataError(path, expected, f"{documents} and {tokens}", f"the files are of different builds: {_AGAIN}")
        found = hash_file(idx)
        if found != self.idx_sha256:
            raise DataError(idx, f"sha256 {self.idx_sha256[:16]}", found[:16], f"the index is damaged or of another build: {_AGAIN}")

    def check_content(self, prefix: str | Path) -> None:
        """Read the whole `.bin` and compare its hash.

        Raises:
            DataError: if it differs.
        """
        path = f"{prefix}.bin"
        found = hash_file(path)
        if found != self.bin_sha256:
            raise DataError(path, f"sha256 {self.bin_sha256[:16]}", found[:16], f"the tokens are damaged: {_AGAIN}")

    def check_tokenizer(self, prefix: str | Path, name: str, vocab_size: int) -> None:
        """Compare with the tokenizer that the run uses.

        Raises:
            DataError: if it is another one.
        """
        if (self.tokenizer, self.vocab_size) != (name, vocab_size):
            remedy = "name its tokenizer in data.tokenizer or build the data set with yours"
            expected, found = f"a data set of tokenizer {name} ({vocab_size} ids)", f"{self.tokenizer} ({self.vocab_size} ids)"
            raise DataError(f"{prefix}.json", expected, found, remedy)
