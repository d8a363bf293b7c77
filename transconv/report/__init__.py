"""HTML pages about kernels: what is read and stored, the schedule, the stages, the machine code.

In: computations with their schedules, plans and machine code. Out: one self-contained HTML text. Knows:
the runtime and what is below it."""

from transconv.report.page import LARGEST, PrintedTable, page, tables_page, write_page
from transconv.report.subject import LabeledTime, Section, Subject

__all__ = [
    "LARGEST",
    "LabeledTime",
    "PrintedTable",
    "Section",
    "Subject",
    "page",
    "tables_page",
    "write_page",
]
