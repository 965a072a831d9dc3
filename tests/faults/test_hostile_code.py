"""Hostile programs in the sandboxes of this machine: what is claimed to be protected is, and no process stays
behind. Where the tests run as root, the programs run as root and as nobody.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from patience import extend

import hpc_rl.sandbox
from hpc_rl.sandbox import (
    Ended,
    Limits,
    Mechanism,
    NotConfined,
    Outcome,
    Protection,
    find_sandbox,
)

pytestmark = pytest.mark.timeout(300)
SOLVED = 77
PATIENCE_S = 60.0
NOBODY = 65534
SYSTEM_PYTHON = "/usr/bin/python3"

# A program exits with SOLVED when it has done what it should not.
READ = "open({secret!r}).read()"
READ_LINK = "import os\nos.symlink({secret!r}, 'link')\nopen('link').read()"
WRITE = "open({secret!r} + '.new', 'w').write('x')"
REPLACE = "open({secret!r}, 'w').write('x')"
REMOVE = "import os\nos.remove({secret!r})"
CHANGE_MODE = "import os\nos.chmod({secret!r}, 0)"
LIST = "import os\nos.listdir({folder!r})"
ENVIRONMENT = "open('/proc/{victim}/environ').read()"
OTHERS = """
import glob
def read(path):
    try:
        return open(path, 'rb').read()
    except (FileNotFoundError, ProcessLookupError):  # it has ended, before or after the file was opened
        return b''
assert [path for path in glob.glob('/proc/[0-9]*/cmdline') if b{mark!r} in read(path)]
"""
CONNECT = "import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)"
DATAGRAM = """
import socket
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))
"""
UNIX_SOCKET = "import socket\nsocket.socket(socket.AF_UNIX).connect({unix!r})"
KILL_OTHER = "import os\nos.kill({victim}, 9)"
MEMORY = "data = bytearray(10 << 30)"
TRACE = """
import ctypes
assert ctypes.CDLL(None).ptrace(16, {victim}, 0, 0) == 0
"""
SIGNAL_BY_KERNEL = """
import fcntl, os
fcntl.fcntl(os.pipe()[0], 8, {victim})  # F_SETOWN
"""
SLOW_OTHER = "import os\nos.setpriority(os.PRIO_PROCESS, {victim}, 1)"
TAKE_FILE = """
import ctypes, os
assert ctypes.CDLL(None).syscall(438, os.pidfd_open({victim}), 1, 0) >= 0
"""
# memory that counts for no process
MEMORY_FILE = "import os\nos.memfd_create('large')"
QUEUE = """
import ctypes
assert ctypes.CDLL(None).mq_open(b"/hpc-rl-{mark}", 0o102, 0o600, None) >= 0
"""
LIMITS_OF_OTHER = "import resource\nresource.prlimit({victim}, resource.RLIMIT_NOFILE, (0, 0))"
REACHES = {
    Protection.FILES: {
        "read": READ, "read by a link": READ_LINK, "write": WRITE, "replace": REPLACE, "remove": REMOVE,
        "change the mode": CHANGE_MODE, "list": LIST, "environment of another": ENVIRONMENT,
        "command lines of others": OTHERS,
    },
    Protection.NETWORK: {"connect": CONNECT, "send a datagram": DATAGRAM, "Unix socket": UNIX_SOCKET},
    Protection.SIGNALS: {
        "kill another": KILL_OTHER, "trace another": TRACE, "limit another": LIMITS_OF_OTHER,
        "have another signalled": SIGNAL_BY_KERNEL, "slow another": SLOW_OTHER, "take a file": TAKE_FILE,
    },
    Protection.MEMORY: {"10 GB": MEMORY, "file of memory": MEMORY_FILE, "queue": QUEUE},
}  # fmt: skip

MARK = "import sys\nmark = 'hpc-rl-hostile-{mark}'\n"
DAEMON = """
import os, time
for _ in range(2):
    if os.fork():
        os._exit({solved})
    os.setsid()
for fd in range(3, 100):
    try:
        os.close(fd)
    except OSError:
        pass
os.execv({python!r}, [{python!r}, '-I', '-S', '-c', 'import time; time.sleep(300)', {mark!r}])
"""
STUBBORN = """
import os, signal, ctypes, time
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # not killed with the parent
for number in range(1, 32):
    try:
        signal.signal(number, signal.SIG_IGN)
    except OSError:
        pass
if os.fork() == 0:
    os.setsid()
    os.execv({python!r}, [{python!r}, '-I', '-S', '-c', 'import time; time.sleep(300)', {mark!r}])
time.sleep(300)
"""
FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
# SIGURG ends none but the victim: a sandbox with a hole must not end what else runs on this machine
KILL_ALL = "import os, signal\nos.kill(-1, signal.SIGURG)\nos.kill(os.getppid(), signal.SIGURG)\n1 / 0"
VICTIM = """
import os, signal, time
signal.signal(signal.SIGURG, lambda *_: os._exit(1))
print("ready", flush=True)
while True:
    time.sleep(300)
"""
ENDLESS = "while True: pass"
OUTPUT = """
import os
for fd in (1, 2):
    for _ in range(1000):
        os.write(fd, b'x' * 65536)
"""
DEEP = """
import os
for _ in range(1100):
    os.mkdir('folder')
    os.chdir('folder')
"""
CHANGE_DEVICE = "import os\nos.chmod('/dev/null', os.stat('/dev/null').st_mode & 0o7777)"
TOGETHER = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        data = b"x" * (150 << 20)
        time.sleep(300)
time.sleep(300)
"""
TRY_ALL = """
import sys
for number, text in enumerate({texts!r}):
    try:
        exec(text, {{}})
    except Exception:
        continue
    sys.exit({reached} + number)
"""
REACHED = 100
DEFAULT = Limits()
# in a process of another account: the arguments of a call as JSON, and its outcome
CALL = """
import json, sys
from hpc_rl import sandbox as lib
name, mechanism, as_stranger, program, limits = json.load(sys.stdin)
if name == "probe":
    print(json.dumps(sorted(lib.probe(lib.Mechanism(mechanism), as_stranger))))
else:
    made = lib.Sandbox(lib.Mechanism(mechanism), frozenset(), as_stranger)
    outcome = lib.run_python(program, lib.Limits(**limits), made)
    print(json.dumps([outcome.code, outcome.ended, outcome.left]))
"""


@dataclass
class Place:
    """A sandbox of this machine, for the programs of one account."""

    mechanism: Mechanism
    as_stranger: bool
    uid: int
    active: frozenset[Protection] = frozenset()

    @property
    def python(self) -> str:
        return sys.executable if self.uid == os.geteuid() else SYSTEM_PYTHON

    def start(self, name: str, program: str = "", limits: Limits = DEFAULT) -> subprocess.Popen:
        """Start a process of the account that calls the sandbox."""
        account = (
            {} if self.uid == os.geteuid() else {"user": self.uid, "group": self.uid, "extra_groups": []}
        )
        process = subprocess.Popen(
            [self.python, "-B", "-c", CALL], cwd=COPY, env={"PYTHONPATH": str(COPY), "TMPDIR": str(FOLDERS)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, umask=0o077, **account,
        )  # fmt: skip
        assert process.stdin
        json.dump([name, self.mechanism, self.as_stranger, program, asdict(limits)], process.stdin)
        process.stdin.close()
        process.stdin = None
        return process

    def call(self, name: str, program: str = "", limits: Limits = DEFAULT) -> list:
        with self.start(name, program, limits) as process:
            out, said = process.communicate(timeout=extend(PATIENCE_S))
        if process.returncode:
            raise NotConfined(said)
        return json.loads(out)

    def run(self, program: str, limits: Limits = DEFAULT) -> Outcome:
        code, ended, left = self.call("run", program, limits)
        return Outcome(code, Ended(ended), left=left)

    def has(self, *wanted: Protection) -> bool:
        return {*wanted} <= self.active


# other accounts can't read this checkout
COPY = Path(tempfile.gettempdir()) / f"hpc-rl-sandbox-{os.getpid()}"
FOLDERS = COPY / "tmp"
BEST = find_sandbox()
PLACES = [(BEST.mechanism, BEST.as_stranger, os.geteuid())]
if os.geteuid() == 0 and os.path.exists(SYSTEM_PYTHON):
    PLACES.append((Mechanism.NAMESPACES, True, NOBODY))
OTHER_PLACES = {(one, False, os.geteuid()) for one in Mechanism} | {
    (one, True, PLACES[-1][2]) for one in Mechanism
}
SOAKED = [pytest.param(one, marks=pytest.mark.soak) for one in sorted(OTHER_PLACES - {*PLACES})]


@pytest.fixture(scope="module", autouse=True)
def copied_package():
    shutil.copytree(Path(hpc_rl.sandbox.__file__).parent, COPY / "hpc_rl" / "sandbox")
    (COPY / "hpc_rl" / "__init__.py").touch()
    subprocess.run(["chmod", "-R", "a+rX", str(COPY)], check=True)
    FOLDERS.mkdir()
    FOLDERS.chmod(0o1777)
    yield
    shutil.rmtree(COPY)


@pytest.fixture(scope="module", params=[*PLACES, *SOAKED], ids=lambda one: f"{one[0]}-{one[1]}-{one[2]}")
def place(request, copied_package) -> Place:
    made = Place(*request.param)
    made.active = frozenset(map(Protection, made.call("probe")))
    return made


@pytest.fixture
def start_victim(place):
    """Start a process of the same account, which a hostile program is after."""
    with contextlib.ExitStack() as stack:

        def start() -> subprocess.Popen:
            process = stack.enter_context(
                subprocess.Popen(
                    [place.python, "-c", VICTIM, "victim"], stdout=subprocess.PIPE, user=place.uid
                )
            )
            stack.callback(process.kill)
            assert process.stdout and process.stdout.readline()
            return process

        yield start


def alive(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            pass
    return found


def test_what_is_protected_can_not_be_reached(place, start_victim):
    victim, decoy = start_victim(), start_victim()
    folder = Path(tempfile.mkdtemp(prefix="victim-"))
    os.chown(folder, place.uid, -1)
    with contextlib.chdir(folder), contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        local = stack.enter_context(socket.socket(socket.AF_UNIX))
        local.bind("socket")
        local.listen()
        for name in ("secret", "decoy"):
            Path(name).write_text("control")
            os.chown(name, place.uid, -1)
        os.chmod("socket", 0o777)
        values = {
            "folder": str(folder),
            "port": listener.getsockname()[1],
            "unix": f"{folder}/socket",
            "mark": "victim",
        }
        ours = {**values, "secret": f"{folder}/secret", "victim": victim.pid}
        for protection in place.active & REACHES.keys():
            texts = [text.format(**ours) for text in REACHES[protection].values()]
            outcome = place.run(TRY_ALL.format(texts=texts, reached=REACHED))
            assert outcome.code == 0, (protection, [*REACHES[protection]][outcome.code - REACHED :])
        if place.has(Protection.FILES):
            assert place.run(CHANGE_DEVICE).code == 1
        assert victim.poll() is None and Path("secret").read_text() == "control"
        assert {*os.listdir()} == {"secret", "decoy", "socket"}
        # each of them works where nothing protects
        theirs = {**values, "secret": f"{folder}/decoy", "victim": decoy.pid}
        order = [
            name for name in (*REACHES[Protection.FILES], *REACHES[Protection.NETWORK]) if name != "remove"
        ]
        every = {name: text for texts in REACHES.values() for name, text in texts.items()}
        last = ("have another signalled", "slow another", "limit another", "kill another")
        for name in (*order, "remove", *last):
            done = subprocess.run([place.python, "-c", every[name].format(**theirs)], user=place.uid)
            assert done.returncode == 0, name
    shutil.rmtree(folder)


def test_no_process_stays_behind_nor_is_another_harmed(place, start_victim):
    victim = start_victim()
    mark = f"hostile-{os.getpid()}-{time.monotonic_ns()}"
    values = {"python": os.path.realpath(place.python), "mark": mark, "solved": SOLVED}
    limits = Limits(wall_s=1.5, cpu_s=1)
    if place.has(Protection.SURVIVORS):
        assert place.run(DAEMON.format(**values)).code == SOLVED
        assert place.run(STUBBORN.format(**values), limits).ended is Ended.TIME
        assert not alive(mark)
    if place.has(Protection.NUM_PROCESSES, Protection.SURVIVORS):
        outcome = place.run(FORK_BOMB, limits)
        assert outcome.code and not outcome.left
    if place.has(Protection.SIGNALS):
        assert place.run(KILL_ALL).code == 1
    assert place.run(ENDLESS, Limits(cpu_s=1)).code == 128 + signal.SIGKILL
    assert victim.poll() is None
    # after all of these, an innocent program runs as before
    assert place.run("import threading\nthreading.Thread(target=print).start()").code == 0


def test_output_memory_and_time_are_limited(place):
    assert place.run(OUTPUT).code == 0
    assert place.run("import time\ntime.sleep(300)", Limits(wall_s=0.5)).ended is Ended.TIME
    limits = Limits(wall_s=PATIENCE_S, total_memory_bytes=512 << 20)
    assert place.run(TOGETHER, limits).ended is Ended.MEMORY
    assert place.run("open('large', 'w').write('x' * (2 << 20))").code != 0
    assert place.run(DEEP).code == 0 and not os.listdir(FOLDERS)
    assert place.run("open('small', 'w').write('x' * 1000)\nassert open('small').read()").code == 0


def test_a_program_ends_with_the_process_that_runs_it(place):
    if not place.has(Protection.SURVIVORS):
        assert place.mechanism is not BEST.mechanism
        return
    mark = f"lasting-{os.getpid()}-{time.monotonic_ns()}"
    program = STUBBORN.format(python=os.path.realpath(place.python), mark=mark)
    with place.start("run", program, Limits(wall_s=250.0)) as caller:
        wait_until(lambda: alive(mark))
        caller.kill()
    wait_until(lambda: not alive(mark) and not os.listdir(FOLDERS))


def wait_until(condition) -> None:
    deadline = time.monotonic() + extend(PATIENCE_S)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
