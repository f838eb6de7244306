"""A file is there whole or not at all, whoever writes it, and whatever is there already."""

import multiprocessing
import os
import re
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest

from jax_ddp_weighting import Ledger
from jax_ddp_weighting._files import open_whole

WRITERS, SAVES = 6, 40


def write(path, content):
    with open_whole(path) as file:
        file.write(content)


def save_often(path, writer):
    ledger = Ledger(20_000, epoch=writer)
    ledger.add(np.arange(0, 20_000, writer + 2))
    for _ in range(SAVES):
        ledger.save(path)


def load_until(path, done):
    """Ledgers of any writer, each of them whole."""
    loads = 0
    while not done.is_set() or not loads:
        ledger = Ledger.load(path)  # a torn one has a wrong checksum
        assert ledger.accepted == -(-20_000 // (ledger.epoch + 2))
        loads += 1
    return loads


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_many_save_one_ledger_and_every_load_is_whole(tmp_path, kind):
    path, done = tmp_path / "ledger", threading.Event()
    save_often(path, 0)
    if kind == "threads":
        writers = [threading.Thread(target=save_often, args=(path, w)) for w in range(WRITERS)]
    else:
        spawn = multiprocessing.get_context("spawn")
        writers = [spawn.Process(target=save_often, args=(path, w)) for w in range(2)]
    failed = []

    def read():
        try:
            load_until(path, done)
        except BaseException as error:  # whatever it is, the test shows it
            failed.append(error)

    reader = threading.Thread(target=read)
    for each in (*writers, reader):
        each.start()
    for each in writers:
        each.join()
    done.set()
    reader.join()
    assert not failed
    assert all(getattr(each, "exitcode", 0) == 0 for each in writers)
    assert [each.name for each in tmp_path.iterdir()] == ["ledger"]  # nothing unfinished


def test_a_writer_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail():
        with open_whole(path) as file:
            file.write(b"new")
            raise ArithmeticError("in the middle")

    with pytest.raises(ArithmeticError, match="in the middle"):
        fail()
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "far").mkdir()
    target, link, chain = tmp_path / "far" / "target", tmp_path / "link", tmp_path / "chain"
    target.write_bytes(b"old")
    link.symlink_to(target)
    chain.symlink_to("link")
    write(chain, b"new")
    assert target.read_bytes() == b"new"
    assert (chain.readlink().name, link.readlink()) == ("link", target)


def test_a_link_to_nothing_makes_what_it_leads_to(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    write(link, b"new")
    assert link.is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755, 0o444])
def test_a_file_keeps_its_mode(tmp_path, mode):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(mode)
    write(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_bytes() == b"new"


def test_a_new_file_has_the_mode_of_new_files(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write(tmp_path / "file", b"new")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_pipe_is_written_straight_and_stays_one(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write(pipe, b"new")
    reader.join()
    assert read == [b"new"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_a_name_that_stands_for_an_open_pipe_is_written_straight(path):
    """In a subprocess, whose output is a pipe: its path leads nowhere in the file system."""
    program = "import sys; from jax_ddp_weighting._files import open_whole\n"
    program += "with open_whole(sys.argv[1]) as file: file.write(b'new')"
    run = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, check=False
    )
    assert (run.stdout, run.stderr) == ("new", "")


def test_the_device_that_takes_everything_stays_one():
    write("/dev/null", b"new")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("name", ["n" * 255, "ü" * 127, ".hidden", "a b", "-x", "ledger.partial"])
def test_every_name_that_a_file_may_have(tmp_path, name):
    write(tmp_path / name, b"new")
    write(str(tmp_path / name), b"newer")
    assert (tmp_path / name).read_bytes() == b"newer"
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "nowhere" / "file"
    with pytest.raises(FileNotFoundError, match=re.escape(f"'{path}'")):  # not its stand-in
        write(path, b"new")
    with pytest.raises(IsADirectoryError, match=re.escape(f"'{tmp_path}'")):
        write(tmp_path, b"new")
