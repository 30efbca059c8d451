"""Memory that the ranks of one node share: where buckets live, so that reducing copies nothing.

One rank creates a block and tells the others its ``token``; each attaches; when all have, the
creator calls ``conceal()``, and from then on nobody else can, and the memory goes when its last user goes.
It is a mapping of our own and not an MPI window, because gradients are views into it and may be
touched after ``shutdown()``: pages stay mapped as long as any array or tensor looks at them.

The file never has a name: others open it through the creator's /proc/PID/fd, so that whenever the creator
is killed nothing is left. Where they can't see that (ranks in containers of their own, which have /dev/shm
in common), it gets a random name until it is concealed.

It has mode 0600, and its room is reserved before anyone maps it: a page
that does not fit would otherwise kill the process when it is touched (a container's /dev/shm has
64 MB by default). Reserving also makes the creator the one who first touches the pages, so on a
machine of several memory nodes they lie next to it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import stat
import sys
import weakref
from typing import Any, NamedTuple

import numpy as np

from horo_lite.arrays import numpy_dtype
from horo_lite.errors import ArgumentError, HoroLiteError
from horo_lite.interfaces import Array

_NAMED = re.compile(r"horo_lite-[0-9a-f]{32}")
_UNNAMED = re.compile(r"([0-9]+)/([0-9]+)/([0-9]+)/([0-9]+)")  # process, descriptor; device and number of the file
_CREATE = os.O_CREAT | os.O_EXCL
_CREATE_UNNAMED = getattr(os, "O_TMPFILE", os.O_DIRECTORY) | os.O_EXCL  # O_EXCL: it can't get a name later
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
_ZEROS_BYTES = 1 << 20


class SharedMemoryError(HoroLiteError, OSError):
    """Memory can't be shared here; whoever asked for it goes another way."""


class NoRoomError(SharedMemoryError):
    """The file system that holds shared memory is full, or a limit is reached."""


class _Offer(NamedTuple):
    """By what others can attach a block."""

    descriptor: int | None
    path: str | None


class SharedBlock:
    """A piece of memory mapped by several processes; made by ``create`` or ``attach``.

    Attributes:
        nbytes: its size as asked for.
        token: what another process of the same user and machine needs to attach it.
    """

    def __init__(self, mapping: mmap.mmap, nbytes: int, token: str, offer: _Offer | None = None) -> None:
        self._mapping: mmap.mmap | None = mapping
        self.nbytes = nbytes
        self.token = token
        # Also runs when the block is dropped and at exit, so that a failed start leaves no file.
        self._withdraw = None if offer is None else weakref.finalize(self, _withdraw, offer, os.getpid())

    @classmethod
    def create(cls, nbytes: int, directory: str = "/dev/shm", named: bool = False) -> SharedBlock:
        """A new block, filled with zeros.

        Args:
            nbytes: its size.
            directory: a directory in memory, in which the block is a file.
            named: the file has a name until ``conceal()``, for processes that can't look into this one's /proc/PID/fd.

        Raises:
            NoRoomError: ``nbytes`` do not fit. Nothing is left behind.
            SharedMemoryError: the directory is missing or can't be written, or has only files with a name.
        """
        if nbytes < 0:
            raise ArgumentError(f"expected a size in bytes, got {nbytes}")
        token = f"horo_lite-{secrets.token_hex(16)}" if named else ""
        path = os.path.join(directory, token)
        try:
            descriptor = os.open(path, (_CREATE if named else _CREATE_UNNAMED) | _OPEN, 0o600)
        except OSError as error:
            raise _told(error, f"could not create shared memory in {directory}") from error
        try:
            os.fchmod(descriptor, 0o600)  # whatever the umask took away
            _reserve(descriptor, _mapped_bytes(nbytes))
            mapping = _map(descriptor, nbytes)
        except OSError as error:
            _withdraw(_Offer(descriptor, path if named else None), os.getpid())
            raise _told(error, f"could not reserve {nbytes} bytes in {directory}") from error
        if named:
            os.close(descriptor)
            return cls(mapping, nbytes, token, _Offer(None, path))
        file = os.fstat(descriptor)
        token = f"{os.getpid()}/{descriptor}/{file.st_dev}/{file.st_ino}"
        return cls(mapping, nbytes, token, _Offer(descriptor, None))

    @classmethod
    def attach(cls, token: str, nbytes: int, directory: str = "/dev/shm") -> SharedBlock:
        """The block that another process created and has not concealed yet.

        Args:
            token: the creator's ``token``.
            nbytes: the creator's ``nbytes``.
            directory: where the creator put it.

        Raises:
            SharedMemoryError: there is no such file (another machine or container), or it is not
                a private file of this user and of this size.
        """
        unnamed = _UNNAMED.fullmatch(token)
        if not unnamed and not _NAMED.fullmatch(token):
            raise ArgumentError(f"expected the token of a shared block, got {token!r}")
        path = "/proc/{}/fd/{}".format(*unnamed.groups()) if unnamed else os.path.join(directory, token)
        try:
            descriptor = os.open(path, _OPEN & ~os.O_NOFOLLOW if unnamed else _OPEN)
        except OSError as error:
            raise _told(error, f"could not open the shared memory {path}") from error
        try:
            status = os.fstat(descriptor)
            if unnamed and (status.st_dev, status.st_ino) != (int(unnamed[3]), int(unnamed[4])):
                raise SharedMemoryError(errno.ENOENT, f"{path} is not the shared memory: of another container?")
            _verify(status, path, _mapped_bytes(nbytes))
            return cls(_map(descriptor, nbytes), nbytes, token)
        except OSError as error:
            raise _told(error, f"could not map the shared memory {path}") from error
        finally:
            os.close(descriptor)

    def array(self, name: str, offset_bytes: int, elements: int) -> Array:
        """A flat array of the element type ``name`` on a part of the block; keeps it mapped."""
        dtype = numpy_dtype(name)
        end = offset_bytes + elements * dtype.itemsize
        if self._mapping is None or offset_bytes < 0 or elements < 0 or end > self.nbytes:
            raise ArgumentError(
                f"{elements} elements of {name} at byte {offset_bytes} do not lie in "
                f"{'a closed block' if self._mapping is None else f'{self.nbytes} bytes'}"
            )
        whole: np.ndarray[Any, Any] = np.frombuffer(self._mapping, np.uint8)
        return whole[offset_bytes:end].view(dtype)

    def conceal(self) -> None:
        """Let nobody attach any more, once all have; the memory stays. Only the creator's does."""
        if self._withdraw is not None:
            self._withdraw()

    def close(self) -> None:
        """Let go of the memory; it is unmapped when the last array on it is gone."""
        self.conceal()
        self._mapping = None  # mmap.close() would raise while arrays look at it


def _mapped_bytes(nbytes: int) -> int:
    return max(-(-nbytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE


def _reserve(descriptor: int, nbytes: int) -> None:
    """Give a file its pages, or raise ENOSPC. A check of the free space would race with others."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
    zeros = bytes(min(_ZEROS_BYTES, nbytes))  # the file system can't reserve: write instead
    written = 0
    while written < nbytes:
        written += os.pwrite(descriptor, zeros[: nbytes - written], written)


def _map(descriptor: int, nbytes: int) -> mmap.mmap:
    # Populated at once (8 to 13 ms for 64 MiB): a fault a page in the first step takes 45.
    options: dict[str, Any] = {"flags": mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)}
    if sys.version_info >= (3, 13):
        options["trackfd"] = False  # a block needs no descriptor, and a node has many blocks
    return mmap.mmap(descriptor, _mapped_bytes(nbytes), **options)


def _verify(status: os.stat_result, path: str, nbytes: int) -> None:
    found = (stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode), status.st_uid)
    if found != (stat.S_IFREG, 0o600, os.geteuid()):
        raise SharedMemoryError(
            errno.EACCES,
            f"{path} is not a private file of user {os.geteuid()}: mode "
            f"{stat.filemode(status.st_mode)}, owner {status.st_uid}",
        )
    if status.st_size != nbytes:
        raise SharedMemoryError(
            errno.EINVAL, f"{path} has {status.st_size} bytes, expected {nbytes}"
        )


def _told(error: OSError, what: str) -> SharedMemoryError:
    if isinstance(error, SharedMemoryError):
        return error
    kind = NoRoomError if error.errno in _NO_ROOM else SharedMemoryError
    return kind(error.errno, f"{what}: {error.strerror}")


def _withdraw(offer: _Offer, creator: int) -> None:
    if os.getpid() != creator:  # a forked child inherits the finalizer
        return
    if offer.path is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(offer.path)
    if offer.descriptor is not None:
        with contextlib.suppress(OSError):  # a program that becomes a daemon closes whatever is open
            os.close(offer.descriptor)
