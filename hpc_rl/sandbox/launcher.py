"""Start a Python program that is not to be trusted, confine it, and end all that it started.

A process of its own, of `python -I -S`: it gets a JSON object on standard input (`_run` in __init__.py)
and prints how the program ended as another one. It imports the standard library alone.

With namespaces: this process enters new ones and makes a file system of what the program may read; its
child is process 1 of the new process namespace, and starts the program. When process 1 exits, the kernel
kills every other one. Without: this process adopts what the program leaves behind, and kills it.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import stat
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

POLL_S = 0.1
END_S = 10.0  # to kill what a program left behind, without namespaces
SETUP_FAILED = 99  # exit code of a child that could not start the program
INSIDE = 1000  # user and group of the program in a user namespace
STRANGER = 0x60000000  # the least user id that is given to a program of root's
TMPFS_BYTES = 64 << 20
ROOT_FOLDERS = ("tmp", "dev", "dev/shm")
DEVICES = ("null", "zero", "random", "urandom")
OPEN_FILES = 64  # of each process; what lies in their buffers is not counted as its memory

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
# flags of a mount that a remount must keep; those of statvfs have the same values
KEPT_FLAGS = MS_NOSUID | MS_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME | os.ST_RELATIME

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same on each architecture
LANDLOCK_READ, LANDLOCK_READ_FILE, LANDLOCK_WRITE_FILE = 0b1101, 0b100, 0b110
SCOPES_SIGNALS = 6  # version of Landlock from which a program can signal only its own processes

# System calls that no test of an algorithm needs, by their numbers on each architecture: sockets, shared
# memory and queues that outlive their processes, the kernel's keys, memory and open files of other processes;
# and memory that counts for no process: files of memory, and larger or more buffers of pairs of sockets.
REFUSED_CALLS = {
    "x86_64": (
        0xC000003E,
        (41, 425, 29, 64, 68, 240, 241, 248, 249, 250, 101, 310, 311, 438, 321, 298, 319, 447, 54, 46, 307),
    ),
    "aarch64": (
        0xC00000B7,
        (
            198,
            425,
            194,
            190,
            186,
            180,
            181,
            217,
            218,
            219,
            117,
            270,
            271,
            438,
            280,
            241,
            279,
            447,
            208,
            211,
            269,
        ),
    ),
}
LIMIT_CALL = {"x86_64": 302, "aarch64": 261}  # prlimit
# fcntl and ioctl can have the kernel signal any process of the account: their second arguments for this
OWNER_CALLS = {
    "x86_64": ((72, (8, 15)), (16, (0x8901, 0x8902))),
    "aarch64": ((25, (8, 15)), (29, (0x8901, 0x8902))),
}
# what slows other processes of the account: priorities, processors, places of their memory
PRIORITY_CALLS = {
    "x86_64": (141, 142, 144, 203, 314, 251, 256, 279, 440),
    "aarch64": (140, 118, 119, 122, 274, 30, 238, 239, 440),
}
# what changes files by their names, which Landlock does not cover: modes, owners, times, attributes
NAME_CALLS = {
    "x86_64": (90, 92, 94, 260, 268, 452, 132, 235, 261, 280, 188, 189, 463, 197, 198),
    "aarch64": (53, 54, 452, 88, 5, 6, 463, 14, 15),
}
# kill and its kin
SIGNAL_CALLS = {"x86_64": (62, 200, 234, 129, 297, 424), "aarch64": (129, 130, 131, 138, 240, 424)}

WAITED_FOR = (signal.SIGCHLD, signal.SIGTERM)
libc = ctypes.CDLL(None, use_errno=True)


def succeed(result: int, what: str) -> int:
    """Return the result of a call of the C library. Raises OSError."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int = 1, more: Any = 0) -> None:
    succeed(libc.prctl(option, ctypes.c_ulong(value), more, 0, 0), f"prctl {option}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind, data)]
    result = libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3])
    succeed(result, f"mount {source} on {target}")


def enter_namespaces(order: dict[str, Any], root: str, is_root: bool) -> None:
    """Put this process into new namespaces, with a file system of what the program may read."""
    uid, gid = os.geteuid(), os.getegid()
    flags = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS
    succeed(libc.unshare(flags if is_root else flags | NEWUSER), "unshare")
    if not is_root:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{INSIDE} {uid} 1"),
            ("gid_map", f"{INSIDE} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={TMPFS_BYTES},nr_inodes=4096,mode=0755")
    for path in ROOT_FOLDERS:
        os.mkdir(f"{root}/{path}")
        os.chmod(f"{root}/{path}", 0o1777)
    for path in order["readable"]:
        bind(path, root + path)
    for one in DEVICES:
        bind(f"/dev/{one}", f"{root}/dev/{one}")
    for point in mounts_below(root):  # a device can be written to there all the same
        kept = os.statvfs(point).f_flag & KEPT_FLAGS
        mount("none", point, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept)
    os.chdir(root)
    succeed(libc.pivot_root(b".", b"."), "pivot_root")
    succeed(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")


def bind(source: str, target: str) -> None:
    """Show a file or folder in the new file system; a link is made again."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    mount(source, target, None, MS_BIND | MS_REC)


def mounts_below(root: str) -> list[str]:
    with open("/proc/self/mountinfo") as file:
        points = [line.split()[4].encode().decode("unicode_escape") for line in file]
    return [point for point in points if point.startswith(f"{root}/")]


def restrict_files(readable: list[str], folder: str) -> None:
    """Let this process read these paths alone, and write into one folder, by Landlock."""
    version = succeed(libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1), "Landlock")
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    size = 8 if version < 4 else 16 if version < SCOPES_SIGNALS else 24
    attributes = struct.pack("=QQQ", rights, 0b11, 0b11)[:size]
    rules = succeed(libc.syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0), "Landlock")
    allowed = [(path, LANDLOCK_READ) for path in readable if os.path.exists(path)]
    allowed += [(f"/dev/{one}", LANDLOCK_WRITE_FILE) for one in DEVICES]
    for path, right in (*allowed, (folder, rights)):
        where = os.open(path, os.O_PATH)
        if not stat.S_ISDIR(os.fstat(where).st_mode):
            right &= LANDLOCK_WRITE_FILE | 1
        rule = struct.pack("=Qi", right, where)
        succeed(libc.syscall(LANDLOCK_ADD, rules, 1, rule, 0), f"Landlock, {path}")
        os.close(where)
    succeed(libc.syscall(LANDLOCK_RESTRICT, rules, 0), "Landlock")


def landlock_version() -> int:
    """Return the version of Landlock that the kernel has, -1 where it has none."""
    return libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)


def call_filter(with_names: bool, with_signals: bool, with_priorities: bool) -> bytes:
    """Return the filter of system calls of this architecture for seccomp; empty for one that is not known."""
    machine = os.uname().machine
    if machine not in REFUSED_CALLS:
        return b""
    architecture, always = REFUSED_CALLS[machine]
    refused = [*always]
    refused += NAME_CALLS[machine] if with_names else ()
    refused += SIGNAL_CALLS[machine] if with_signals else ()
    refused += PRIORITY_CALLS[machine] if with_priorities else ()
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    # (operation, jump if true, jump if false, operand); a jump names a step, or is how many are skipped
    steps: list[tuple[int, int | str, int | str, int]] = [
        (load, 0, 0, 4),
        (equal, 0, "refuse", architecture),
        (load, 0, 0, 0),
        (at_least, "refuse", 0, 0x40000000),  # the calls of x32
        *((equal, "refuse", 0, number) for number in refused),
    ]
    for number, arguments in OWNER_CALLS[machine]:
        steps += [(equal, 0, len(arguments) + 2, number), (load, 0, 0, 24)]
        steps += [(equal, "refuse", 0, one) for one in arguments]
        steps.append((at_least, "allow", "allow", 0))
    steps += [
        (equal, 0, "allow", LIMIT_CALL[machine]),
        (load, 0, 0, 16),  # whose limits: 0 for those of the process itself
        (equal, "allow", "refuse", 0),
        (answer, 0, 0, 0x7FFF0000),
        (answer, 0, 0, 0x50000 | errno.EPERM),
    ]
    places = {"allow": len(steps) - 2, "refuse": len(steps) - 1}

    def skipped(jump: int | str, at: int) -> int:
        return places[jump] - at - 1 if isinstance(jump, str) else jump

    return b"".join(
        struct.pack("=HBBI", operation, skipped(yes, at), skipped(no, at), operand)
        for at, (operation, yes, no, operand) in enumerate(steps)
    )


def refuse_calls(with_names: bool, with_signals: bool, with_priorities: bool) -> None:
    """Refuse system calls by seccomp, where this can be done."""
    code = call_filter(with_names, with_signals, with_priorities)
    if not code:
        return
    memory = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(memory)))
    with contextlib.suppress(OSError):  # what is protected is measured (probe)
        prctl(PR_SET_SECCOMP, 2, program)


def set_limits(order: dict[str, Any], num_tasks: int) -> None:
    for what, most in (
        (resource.RLIMIT_CPU, order["cpu_s"]),
        (resource.RLIMIT_AS, order["memory_bytes"]),
        (resource.RLIMIT_FSIZE, order["file_bytes"]),
        (resource.RLIMIT_NPROC, num_tasks + order["num_processes"]),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def tasks_of(proc: int, uid: int) -> int:
    """Return the number of threads that an account has on this machine."""
    total = 0
    for name in os.listdir(proc):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                if os.stat(name, dir_fd=proc).st_uid == uid:
                    total += int(read_at(proc, f"{name}/stat").rpartition(")")[2].split()[17])
    return total


def read_at(folder: int, path: str) -> str:
    with open(path, opener=lambda name, flags: os.open(name, flags, dir_fd=folder)) as file:
        return file.read()


def descendants(proc: int, pid: int) -> Iterator[int]:
    """Yield the processes below one, as the kernel lists them."""
    with contextlib.suppress(OSError):
        for child in map(int, read_at(proc, f"{pid}/task/{pid}/children").split()):
            yield child
            yield from descendants(proc, child)


def memory_below(proc: int, pid: int) -> int:
    """Return the bytes of memory of the processes below one."""
    pages = 0
    for one in descendants(proc, pid):
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages += int(read_at(proc, f"{one}/statm").split()[1])
    return pages * resource.getpagesize()


def may_change_user() -> bool:
    """Return whether this process may take a user id that no account has."""
    if os.geteuid() != 0:
        return False
    child = os.fork()
    if child == 0:
        try:
            become_stranger(STRANGER)
            os._exit(0)
        except OSError:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def become_stranger(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def start_program(order: dict[str, Any], folder: str, uid: int | None, num_tasks: int) -> None:
    """Become the program; never returns. Raises OSError."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.chdir(folder)
    mechanism = order["mechanism"]
    if uid is not None:
        become_stranger(uid)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user resets it
    prctl(PR_SET_NO_NEW_PRIVS)
    if mechanism == "Landlock":
        restrict_files(order["readable"], folder)
    is_apart = mechanism == "namespaces" or (mechanism == "Landlock" and landlock_version() >= SCOPES_SIGNALS)
    set_limits(order, num_tasks)
    refuse_calls(mechanism == "Landlock", not is_apart, with_priorities=mechanism != "namespaces")
    program = "/program.py" if mechanism == "namespaces" else f"{folder}/program.py"
    variables = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder}
    os.execve(order["python"], [order["python"], "-I", "-S", program], variables)


def be_first(order: dict[str, Any], folder: str, uid: int | None, num_tasks: int) -> int:
    """As process 1 of a namespace: start the program; return its exit code once it has ended."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    child = os.fork()
    if child == 0:
        start_program(order, folder, uid, num_tasks)
    while True:
        pid, status = os.wait()
        if pid == child:
            return as_exit_code(status)


def as_exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Run the program; return how it ended. Raises OSError where it can't be confined as ordered."""
    began, proc = time.monotonic(), os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    own, folder, mechanism = os.getpid(), order["folder"], order["mechanism"]
    prctl(PR_SET_CHILD_SUBREAPER)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory is short, it goes first
    parent = os.open(os.path.dirname(folder), os.O_PATH | os.O_DIRECTORY)
    uid = STRANGER + own % STRANGER if order["as_stranger"] and may_change_user() else None
    is_counted_alone = uid is not None or (mechanism == "namespaces" and order["counts_by_namespace"])
    num_tasks = 0 if is_counted_alone else tasks_of(proc, os.geteuid())
    if mechanism == "namespaces":
        enter_namespaces(order, folder, is_root=uid is not None)
        write_program("/program.py", order["program"])
        folder = "/tmp"
    else:
        write_program(f"{folder}/program.py", order["program"])
        if uid is not None:
            os.chown(folder, uid, uid)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if mechanism == "namespaces":
                os._exit(be_first(order, folder, uid, num_tasks))
            start_program(order, folder, uid, num_tasks)
        except BaseException as error:
            os.write(tell, str(error).encode())
        os._exit(SETUP_FAILED)
    os.close(tell)
    outcome = {"code": None, "ended": "exit", "killed": 0, "left": 0}
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() - began > order["wall_s"]:
            outcome["ended"] = "time"
        elif memory_below(proc, own) > order["total_memory_bytes"]:
            outcome["ended"] = "memory"
        if outcome["ended"] != "exit":
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            break
        came = signal.sigtimedwait(WAITED_FOR, POLL_S)
        if came is not None and came.si_signo == signal.SIGTERM:
            outcome["ended"] = "stopped"
    outcome["code"] = as_exit_code(status)
    if problem := os.read(told, 4096).decode() if outcome["code"] == SETUP_FAILED else "":
        raise OSError(problem)
    outcome["killed"], outcome["left"] = end_all(proc, own)
    if outcome["ended"] == "stopped":  # else who asked removes its folder
        remove(os.path.basename(order["folder"]), parent)
    return outcome


def remove(name: str, parent: int) -> None:
    """Remove a folder, also where it is outside of the file system that this process sees.

    However deep it is: each folder in it is moved to the top before it is emptied.
    """
    with contextlib.suppress(OSError):
        top = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        try:
            while names := os.listdir(top):
                for one in names:
                    _empty(one, top)
        finally:
            os.close(top)
        os.rmdir(name, dir_fd=parent)


def _empty(name: str, top: int) -> None:
    """Remove a file, or a folder; the folders in it are moved to the top."""
    if not stat.S_ISDIR(os.lstat(name, dir_fd=top).st_mode):
        os.unlink(name, dir_fd=top)
        return
    os.chmod(name, 0o700, dir_fd=top)
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        for one in os.listdir(folder):
            if stat.S_ISDIR(os.lstat(one, dir_fd=folder).st_mode):
                os.chmod(one, 0o700, dir_fd=folder)
                os.rename(one, os.urandom(16).hex(), src_dir_fd=folder, dst_dir_fd=top)
            else:
                os.unlink(one, dir_fd=folder)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)


def end_all(proc: int, pid: int) -> tuple[int, int]:
    """Kill all that is below a process; return how many there were at first, and how many are left."""
    deadline, num_first = time.monotonic() + END_S, -1
    while True:
        found = list(descendants(proc, pid))
        num_first = len(found) if num_first < 0 else num_first
        for one in found:
            with contextlib.suppress(OSError):
                os.kill(one, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not found or time.monotonic() > deadline:
            return num_first, len(found)


def write_program(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, 0o644)


def main() -> None:
    os.umask(0o022)  # that of a trial closes what is made here to the user of the program
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # also then nothing may stay behind
    order = json.load(sys.stdin)
    try:
        outcome = run(order)
    except OSError as error:
        outcome = {"problem": error.strerror or str(error)}
    print(json.dumps(outcome))
