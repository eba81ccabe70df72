"""The installed wheel, run from a folder whose train.py, configs/ and tests/ must not be taken for ours."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"train", "s2", "moe", "launch", "configs"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our wheel, built without the network from a copy of what is packaged."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content and its console script."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target", str(target), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A working directory with names like ours."""
    (tmp_path / "train.py").write_text("raise SystemExit('the user\\'s own train.py was imported')\n")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").write_text("raise SystemExit('the user\\'s own configs was imported')\n")
    (tmp_path / "configs" / "config.yaml").write_text("defaults: [nonsense]\n")
    (tmp_path / "tests").mkdir()
    return tmp_path


def test_the_wheel_holds_our_packages_and_every_yaml(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")} == PACKAGES
    shipped = {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml")}
    assert shipped <= set(names)


@pytest.mark.parametrize("entry", ["script", "module"])
def test_a_dry_run_uses_ours(installed: Path, hostile: Path, entry: str) -> None:
    start = [str(installed / "bin" / "leantron")] if entry == "script" else [sys.executable, "-m", "launch"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [*start, "pretrain", "experiment=demo", "--dry-run"], cwd=hostile, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "dp 2, ep 2" in done.stdout
    assert {path.name for path in hostile.iterdir()} - {"__pycache__"} == {"train.py", "configs", "tests"}


def test_a_foreign_package_is_named(installed: Path, hostile: Path) -> None:
    """Even where the path is turned round after the start, ours is looked for beside the launcher."""
    code = (
        "import sys, launch.packages as packages; sys.path.insert(0, '.'); print(packages.shadowed())\n"
        "packages.use_own_packages(); print(packages.shadowed())"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=hostile, env=environment, capture_output=True, text=True, timeout=60)
    first, second = done.stdout.splitlines()
    assert "'train'" in first and "'configs'" in first
    assert second == "{}"
