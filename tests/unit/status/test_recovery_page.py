"""docs/recovery.md says of every class of failure what the table of policies does."""

from pathlib import Path

from hpc_rl.supervise.failure_policy import POLICIES

PAGE = Path(__file__).parents[3] / "docs" / "recovery.md"
SAID = {"end": "ends", "restart": "started again", "requeue": "requeued"}


def test_the_page_has_the_policy_of_every_class():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().partition("## Failures\n")[2].splitlines()
        if line[:1] == "|"
    ]
    told = {name: (follows, counts) for name, follows, counts in rows[2:]}
    assert set(told) == {failure.value for failure in POLICIES}
    for failure, policy in POLICIES.items():
        follows, counts = told[failure.value]
        assert SAID[policy.action] in follows, failure
        assert counts == ("yes" if policy.uses_retry else "no"), failure
        assert (policy.pause_s is None) or f"{policy.pause_s:.0f} s" in follows
