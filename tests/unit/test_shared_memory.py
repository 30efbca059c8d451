"""Shared blocks are seen by all, private to the user, gone afterwards, and clean when room ends."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import stat
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from horo_lite.errors import ArgumentError, HoroLiteError
from horo_lite.transport import shared
from horo_lite.transport.shared import NoRoomError, SharedBlock, SharedMemoryError


@pytest.fixture
def directory(tmp_path):
    """A directory of our own: what is left in it at the end was left behind."""
    gc.freeze()  # only what the test makes is looked for
    yield str(tmp_path)
    gc.collect()
    assert os.listdir(tmp_path) == []


def python(code, *arguments, check=True):
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, check=check, timeout=60, capture_output=True, text=True)


named = pytest.mark.parametrize("named", [False, True])


@named
def test_two_mappings_are_one_memory(directory, named):
    ours = SharedBlock.create(1000, directory, named)
    assert os.listdir(directory) == [ours.token] * named
    theirs = SharedBlock.attach(ours.token, 1000, directory)
    ours.conceal()
    assert os.listdir(directory) == []
    ours.array("float32", 64, 3)[:] = [1, 2, 3]
    assert theirs.array("float32", 64, 3).tolist() == [1, 2, 3]
    theirs.array("bfloat16", 68, 1)[:] = 8
    assert ours.array("bfloat16", 68, 1).tolist() == [8]
    assert not ours.array("uint8", 100, 900).any()


@named
def test_another_process_sees_it(directory, named):
    block = SharedBlock.create(1 << 16, directory, named)
    code = """
        import sys
        from horo_lite.transport.shared import SharedBlock
        block = SharedBlock.attach(sys.argv[1], 1 << 16, sys.argv[2])
        array = block.array("int32", 0, 100)
        array += 1
        block.close()
        array += 1
    """
    block.array("int32", 0, 100)[:] = range(100)
    python(code, block.token, directory)
    assert block.array("int32", 0, 100).tolist() == list(range(2, 102))


def test_arrays_outlive_the_block(directory):
    block = SharedBlock.create(1 << 16, directory)
    part = block.array("float64", 8, 1000)[10:20]
    block.close()
    del block
    gc.collect()
    part[:] = 5
    assert part.sum() == 50
    with pytest.raises(ArgumentError, match="closed"):
        closed = SharedBlock.create(8, directory)
        closed.close()
        closed.array("uint8", 0, 1)


def test_tensors_outlive_the_block(directory):
    torch = pytest.importorskip("torch")
    block = SharedBlock.create(1 << 16, directory)
    tensor = torch.from_numpy(block.array("float32", 0, 1000))
    del block
    gc.collect()
    tensor.fill_(2)
    assert tensor.sum() == 2000


@named
def test_arrays_may_be_alive_when_the_interpreter_ends(directory, named):
    code = f"""
        import sys
        from horo_lite.transport.shared import SharedBlock
        block = SharedBlock.create(1 << 16, sys.argv[1], {named})
        array = block.array("float32", 0, 1000)
        array[:] = 1
    """
    result = python(code, directory)  # never unlinked by hand either
    assert (result.returncode, result.stderr) == (0, "")


@named
def test_a_dropped_block_leaves_no_file(directory, named):
    SharedBlock.create(4096, directory, named)
    gc.collect()
    assert os.listdir(directory) == []


@named
def test_a_forked_child_takes_nothing_away(directory, named):
    block = SharedBlock.create(4096, directory, named)
    child = os.fork()
    if child == 0:
        block.close()
        os._exit(0)
    os.waitpid(child, 0)
    SharedBlock.attach(block.token, 4096, directory)


def test_a_killed_creator_leaves_nothing(directory):
    code = """
        import os, signal, sys
        from horo_lite.transport.shared import SharedBlock
        block = SharedBlock.create(1 << 16, sys.argv[1])
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert python(code, directory, check=False).returncode == -9  # the fixture looks for what is left


def test_a_concealed_block_is_attached_no_more(directory):
    for block in (SharedBlock.create(4096, directory), SharedBlock.create(4096, directory, named=True)):
        block.conceal()
        with pytest.raises(SharedMemoryError, match="could not open"):
            SharedBlock.attach(block.token, 4096, directory)


def test_a_descriptor_of_that_number_may_be_another_file(directory, tmp_path_factory):
    block = SharedBlock.create(4096, directory)
    pid, descriptor, device, number = block.token.split("/")
    with pytest.raises(SharedMemoryError, match="not the shared memory"):
        SharedBlock.attach(f"{pid}/{descriptor}/{device}/{int(number) + 1}", 4096, directory)
    other = os.open(tmp_path_factory.mktemp("other") / "file", os.O_CREAT | os.O_RDWR, 0o600)
    os.truncate(other, 4096)
    with pytest.raises(SharedMemoryError, match="not the shared memory"):
        SharedBlock.attach(f"{pid}/{other}/{device}/{number}", 4096, directory)
    os.close(other)


def test_a_file_system_that_has_only_names_is_told(directory, monkeypatch):
    monkeypatch.setattr(shared, "_CREATE_UNNAMED", os.O_DIRECTORY | os.O_EXCL)  # what a system without O_TMPFILE takes
    with pytest.raises(SharedMemoryError, match="could not create"):
        SharedBlock.create(4096, directory)


@pytest.mark.parametrize("mask", [0o000, 0o777])
def test_without_a_name_it_is_private_too(directory, mask):
    previous = os.umask(mask)
    try:
        block = SharedBlock.create(10, directory)
    finally:
        os.umask(previous)
    status = os.stat("/proc/self/fd/" + block.token.split("/")[1])
    assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
    assert status.st_blocks * 512 >= 4096  # reserved, not sparse


@pytest.mark.parametrize("mask", [0o000, 0o777])
def test_the_file_is_private_and_unguessable(directory, mask):
    previous = os.umask(mask)
    try:
        blocks = [SharedBlock.create(10, directory, named=True) for _ in range(2)]
    finally:
        os.umask(previous)
    for block in blocks:
        status = os.stat(os.path.join(directory, block.token))
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_blocks * 512 >= 4096  # reserved, not sparse
    assert blocks[0].token != blocks[1].token


def test_what_is_not_ours_is_not_attached(directory):
    block = SharedBlock.create(10_000, directory, named=True)
    path = os.path.join(directory, block.token)
    with pytest.raises(SharedMemoryError, match="bytes, expected"):
        SharedBlock.attach(block.token, 20_000, directory)
    os.chmod(path, 0o666)
    with pytest.raises(SharedMemoryError, match="not a private file"):
        SharedBlock.attach(block.token, 10_000, directory)
    link = os.path.join(directory, "horo_lite-" + "0" * 32)
    os.symlink(path, link)
    with pytest.raises(SharedMemoryError):
        SharedBlock.attach(os.path.basename(link), 10_000, directory)
    os.unlink(link)
    with pytest.raises(SharedMemoryError, match="could not open"):
        SharedBlock.attach("horo_lite-" + "1" * 32, 10_000, directory)
    for token in ("", "../" + block.token, block.token + "/", "horo_lite-x", "1/2/3", "self/0/1/1", "1/../2/3"):
        with pytest.raises(ArgumentError, match="token"):
            SharedBlock.attach(token, 10_000, directory)


def test_a_missing_directory_is_told(tmp_path):
    with pytest.raises(SharedMemoryError, match="absent") as caught:
        SharedBlock.create(10, str(tmp_path / "absent"))
    assert isinstance(caught.value, HoroLiteError)
    assert caught.value.errno == errno.ENOENT


def test_sizes_and_bounds(directory):
    empty = SharedBlock.create(0, directory)
    assert len(empty.array("float32", 0, 0)) == 0
    block = SharedBlock.create(4097, directory)
    assert len(block.array("uint8", 4096, 1)) == 1
    assert len(block.array("float64", 4096, 0)) == 0
    for place in [("uint8", 4096, 2), ("float64", 4096, 1), ("uint8", -1, 1), ("uint8", 0, -1)]:
        with pytest.raises(ArgumentError, match="4097 bytes"):
            block.array(*place)
    with pytest.raises(ArgumentError):
        SharedBlock.create(-1, directory)


def test_a_file_system_that_cannot_reserve_is_written_to(directory, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    block = SharedBlock.create((1 << 20) + 5000, directory, named=True)
    assert os.stat(os.path.join(directory, block.token)).st_blocks * 512 >= (1 << 20) + 5000
    assert not block.array("uint8", 0, (1 << 20) + 5000).any()


@named
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM])
def test_no_room_is_its_own_error(directory, monkeypatch, code, named):
    def full(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(shared.os, "posix_fallocate", full)
    with pytest.raises(NoRoomError, match="reserve 4096 bytes"):
        SharedBlock.create(4096, directory, named)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)
def test_a_container_with_64_mb(directory):
    code = f"""
        import os, sys
        sys.path[:0] = {sys.path!r}
        from horo_lite.transport.shared import NoRoomError, SharedBlock
        held = SharedBlock.create(40 << 20, {directory!r})
        try:
            SharedBlock.create(40 << 20, {directory!r})
        except NoRoomError as error:
            assert os.statvfs({directory!r}).f_bavail << 12 > 20 << 20, "the failed file is still there"
        else:
            sys.exit("80 MB fitted into 64")
        array = held.array("uint8", 0, 40 << 20)
        array[:] = 1  # every page is really there
        held.close()
        print(os.listdir({directory!r}), int(array.sum()))
    """
    script = f"mount -t tmpfs -o size=64m tmpfs {directory} && exec {sys.executable} -c '{{}}'"
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", script.format(textwrap.dedent(code).replace("'", "'\\''"))],
        timeout=60,
        capture_output=True,
        text=True,
    )
    if "unshare" in result.stderr or "mount" in result.stderr:
        pytest.skip(f"mounting is not allowed here: {result.stderr.strip()}")
    assert (result.stdout.strip(), result.returncode) == (f"[] {40 << 20}", 0), result.stderr


def test_descriptors_are_given_back(directory):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    blocks = [SharedBlock.create(4096, directory, named) for named in [False, True] * 10]
    for block in blocks:
        block.conceal()
    if sys.version_info >= (3, 13):
        assert descriptors() == before
    arrays = [block.array("uint8", 0, 10) for block in blocks]
    del block, blocks, arrays
    gc.collect()
    assert descriptors() == before


def test_memory_is_given_back(directory):
    def mapped():
        with open("/proc/self/maps") as maps:
            return sum(directory in line for line in maps)

    before = mapped()
    for _ in range(100):
        block = SharedBlock.create(1 << 16, directory)
        np.add(block.array("float32", 0, 100), 1)
        block.close()
    del block
    gc.collect()
    assert mapped() == before
