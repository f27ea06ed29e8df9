"""What can be wrong with a Trainium node or its placement."""


class NeuronError(Exception):
    """This machine cannot run what was asked of it; the message says what was found and why."""
