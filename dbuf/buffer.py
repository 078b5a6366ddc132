"""`DBuffer`: one flat tensor and its static description; making one, and taking it apart.

    shard:   tree of full tensors  ->  DBuffer           unpack:  DBuffer  ->  tree of this rank's tensors
    select:  DBuffer -> DBuffer of some of its tensors   pack:    its inverse
    merge:   puts a selection back                       cast, shapes, check

Nothing here communicates, except `check` and `shard(broadcast_from=)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from dbuf import tree as trees
from dbuf.collectives import move
from dbuf.errors import PlacementError, TreeError, explain
from dbuf.layout import GlobalLayout
from dbuf.mesh import DeviceMesh
from dbuf.placement import Placements
from dbuf.refusals import refuse_no_dtype, refuse_partial, refuse_structure
from dbuf.spec import BufferSpec

__all__ = ["DBuffer", "buffers", "cast", "is_buffer", "merge", "pack", "select", "shapes", "unpack"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DBuffer(trees.Node):
    """A group of tensors as one flat tensor a rank, and how it is spread over a mesh.

    A pytree node for torch and optree whose one leaf is `local`: `tree_map(torch.add, a, b)` adds two buffers, and
    refuses them if their specs differ. Building one checks nothing, so that transforms may pass other objects
    through; `shard` and `pack` are the ways to make one from tensors.

    Attributes:
        local: This rank's 1-D contiguous tensor.
        spec: Mesh, placements, layout and tree structure; static and hashable.
    """

    local: torch.Tensor
    spec: BufferSpec

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh that the buffer lives on."""
        return self.spec.mesh

    @property
    def placements(self) -> Placements:
        """What each mesh axis does to the buffer, outermost first."""
        return self.spec.placements

    @property
    def layout(self) -> GlobalLayout:
        """Where each tensor lies in the flat buffer."""
        return self.spec.layout

    @property
    def dtype(self) -> torch.dtype:
        """The one dtype of all tensors in the buffer."""
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        """Where `local` lies."""
        return self.local.device

    def __getitem__(self, key: object) -> NoReturn:
        raise TreeError(
            explain(
                "DBuffer",
                "a buffer is not the tree of its tensors.",
                got=f"buf[{key!r}]",
                need="full tensors, or this rank's own",
                fix="dbuf.gathered(fn)(buf, ...) for a function of full tensors; dbuf.unpack(buf) for this rank's",
            )
        )

    def __repr__(self) -> str:
        what = f"{self.local.dtype}, " if isinstance(self.local, torch.Tensor) else f"{self.local!r}, "
        return f"DBuffer({what}{self.spec!r})"


trees.register_node(
    DBuffer,
    fields=("local",),
    get_static=lambda buf: buf.spec,
    build=lambda spec, children: DBuffer(children[0], spec),
)


def is_buffer(node: object) -> bool:
    """Whether a node of a tree is a `DBuffer`."""
    return isinstance(node, DBuffer)


def buffers(tree: Any) -> list[DBuffer]:
    """The buffers of a tree, in its order; other leaves are left out."""
    return [leaf for leaf in trees.leaves(tree, is_leaf=is_buffer) if isinstance(leaf, DBuffer)]


def require_buffers(tree: Any, where: str) -> list[DBuffer]:
    """The buffers of a tree that may hold nothing else; `None` holds no buffer.

    Raises:
        TreeError: Names every other leaf. Not while tracing: `jit` has tried the function out by then.
    """
    if not torch.compiler.is_compiling():
        named = trees.flatten_with_paths(tree, is_leaf=is_buffer)[0]
        bad = [f"bufs{path}: {type(leaf).__name__}" for path, leaf in named if leaf is not None and not is_buffer(leaf)]
        if bad:
            raise TreeError(
                explain(
                    where,
                    "not every leaf is a DBuffer.",
                    got="\n".join(bad),
                    need="a pytree of DBuffers",
                    fix="dbuf.shard(tensors, mesh, placements)",
                )
            )
    return buffers(tree)


def unpack(buf: DBuffer) -> Any:
    """The user's tree of tensors, as this rank holds them.

    From a replicated buffer the full tensors; from a sharded one this rank's rows, `(0, *shape[1:])` where it owns
    none of a tensor, `(0,)` for a scalar. If its layout counts rows over more leading dimensions (`row_dims`), the rows
    are stacked in one: of an `(experts, out, in)` tensor a `(rows, in)` matrix, which may begin and end within an
    expert, on every rank, whatever it holds. Under `TensorAtomic` an owned tensor is whole and keeps its shape.

    Args:
        buf: Replicated or sharded.

    Returns:
        The tree that went into `shard`, its leaves views of `buf.local`: they alias it.

    Raises:
        PlacementError: The buffer is partial: its numbers are not values yet.

    Gradient:
        One concatenation, with zeros for gaps and padding.

    Example:
        >>> import dbuf
        >>> buf = dbuf.shard({"w": torch.ones(2, 3), "b": torch.zeros(2)}, dbuf.init_mesh(), dbuf.RowAtomic())
        >>> dbuf.unpack(buf)["w"].shape
        torch.Size([2, 3])
    """
    spec = buf.spec
    refuse_partial(spec, "dbuf.unpack")
    sizes, part_of = spec.split_sizes(), spec.part_of_tensor()
    if -1 in part_of:  # an empty last part for what is elsewhere, so that its gradient is part of the graph here too
        sizes = (*sizes, 0)
    # One split, never a slice a tensor: the gradient is then one concatenation (10 times faster at 64 tensors).
    parts = buf.local.split_with_sizes(sizes) if len(sizes) > 1 else (buf.local,)
    leaves = [parts[part].view(shape) for part, shape in zip(part_of, spec.local_shapes(), strict=True)]
    return trees.fill(leaves, spec.treespec(), spec.present())


def pack(tensors: Any, like: DBuffer) -> DBuffer:
    """Put this rank's tensors into a buffer like `like`; the inverse of `unpack`.

    Args:
        tensors: A tree like `unpack(like)`, with the same local shapes; one dtype, which may differ from `like`'s.
            For a partial buffer: this rank's contributions, in full shapes.
        like: Gives mesh, placements, layout and structure; its numbers are not read.

    Returns:
        A new buffer with the spec of `like`; gaps and padding are zero.

    Raises:
        TreeError: Another structure, a wrong local shape, a leaf that is no plain tensor, or mixed dtypes.

    Gradient:
        A slice for each tensor.
    """
    everything, structure = trees.flatten(tensors)
    leaves = [leaf for leaf in everything if leaf is not None]
    spec = like.spec
    if not torch.compiler.is_compiling():
        _check_pack(everything, structure, spec)
    return DBuffer(assemble(leaves, spec, like.local), spec)


def _check_pack(everything: list[Any], structure: Any, spec: BufferSpec) -> None:
    where = "dbuf.pack"
    if structure != spec.tree.spec:
        refuse_structure(f"structure {structure}", f"structure {spec.tree.spec}", where)
    leaves = [leaf for leaf in everything if leaf is not None]
    present = tuple(leaf is not None for leaf in everything)
    if present != spec.tree.present:
        refuse_structure(f"tensors, in leaf order: {present}", f"{spec.tree.present}", where)
    check_leaves(leaves, spec.tree.paths, where)
    wrong = [
        f"{path}: {tuple(leaf.shape)}, should be {shape}"
        for path, leaf, shape in zip(spec.tree.paths, leaves, spec.local_shapes(), strict=True)
        if tuple(leaf.shape) != shape
    ]
    if wrong:
        refuse_structure("\n".join(wrong), "this rank's rows of each tensor", where)


def check_leaves(leaves: list[Any], paths: tuple[str, ...], where: str) -> None:
    """Refuse leaves that are not plain real tensors of one dtype.

    Raises:
        TreeError: Names every offending leaf.
    """
    named = list(zip(paths, leaves, strict=True))
    bad = [f"{path or 'the tree'}: {type(leaf).__name__}" for path, leaf in named if not is_plain_tensor(leaf)]
    if bad:
        raise TreeError(
            explain(
                where,
                "not every leaf is a plain tensor.",
                got="\n".join(bad),
                need="torch.Tensor leaves; None holds no tensor",
                fix="leaf.full_tensor() for a DTensor, torch.tensor(...) for a number, module.state_dict()",
            )
        )
    if any(leaf.is_complex() for leaf in leaves):
        raise TreeError(
            explain(
                where,
                "no buffer holds complex numbers: collectives and norms do not know them.",
                got="\n".join(f"{path}: {leaf.dtype}" for path, leaf in named if leaf.is_complex()),
                need="real or integer tensors",
                fix="torch.view_as_real(leaf), and torch.view_as_complex where it is used",
            )
        )
    if len({(leaf.dtype, leaf.device) for leaf in leaves}) > 1:
        raise TreeError(
            explain(
                where,
                "the tensors of one buffer share one dtype and one device; nothing is promoted.",
                got="\n".join(f"{path}: {leaf.dtype} on {leaf.device}" for path, leaf in named),
                need="one dtype and one device",
                fix="one buffer a dtype, such as {'half': shard(half), 'full': shard(full)}, or cast the leaves",
            )
        )


def is_plain_tensor(leaf: object) -> bool:
    """A tensor whose shape is its own: a DTensor's is the global one and would be misread."""
    return isinstance(leaf, torch.Tensor) and not hasattr(leaf, "device_mesh")


def assemble(leaves: list[torch.Tensor], spec: BufferSpec, like: torch.Tensor) -> torch.Tensor:
    """This rank's flat tensor from its local tensors: one concatenation, zeros in gaps and padding."""
    parts: list[torch.Tensor | None] = [None] * len(spec.split_sizes())
    elsewhere: list[torch.Tensor] = []
    for leaf, part in zip(leaves, spec.part_of_tensor(), strict=True):
        if part >= 0:
            parts[part] = leaf.reshape(-1)
        elif leaf.requires_grad:
            elsewhere.append(leaf.reshape(-1))
    source = leaves[0] if leaves else like
    full = [
        part if part is not None else source.new_zeros(size)
        for part, size in zip(parts, spec.split_sizes(), strict=True)
    ]
    # Empty, but a rank that owns nothing must take part in the backward's collectives like the others.
    full += elsewhere
    return torch.cat(full) if full else source.new_zeros(0)


def shapes(buf: DBuffer) -> Any:
    """The tree of global shapes, each a `torch.Size`, whatever this rank holds.

    Example:
        >>> import dbuf
        >>> dbuf.shapes(dbuf.shard({"w": torch.ones(2, 3)}, dbuf.init_mesh(), dbuf.RowAtomic()))
        {'w': torch.Size([2, 3])}
    """
    spec = buf.spec
    return trees.fill([torch.Size(s) for s in spec.global_shapes()], spec.treespec(), spec.present())


def cast(bufs: Any, dtype: torch.dtype) -> Any:
    """The same buffers in another dtype; the gradient comes back in the old one.

    Args:
        bufs: A pytree of DBuffers.
        dtype: The dtype wanted.

    Returns:
        New buffers; one that has the dtype already is itself.
    """
    require_buffers(bufs, "dbuf.cast")
    refuse_no_dtype(dtype, "dbuf.cast")

    def change(buf: DBuffer | None) -> DBuffer | None:
        return buf if buf is None or buf.local.dtype == dtype else DBuffer(buf.local.to(dtype), buf.spec)

    return trees.map(change, bufs, is_leaf=is_buffer)


def select(buf: DBuffer, rule: Callable[[str], bool] | Iterable[str]) -> DBuffer:
    """Take tensors out by path: a buffer of those alone, each rank keeping what it holds of them.

    Args:
        buf: Any buffer.
        rule: A function of the key path, such as `lambda path: "norm" in path`, or the paths themselves, as in
            `"['block']['w']"`.

    Returns:
        A new buffer whose tree has None where a tensor was left out, and whose layout packs the rest in buffer
        order, cut between ranks where it was cut before.

    Raises:
        TreeError: A path that the buffer does not have.

    Gradient:
        Zeros for what was left out.
    """
    part = buf.spec.selected(_mask(buf, rule))
    return DBuffer(move(buf.local, buf.spec.steps_to_selection(part)), part)


def _mask(buf: DBuffer, rule: Callable[[str], bool] | Iterable[str]) -> tuple[bool, ...]:
    paths = buf.spec.tree_paths()
    if callable(rule):
        return tuple([bool(rule(path)) for path in paths])
    wanted = tuple(rule)
    unknown = [path for path in wanted if path not in paths]
    if unknown:
        raise TreeError(
            explain(
                "dbuf.select",
                "no tensor has that path.",
                got="\n".join(unknown),
                need="paths of the buffer: " + ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else ""),
                fix="a rule, such as lambda path: 'norm' in path",
            )
        )
    return tuple([path in wanted for path in paths])


def merge(buf: DBuffer, part: DBuffer) -> DBuffer:
    """Put a selection back: `buf` with the tensors of `part` in place of its own.

    Args:
        buf: The whole.
        part: What `select` took from a buffer with the spec of `buf`, or a map of it.

    Returns:
        A new buffer with the spec of `buf`.

    Raises:
        PlacementError: `part` is not a selection of a buffer like `buf`.
        TreeError: The dtypes differ.
    """
    if not buf.spec.has_selection(part.spec):
        raise PlacementError(
            explain(
                "dbuf.merge",
                "the part is not a selection of this buffer.",
                got=f"{part.spec!r}",
                need=f"what dbuf.select gives of {buf.spec!r}",
                fix="dbuf.redistribute(part, placements, layout=) back to where select left it",
            )
        )
    if buf.local.dtype != part.local.dtype:
        raise TreeError(
            explain(
                "dbuf.merge",
                "the dtypes differ; nothing is promoted.",
                got=f"{part.local.dtype} into {buf.local.dtype}",
                need="one dtype",
                fix=f"dbuf.cast(part, {buf.local.dtype})",
            )
        )
    joined = torch.cat([buf.local, part.local])
    return DBuffer(move(joined, buf.spec.steps_from_selection(part.spec)), buf.spec)
