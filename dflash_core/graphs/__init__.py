"""The graphs that the server compiles on Trainium: captured, checked and sized without a device.

`python -m dflash_core.graphs CONFIG` does it for a `serve run` file.
"""
