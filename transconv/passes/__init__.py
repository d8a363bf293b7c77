"""The compiler: passes from kernel to kernel, in the order of one tuple.

In: a computation and a schedule. Out: the kernel after every pass. Knows: IR, simplifier, schedule."""

from transconv.passes.footprints import told_addresses as told_addresses
from transconv.passes.lowering.gridwise import STEP as STEP
from transconv.passes.lowering.launch_fusion import together as together
from transconv.passes.pipeline import EMIT as EMIT
from transconv.passes.pipeline import NAIVE as NAIVE
from transconv.passes.pipeline import PIPELINE as PIPELINE
from transconv.passes.pipeline import PROBLEM as PROBLEM
from transconv.passes.pipeline import SCHEDULE as SCHEDULE
from transconv.passes.pipeline import STAGES as STAGES
from transconv.passes.pipeline import TOGETHER as TOGETHER
from transconv.passes.pipeline import Context as Context
from transconv.passes.pipeline import Form as Form
from transconv.passes.pipeline import Pass as Pass
from transconv.passes.pipeline import finish as finish
from transconv.passes.pipeline import forms as forms
from transconv.passes.pipeline import leave as leave
from transconv.passes.pipeline import levels as levels
from transconv.passes.pipeline import lower as lower
from transconv.passes.pipeline import passes as passes
from transconv.passes.pipeline import register as register
from transconv.passes.pipeline import running as running
from transconv.passes.pipeline import stages as stages
from transconv.passes.pipeline import unregister as unregister
from transconv.passes.scope import decided as decided
from transconv.passes.scope import resolved as resolved
