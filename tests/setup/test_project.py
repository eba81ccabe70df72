"""The set-up's files agree with each other: pins and requirements, make's targets and the CI script, links of the documentation."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


IN_OWN_VENV = Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): pinned for name, pinned in (line.split("==") for line in lines)}


@pytest.mark.parametrize("text", [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]])
def test_every_requirement_is_pinned_inside_its_range_and_installed_so(text: str) -> None:
    requirement = Requirement(text)
    pinned = pins()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pinned, prereleases=True)
    if IN_OWN_VENV:
        assert version(requirement.name) == pinned, "this environment is not the tested one: run make setup"


def test_every_dependency_has_a_reason_on_the_page() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    requirements = [*PROJECT["dependencies"], *(text for extra in PROJECT["optional-dependencies"].values() for text in extra)]
    missing = [Requirement(text).name for text in requirements if f"`{Requirement(text).name}`" not in page]
    assert not missing


def test_make_explains_its_targets() -> None:
    said = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("setup", "demo", "test", "test-slow", "lint", "types", "clean"):
        assert re.search(rf"^ +make {target} +\S", said, re.MULTILINE), target


def test_ci_runs_every_stage_and_names_the_one_that_fails(tmp_path: Path) -> None:
    """In a folder whose make fails at `types`: the stages before it run, none after it, and the status is its own."""
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "run"
    script.write_text((ROOT / ".ci" / "run").read_text())
    script.chmod(0o755)
    (tmp_path / "Makefile").write_text(
        'setup lint test test-slow demo:\n\t@echo ran $@; test -z "$$(cat)"; test "$$CI" = true\ntypes:\n\t@test -z \'$(FAIL)\'\n'
    )
    good = subprocess.run([script], cwd="/", capture_output=True, text=True, input="not for make", timeout=60)
    assert good.returncode == 0, good.stdout + good.stderr
    assert re.findall(r"^ran (.*)$", good.stdout, re.MULTILINE) == ["setup", "lint", "test", "test-slow", "demo"]
    assert re.search(r"all 6 stages passed in \d+ s", good.stdout)
    bad = subprocess.run(
        [script], cwd="/", capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "MAKEFLAGS": "FAIL=1"}, timeout=60
    )
    assert bad.returncode != 0
    assert re.search(r"stage 3: make types FAILED with status \d+ after \d+ s", bad.stdout)
    assert "make test" not in bad.stdout


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("**/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken


@pytest.mark.skipif(not IN_OWN_VENV, reason="this interpreter is not the one of .venv, which make setup makes")
def test_the_command_is_installed() -> None:
    command = Path(sys.executable).parent / "leantron"
    said = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    assert said == f"leantron {PROJECT['version']}\n"
