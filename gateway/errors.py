"""Why a gateway cannot start. Clients' errors are in `service.errors`."""

from service.startup import StartupError


class ModelFilesError(StartupError):
    """The model's files do not give a tokenizer."""
