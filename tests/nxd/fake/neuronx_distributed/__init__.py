"""A small stand-in for neuronx-distributed: as much of it as `dflash_core.nxd` uses.

Names, parameters, defaults and rules follow the source of version 0.18; the code is this project's.
A trace is a real graph (torch.fx, of rank 0, with collectives as opaque operators), which then runs
once per rank, in threads, each with weights and state of its own. So what NxD would bake into the
graph is baked in here: a rank's number, a Python value, a table that is no weight.
"""

from neuronx_distributed.model_builder import ModelBuilder
from neuronx_distributed.nxd_model import NxDModel
from neuronx_distributed.parallel_context import NxDParallelState
from neuronx_distributed.sharding import shard_checkpoint

__all__ = ["ModelBuilder", "NxDModel", "NxDParallelState", "shard_checkpoint"]
