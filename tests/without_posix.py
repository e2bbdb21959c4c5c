"""A Python in which headstart finds nothing of POSIX, as on Windows: no fcntl, no os.fork, no /proc, no compiler.

    python without_posix.py CODE [ARGUMENTS]

Knows: what Windows lacks. Does not know: what is run. Only headstart's own modules are shown the poorer Python: torch
and the standard library were built for this machine and need what it has. So it cannot show what differs in a real
Windows beyond what is missing (open files that cannot be renamed, say).
"""

from __future__ import annotations

import builtins
import os
import signal
import sys
import types
from typing import Any

_MODULES = """
_posixsubprocess crypt curses fcntl grp nis ossaudiodev posix pty pwd readline resource spwd syslog termios tty
"""
_OS_NAMES = """
chown chroot confstr copy_file_range ctermid eventfd fchdir fchmod fchown fdatasync fork forkpty fpathconf fstatvfs
getegid geteuid getgid getgroups getloadavg getpgid getpgrp getpriority getresgid getresuid getsid getuid getxattr
initgroups killpg lchown listxattr lockf major makedev memfd_create minor mkfifo mknod nice openpty pathconf
pidfd_open pipe2 posix_fadvise posix_fallocate posix_openpt posix_spawn posix_spawnp pread preadv pwrite pwritev
readv register_at_fork removexattr sched_get_priority_max sched_getaffinity sched_getparam sched_getscheduler
sched_setaffinity sched_setscheduler sched_yield sendfile setegid seteuid setgid setgroups setns setpgid setpriority
setregid setresgid setresuid setreuid setsid setuid setxattr splice statvfs sync sysconf tcgetpgrp tcsetpgrp ttyname
uname unshare wait wait3 wait4 waitid writev WNOHANG WUNTRACED O_CLOEXEC O_DIRECTORY O_NOCTTY O_NOFOLLOW O_NONBLOCK
O_SYNC
"""
_SIGNAL_NAMES = """
SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGTTIN SIGTTOU SIGUSR1 SIGUSR2
SIGWINCH alarm pause pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigwait
"""
MODULES, OS_NAMES, SIGNAL_NAMES = (frozenset(names.split()) for names in (_MODULES, _OS_NAMES, _SIGNAL_NAMES))
PLACES = ("/proc", "/sys", "/dev")


class Poorer(types.ModuleType):
    """A module without some of its names, and with other values of some."""

    def __init__(self, module: types.ModuleType, without: frozenset[str], other: dict[str, object]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update({"_module": module, "_without": without, **other})

    def __getattr__(self, name: str) -> Any:
        if name in self._without:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}, as on Windows")
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._module, name, value)


POORER = {
    "os": Poorer(os, OS_NAMES, {"name": "nt"}),
    "signal": Poorer(signal, SIGNAL_NAMES, {}),
    "sys": Poorer(sys, frozenset(), {"platform": "win32"}),
}


def ours(name: object) -> bool:
    return isinstance(name, str) and (name == "headstart" or name.startswith("headstart."))


def begin() -> None:
    """From now on headstart, which must not have been imported yet, sees the poorer Python."""
    assert "headstart" not in sys.modules
    real = builtins.__import__

    def poorer(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level == 0 and ours((globals or {}).get("__name__")):
            if name.partition(".")[0] in MODULES:
                raise ModuleNotFoundError(f"No module named {name!r}, as on Windows", name=name)
            if name in POORER:
                return POORER[name]
        return real(name, globals, locals, fromlist, level)

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(PLACES):
            frame: types.FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_globals.get("__name__", "").startswith("pathlib"):
                frame = frame.f_back  # on somebody's behalf
            if frame is not None and ours(frame.f_globals.get("__name__")):
                raise FileNotFoundError(f"{arguments[0]}: there is no such place, as on Windows")

    builtins.__import__ = poorer
    sys.addaudithook(watch)
    os.environ["PATH"] = ""  # nor is there a compiler
    os.environ.pop("CXX", None)


if __name__ == "__main__":
    begin()
    code, sys.argv = sys.argv[1], sys.argv[1:]
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
