"""The version of the package, for those below its root."""

__version__ = "0.1.0"
