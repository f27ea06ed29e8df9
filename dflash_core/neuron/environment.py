"""The environment variables of a rank on Trainium, all read before or while torch is imported.

torch-neuronx reads them when it is loaded or when the process group is made, and torch some when
it is imported: so they must be in the process's environment from its start. Sources: the Neuron
documentation on runtime environment variables and on the logical NeuronCore configuration;
torch-neuronx, `distributed/backend.py` and `docs/environment_variables.md`.
"""

from __future__ import annotations

from pathlib import Path

HOST = "127.0.0.1"  # the ranks of a model are on one node
# Chosen by rank 0 of each group when it is unset; one that is inherited would join target and
# drafter to one another's runtime.
ROOT_COMM_ID = "NEURON_RT_ROOT_COMM_ID"


def group_environment(*, cores: range, logical_nc_config: int) -> dict[str, str]:
    """Variables for the one process that drives all of a model's cores (`parallel: nxd`)."""
    return {
        "NEURON_RT_VISIBLE_CORES": visible_cores(cores),
        "NEURON_RT_NUM_CORES": str(len(cores)),
        "NEURON_LOGICAL_NC_CONFIG": str(logical_nc_config),
        # Ray would put the numbers of whichever cores it counted into NEURON_RT_VISIBLE_CORES.
        "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES": "1",
    }


def visible_cores(cores: range) -> str:
    """As the Neuron runtime takes it: "0-7", or "8"."""
    return str(cores[0]) if len(cores) == 1 else f"{cores[0]}-{cores[-1]}"


def rank_environment(
    *, rank: int, size: int, core: int, store_port: int, logical_nc_config: int, cache: Path
) -> dict[str, str]:
    """Variables for the process of one rank.

    Args:
        core: the one logical NeuronCore that this process may use.
        store_port: where the ranks of this model rendezvous; every replica has its own.
        logical_nc_config: physical cores per logical one (LNC), as on the node.
        cache: folder for what is compiled; each rank has a folder of its own in it, so that no
            two processes write the same file.
    """
    own = cache / f"rank-{rank}-of-{size}"
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(store_port),
        "NEURON_RT_VISIBLE_CORES": str(core),
        "NEURON_RT_NUM_CORES": "1",
        "NEURON_LOGICAL_NC_CONFIG": str(logical_nc_config),
        "TORCH_NEURONX_NEFF_CACHE_DIR": str(own / "neff"),
        "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": str(own / "neff-local"),
        "TORCH_NEURONX_HLO_CACHE_DIR": str(own / "hlo"),
        # Loaded by `open_device`, after its checks, not by `import torch`.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        # Ray would put the number of whichever core it counted into NEURON_RT_VISIBLE_CORES.
        "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES": "1",
    }
