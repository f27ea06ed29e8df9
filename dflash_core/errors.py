"""What can be wrong with a model before anything runs."""


class CheckpointError(Exception):
    """A checkpoint cannot be found, fetched or read; the message says why and what to do."""


class ConfigError(CheckpointError):
    """A checkpoint's config.json describes something that this code does not run."""


class PairingError(Exception):
    """Target, drafter and deployment options do not fit together."""


class KernelError(Exception):
    """The CPU kernels cannot be compiled here; the message says why."""
