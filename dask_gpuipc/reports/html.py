"""A report as HTML for notebooks, by Dask's own widgets."""

from __future__ import annotations

import html
import os
import re

from dask.utils import format_bytes, format_time
from dask.widgets import TEMPLATE_PATHS, get_template  # type: ignore[attr-defined]

from dask_gpuipc.reports.layout import busiest, label, labels, matrix, ordered
from dask_gpuipc.reports.record import HANDLES, RUNGS, Report, percent

TEMPLATES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "templates")


def as_html(report: Report) -> str:
    """A fragment with no script and no style sheet, like those of Dask's own objects."""
    if TEMPLATES not in TEMPLATE_PATHS:
        TEMPLATE_PATHS.append(TEMPLATES)
    workers = ordered(report)
    names = labels(workers)
    fields = matrix(report, workers)
    most = max((f.handles for row in fields or [] for f in row), default=0)
    text: str = get_template("gpuipc_report.html.j2").render(
        report=report,
        workers=workers,
        names=names,
        fields=fields,
        most=most,
        moved=sum(traffic.bytes for traffic in report.totals.values()),
        busiest=busiest(report),
        label=label,
        rungs=RUNGS,
        handles=HANDLES,
        size=format_bytes,
        duration=format_time,
        percent=percent,
        code=_code,
    )
    return text


def _code(markdown: str) -> str:
    """HTML of a text with code in backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(markdown))
