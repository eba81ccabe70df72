"""The pages about configuration name every key, every option, and commands that work."""

import re
import shlex
from pathlib import Path

import pytest

from launch.cli import main
from launch.help import group_options
from train.config.convert import known_keys, sections

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("configuration.md", "quickstart.md", "parallelism.md")


def test_the_page_names_every_key_and_option() -> None:
    text = (DOCS / "configuration.md").read_text()
    for key in known_keys():
        assert f"`{key}`" in text, key
    for group, options in group_options().items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{group}` |"))
        assert set(re.findall(r"`(\w+)`", row.split("|")[2])) == set(options), group


@pytest.mark.parametrize("page", PAGES)
def test_every_key_that_a_page_names_exists(page: str) -> None:
    known = {*known_keys(), "parallel"}
    for key in re.findall(rf"(?<![\w/.])((?:{'|'.join(sections())})\.\w+)", (DOCS / page).read_text()):
        assert key in known or key.endswith((".md", ".pretrain", ".engine")), key


def commands() -> list[str]:
    """The `leantron pretrain` commands in shell blocks that need nothing from before."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
            found += [line.partition("#")[0].strip() for line in block.splitlines() if line.startswith("leantron pretrain ")]
    return [line for line in found if "resume=" not in line and "searchpath" not in line]


@pytest.mark.parametrize("command", commands())
def test_commands_plan(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if "sets/mine" in command:
        Path("my_texts").mkdir()
        for name in ("a.txt", "b.txt"):
            (tmp_path / "my_texts" / name).write_text(f"the text of {name}\n" * 200)
        assert main(["data", "build", "my_texts", "--output", "sets/mine"]) == 0
    arguments = shlex.split(command)[1:]
    code = main([*arguments, "--dry-run"] if "--help" not in arguments else arguments)
    assert code == 0, capsys.readouterr().err
