"""`scripts/find_python` must name an interpreter that runs, skip shims that do not, and say clearly why there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "find_python"

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] not in ((3, 12), (3, 13)), reason=f"the fake interpreters need this one to be 3.12 or 3.13, not {sys.version}"
)


def executable(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def working(path: Path) -> Path:
    return executable(path, f'exec "{sys.executable}" "$@"')


def other_version(path: Path, version: str) -> Path:
    """A stand-in for another Python: it answers the first question with its version and exits 3 to the second, as the real one would."""
    return executable(path, f'case "$2" in *ensurepip*) exit 3 ;; esac\necho {version}')


def refusing_shim(path: Path) -> Path:
    """What pyenv leaves on PATH for a version that is installed but not selected."""
    return executable(path, 'echo "pyenv: $0: command not found" >&2\nexit 127')


def find(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script with nothing on PATH but `tmp_path/bin` and an empty home, so that the machine's own interpreters stay out."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    full = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home"), "FIND_PYTHON_NO_SYSTEM": "1", **env}
    return subprocess.run(["/bin/sh", str(SCRIPT)], env=full, capture_output=True, text=True, timeout=60)


def running_version(path: str) -> tuple[int, int]:
    answer = subprocess.run([path, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True, check=True)
    major, minor = answer.stdout.split()
    return int(major), int(minor)


def test_takes_a_working_interpreter_from_path(tmp_path: Path) -> None:
    working(tmp_path / "bin" / f"python3.{sys.version_info.minor}")
    result = find(tmp_path)
    assert result.returncode == 0, result.stderr
    assert running_version(result.stdout.strip()) == sys.version_info[:2]


def test_skips_a_shim_that_does_not_run_and_an_older_python3(tmp_path: Path) -> None:
    minor = sys.version_info.minor
    refusing_shim(tmp_path / "bin" / f"python3.{minor}")
    other_version(tmp_path / "bin" / "python3", "3.11.7")
    working(tmp_path / "home" / ".pyenv" / "versions" / f"3.{minor}.1" / "bin" / "python3")
    result = find(tmp_path)
    assert result.returncode == 0, result.stderr
    assert running_version(result.stdout.strip()) == sys.version_info[:2]


def test_pyenv_root_is_honoured(tmp_path: Path) -> None:
    working(tmp_path / "elsewhere" / "versions" / f"3.{sys.version_info.minor}.9" / "bin" / "python3")
    result = find(tmp_path, PYENV_ROOT=str(tmp_path / "elsewhere"))
    assert result.returncode == 0, result.stderr


def test_none_says_what_was_found_and_what_to_do(tmp_path: Path) -> None:
    refusing_shim(tmp_path / "bin" / "python3.12")
    other_version(tmp_path / "bin" / "python3", "3.11.7")
    result = find(tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "no working Python 3.12 or 3.13" in result.stderr
    assert "python3.12 does not run" in result.stderr
    assert "python3 is Python 3.11.7" in result.stderr
    assert "make setup PYTHON=" in result.stderr


def test_one_without_venv_is_skipped_with_the_reason(tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "python3.12", 'case "$2" in *ensurepip*) exit 4 ;; esac\necho 3.12.3')
    result = find(tmp_path)
    assert result.returncode == 1
    assert "3.12.3 without the venv module" in result.stderr
    assert "python3.12-venv" in result.stderr


def test_a_named_interpreter_is_the_only_one_tried(tmp_path: Path) -> None:
    working(tmp_path / "bin" / f"python3.{sys.version_info.minor}")
    named = other_version(tmp_path / "mine" / "python", "3.9.1")
    result = find(tmp_path, PYTHON=str(named))
    assert result.returncode == 1
    assert f"PYTHON={named} is not a working Python" in result.stderr
    assert "is Python 3.9.1" in result.stderr
    missing = find(tmp_path, PYTHON=str(tmp_path / "nowhere"))
    assert missing.returncode == 1 and "nowhere is not an executable" in missing.stderr


def test_on_this_machine_it_finds_one(tmp_path: Path) -> None:
    """With the real PATH and home there must be one: this interpreter came from somewhere."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env.pop("PYTHON", None)
    result = subprocess.run(["/bin/sh", str(SCRIPT)], env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert running_version(result.stdout.strip()) in ((3, 12), (3, 13))
