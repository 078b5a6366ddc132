"""What layouts and strategies cost, as numbers, text and pictures."""

from dbuf.reports.layout import LayoutReport, SegmentReport, report, report_segment
from dbuf.reports.memory import MemoryPlan, plan_memory
from dbuf.reports.picture import plot
from dbuf.reports.text import draw

__all__ = [
    "LayoutReport",
    "MemoryPlan",
    "SegmentReport",
    "draw",
    "plan_memory",
    "plot",
    "report",
    "report_segment",
]
