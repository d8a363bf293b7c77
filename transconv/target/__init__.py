"""The supported chips: one record each, with matrix instructions and rates.

In: a name or a device. Out: a Target. Knows: element types and the environment, nothing of computations.
"""

from transconv.target.matrix_units import BlockMma as BlockMma
from transconv.target.records import CARDS as CARDS
from transconv.target.records import L2_GBS as L2_GBS
from transconv.target.records import TARGETS as TARGETS
from transconv.target.records import Constants as Constants
from transconv.target.records import Rates as Rates
from transconv.target.records import Target as Target
from transconv.target.records import detect as detect
from transconv.target.records import expect_release as expect_release
from transconv.target.records import of_card as of_card
from transconv.target.records import register as register
from transconv.target.records import unregister as unregister
from transconv.target.records import why_no_switches as why_no_switches
