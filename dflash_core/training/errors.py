"""What can go wrong in training that the user can put right."""


class TrainingError(Exception):
    """Settings, data or disk do not allow to go on; the message says what to do."""
