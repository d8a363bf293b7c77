"""What all rooms stand on: errors, environment variables, versions, and what is kept in memory and on the
disk.

In: texts of the environment; keys and JSON. Out: the records of other processes, if the folder can be
trusted. Knows: no other room."""

from transconv.support import files as files
from transconv.support import knobs as knobs
from transconv.support import records as records
from transconv.support.errors import AddressError as AddressError
from transconv.support.errors import ComputeError as ComputeError
from transconv.support.errors import ConfigError as ConfigError
from transconv.support.errors import KernelError as KernelError
from transconv.support.errors import LayoutError as LayoutError
from transconv.support.errors import ProblemError as ProblemError
from transconv.support.errors import ScheduleError as ScheduleError
from transconv.support.errors import ScopeError as ScopeError
from transconv.support.errors import StageError as StageError
from transconv.support.errors import TensorError as TensorError
from transconv.support.errors import TransconvError as TransconvError
from transconv.support.errors import Unsupported as Unsupported
from transconv.support.errors import nearest as nearest
from transconv.support.errors import one_line as one_line
from transconv.support.files import leave_text as leave_text
from transconv.support.files import read_named as read_named
from transconv.support.files import replace_data as replace_data
from transconv.support.files import replace_named as replace_named
from transconv.support.files import why_foreign as why_foreign
from transconv.support.files import why_untrusted as why_untrusted
from transconv.support.files import why_unwritable as why_unwritable
from transconv.support.knobs import DIRECT as DIRECT
from transconv.support.knobs import __version__ as __version__
from transconv.support.knobs import has_wide_views as has_wide_views
from transconv.support.knobs import is_direct as is_direct
from transconv.support.knobs import triton_release as triton_release
from transconv.support.knobs import triton_version as triton_version
from transconv.support.python_functions import defined as defined
from transconv.support.python_functions import executed as executed
from transconv.support.python_functions import factory as factory
from transconv.support.python_functions import lasting as lasting
from transconv.support.python_functions import soon_turns as soon_turns
from transconv.support.python_functions import without_collections as without_collections
from transconv.support.records import Cache as Cache
from transconv.support.records import Content as Content
from transconv.support.records import Drawer as Drawer
from transconv.support.records import forget_all as forget_all
