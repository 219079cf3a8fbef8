"""The version of the package, read by the build and by `saev_store.__version__`."""

__version__ = "0.1.0"
