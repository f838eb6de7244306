"""The library's version: here alone, so that whoever writes it into a file imports nothing else."""

__all__ = ["__version__"]
__version__ = "0.1.0"
