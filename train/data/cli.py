"""`leantron data build` and `leantron data show`: make an indexed data set, and look into one."""

import argparse
import sys
import time
from pathlib import Path

from train.config.errors import ConfigError
from train.data.build import build_dataset
from train.data.indexed import IndexedFile
from train.data.manifest import Manifest
from train.data.readers import KINDS
from train.data.tokenizer import Tokenizer, load_tokenizer

_SHOWN_CHARACTERS = 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands `build` and `show` to the parser of `leantron data`."""
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="build|show")
    build = commands.add_parser("build", help="tokenise text, JSON lines or Parquet into an indexed data set")
    build.add_argument("inputs", nargs="+", help="files and folders; .jsonl and .parquet by suffix (also .gz), else a document a file")
    build.add_argument("--output", required=True, metavar="PREFIX", help="where PREFIX.bin, PREFIX.idx and PREFIX.json go")
    build.add_argument("--tokenizer", default="byte", help="byte, a tokenizer.json or .tiktoken file, or tiktoken:<encoding>")
    build.add_argument("--text-key", default="text", metavar="KEY", help="key or column of the text (default: text)")
    build.add_argument("--kind", default="auto", choices=KINDS, help="read all inputs as this kind (default: by suffix)")
    build.add_argument("--workers", type=int, default=1, metavar="N", help="tokenising processes (default: 1)")
    build.add_argument("--force", action="store_true", help="replace a data set that is there")
    show = commands.add_parser("show", help="print what a data set holds")
    show.add_argument("prefix", metavar="PREFIX", help="path without .bin or .idx")
    show.add_argument("--tokenizer", default=None, help="tokenizer to decode with, when it is a file")
    show.add_argument("--verify", action="store_true", help="read all of the .bin and compare its hash")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit code: 0, or 2 after one line on stderr for what the user can mend."""
    try:
        return _build(args) if args.data_command == "build" else _show(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _build(args: argparse.Namespace) -> int:
    """Build with a bar on a terminal; print a summary."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("[progress.description]{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
        TextColumn("{task.fields[tokens]:,} tokens"), TimeRemainingColumn(),
    )  # fmt: skip
    started = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokenising", total=None, tokens=0)
        manifest = build_dataset(
            args.inputs,
            args.output,
            args.tokenizer,
            kind=args.kind,
            text_key=args.text_key,
            workers=args.workers,
            overwrite=args.force,
            progress=lambda done, total, tokens: bar.update(task, completed=done, total=total, tokens=tokens),
        )
    seconds = time.monotonic() - started
    print(
        f"{args.output}: {manifest.documents:,} documents, {manifest.tokens:,} tokens of {manifest.tokenizer}, "
        f"{manifest.bytes:,} bytes of text from {manifest.files:,} files in {seconds:.1f} s"
    )
    if manifest.empty_documents or manifest.not_text:
        print(f"left out: {manifest.empty_documents:,} empty documents, {manifest.not_text:,} files that are not UTF-8 text")
    return 0


def _show(args: argparse.Namespace) -> int:
    """Print counts, lengths, and the beginning of the first document."""
    prefix = str(Path(args.prefix))
    for suffix in (".idx", ".bin", ".json"):
        prefix = prefix.removesuffix(suffix)
    data, manifest = IndexedFile(prefix), Manifest.read(prefix)
    if manifest is not None:
        manifest.check_files(prefix, len(data), data.total_tokens)
    lengths = data.lengths
    print(f"{prefix}: {len(data):,} documents, {data.total_tokens:,} tokens ({data.dtype})")
    print(f"tokens of a document: {lengths.min():,} to {lengths.max():,}, mean {lengths.mean():,.1f}")
    if manifest is not None:
        print(f"tokenizer {manifest.tokenizer}, vocabulary {manifest.vocab_size:,}, eod {manifest.eod}, {manifest.bytes:,} bytes of text")
    else:
        print("no description beside it (built by another tool): its tokenizer is not known")
    if args.verify:
        if manifest is None:
            raise ConfigError("--verify", prefix, "needs the hashes of the data set's .json", "build it with `leantron data build`")
        manifest.check_content(prefix)
        print("verified: the hashes of .bin and .idx are right")
    tokenizer = _tokenizer_of(args.tokenizer, manifest, prefix)
    first = data.document(0)
    if tokenizer is None:
        print(f"first ids (name the tokenizer's file with --tokenizer to read them): {[int(i) for i in first[:32]]}")
    else:
        text = tokenizer.decode(int(i) for i in first[: 4 * _SHOWN_CHARACTERS])
        print(f"first text:\n{text[:_SHOWN_CHARACTERS]}{' ...' if len(text) > _SHOWN_CHARACTERS else ''}")
    return 0


def _tokenizer_of(name: str | None, manifest: Manifest | None, prefix: str) -> Tokenizer | None:
    """Return the tokenizer to decode with: the one given, else the one whose name the description holds, else None."""
    if name is None:
        found_by_name = manifest is not None and not manifest.tokenizer.startswith(("hf:", "tiktoken-file:"))
        return load_tokenizer(manifest.tokenizer) if manifest is not None and found_by_name else None
    tokenizer = load_tokenizer(name)
    if manifest is not None:
        manifest.check_tokenizer(prefix, tokenizer.name, tokenizer.vocab_size)
    return tokenizer
