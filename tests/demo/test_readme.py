"""The commands that the front door and the page on evaluation show: they exist, take those options, and their overrides compose."""

import contextlib
import re
import shlex
from pathlib import Path

import pytest

from launch.cli import COMMANDS, main
from train.config.compose import compose

ROOT = Path(__file__).resolve().parents[2]


def commands() -> list[str]:
    found = []
    for page in ("README.md", "docs/evaluate.md"):
        for block in re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
            found += [line.partition("#")[0].strip() for line in block.splitlines() if line.startswith("leantron ")]
    return found


@pytest.mark.parametrize("command", commands())
def test_a_command_is_understood(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *arguments = shlex.split(command)[1:]
    assert name in COMMANDS
    overrides = [text for text in arguments if "=" in text and not text.startswith(("-", "resume="))]
    compose(overrides)
    with contextlib.suppress(SystemExit):
        main([name, *(["build"] if name == "data" else []), "--help"])
    words = capsys.readouterr().out
    for option in (text for text in arguments if text.startswith("--")):
        assert option in words, option


def test_every_target_that_the_front_door_names_is_in_the_makefile() -> None:
    targets = re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert targets == ["demo", "test"] and all(re.search(rf"^{target}: ", makefile, re.MULTILINE) for target in targets)


def test_every_inline_override_of_the_front_door_composes() -> None:
    inline = re.findall(r"`((?:\w[\w.]*=[\w.,\[\]]+ ?)+)`", (ROOT / "README.md").read_text())
    assert inline, "the front door shows how two sites are asked for"
    for text in inline:
        assert compose(text.split()).federation.sites == 2
