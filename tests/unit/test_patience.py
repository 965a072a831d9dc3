"""Limits of time in tests grow with the slowness of the machine."""

import ast
from collections.abc import Iterator
from pathlib import Path

import patience
import pytest
from package_sources import parse_source

TESTS = Path(__file__).parents[1]
WAITING_METHODS = {"wait", "communicate", "result", "join"}
# shorter waits are part of what a test does
GUARD_S = 5
# programs that run without pytest
OTHER_PROGRAMS = {"slurm/packages.py", "atropos/manager_client.py"}


def is_guard(node: ast.expr | None) -> bool:
    is_number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
    return is_number and node.value >= GUARD_S


def list_limits(node: ast.AST) -> list[ast.expr]:
    """Return the parts of an expression that are limits of a wait."""
    if isinstance(node, ast.BinOp):
        return [node.right] if ast.unparse(node.left) == "time.monotonic()" else []
    if not isinstance(node, ast.Call):
        return []
    called = ast.unparse(node.func)
    if called.endswith("Config"):  # a time limit of the product
        return []
    is_wait = called.rpartition(".")[2] in WAITING_METHODS and len(node.args) == 1
    is_wait = is_wait or called in {"asyncio.timeout", "asyncio.wait_for"}
    return [
        *(node.args[-1:] if is_wait else []),
        *(word.value for word in node.keywords if word.arg == "timeout"),
    ]


def find_fixed_limits(tree: ast.AST) -> Iterator[int]:
    """Yield the lines with a number of seconds as the limit of a wait."""
    for node in ast.walk(tree):
        if any(map(is_guard, list_limits(node))):
            yield node.lineno


def test_every_limit_of_a_wait_is_extended():
    fixed = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        if str(path.relative_to(TESTS)) not in OTHER_PROGRAMS
        for line in find_fixed_limits(parse_source(path))
    ]
    assert not fixed, f"put these limits through patience.extend: {fixed}"


@pytest.mark.parametrize(
    "line",
    [
        "process.wait(60)",
        "process.communicate(timeout=60)",
        "subprocess.run(argv, timeout=60)",
        "asyncio.wait_for(job, 60)",
        "deadline = time.monotonic() + 60",
    ],
)
def test_a_fixed_limit_is_found(line):
    assert list(find_fixed_limits(ast.parse(line))) == [1]
    assert not list(find_fixed_limits(ast.parse(line.replace("60", "extend(60)"))))


def test_limits_grow_with_the_slowness(monkeypatch):
    monkeypatch.setenv(patience.VARIABLE, "1")
    usual_s = patience.extend(10)
    monkeypatch.setenv(patience.VARIABLE, "3")
    assert patience.extend(10) == 3 * usual_s


def test_the_limit_of_a_test_grows_too(request):
    marker = request.node.get_closest_marker("timeout")
    assert marker.args[0] == patience.extend(60)


@pytest.mark.parametrize(
    "times, slowness", [((1.0, 1.0), 1.0), ((3.0, 2.0), 3.0), ((1.0, 4.0), 4.0), ((90, 1), 6.0)]
)
def test_the_slower_of_loop_and_import_decides(monkeypatch, times, slowness):
    loop_s, start_s = times[0] * patience.LOOP_S, times[1] * patience.START_S
    clock = iter((0.0, loop_s, loop_s + start_s))
    monkeypatch.setattr(patience.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(patience, "NUM_LOOPS", 1)
    monkeypatch.setattr(patience.subprocess, "run", lambda *words, **options: None)
    assert patience.measure_slowness() == pytest.approx(slowness)


def test_a_look_that_takes_long_is_followed_by_a_longer_pause(monkeypatch):
    clock, pauses = [0.0], []
    monkeypatch.setattr(patience.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(patience.time, "sleep", pauses.append)

    def condition(takes_s: float, found: int) -> int:
        clock[0] += takes_s
        return found

    assert patience.look(lambda: condition(0.1, 0)) == 0
    assert patience.look(lambda: condition(0.0, 0), 0.05) == 0
    assert patience.look(lambda: condition(60.0, 0)) == 0
    assert pauses == pytest.approx([0.4, 0.05, patience.LONGEST_PAUSE_S])
    assert patience.look(lambda: condition(0.1, 7)) == 7 and len(pauses) == 3
