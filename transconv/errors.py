"""The errors that users catch, by their public names."""

from transconv.support import ComputeError as ComputeError
from transconv.support import ConfigError as ConfigError
from transconv.support import KernelError as KernelError
from transconv.support import LayoutError as LayoutError
from transconv.support import ProblemError as ProblemError
from transconv.support import ScheduleError as ScheduleError
from transconv.support import ScopeError as ScopeError
from transconv.support import StageError as StageError
from transconv.support import TensorError as TensorError
from transconv.support import TransconvError as TransconvError
from transconv.support import Unsupported as Unsupported
from transconv.support import nearest as nearest
