"""The version of the package, read by the modules that write it into files."""

__version__ = "0.1.0"
