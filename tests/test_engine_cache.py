"""Where the compiled engine is kept: found again, rebuilt when damaged, and never in the way of a run."""

import json
import os
import tempfile
from pathlib import Path

import pytest

from infersim.engine.compiled import build

BUILT = b"object code", {"entry": "e", "helpers": []}


@pytest.fixture
def builds(monkeypatch):
    """How often the engine was compiled; compiling is left out, it takes seconds."""
    made = []
    monkeypatch.setattr(build, "_compile", lambda: made.append(1) or (BUILT[0], dict(BUILT[1])))
    return made


def built(folder):
    code, symbols = build._read(folder) or build._build(folder)
    assert code == BUILT[0]
    assert symbols["entry"] == "e"


def test_what_is_built_once_is_found_again_and_what_is_damaged_is_built_anew(builds, tmp_path):
    folder = tmp_path / "key"
    built(folder)
    built(folder)
    assert len(builds) == 1
    for name, damage in (("engine.o", b""), ("engine.o", b"other"), ("symbols.json", b""), ("symbols.json", b"{}")):
        (folder / name).write_bytes(damage)
        built(folder)
        built(folder)
    assert len(builds) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_folder_that_cannot_be_written_costs_only_time(builds, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    built(file / "key")
    built(file / "key")
    assert len(builds) == 2


@pytest.mark.parametrize("wished", ["a file", "no home"])
def test_without_a_cache_folder_there_is_a_temporary_one_that_a_second_run_finds_again(monkeypatch, tmp_path, wished):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if wished == "a file":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("INFERSIM_CACHE_DIR", str(tmp_path / "file"))
    else:
        monkeypatch.delenv("INFERSIM_CACHE_DIR", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

        def home():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", home)
    folder = build.cache_folder()
    assert folder.parent == tmp_path
    assert build.cache_folder() == folder
    assert folder.stat().st_mode & 0o077 == 0


def test_nobody_elses_temporary_folder_is_trusted(monkeypatch, tmp_path):
    """It holds code that will be run, and anybody may have made it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("INFERSIM_CACHE_DIR", os.devnull)
    ours = build.cache_folder()
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    made_by_us = tmp_path / f"infersim-{other}"
    made_by_us.mkdir()
    assert build.cache_folder() not in (ours, made_by_us)


def test_a_folder_that_others_may_write_to_is_refused_in_words(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("INFERSIM_CACHE_DIR", str(tmp_path / "shared"))
    (tmp_path / "shared").mkdir()
    for mode, found in ((0o755, "shared"), (0o775, f"infersim-{os.getuid()}"), (0o757, f"infersim-{os.getuid()}")):
        (tmp_path / "shared").chmod(mode)
        assert build.cache_folder() == tmp_path / found
    assert "shared may be written to by others" in capsys.readouterr().err


def test_symbols_carry_the_hash_of_their_code(builds, tmp_path):
    build._build(tmp_path / "key")
    symbols = json.loads((tmp_path / "key" / "symbols.json").read_text())
    assert len(symbols["sha256"]) == 64
