"""The workflow `agent`: what submission refuses."""

import pytest

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind
from tests.unit.config.test_dataset_rules import load_checked, make_place, remove_template

ROWS = [{"prompt": "1+2=", "topic": "sums"}]


def load_agent(place, **arguments):
    given = [f"rollout.workflow_args.{name}={value}" for name, value in arguments.items()]
    return load_checked(place, ROWS, "rollout.workflow=agent", *given)


def test_an_agent_needs_no_column_for_a_reward(tmp_path):
    place = make_place(tmp_path)
    loaded = load_agent(
        place, command="python agent.py {topic}", timeout_s=5, failure_reward=-1, max_episodes=4
    )
    assert loaded.config.rollout.workflow_args["command"] == "python agent.py {topic}"
    assert load_agent(place, function="agent:solve", failure_reward="null")
    assert load_agent(place, command='["python", "agent.py"]')


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({}, Kind.MISSING, "needs the agent's program"),
        ({"command": "a", "function": "b:c"}, Kind.CONFLICT, "has both command and function"),
        ({"function": "agent.solve"}, Kind.VALUE, "not of the form package.module:name"),
        ({"command": "python 'agent.py"}, Kind.VALUE, "can't be split into words"),
        ({"command": "echo {question}"}, Kind.CONFLICT, "{question}, but not every row"),
        ({"command": "a", "retries": -1}, Kind.VALUE, "retries -1 can't be used"),
        ({"command": "a", "max_calls": 0}, Kind.VALUE, "max_calls 0 can't be used"),
        ({"command": "a", "max_episodes": "many"}, Kind.VALUE, "max_episodes 'many' can't be used"),
        ({"command": "a", "keep_token": "true"}, Kind.CONFLICT, "Did you mean keep_tokens?"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_refusals(tmp_path, arguments, kind, words):
    with pytest.raises(ConfigError) as caught:
        load_agent(make_place(tmp_path), **arguments)
    found = [one for one in caught.value.refusals if "rollout.workflow_args" in one.options]
    assert (kind, True) in [(one.kind, words in str(one)) for one in found], caught.value


def test_an_agents_rows_are_not_truncated(tmp_path):
    with pytest.raises(ConfigError, match="workflow agent never truncates"):
        load_checked(
            make_place(tmp_path), ROWS, "rollout.workflow=agent", "rollout.workflow_args.command=a",
            "train_dataset.too_long=truncate_left", "train_dataset.max_length=8",
        )  # fmt: skip


def test_a_note_tells_that_chats_need_a_template(tmp_path):
    place = make_place(tmp_path)
    words = "can only use /v1/completions"
    assert not any(words in str(note) for note in load_agent(place, command="a").notes)
    remove_template(place)
    assert any(words in str(note) for note in load_agent(place, command="a").notes)
