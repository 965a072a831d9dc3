"""What is said of the sandbox of a machine; tests/faults/test_hostile_code.py attacks it."""

from hpc_rl.sandbox import Mechanism, Protection, Sandbox, find_problem, find_sandbox


def test_this_machine_has_a_complete_sandbox_and_says_so():
    sandbox = find_sandbox()
    assert sandbox.is_complete and sandbox.describe().startswith(sandbox.mechanism)
    assert find_problem("required", sandbox) == ""


def test_what_is_missing_is_said_and_refused_where_all_is_required():
    weak = Sandbox(Mechanism.LIMITS, frozenset({Protection.MEMORY}), problems=("namespaces: not permitted",))
    said = find_problem("required", weak)
    assert "files of this account can be read and changed" in said and "namespaces: not permitted" in said
    assert find_problem("available", weak) == ""
