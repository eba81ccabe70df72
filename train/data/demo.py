"""The corpus that every machine has: the Python standard library's sources, tokenised once into the cache."""

import fcntl
import platform
import re
import sysconfig
from pathlib import Path

from train.config.errors import ConfigError
from train.data.build import build_dataset
from train.data.config import DataConfig
from train.data.tokenizer import load_tokenizer

MAX_BYTES = 32 << 20
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def stdlib_sources() -> list[Path]:
    """Return the `.py` files of the running interpreter's standard library, without its tests, sorted, at most 32 MiB in all.

    Raises:
        ConfigError: if this Python comes without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = sorted(p for p in root.rglob("*.py") if not _LEFT_OUT.intersection(p.relative_to(root).parts))
    sources: list[Path] = []
    size = 0
    for path in found:
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few sources declare another encoding; the corpus is UTF-8
        size += path.stat().st_size
        if size > MAX_BYTES:
            break
        sources.append(path)
    if len(sources) < 20:
        raise ConfigError(
            "data.demo", True, f"this Python has only {len(sources)} readable sources under {root}",
            "use an interpreter with its standard library, or give data.paths",
        )  # fmt: skip
    return sources


def ensure_demo_corpus(config: DataConfig) -> str:
    """Return the prefix of the demo corpus under `config.cache`, built first when it is not there.

    Processes that start together wait for the one that builds, by a file lock that the system releases when its holder dies. The
    prefix names Python's version and the tokenizer, so that a change of either builds anew instead of mixing texts.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", tokenizer.name)
    folder = Path(config.cache)
    prefix = folder / f"stdlib_{platform.python_version()}_{slug}"
    if Path(f"{prefix}.idx").is_file():
        return str(prefix)
    folder.mkdir(parents=True, exist_ok=True)
    with open(f"{prefix}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not Path(f"{prefix}.idx").is_file():
            build_dataset(stdlib_sources(), prefix, tokenizer, kind="text")
    return str(prefix)
