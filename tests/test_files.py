import os
import signal
import stat
import subprocess
import sys

import pytest

from flatbook.files import atomic_folder, atomic_write

KILLED_IN_A_WRITE = """
import os, signal, sys
from flatbook.files import atomic_write
with atomic_write(sys.argv[1]) as file:
    file.write("half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
KILLED_IN_A_FOLDER = """
import os, signal, sys
from pathlib import Path
from flatbook.files import atomic_folder
with atomic_folder(sys.argv[1]) as staging:
    (staging / Path(sys.argv[1]).name).mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize(("mode", "content"), [("w", "flat ≠ sharp\n"), ("wb", b"\x00\xff\r\n")])
def test_atomic_write_writes_what_it_is_given(tmp_path, mode, content):
    path = tmp_path / "new" / "folder" / "file"
    with atomic_write(path, mode) as file:
        file.write(content)
    raw = path.read_bytes()
    assert (raw.decode("utf-8") if mode == "w" else raw) == content
    assert names(path.parent) == ["file"]


def test_readers_see_the_old_file_until_the_block_ends(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_write(path) as file:
        file.write("new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def interrupted():
        with atomic_write(path) as file:
            file.write("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_kill_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", KILLED_IN_A_WRITE, path], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"


def test_atomic_write_gives_the_rights_of_an_ordinary_file(tmp_path):
    (tmp_path / "ordinary").write_text("")
    with atomic_write(tmp_path / "atomic"):
        pass
    rights = [stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("ordinary", "atomic")]
    assert rights[0] == rights[1]


@pytest.mark.parametrize("mode", ["a", "r", "x", "w+", None])
def test_atomic_write_refuses_other_modes(tmp_path, mode):
    with (
        pytest.raises(ValueError, match="mode must be 'w' or 'wb'; got"),
        atomic_write(tmp_path / "file", mode),
    ):
        pass
    assert names(tmp_path) == []


def build(path, content):
    with atomic_folder(path) as staging:
        (staging / path.name).mkdir()
        (staging / path.name / content).touch()


def test_atomic_folder_builds_and_replaces(tmp_path):
    path = tmp_path / "data" / "set"
    build(path, "first")
    assert names(path) == ["first"]
    build(path, "second")
    assert names(path) == ["second"]
    assert names(path.parent) == ["set"]


def test_atomic_folder_keeps_the_old_one_when_the_block_fails(tmp_path):
    path = tmp_path / "set"
    build(path, "old")

    def failing():
        with atomic_folder(path) as staging:
            (staging / "set").mkdir()
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        failing()
    with pytest.raises(FileNotFoundError, match="set was not built"), atomic_folder(path):
        pass
    assert names(path) == ["old"]
    assert names(tmp_path) == ["set"]


def test_a_kill_leaves_the_old_folder(tmp_path):
    path = tmp_path / "set"
    build(path, "old")
    done = subprocess.run([sys.executable, "-c", KILLED_IN_A_FOLDER, path], check=False)
    assert done.returncode == -signal.SIGKILL
    assert names(path) == ["old"]
