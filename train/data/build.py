"""Text to an indexed data set: `build_dataset`, behind `leantron data build`.

Three files appear, the index last, each written under another name and flushed before it is renamed: a killed build leaves no index, so
nothing takes its files for a data set.

    <prefix>.bin   token ids of all documents, each ended by eod
    <prefix>.json  tokenizer, vocabulary, counts and hashes: a run with another tokenizer is refused
    <prefix>.idx   lengths and offsets (Megatron's indexed format)
"""

import hashlib
import json
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from train.data.errors import DataError
from train.data.indexed import IndexedWriter
from train.data.readers import KINDS, ReadCounts, find_files, read_documents
from train.data.tokenizer import Tokenizer, load_tokenizer

_CHUNK_CHARACTERS = 1 << 20
"""Text handed to a tokenising process at once."""

Progress = Callable[[int, int, int], None]
"""Called with files begun, files in all, and tokens written."""


@dataclass(frozen=True)
class Manifest:
    """What `<prefix>.json` says of a data set."""

    tokenizer: str
    vocab_size: int
    eod: int
    documents: int
    tokens: int
    bytes: int
    """Bytes of UTF-8 text, without eod."""
    empty_documents: int
    """Documents without text, left out."""
    files: int
    not_text: int
    """Files of walked folders that are not UTF-8 text, left out."""
    bin_sha256: str
    idx_sha256: str
    format: int = 1

    @classmethod
    def read(cls, prefix: str | Path) -> Self | None:
        """Return the manifest beside `prefix`, or None when there is none (a data set that Megatron itself built).

        Raises:
            DataError: if the file is damaged or of another format.
        """
        path = Path(f"{prefix}.json")
        if not path.is_file():
            return None
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            manifest = cls(**fields)
        except (ValueError, TypeError) as error:
            raise DataError(path, "the description of a data set", str(error), "build the data set again") from None
        if manifest.format != 1:
            raise DataError(path, "format 1", f"format {manifest.format}", "build the data set again")
        return manifest


def build_dataset(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    tokenizer: str | Tokenizer,
    *,
    kind: str = "auto",
    text_key: str = "text",
    workers: int = 1,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Tokenise `inputs` into the indexed data set `output_prefix` and return its description.

    Args:
        inputs: files and folders; folders are walked in sorted order.
        output_prefix: path without suffix; its folder is made.
        tokenizer: a name as `load_tokenizer` takes it (needed when `workers` is above 1), or a tokenizer.
        kind: `text` (a document a file), `jsonl`, `parquet`, or `auto`: by each file's suffix.
        text_key: key of a JSON line, or column of a Parquet file, that holds the text.
        workers: processes that tokenise; the result does not depend on their number.
        overwrite: replace a data set that is there.
        progress: called after each file and each stretch of about 1 MB of text.

    Raises:
        DataError, ConfigError: in one line, for anything that cannot be read or built.
    """
    prefix = Path(output_prefix)
    if kind not in KINDS:
        raise DataError(prefix, f"a kind of {', '.join(KINDS)}", kind, "give one of these")
    if workers < 1 or (workers > 1 and not isinstance(tokenizer, str)):
        raise DataError(prefix, "workers=1, or more with a tokenizer given by name", f"workers={workers}", "correct one of them")
    if not overwrite and Path(f"{prefix}.idx").exists():
        raise DataError(f"{prefix}.idx", "no data set there yet", "one", "choose another output or replace it with --force")
    files = find_files(inputs, kind)
    loaded = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    prefix.parent.mkdir(parents=True, exist_ok=True)
    names = {suffix: Path(f"{prefix}.{os.getpid()}.tmp{suffix}") for suffix in (".bin", ".json", ".idx")}
    counts = ReadCounts()
    state = {"empty": 0, "bytes": 0, "begun": 0}

    def texts() -> Iterator[str]:
        for number, file in enumerate(files):
            state["begun"] = number + 1
            for text in read_documents(file, text_key, counts):
                if text:
                    yield text
                else:
                    state["empty"] += 1

    try:
        with IndexedWriter(names[".bin"], loaded.vocab_size) as writer:
            for chunk, text_bytes in _tokenise(texts(), loaded, tokenizer, workers):
                state["bytes"] += text_bytes
                for ids in chunk:
                    writer.add_document(ids)
                if progress is not None:
                    progress(state["begun"], len(files), writer.tokens)
            if not writer.documents:
                found = f"{counts.files} files, {state['empty']} empty documents, {len(counts.not_text)} files that are not text"
                raise DataError(prefix, "at least one document with text", found, "give inputs that hold text")
            writer.finish(names[".idx"])
            manifest = Manifest(
                tokenizer=loaded.name, vocab_size=loaded.vocab_size, eod=loaded.eod, documents=writer.documents, tokens=writer.tokens,
                bytes=state["bytes"], empty_documents=state["empty"], files=counts.files, not_text=len(counts.not_text),
                bin_sha256=writer.sha256, idx_sha256=hash_file(names[".idx"]),
            )  # fmt: skip
        with open(names[".json"], "w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(manifest), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        _publish(prefix, names)
    finally:
        for path in names.values():
            path.unlink(missing_ok=True)
    return manifest


def _publish(prefix: Path, names: dict[str, Path]) -> None:
    """Rename the finished files into place; an old index goes first and the new one comes last."""
    Path(f"{prefix}.idx").unlink(missing_ok=True)
    for suffix in (".bin", ".json", ".idx"):
        os.replace(names[suffix], f"{prefix}{suffix}")
    folder = os.open(prefix.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def hash_file(path: str | Path) -> str:
    """Return the sha256 hex digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_Chunk = tuple[list[NDArray[np.integer]], int]
_worker_tokenizer: Tokenizer | None = None


def _encode(texts: list[str], tokenizer: Tokenizer) -> _Chunk:
    """Return the ids of each text, ended by eod, and the bytes of all texts."""
    dtype = np.uint16 if tokenizer.vocab_size < 65500 else np.int32
    arrays = [np.append(tokenizer.encode_array(text).astype(dtype), dtype(tokenizer.eod)) for text in texts]
    return list(arrays), sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)


def _start_worker(name: str) -> None:
    global _worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker_tokenizer = load_tokenizer(name)


def _encode_in_worker(texts: list[str]) -> _Chunk:
    assert _worker_tokenizer is not None, "the pool's initialiser has run"
    return _encode(texts, _worker_tokenizer)


def _chunks(texts: Iterator[str]) -> Iterator[list[str]]:
    """Yield lists of texts of about `_CHUNK_CHARACTERS` characters."""
    chunk: list[str] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _tokenise(texts: Iterator[str], tokenizer: Tokenizer, name: Any, workers: int) -> Iterator[_Chunk]:
    """Yield the encoded chunks in the order of the texts, by `workers` processes and with a bounded number of chunks in flight."""
    if workers == 1:
        for chunk in _chunks(texts):
            yield _encode(chunk, tokenizer)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(name,)) as pool:
        pending: deque[Future[_Chunk]] = deque()
        try:
            for chunk in _chunks(texts):
                pending.append(pool.submit(_encode_in_worker, chunk))
                if len(pending) >= 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise DataError("--workers", "tokenising processes that live", "one that died", "use fewer workers or less memory") from None
