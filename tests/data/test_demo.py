"""The demo corpus: built once, whole, by however many processes ask for it."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from train.config.errors import ConfigError
from train.data import demo
from train.data.config import DataConfig
from train.data.dataset import BatchSource
from train.data.entropy import bigram_bits_per_byte
from train.data.indexed import IndexedFile
from train.data.manifest import Manifest
from train.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Return settings of the demo corpus in a cache of its own."""
    return DataConfig(demo=True, cache=str(tmp_path_factory.mktemp("cache")))


def test_processes_that_start_together_build_once(config: DataConfig) -> None:
    code = f"""
from train.data.build import _publish
from train.data import build, demo
from train.data.config import DataConfig
def publish(prefix, names):
    print("built", flush=True)
    _publish(prefix, names)
build._publish = publish
print("prefix", demo.ensure_demo_corpus(DataConfig(demo=True, cache={config.cache!r})))
"""
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(4)]
    outputs = [child.communicate(timeout=120)[0] for child in children]
    assert [child.returncode for child in children] == [0] * 4
    assert sum(output.count("built") for output in outputs) == 1
    prefixes = {re.findall(r"prefix (.*)", output)[0] for output in outputs}
    assert prefixes == {demo.ensure_demo_corpus(config)}
    manifest = Manifest.read(prefixes.pop())
    assert manifest is not None and manifest.documents > 300 and 5e6 < manifest.bytes <= demo.MAX_BYTES
    assert sorted(p.suffix for p in Path(config.cache).iterdir()) == [".bin", ".idx", ".json", ".lock"]


def test_it_is_the_standard_library(config: DataConfig) -> None:
    prefix = demo.ensure_demo_corpus(config)
    data, tokenizer = IndexedFile(prefix), load_tokenizer("byte")
    sources = demo.stdlib_sources()
    assert sources == sorted(sources) and not any({"test", "site-packages"} & set(path.parts) for path in sources)
    assert any(path.name == "argparse.py" for path in sources)
    with_text = [path for path in sources if path.read_bytes()]
    assert len(with_text) == len(data)
    for i in (0, 100, len(data) - 1):
        assert tokenizer.decode(data.document(i)) == with_text[i].read_bytes().decode("utf-8-sig")


def test_sources_use_it_without_paths(config: DataConfig) -> None:
    tokenizer = load_tokenizer("byte")
    train = BatchSource(config, tokenizer, 512, 1, "train")
    validation = BatchSource(config, tokenizer, 512, 1, "validation")
    assert train.total_rows > 5000 and validation.total_rows > 32
    assert train.fingerprint()["datasets"] == validation.fingerprint()["datasets"]


def test_its_bigram_entropy_is_about_three_and_a_half_bits(config: DataConfig) -> None:
    assert 3.2 < bigram_bits_per_byte(demo.ensure_demo_corpus(config), load_tokenizer("byte")) < 3.8


def test_the_size_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = demo.stdlib_sources()
    monkeypatch.setattr(demo, "MAX_BYTES", 1_000_000)
    some = demo.stdlib_sources()
    assert some == everything[: len(some)] and sum(p.stat().st_size for p in some) <= 1_000_000 and 20 < len(some) < len(everything)


def test_a_python_without_sources_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: DataConfig) -> None:
    monkeypatch.setattr(demo.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=r"^data.demo=true: this Python has only 0 readable sources under .*; use an interpreter"):
        demo.ensure_demo_corpus(replace(config, cache=str(tmp_path / "cache")))
