"""dbuf: sharded training state for PyTorch as plain values and pure functions, compiled end to end."""

from dbuf import nn, optim, train, tree
from dbuf.agreement import check
from dbuf.buffer import DBuffer, cast, merge, pack, select, shapes, unpack
from dbuf.compile import Jitted, disable_jit, inspect, jit
from dbuf.creation import shard
from dbuf.errors import DbufError, LayoutError, PlacementError, TreeError
from dbuf.layout import GlobalLayout
from dbuf.mesh import DeviceMesh, init_mesh
from dbuf.movement import allgather, allreduce, redistribute, reduce_scatter, view
from dbuf.once import compiled_once
from dbuf.placement import (
    BlockAtomic,
    Partial,
    Replicate,
    RowAtomic,
    ShardLayout,
    TensorAtomic,
    changed_mesh_axis,
)
from dbuf.plan import plan_compact, plan_layout, plan_row_atomic, plan_tensor_atomic
from dbuf.reduce import all_finite, global_norm, norms, pmean, psum, vdot
from dbuf.rematerialize import gathered, remat
from dbuf.reports import report
from dbuf.transforms import grad, value_and_grad

__all__ = [
    "BlockAtomic",
    "DBuffer",
    "DbufError",
    "DeviceMesh",
    "GlobalLayout",
    "Jitted",
    "LayoutError",
    "Partial",
    "PlacementError",
    "Replicate",
    "RowAtomic",
    "ShardLayout",
    "TensorAtomic",
    "TreeError",
    "all_finite",
    "allgather",
    "allreduce",
    "cast",
    "changed_mesh_axis",
    "check",
    "compiled_once",
    "disable_jit",
    "gathered",
    "global_norm",
    "grad",
    "init_mesh",
    "inspect",
    "jit",
    "merge",
    "nn",
    "norms",
    "optim",
    "pack",
    "plan_compact",
    "plan_layout",
    "plan_row_atomic",
    "plan_tensor_atomic",
    "pmean",
    "psum",
    "redistribute",
    "reduce_scatter",
    "remat",
    "report",
    "select",
    "shapes",
    "shard",
    "train",
    "tree",
    "unpack",
    "value_and_grad",
    "vdot",
    "view",
]
