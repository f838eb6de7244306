"""What the library's own errors have in common."""


class JdwError(Exception):
    """The base of the library's own errors, to catch all of them by.

    Bad arguments are plain `ValueError` and `TypeError`. What was *found* wrong has a class of its
    own, in the module that finds it: `CoverageError`, `ParityError`, `DisagreementError`.
    """
