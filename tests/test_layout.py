"""`GlobalLayout`: ranges asserted as numbers for every rank, pieces, admission and validation."""

import copy
import itertools
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate

from dbuf.errors import LayoutError
from dbuf.layout import GlobalLayout, check_shapes
from dbuf.placement import BlockAtomic, Placement, RowAtomic, TensorAtomic

R, S = Replicate(), RowAtomic()
UNEVEN = GlobalLayout(((7, 3), (2, 5), (7,)), (0, 21, 31), 38, (0, 9, 18, 26))
GAPPED = GlobalLayout(((2, 3), (0, 4), (), (4,)), (8, 0, 2, 16), 24, (0, 8, 16))


def even(dp_size: int, numel: int = 2) -> GlobalLayout:
    """`dp_size` segments of `numel` elements, one tensor of as many rows."""
    return GlobalLayout(((dp_size, numel),), (0,), dp_size * numel, tuple(range(0, dp_size * numel, numel))).validate()


@st.composite
def layouts(draw: st.DrawFn) -> GlobalLayout:
    """Tensors in any order with gaps between them, and cuts anywhere."""
    shapes = draw(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=7))
    offsets, end = [0] * len(shapes), draw(st.integers(0, 3))
    for tensor in draw(st.permutations(range(len(shapes)))):
        offsets[tensor] = end
        end += math.prod(shapes[tensor]) + draw(st.integers(0, 3))
    cuts = sorted(draw(st.lists(st.integers(0, end), max_size=6)))
    return GlobalLayout(tuple(shapes), tuple(offsets), end, (0, *cuts)).validate()


def owner_of_each_element(layout: GlobalLayout) -> list[tuple[int, int] | None]:
    """The slow oracle: (tensor, index in it) of each element of the buffer, None in padding."""
    owners: list[tuple[int, int] | None] = [None] * layout.size
    for tensor, (offset, numel) in enumerate(zip(layout.tensor_to_offset, layout.tensor_numels, strict=True)):
        for index in range(numel):
            assert owners[offset + index] is None
            owners[offset + index] = (tensor, index)
    return owners


# --- ranges ---------------------------------------------------------------------------------------


def test_ranges_on_one_axis() -> None:
    layout = even(4)
    assert [layout.local_range((S,), (4,), (a,)) for a in range(4)] == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert [layout.local_range((R,), (4,), (a,)) for a in range(4)] == [(0, 8)] * 4
    assert [layout.local_range((Partial("sum"),), (4,), (a,)) for a in range(4)] == [(0, 8)] * 4


def test_ranges_on_two_axes() -> None:
    """segment = inner * 2 + outer on a (2, 3) mesh; one sharded axis holds two segments."""
    layout = even(6)
    assert {at: layout.local_range((S, S), (2, 3), at) for at in itertools.product(range(2), range(3))} == {
        (0, 0): (0, 2),
        (0, 1): (4, 2),
        (0, 2): (8, 2),
        (1, 0): (2, 2),
        (1, 1): (6, 2),
        (1, 2): (10, 2),
    }
    assert {at: layout.local_range((R, S), (2, 3), at) for at in itertools.product(range(2), range(3))} == {
        (0, 0): (0, 4),
        (0, 1): (4, 4),
        (0, 2): (8, 4),
        (1, 0): (0, 4),
        (1, 1): (4, 4),
        (1, 2): (8, 4),
    }
    assert layout.local_range((R, R), (2, 3), (1, 2)) == (0, 12)


def test_ranges_on_three_axes() -> None:
    """(a, b, c) -> 4c + 2b + a on a (2, 2, 2) mesh."""
    layout = even(8)
    starts = {
        (0, 0, 0): (0, 0, 0),
        (0, 0, 1): (8, 8, 8),
        (0, 1, 0): (4, 4, 0),
        (0, 1, 1): (12, 12, 8),
        (1, 0, 0): (2, 0, 0),
        (1, 0, 1): (10, 8, 8),
        (1, 1, 0): (6, 4, 0),
        (1, 1, 1): (14, 12, 8),
    }
    for at, (three, two, one) in starts.items():
        assert layout.local_range((S, S, S), (2, 2, 2), at) == (three, 2)
        assert layout.local_range((R, S, S), (2, 2, 2), at) == (two, 4)
        assert layout.local_range((R, R, S), (2, 2, 2), at) == (one, 8)
        assert layout.local_range((R, R, R), (2, 2, 2), at) == (0, 16)


def test_ranges_of_uneven_segments() -> None:
    at = list(itertools.product(range(2), range(2)))
    assert [UNEVEN.local_range((S, S), (2, 2), c) for c in at] == [(0, 9), (18, 8), (9, 9), (26, 12)]
    assert [UNEVEN.local_range((R, S), (2, 2), c) for c in at] == [(0, 18), (18, 20), (0, 18), (18, 20)]


def test_dp_size_smaller_than_the_mesh() -> None:
    """An HSDP group on a (64, 8) mesh is planned for 8 segments and pays padding for 8."""
    layout = even(8)
    for a, b in itertools.product((0, 1, 63), range(8)):
        assert layout.local_range((R, S), (64, 8), (a, b)) == (2 * b, 2)


@pytest.mark.parametrize(("dp_size", "placements"), [(3, (S, S)), (2, (R, S)), (4, (R, S))])
def test_sharding_finer_than_planned_is_refused(dp_size: int, placements: tuple[Placement, ...]) -> None:
    with pytest.raises(LayoutError, match=f"that was planned for {dp_size}") as caught:
        even(dp_size).local_range(placements, (2, 3), (0, 0))
    assert "on a mesh of shape (2, 3)" in str(caught.value)
    assert "plan the group with dp_size=" in str(caught.value)


def test_axes_of_size_one_change_nothing() -> None:
    layout = even(4)
    for k in range(4):
        expected = (2 * k, 2)
        assert layout.local_range((S, S), (1, 4), (0, k)) == expected
        assert layout.local_range((S, S), (4, 1), (k, 0)) == expected
        assert layout.local_range((S, S, S), (1, 4, 1), (0, k, 0)) == expected


@given(layouts(), st.sampled_from([(6,), (2, 3), (3, 2), (1, 6), (2, 1, 3)]), st.data())
@settings(max_examples=50, deadline=None)
def test_law_fewer_sharded_axes_hold_a_superset(
    layout: GlobalLayout, mesh_shape: tuple[int, ...], data: st.DataObject
) -> None:
    cuts = tuple(sorted(data.draw(st.lists(st.integers(0, layout.size), min_size=5, max_size=5))))
    layout = GlobalLayout(layout.tensor_shapes, layout.tensor_to_offset, layout.size, (0, *cuts))
    ndim = len(mesh_shape)
    for at in itertools.product(*map(range, mesh_shape)):
        held = [layout.local_range((R,) * (ndim - n) + (S,) * n, mesh_shape, at) for n in range(ndim + 1)]
        assert held[0] == (0, layout.size)
        for (outer, outer_numel), (inner, numel) in itertools.pairwise(held):
            assert outer <= inner
            assert inner + numel <= outer + outer_numel
    ranges = sorted(
        layout.local_range((S,) * ndim, mesh_shape, at) for at in itertools.product(*map(range, mesh_shape))
    )
    assert ranges == sorted(layout.segment(k) for k in range(6))


# --- segments and pieces --------------------------------------------------------------------------


def test_segments() -> None:
    assert [UNEVEN.segment(k) for k in range(4)] == [(0, 9), (9, 9), (18, 8), (26, 12)]
    assert UNEVEN.dp_size == 4
    assert not UNEVEN.is_even
    assert even(4).is_even
    assert GlobalLayout((), (), 0, (0, 0)).is_even
    for k in (-1, 4):
        with pytest.raises(LayoutError, match=f"there is no segment {k}"):
            UNEVEN.segment(k)


def test_pieces_in_buffer_order_without_padding_or_empty_tensors() -> None:
    assert GAPPED.pieces(0, 24) == ((2, 0, 1, 2), (0, 0, 6, 8), (3, 0, 4, 16))
    assert GAPPED.pieces(2, 1) == ((2, 0, 1, 0),)
    assert GAPPED.pieces(3, 5) == ()
    assert GAPPED.pieces(10, 9) == ((0, 2, 4, 0), (3, 0, 3, 6))
    assert GAPPED.pieces(9, 0) == ()
    assert GAPPED.pieces(24, 0) == ()


@pytest.mark.parametrize(("start", "numel"), [(-1, 2), (0, 25), (24, 1), (3, -1)])
def test_pieces_outside_of_the_buffer_are_refused(start: int, numel: int) -> None:
    with pytest.raises(LayoutError, match="the range leaves the buffer") as caught:
        GAPPED.pieces(start, numel)
    assert f"got:  [{start}, {start + numel})" in str(caught.value)


@given(layouts(), st.data())
@settings(max_examples=100, deadline=None)
def test_law_pieces_are_the_content_of_a_range(layout: GlobalLayout, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, layout.size))
    numel = data.draw(st.integers(0, layout.size - start))
    found: list[tuple[int, int] | None] = [None] * numel
    pieces = layout.pieces(start, numel)
    for tensor, first, count, place in pieces:
        assert count > 0
        for index in range(count):
            assert found[place + index] is None
            found[place + index] = (tensor, first + index)
    assert found == owner_of_each_element(layout)[start : start + numel]
    assert [piece[3] for piece in pieces] == sorted(piece[3] for piece in pieces)


@given(layouts())
@settings(max_examples=50, deadline=None)
def test_law_segments_tile_the_layout(layout: GlobalLayout) -> None:
    end = 0
    for k in range(layout.dp_size):
        start, numel = layout.segment(k)
        assert start == end
        end += numel
    assert end == layout.size
    total = sum(count for k in range(layout.dp_size) for _, _, count, _ in layout.pieces(*layout.segment(k)))
    assert total == sum(layout.tensor_numels)


# --- admission ------------------------------------------------------------------------------------


def test_admission_is_judged_from_cuts() -> None:
    rows = GlobalLayout(((4, 2), (3,)), (0, 8), 12, (0, 4, 8))
    assert rows.admits(RowAtomic())
    assert rows.admits(BlockAtomic(2))
    assert not rows.admits(BlockAtomic(3))
    assert not rows.admits(TensorAtomic())
    assert rows.admits(Replicate())
    assert rows.admits(Partial("sum"))
    whole = GlobalLayout(((4, 2), (3,)), (0, 8), 12, (0, 8))
    assert whole.admits(TensorAtomic())
    assert whole.admits(BlockAtomic(3))


def test_first_violation_names_cut_tensor_and_rule() -> None:
    layout = GlobalLayout(((3,), (4, 2)), (8, 0), 12, (0, 5, 9))
    assert layout.first_violation(RowAtomic()) == (
        "the cut at 5 splits tensor 1 of shape (4, 2) after 5 elements; RowAtomic() cuts at multiples of 2"
    )
    assert "TensorAtomic() keeps it whole" in str(layout.first_violation(TensorAtomic()))
    assert layout.first_violation(Replicate()) is None
    assert layout.first_violation(RowAtomic()) is layout.first_violation(RowAtomic())  # kept, not searched again


@given(layouts(), st.sampled_from([RowAtomic(), BlockAtomic(2), BlockAtomic(3), TensorAtomic()]))
@settings(max_examples=100, deadline=None)
def test_law_admits_equals_trying_every_cut_and_tensor(layout: GlobalLayout, placement: Placement) -> None:
    legal = True
    for cut in layout.rank_to_offset:
        for tensor, (offset, numel) in enumerate(zip(layout.tensor_to_offset, layout.tensor_numels, strict=True)):
            if offset < cut < offset + numel:
                rows = {RowAtomic: 1, TensorAtomic: 10**6}.get(type(placement)) or placement.block_size
                legal &= (cut - offset) % (rows * layout.row_size(tensor)) == 0
    assert layout.admits(placement) is legal


# --- a value --------------------------------------------------------------------------------------


def test_equal_layouts_are_equal_and_hash_alike() -> None:
    again = GlobalLayout(((7, 3), (2, 5), (7,)), (0, 21, 31), 38, (0, 9, 18, 26))
    assert again == UNEVEN
    assert hash(again) == hash(UNEVEN)
    assert again is not UNEVEN
    assert GlobalLayout(*UNEVEN.__reduce__()[1][:4], align=2) != UNEVEN
    assert UNEVEN != even(4)
    assert UNEVEN != "layout"


def test_layouts_survive_repr_copy_and_pickle_without_their_caches() -> None:
    UNEVEN.admits(RowAtomic())
    for again in (eval(repr(UNEVEN)), copy.deepcopy(UNEVEN), pickle.loads(pickle.dumps(UNEVEN))):
        assert again == UNEVEN
        assert "_violations" not in vars(again)


def test_layouts_are_frozen() -> None:
    with pytest.raises(AttributeError):
        UNEVEN.size = 3  # type: ignore[misc]


def test_sizes_of_tensors_and_rows() -> None:
    assert GAPPED.tensor_numels == (6, 0, 1, 4)
    assert [GAPPED.row_size(tensor) for tensor in range(4)] == [3, 4, 1, 1]


# --- validation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        (
            (((2,), (2,)), (0, 1), 4, (0,)),
            ["tensor 0 overlaps tensor 1", "in [0, 2)", "offset 2 for tensor 1"],
        ),
        ((((2,),), (3,), 4, (0,)), ["tensor 0 leaves the buffer", "in [3, 5)", "try:  size=5"]),
        ((((2,),), (0, 2), 4, (0,)), ["1 shapes and 2 offsets", "one offset a tensor"]),
        ((((2,),), (0,), 4, (0, 3, 2)), ["rank_to_offset is malformed", "(0, 3, 2)", "never decreasing"]),
        ((((2,),), (0,), 4, (1, 3)), ["the first 0"]),
        ((((2,),), (0,), 4, (0, 5)), ["none past size=4"]),
        ((((2,),), (0,), 4, ()), ["at least one cut"]),
        ((((2,),), [0], 4, (0,)), ["tensor_to_offset is malformed", "got:  [0]"]),
        ((((2,),), (0,), 4.0, (0,)), ["size is malformed", "got:  4.0"]),
        ((((2,),), (-1,), 4, (0,)), ["tensor_to_offset is malformed"]),
        ((([2],), (0,), 4, (0,)), ["tensor_shapes is malformed", "a tuple of tuples"]),
        ((((-2,),), (0,), 4, (0,)), ["tensor 0 has a bad shape", "got:  (-2,)"]),
        ((((2,),), (0,), 4, (0,), 0), ["align is not a positive int"]),
    ],
)
def test_validate_refuses(fields: tuple[object, ...], parts: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        GlobalLayout(*fields).validate()  # type: ignore[arg-type]
    for part in parts:
        assert part in str(caught.value)


def test_validate_returns_the_layout() -> None:
    assert GAPPED.validate() is GAPPED
    assert GlobalLayout((), (), 0, (0, 0)).validate().pieces(0, 0) == ()


@pytest.mark.parametrize("shape", [(2, -1), (True, 2), (2.0,), ("2",)])
def test_check_shapes_refuses(shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="f: tensor 1 has a bad shape") as caught:
        check_shapes([(2,), shape], "f")
    assert f"got:  {shape!r}" in str(caught.value)
