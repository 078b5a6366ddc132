"""Placements and layouts: who owns what, drawn from integers alone.

No process group is needed here: a layout knows the range of every rank of any mesh.

    python examples/02_placements.py
"""

from itertools import product

import dbuf
from dbuf import BlockAtomic, Replicate, RowAtomic, ShardLayout, TensorAtomic

SHAPES = [(5, 4), (3,), (2, 6)]  # tensors A, B and C: 20 + 3 + 12 = 35 elements
NAMES = "ABC"
SEGMENTS = 2


def picture(layout: dbuf.GlobalLayout, start: int, numel: int) -> str:
    """A range of the buffer, one letter an element: which tensor it belongs to; a dot is a gap or padding."""
    letters = ["."] * numel
    for tensor, _, count, place in layout.pieces(start, numel):
        letters[place : place + count] = NAMES[tensor] * count
    return "".join(letters)


def draw(title: str, layout: dbuf.GlobalLayout) -> None:
    print(title)
    for k in range(layout.dp_size):
        print(f"  segment {k}  [{picture(layout, *layout.segment(k))}]")


def main() -> None:
    # PADDED: equal segments, so that a gather needs no copy. Large tensors start at multiples of the least common
    # multiple of all row sizes (4, 1 and 6: 12), so no cut falls inside a row; the small B fills the gap behind A.
    padded = dbuf.plan_row_atomic(SHAPES, SEGMENTS)
    draw("RowAtomic, padded", padded)
    assert (padded.size, padded.tensor_to_offset, padded.rank_to_offset) == (48, (0, 20, 24), (0, 24))

    # UNPADDED: no padding, uneven segments; cuts at the row boundary nearest to an even share.
    unpadded = dbuf.plan_row_atomic(SHAPES, SEGMENTS, shard_layout=ShardLayout.UNPADDED)
    draw("RowAtomic, unpadded", unpadded)
    assert (unpadded.size, unpadded.rank_to_offset) == (35, (0, 16))

    # TensorAtomic: whole tensors. The layout, not the placement, says who owns which.
    whole = dbuf.plan_tensor_atomic(SHAPES, SEGMENTS, tensor_owners=[1, 0, 0])
    draw("TensorAtomic, A on segment 1", whole)
    assert (whole.size, whole.rank_to_offset) == (35, (0, 15))

    # Whether a layout fits a placement is read from its cuts, whoever planned it.
    assert unpadded.admits(RowAtomic()) and not unpadded.admits(TensorAtomic())
    assert whole.admits(RowAtomic()) and whole.admits(BlockAtomic(2))

    # On a mesh of several axes the innermost sharded axis is the most significant digit of the segment index.
    mesh_shape = (2, 3)  # (outer, inner)
    layout = dbuf.plan_row_atomic([(12, 2)], 6)
    print("rank (outer, inner) on a (2, 3) mesh, 24 elements:")
    for coordinate in product(*map(range, mesh_shape)):
        both = layout.local_range((RowAtomic(), RowAtomic()), mesh_shape, coordinate)
        inner = layout.local_range((Replicate(), RowAtomic()), mesh_shape, coordinate)
        ranges = [f"[{start:2}, {start + numel:2})" for start, numel in (both, inner)]
        print(f"  {coordinate}  sharded over both {ranges[0]}, over the inner axis alone {ranges[1]}")
        assert both == (4 * (2 * coordinate[1] + coordinate[0]), 4)
        assert inner == (8 * coordinate[1], 8)


if __name__ == "__main__":
    main()
