"""HTML pages about kernels: what is read and stored, the schedule, the stages, the machine code.

In: computations with their schedules, plans and machine code. Out: one self-contained HTML text. Knows:
the runtime and what is below it.
"""

from transconv.report.page import LARGEST as LARGEST
from transconv.report.page import PrintedTable as PrintedTable
from transconv.report.page import page as page
from transconv.report.page import tables_page as tables_page
from transconv.report.page import write_page as write_page
from transconv.report.subject import LabeledTime as LabeledTime
from transconv.report.subject import Section as Section
from transconv.report.subject import Subject as Subject
