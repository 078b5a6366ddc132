"""The one door to torch's private or renamed names, and to optree's.

Every name here says which version it was read in and what will let it go. Nothing else in the library imports a
private part of torch; `tests/test_compat.py` names each of these and fails when one moves.
"""

from dbuf.compat.inductor import ScheduledOp, compile_inductor
from dbuf.compat.nodes import (
    GATHER_START,
    annotate,
    annotated,
    node_draws_random,
    node_is_backward,
    node_is_inlined,
    node_is_recomputed,
    node_is_region,
    node_mark,
    node_region,
)
from dbuf.compat.runtime import (
    OPTREE_GLOBAL,
    FakeTensor,
    FakeTensorMode,
    GetAttrKey,
    NeedsRealTensors,
    TreeSpec,
    destroy_subgroups,
    flatten_mesh,
    group_backend,
    group_rank,
    inside_func_transform,
    storage_id,
)
from dbuf.compat.tracing import (
    BackendFailed,
    allow_in_graph,
    call_with_side_effects,
    compile_once,
    compile_program,
    forget_programs,
    graph_breaks,
    kept_in_backward,
    merging_trace_length,
    register_constant,
    trace_autograd,
)

__all__ = [
    "GATHER_START",
    "OPTREE_GLOBAL",
    "BackendFailed",
    "FakeTensor",
    "FakeTensorMode",
    "GetAttrKey",
    "NeedsRealTensors",
    "ScheduledOp",
    "TreeSpec",
    "allow_in_graph",
    "annotate",
    "annotated",
    "call_with_side_effects",
    "compile_inductor",
    "compile_once",
    "compile_program",
    "destroy_subgroups",
    "flatten_mesh",
    "forget_programs",
    "graph_breaks",
    "group_backend",
    "group_rank",
    "inside_func_transform",
    "kept_in_backward",
    "merging_trace_length",
    "node_draws_random",
    "node_is_backward",
    "node_is_inlined",
    "node_is_recomputed",
    "node_is_region",
    "node_mark",
    "node_region",
    "register_constant",
    "storage_id",
    "trace_autograd",
]
