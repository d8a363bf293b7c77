"""Plans: the launches that answer a workload, kept once per process, and checked when new.

In: a workload, a target. Out: a plan whose first result was checked. Knows: everything below.
"""

from transconv.backend_triton import torch_internals as torch_internals
from transconv.runtime.cache_bundle import BundleContents, info, pack, unpack
from transconv.runtime.compilation import rehearsal_thread as rehearsal_thread
from transconv.runtime.compilation.async_compile import (
    ahead,
    begin_processes,
    beside,
    cores,
    expect,
    helpers,
    is_ready,
    ready,
    state,
    was_awaited,
    withdraw,
)
from transconv.runtime.compilation.batch_compile import BatchCompile, Prepared, begin, prepare, rank
from transconv.runtime.compilation.plan_request import (
    COMPILING,
    NEVER,
    Batch,
    PlanRequest,
    Waiting,
    collect,
    collecting,
    is_collecting,
)
from transconv.runtime.compilation.recompilation import Compared, compare
from transconv.runtime.compiler import build, build_compute, build_scheduled, forget, plan, replan
from transconv.runtime.first_run_check import beside_samples, by_samples, first_result
from transconv.runtime.launch import (
    SIZES,
    Copy,
    FirstSizes,
    Launch,
    Spaces,
    WeightPrepack,
    apart,
    on_device,
)
from transconv.runtime.operands import Wanted, is_capturing
from transconv.runtime.plans import Plan, PlanStep
from transconv.runtime.registry import ChosenPlan, RegisteredPlan, Registry
from transconv.runtime.steps import (
    Choose,
    Planned,
    estimated,
    header,
    is_estimated,
    job_of,
    kernel_name,
    main_computations,
    microseconds,
    one_kernel_plan,
    plan_steps,
)
from transconv.selection import register_reader
from transconv.support import Cache

__all__ = [
    "COMPILING",
    "NEVER",
    "SIZES",
    "Batch",
    "BatchCompile",
    "BundleContents",
    "Cache",
    "Choose",
    "ChosenPlan",
    "Compared",
    "Copy",
    "FirstSizes",
    "Launch",
    "Plan",
    "PlanRequest",
    "PlanStep",
    "Planned",
    "Prepared",
    "RegisteredPlan",
    "Registry",
    "Spaces",
    "Waiting",
    "Wanted",
    "WeightPrepack",
    "ahead",
    "apart",
    "begin",
    "begin_processes",
    "beside",
    "beside_samples",
    "build",
    "build_compute",
    "build_scheduled",
    "by_samples",
    "collect",
    "collecting",
    "compare",
    "cores",
    "estimated",
    "expect",
    "first_result",
    "forget",
    "header",
    "helpers",
    "info",
    "is_capturing",
    "is_collecting",
    "is_estimated",
    "is_ready",
    "job_of",
    "kernel_name",
    "main_computations",
    "microseconds",
    "on_device",
    "one_kernel_plan",
    "pack",
    "plan",
    "plan_steps",
    "prepare",
    "rank",
    "ready",
    "register_reader",
    "replan",
    "state",
    "unpack",
    "was_awaited",
    "withdraw",
]
