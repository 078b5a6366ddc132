"""What layouts and strategies cost, as numbers, text and pictures."""

from dbuf.reports.layout import LayoutReport, SegmentReport, report, report_segment

__all__ = ["LayoutReport", "SegmentReport", "report", "report_segment"]
