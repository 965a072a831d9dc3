"""Templates with named values: braces that are no names stay, and values are never templates."""

import pytest

from hpc_rl.config.options.teacher import TemplatesConfig
from hpc_rl.config.text_templates import fill_template, list_names

EMPTY_BOX = r"{question} End with \boxed{}."


def test_empty_braces_are_text():
    """`str.format` fails on them."""
    assert fill_template(EMPTY_BOX, {"question": "1 + 1?"}) == r"1 + 1? End with \boxed{}."
    assert list_names(EMPTY_BOX) == ["question"]


@pytest.mark.parametrize(
    ("template", "names"),
    [
        (r"\boxed{answer} \frac{a}{b} \text{x y}", []),
        (r"\boxed{{question}}", ["question"]),
        (r"\section{Approach}{approach} {question}", ["approach", "question"]),
        (
            r"\boxed{4}{question} \dfrac{a}{b}{teaching} \frac{1}{{validation}}",
            ["question", "teaching", "validation"],
        ),
        (r"Question:\n{question}", ["question"]),
        ("{question} { question } {0} {} {a b} {{}} {question!r}", ["question"]),
        ('{"question": {question}, "b": {b}, "again": {question}}', ["question", "b"]),
    ],
)
def test_names_are_found_by_their_pattern(template, names):
    assert list_names(template) == names
    assert fill_template(template, dict.fromkeys(names, "{approach} {}")).count("{approach} {}") == sum(
        template.count(f"{{{name}}}") for name in names
    )


def test_values_are_not_templates():
    values = {"question": "What is {teaching}? {", "teaching": "{question} } {validation}"}
    made = fill_template("{question} | {teaching}", values)
    assert made == "What is {teaching}? { | {question} } {validation}"


def test_an_unknown_name_shows_no_value_of_another():
    with pytest.raises(KeyError) as raised:
        fill_template("{question} {validation_note}", {"question": "q", "validation": "the secret"})
    assert raised.value.args == ("validation_note",)


def test_defaults_need_no_column():
    templates = TemplatesConfig()
    assert list_names(templates.baseline) == list_names(templates.diagnostic) == ["question"]
    assert list_names(templates.adaptive) == ["question", "approach"]
    assert list_names(templates.with_teaching) == ["question", "teaching"]
