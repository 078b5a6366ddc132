"""The four-part message and the argument check that everything else raises with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dbuf
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


def _buffer() -> dbuf.DBuffer:
    return dbuf.shard({"w": torch.ones(2, 2)}, dbuf.init_mesh(), dbuf.RowAtomic())


def _shard(tensors: Any, mesh: Any = None, **options: Any) -> dbuf.DBuffer:
    return dbuf.shard(tensors, dbuf.init_mesh() if mesh is None else mesh, dbuf.RowAtomic(), **options)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: _shard({"w": torch.ones(2, dtype=torch.complex64)}),
            r"dbuf.shard: no buffer holds complex(?s:.*)\['w'\]",
        ),
        (lambda: _shard({"w": _buffer()}), r"dbuf.shard: a buffer is sharded already(?s:.*)tensors\['w'\]"),
        (lambda: _shard({"w": torch.ones(2)}, "dp"), "dbuf.shard: no mesh"),
        (lambda: _shard({"w": torch.ones(2)}, broadcast_from=1), "broadcast_from=1 on 1 ranks"),
        (lambda: dbuf.cast(_buffer(), "float32"), "dbuf.cast: no dtype"),
        (lambda: dbuf.allgather(_buffer(), dtype="bfloat16"), "dbuf.allgather: no dtype"),
        (lambda: dbuf.allgather(_buffer(), grad_dtype=32), "dbuf.allgather: no dtype"),
        (lambda: dbuf.jit(3), "dbuf.jit: no function"),
        (lambda: dbuf.jit(_buffer, donate_argnums="p"), "donate_argnums='p'"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(DbufError, match=message) as caught:
        call()
    assert [line.split()[0] for line in str(caught.value).splitlines()[1:]][-2:] == ["need:", "try:"]
