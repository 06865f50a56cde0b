"""NemoLocal. Only the version lives here: the engine's child process imports this package too."""

__version__ = "0.1.0"
