"""The four-part message and the argument check that everything else raises with."""

import pytest

from dbuf.errors import DbufError, LayoutError, PlacementError, TreeError, explain, require_positive


def test_every_error_is_a_value_error() -> None:
    for error in (PlacementError, LayoutError, TreeError):
        assert issubclass(error, DbufError)
        assert issubclass(error, ValueError)


def test_message_has_four_parts() -> None:
    message = explain("dbuf.view: params['w']", "cannot do it.", got="A", need="B", fix="C")
    assert message == "dbuf.view: params['w']: cannot do it.\n  got:  A\n  need: B\n  try:  C"


def test_later_lines_of_a_part_line_up_with_its_first() -> None:
    message = explain("f", "two things.\nreally", got="one\ntwo", need="x\ny", fix="p\nq")
    assert message.splitlines() == [
        "f: two things.",
        "  really",
        "  got:  one",
        "        two",
        "  need: x",
        "        y",
        "  try:  p",
        "        q",
    ]


def test_require_positive_returns_the_int() -> None:
    assert require_positive(7, "n", "f", LayoutError) == 7


@pytest.mark.parametrize("value", [True, 0, -1, 2.0, "3", None])
def test_require_positive_refuses(value: object) -> None:
    with pytest.raises(LayoutError, match="f: n is not a positive int") as caught:
        require_positive(value, "n", "f", LayoutError)
    assert f"got:  n={value!r} ({type(value).__name__})" in str(caught.value)
