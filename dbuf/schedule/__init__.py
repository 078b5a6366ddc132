"""Passes over the one graph of a compiled step, and the order of its program: one pass a file."""

from dbuf.schedule.donated import take_before_writing
from dbuf.schedule.gathers import prefetch_gathers, sink_gathers
from dbuf.schedule.order import order_ops
from dbuf.schedule.overlap import Overlap
from dbuf.schedule.padding import anchor_padding
from dbuf.schedule.regions import take_aliases_outside
from dbuf.schedule.repeat import repeat_in_backward
from dbuf.schedule.uses import store_results

__all__ = [
    "Overlap",
    "anchor_padding",
    "order_ops",
    "prefetch_gathers",
    "repeat_in_backward",
    "sink_gathers",
    "store_results",
    "take_aliases_outside",
    "take_before_writing",
]
