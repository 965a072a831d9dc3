"""Strictness and quoting."""

import subprocess

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_rl.core.errors import ConfigError
from hpc_rl.render.jinja_environment import LayeredEnvironment, comment, directive, sh


@pytest.mark.parametrize("source", ["{{ x }}", "{{ x | sh }}", "{{ x | directive }}", "{{ x | comment }}"])
def test_none_and_misspelt_names_are_refused(source):
    for values in ({"x": None}, {"y": 1}):
        with pytest.raises(jinja2.UndefinedError):
            LayeredEnvironment().from_string(source).render(**values)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",))), max_size=60))
def test_bash_reads_what_sh_wrote(words):
    words = [*words, "$(touch /tmp/pwned)", "a b", "'", '"', "\n", "\\", "`id`", "ü", "-n", "*", "!x", "~"]
    script = "printf '%s\\0' " + " ".join(map(sh, words))
    read = subprocess.run(["bash", "-c", script], capture_output=True).stdout.decode()
    assert read == "".join(f"{word}\0" for word in words)


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\u2028b", "x\0"])
def test_a_directive_holds_no_line_break(value):
    with pytest.raises(ConfigError, match="line breaks"):
        directive(value)
    assert len(f"# {comment(value)}".splitlines()) == 1


def test_directive_quotes_as_sbatch_reads():
    assert directive("n[1-4],x=2") == "n[1-4],x=2"
    assert directive('it\'s a "b" # \\c') == '"it\'s a \\"b\\" # \\\\c"'
