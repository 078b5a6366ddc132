"""The command line: its options, and what they mean."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import NoReturn

import torch

from dbuf.cli.layout import LayoutQuestion, run_layout
from dbuf.cli.plan import PlanQuestion, run_plan
from dbuf.errors import DbufError, PlacementError, explain, require_positive
from dbuf.models import builtin_names
from dbuf.placement import BlockAtomic, Placement, Placements, Replicate, RowAtomic, TensorAtomic, normalize
from dbuf.reports.memory import OPTIMIZERS

__all__ = ["parse"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_LAYOUTS = ("padded", "compact", "unpadded")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; what argparse refuses ends the program with exit code 2."""
    parser = argparse.ArgumentParser("python -m dbuf", description="What sharding costs, before a GPU is rented.")
    commands = parser.add_subparsers(required=True, metavar="{layout,plan}")
    of_layout = commands.add_parser(
        "layout",
        help="padding, balance, empty ranks and bytes of each unit of a model",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python -m dbuf layout --model deepseek-v3 --ranks 256 --block 32 --row-dims 2",
    )
    _add_common(of_layout)
    of_layout.add_argument(
        "--placement", metavar="P,P", help="one an axis, outermost first: replicate, row, block, tensor"
    )
    of_layout.add_argument("--align", type=int, default=1, metavar="N", help="segments are multiples of N elements")
    of_layout.add_argument("--unit", help="what --plot shows; by default the unit with the most parameters")
    of_layout.add_argument("--plot", nargs="?", const="", metavar="FILE", help="draw a unit: a PNG, or text if no FILE")
    of_layout.set_defaults(command=_layout)
    of_plan = commands.add_parser(
        "plan",
        help="memory a rank and bytes a step of each strategy",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python -m dbuf plan --model llama3-70b --mesh 8x8 --optimizer adamw8bit",
    )
    _add_common(of_plan)
    of_plan.add_argument("--optimizer", default="adamw", metavar="NAME", help=", ".join(OPTIMIZERS))
    of_plan.add_argument("--microbatches", type=int, default=1, metavar="N")
    of_plan.set_defaults(command=_plan)
    return parser.parse_args(arguments)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        help=f"{', '.join(builtin_names())}; a Hugging Face config.json; a .safetensors file, its index, or a "
        "folder of these; or package.module:function, which builds a module",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks in all")
    parser.add_argument("--mesh", metavar="AxB", help="sizes of mesh axes, outermost first; by default one axis")
    parser.add_argument("--layout", choices=_LAYOUTS, default="padded", help="how segments are cut (padded)")
    parser.add_argument("--block", type=int, metavar="ROWS", help="rows that stay together")
    parser.add_argument("--row-dims", type=int, default=1, metavar="N", help="leading dimensions that number rows (1)")
    parser.add_argument("--group-by", default="block", metavar="HOW", help="block, tensor, all, or a pattern of paths")
    parser.add_argument("--dtype", choices=_DTYPES, help="of weights; by default the model's (layout), bfloat16 (plan)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _layout(options: argparse.Namespace) -> int:
    mesh = _mesh(options.ranks, options.mesh)
    return run_layout(
        LayoutQuestion(
            model=options.model,
            group_by=options.group_by,
            dtype=_DTYPES.get(options.dtype),
            mesh=mesh,
            placements=_placements(options.placement, options.block, len(mesh)),
            shard_layout=options.layout,
            row_dims=options.row_dims,
            align=options.align,
        ),
        as_json=options.json,
        unit=options.unit,
        plot=options.plot,
    )


def _plan(options: argparse.Namespace) -> int:
    return run_plan(
        PlanQuestion(
            model=options.model,
            group_by=options.group_by,
            dtype=_DTYPES[options.dtype or "bfloat16"],
            mesh=_mesh(options.ranks, options.mesh),
            shard=_rows(options.block),
            shard_layout=options.layout,
            row_dims=options.row_dims,
            optimizer=options.optimizer,
            microbatches=options.microbatches,
        ),
        as_json=options.json,
    )


def _mesh(ranks: int | None, text: str | None) -> tuple[int, ...]:
    """The sizes of the axes."""
    if text is None and ranks is None:
        _refuse("how many ranks?", got="neither --ranks nor --mesh", need="one of them", fix="--ranks 64")
    if ranks is not None:
        require_positive(ranks, "--ranks", "dbuf", DbufError)
    if text is None:
        return (int(ranks or 1),)
    try:
        shape = tuple(int(size) for size in text.replace(",", "x").split("x"))
    except ValueError:
        _refuse("a mesh is not given by numbers.", got=f"--mesh {text}", need="sizes of its axes", fix="--mesh 8x8")
    for size in shape:
        require_positive(size, "--mesh", "dbuf", DbufError)
    if ranks is not None and math.prod(shape) != ranks:
        _refuse(
            "the mesh does not have that many ranks.",
            got=f"--mesh {text}, which has {math.prod(shape)}, with --ranks {ranks}",
            need="sizes whose product is the number of ranks",
            fix=f"--mesh {text}",
        )
    return shape


def _placements(text: str | None, block: int | None, ndim: int) -> Placements:
    """One placement an axis; rows on all axes by default, or blocks."""
    if text is None:
        return (_rows(block),) * ndim
    kinds: dict[str, Placement] = {"replicate": Replicate(), "row": RowAtomic(), "tensor": TensorAtomic()}
    if block is not None:
        kinds["block"] = _rows(block)
    names = text.split(",")
    if unknown := [name for name in names if name not in kinds]:
        _refuse(
            "no such placement." if unknown != ["block"] else "a block has how many rows?",
            got=f"--placement {text}",
            need=", ".join(kinds) + ("" if block else "; block with --block ROWS"),
            fix=f"--placement {','.join(['row'] * ndim)}",
        )
    return normalize([kinds[name] for name in names], ndim, "dbuf: --placement")


def _rows(block: int | None) -> RowAtomic | BlockAtomic:
    if block is None:
        return RowAtomic()
    return BlockAtomic(require_positive(block, "--block", "dbuf", PlacementError))


def _refuse(what: str, *, got: str, need: str, fix: str) -> NoReturn:
    raise DbufError(explain("dbuf", what, got=got, need=need, fix=fix))
