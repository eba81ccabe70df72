"""The wheel: exactly the five packages with their YAML files, and a command that works beside a user's own train.py and configs/."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("train", "s2", "moe", "launch", "configs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves its traces in the folder it runs in."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in (*PACKAGES, "tests", "docs", "scripts"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    (path,) = target.glob("leantron-*.whl")
    return path


def test_it_holds_exactly_the_packages_and_their_yaml(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".yaml", ".json") or path.name == "py.typed"
    }
    assert names == expected
    assert "configs/experiment/demo.yaml" in names and "train/tracking/build.py" in names


def test_the_installed_command_runs_where_the_user_has_files_of_the_same_names(wheel: Path, tmp_path: Path) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, timeout=240)
    (work / "configs").mkdir(parents=True)
    (work / "tests").mkdir()
    (work / "configs" / "__init__.py").write_text("raise RuntimeError('the user s configs was imported')")
    (work / "train.py").write_text("raise RuntimeError('the user s train was imported')")
    env = {**os.environ, "PYTHONPATH": str(site)}
    command = [str(site / "bin" / "leantron"), "config", "experiment=demo"]
    ended = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "steps:" in ended.stdout and "byte" in ended.stdout
    where = "import train, s2, moe, launch, configs; print(*(m.__file__ for m in (train, s2, moe, launch, configs)))"
    found = subprocess.run(
        [sys.executable, "-P", "-c", where], cwd=work, env=env, capture_output=True, text=True, check=True
    ).stdout.split()
    assert all(path.startswith(str(site)) for path in found), found
