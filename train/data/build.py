"""Text to an indexed data set: `build_dataset`, behind `leantron data build`.

Three files appear, the index last, each written under another name and flushed before it is renamed: a killed build leaves no index, so
nothing takes its files for a data set.

    <prefix>.bin   token ids of all documents, each ended by eod
    <prefix>.json  tokenizer, vocabulary, counts and hashes: a run with another tokenizer is refused
    <prefix>.idx   lengths and offsets (Megatron's indexed format)
"""

import fcntl
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train.data.errors import DataError
from train.data.indexed import IndexedWriter, token_dtype
from train.data.manifest import Manifest, hash_file
from train.data.readers import KINDS, InputFile, ReadCounts, find_files, read_documents
from train.data.tokenizer import Tokenizer, load_tokenizer

_CHUNK_CHARACTERS = 1 << 20
"""Text handed to a tokenising process at once."""

Progress = Callable[[int, int, int], None]
"""Called with bytes read, bytes of all inputs, and tokens written."""


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
        progress: called after each stretch of about 1 MB of text.

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
    own = {Path(f"{prefix}{suffix}").resolve() for suffix in (".bin", ".json", ".idx")}  # a walked folder may hold the output
    files = [file for file in find_files(inputs, kind) if file.path.resolve() not in own]
    loaded = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    prefix.parent.mkdir(parents=True, exist_ok=True)
    names = {suffix: Path(f"{prefix}.{os.getpid()}.tmp{suffix}") for suffix in (".bin", ".json", ".idx")}
    counts = ReadCounts()
    try:
        with IndexedWriter(names[".bin"], loaded.vocab_size) as writer:
            texts = _chunks(_texts(files, text_key, counts))
            if workers > 1 and isinstance(tokenizer, str):
                chunks = _encode_in_parallel(texts, tokenizer, workers)
            else:
                chunks = (_encode(chunk, loaded) for chunk in texts)
            text_bytes = _write(writer, chunks, files, counts, progress)
            if not writer.documents:
                found = f"{counts.files} files, {counts.empty} empty documents, {len(counts.not_text)} files that are not text"
                raise DataError(prefix, "at least one document with text", found, "give inputs that hold text")
            writer.finish(names[".idx"])
        manifest = Manifest(
            tokenizer=loaded.name,
            vocab_size=loaded.vocab_size,
            eod=loaded.eod,
            documents=writer.documents,
            tokens=writer.tokens,
            bytes=text_bytes,
            empty_documents=counts.empty,
            files=counts.files,
            not_text=len(counts.not_text),
            bin_sha256=writer.sha256,
            idx_sha256=hash_file(names[".idx"]),
        )
        with open(names[".json"], "w", encoding="utf-8") as file:
            file.write(manifest.dumps())
            file.flush()
            os.fsync(file.fileno())
        _publish(prefix, names)
    finally:
        for path in names.values():
            path.unlink(missing_ok=True)
    return manifest


def _publish(prefix: Path, names: dict[str, Path]) -> None:
    """Rename the finished files into place; an old index goes first and the new one comes last."""
    folder = os.open(prefix.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # so that two builds of one prefix do not mix their files
        Path(f"{prefix}.idx").unlink(missing_ok=True)
        for suffix in (".bin", ".json", ".idx"):
            os.replace(names[suffix], f"{prefix}{suffix}")
        os.fsync(folder)
    finally:
        os.close(folder)


_Chunk = tuple[list[NDArray[np.integer]], int]
_worker_tokenizer: Tokenizer | None = None


def _write(writer: IndexedWriter, chunks: Iterator[_Chunk], files: list[InputFile], counts: ReadCounts, progress: Progress | None) -> int:
    """Write all documents and return the bytes of their text."""
    input_bytes = sum(file.path.stat().st_size for file in files)
    text_bytes = 0
    for chunk, chunk_bytes in chunks:
        text_bytes += chunk_bytes
        for ids in chunk:
            writer.add_document(ids)
        if progress is not None:
            progress(counts.bytes, input_bytes, writer.tokens)
    return text_bytes


def _texts(files: list[InputFile], text_key: str, counts: ReadCounts) -> Iterator[str]:
    """Yield the documents of all files, the empty ones counted and left out."""
    for file in files:
        for text in read_documents(file, text_key, counts):
            if text:
                yield text
            else:
                counts.empty += 1


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


def _encode(texts: list[str], tokenizer: Tokenizer) -> _Chunk:
    """Return the ids of each text, ended by eod, and the bytes of all texts."""
    dtype = token_dtype(tokenizer.vocab_size)
    arrays = [np.append(tokenizer.encode_array(text).astype(dtype), dtype(tokenizer.eod)) for text in texts]
    return list(arrays), sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)


def _start_worker(name: str) -> None:
    """Load the tokenizer of this process."""
    global _worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker_tokenizer = load_tokenizer(name)


def _encode_in_worker(texts: list[str]) -> _Chunk:
    assert _worker_tokenizer is not None, "the pool's initialiser has run"
    return _encode(texts, _worker_tokenizer)


def _encode_in_parallel(chunks: Iterator[list[str]], name: str, workers: int) -> Iterator[_Chunk]:
    """Yield the encoded chunks in their order, by `workers` processes and with a bounded number of chunks in flight."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(name,)) as pool:
        pending: deque[Future[_Chunk]] = deque()
        try:
            for chunk in chunks:
                pending.append(pool.submit(_encode_in_worker, chunk))
                if len(pending) >= 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise DataError("--workers", f"{workers} tokenising processes", "one that died", "use fewer workers or less memory") from None
