"""Make this Linux look like another system to asyncpar: what only Linux has, or what Windows has not, is gone.

Every Python with this folder on PYTHONPATH imports this file first; ``SYSTEM_TO_BE`` names the system.

The standard library and other packages are imported before, so they go on to work as they do here.  ``darwin`` has no
name of Python that is there on Linux only; ``win32`` has no module and no name of POSIX either, and an event loop that
handles no signals and watches no files.  Both have no ``/proc``, ``/sys`` and ``/dev/shm``.
"""

from __future__ import annotations

import asyncio
import asyncio.selector_events
import asyncio.unix_events
import errno
import importlib
import inspect
import os
import select
import signal
import socket
import ssl
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

BEFORE = (
    *("concurrent.futures", "ctypes.util", "getpass", "http.server", "multiprocessing.popen_spawn_posix"),
    *(
        "multiprocessing.connection",
        "multiprocessing.util",
        "platform",
        "shutil",
        "ssl",
        "subprocess",
        "tempfile",
        "urllib.request",
    ),
    *("click", "cryptography", "google.protobuf", "grpc.aio", "grpc_health.v1.health", "ml_dtypes"),
    *("msgspec", "numpy", "psutil", "rich.console", "rich.live", "uvloop", "xxhash"),
)
"""What asyncpar imports of others, which look at the system when they are imported."""

LINUX = {
    os: (
        *("memfd_create", "eventfd", "eventfd_read", "eventfd_write", "sched_getaffinity", "sched_setaffinity"),
        *("pidfd_open", "pipe2", "posix_fallocate", "posix_fadvise", "getrandom", "copy_file_range", "splice"),
        *("O_PATH", "O_DIRECT", "O_NOATIME"),
    ),
    select: ("epoll",),
    signal: ("SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT", "SIGPOLL", "SIGCLD", "sigtimedwait", "sigwaitinfo"),
    socket: (
        *("SO_PEERCRED", "SO_BUSY_POLL", "SO_INCOMING_CPU", "SO_MARK", "SO_PRIORITY", "SO_DOMAIN", "SO_PROTOCOL"),
        *("SO_PASSCRED", "SO_PEERSEC", "SO_BINDTODEVICE", "MSG_CMSG_CLOEXEC", "MSG_ERRQUEUE", "MSG_MORE"),
        *("SOCK_CLOEXEC", "SOCK_NONBLOCK", "TCP_CONGESTION", "TCP_CORK", "TCP_INFO", "TCP_KEEPIDLE", "TCP_QUICKACK"),
        *("TCP_USER_TIMEOUT", "TCP_DEFER_ACCEPT", "TCP_LINGER2", "TCP_SYNCNT", "IP_TRANSPARENT"),
    ),
}
POSIX_MODULES = ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty", "uvloop")
POSIX = {
    os: (
        *("fchmod", "fchown", "fork", "forkpty", "geteuid", "getegid", "getgid", "getloadavg", "getpgid", "getuid"),
        *("killpg", "mkfifo", "posix_spawn", "pread", "preadv", "pwrite", "pwritev", "register_at_fork"),
        *("sched_yield", "setpgid", "setsid", "statvfs", "sysconf", "uname", "WNOHANG", "waitid"),
        *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK"),
    ),
    select: ("poll",),
    signal: (
        *("SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGPROF", "SIGQUIT", "SIGSTOP", "SIGTSTP"),
        *("SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIG_BLOCK", "SIG_SETMASK", "SIG_UNBLOCK", "alarm", "pthread_kill"),
        *("pthread_sigmask", "setitimer", "siginterrupt", "sigpending", "sigwait"),
    ),
    socket: ("AF_UNIX", "MSG_DONTWAIT", "MSG_NOSIGNAL", "SCM_RIGHTS", "SO_REUSEPORT"),
}
_HIDDEN = ("/proc", "/sys", "/dev/shm")


def become(system: str) -> None:
    """Be ``darwin`` or ``win32`` from now on."""
    for name in BEFORE:
        importlib.import_module(name)
    sysconfig.get_config_vars()
    _take(LINUX)
    _hide_files()
    if system == "win32":
        for name in POSIX_MODULES:
            sys.modules[name] = None  # type: ignore[assignment]  # as the import system has it
        ssl.enum_certificates = lambda store: []  # type: ignore[attr-defined]
        socket.socketpair = partial(socket.socketpair, socket.AF_UNIX)
        _take(POSIX)
        for loop in (asyncio.selector_events.BaseSelectorEventLoop, asyncio.SelectorEventLoop):
            for method in ("add_reader", "add_signal_handler", "add_writer", "remove_signal_handler"):
                setattr(loop, method, _not_there)
    sys.platform = system


def _take(names: dict[Any, tuple[str, ...]]) -> None:
    for module, there in names.items():
        for name in there:
            if hasattr(module, name):
                delattr(module, name)


def _not_there(*arguments: object) -> None:
    raise NotImplementedError


def _hide_files() -> None:
    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            _refuse(arguments[0])

    sys.addaudithook(audit)
    for name in ("stat", "lstat", "readlink"):
        setattr(os, name, _refusing(getattr(os, name)))


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        _refuse(path)
        return function(path, *arguments, **options)

    return refuse


def _refuse(path: object) -> None:
    text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    if not text.startswith(_HIDDEN):
        return
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(("psutil", "subprocess", "multiprocessing")):
            return
        frame = frame.f_back
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)


become(os.environ["SYSTEM_TO_BE"])
