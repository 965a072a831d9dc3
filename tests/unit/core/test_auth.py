"""The body of a request: JSON in UTF-8, not too deep for the parser."""

import pytest

from hpc_rl.core.auth import MAX_DEPTH, parse_json_object, parse_json_value


@pytest.mark.parametrize(
    "body",
    [
        b"[" * (MAX_DEPTH + 1),
        b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1),
        b'["' + b"]" * 1000 + b'",' + b"[" * 500 + b"]" * 501,  # brackets in a string close nothing
        b'["\\"' + b"]" * 1000 + b'",' + b"[" * 500 + b"]" * 501,
    ],
    ids=["unclosed", "objects", "after a string", "after a quote in a string"],
)
def test_deep_nesting_is_refused(body):
    with pytest.raises(ValueError, match=f"nested deeper than {MAX_DEPTH} levels"):
        parse_json_value(body)


@pytest.mark.parametrize(
    "value",
    [b'"' + b"[" * 1000 + b'"', b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, b"[" + b"[]," * 1000 + b"{}]"],
    ids=["in a string", "deep", "wide"],
)
def test_brackets_in_strings_or_side_by_side_are_not_deep(value):
    parse_json_value(value)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff{}", "{}".encode("utf-16"), b'{"a": "\\ud800"}', b"{} {}"], ids=repr
)
def test_other_bodies_are_no_json(body):
    with pytest.raises(ValueError, match="not valid JSON"):
        parse_json_value(body)


def test_an_object_is_an_object():
    assert parse_json_object('\ufeff{"a": "\u00e9", "b": NaN}'.encode())["a"] == "\u00e9"
    with pytest.raises(ValueError, match="must be a JSON object, not list"):
        parse_json_object(b"[]")
