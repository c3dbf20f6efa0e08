"""Why a process cannot start. Raised by what a process does before it serves, caught by `commands` alone."""

EXIT_CODE = 2


class StartupError(Exception):
    """One line for the operator, without a traceback; the process exits with EXIT_CODE and is not
    restarted."""
