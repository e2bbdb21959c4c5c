"""Compiled kernels that are loaded are nobody else's, and those that nobody uses go."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from kernel_tools import Compiler, names, use

from headstart.errors import HeadstartWarning
from headstart.machine.cpu import build

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))


# -- whose they are ---------------------------------------------------------------------------------------------------


def planted(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A library that leaves a mark when it is loaded, under the kernels' name, with a note that fits; and the mark."""
    mark, source, library = tmp_path / "mark", tmp_path / "evil.cpp", tmp_path / "evil.so"
    source.write_text(
        "#include <cstdio>\n__attribute__((constructor)) static void loaded() "
        f'{{ fclose(fopen("{mark}", "w")); }}\nextern "C" int hs_forward() {{ return 0; }}\n'
    )
    subprocess.run([*(build._compiler() or []), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    use(monkeypatch, Compiler(tmp_path / "evil", library=library))
    made = build.compiled("native")
    use(monkeypatch, Compiler(tmp_path / "one"))
    return made, mark


def test_a_planted_library_would_run(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of one's own; so the tests below can fail."""
    _made, mark = planted(cold, tmp_path, monkeypatch)
    assert build.why_not() is None
    assert mark.exists()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_that_others_can_write(cold: Path, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, mark = planted(cold, tmp_path, monkeypatch)
    cold.chmod(mode)
    with pytest.warns(
        HeadstartWarning, match=f"{cold} can be written by other users.*a private folder is used instead"
    ):
        assert build.why_not() is None
    assert not mark.exists()
    (private,) = (folder for folder in cold.parent.iterdir() if folder != cold)
    assert private.stat().st_mode & 0o777 == 0o700
    assert names(private) == names(cold)
    with pytest.warns(HeadstartWarning):
        assert build.compiled("native").parent == private, "found again"
    assert made.exists()


@pytest.mark.parametrize("mode", [0o666, 0o664])
def test_a_file_that_others_can_write(cold: Path, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, mark = planted(cold, tmp_path, monkeypatch)
    made.chmod(mode)
    assert build.why_not() is None
    assert not mark.exists()
    assert made.stat().st_mode & 0o022 == 0, "made anew"


@pytest.mark.parametrize("which", ["so", "json", "folder"])
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_somebody_else(cold: Path, which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, mark = planted(cold, tmp_path, monkeypatch)
    os.chown({"so": made, "json": made.with_suffix(".json"), "folder": cold}[which], 12345, 12345)
    if which == "folder":
        with pytest.warns(HeadstartWarning, match="belongs to another user"):
            assert build.why_not() is None
    else:
        assert build.why_not() is None
    assert not mark.exists()


def test_a_link_to_somewhere_else(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, mark = planted(cold, tmp_path, monkeypatch)
    made.rename(tmp_path / "away.so")
    made.symlink_to(tmp_path / "away.so")
    assert build.why_not() is None
    assert not mark.exists()
    assert not made.is_symlink()


def test_a_folder_of_ones_own_that_lies_elsewhere(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that the user made is followed; the folder behind it must be as safe as any."""
    other = tmp_path / "large disk"
    other.mkdir(mode=0o755)
    cold.parent.mkdir()
    cold.symlink_to(other)
    use(monkeypatch, Compiler(tmp_path / "one"))
    assert build.compiled("native").parent == cold
    assert len(names(other)) == 2
    other.chmod(0o777)
    with pytest.warns(HeadstartWarning, match="can be written by other users"):
        assert build.compiled("native").parent != cold


def test_new_folders_and_files_are_ones_own(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the umask says; but what root put into an image can be used by all."""
    use(monkeypatch, Compiler(tmp_path / "one"))
    before = os.umask(0)
    try:
        made = build.compiled("native")
    finally:
        os.umask(before)
    assert (cold.stat().st_mode & 0o777, made.stat().st_mode & 0o777) == (0o755, 0o644)
    assert build.compiled("native") == made


# -- how long they stay -----------------------------------------------------------------------------------------------


def test_kernels_that_nobody_used_for_a_month_go(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Compiler(tmp_path / "one"))
    made = build.compiled("native")
    month = time.time() - 31 * 86400
    for name in ("plain-old.so", "plain-old.json", "native-older.so", "whole-old.cubin", "alone.json", ".old.so.lock"):
        (cold / name).write_text("x")
        os.utime(cold / name, (month, month))
    for name in ("plain-new.so", "plain-new.json", "whole-new.cubin"):
        (cold / name).write_text("x")
    (cold / "held.so").write_text("x")
    with open(cold / "held.so") as held:
        build.hold(held.fileno())  # as a process that has run for more than a month
        for path in (cold / "held.so", made, made.with_suffix(".json")):
            os.utime(path, (month, month))
        assert build.why_not() is None
    kept = {made.name, made.with_suffix(".json").name, "plain-new.so", "plain-new.json", "whole-new.cubin", "held.so"}
    assert set(names(cold)) == kept
    assert time.time() - made.stat().st_mtime < 3600, "used now"
