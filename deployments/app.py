"""Builds the application of a `serve run` YAML file: `import_path: deployments.app:build`."""

# No `from __future__ import annotations`: Serve looks at the class that annotates `args`.

from ray.serve import Application

from deployments.api.openai_protocol import MAX_STOP_TOKEN_IDS
from deployments.app_args import AppArgs, WorkerArgs
from deployments.cluster_resources import NEURON_CORES, require
from deployments.drafter import Drafter
from deployments.router import Router
from deployments.specs import DrafterSpec, NeuronSpec, VerifierSpec
from deployments.verifier import Verifier
from dflash_core.checkpoint import (
    check_access,
    load_drafter_config,
    load_sampling_defaults,
    load_target_config,
    resolve,
)
from dflash_core.pairing import validate_pair
from dflash_core.runtime import DTYPES
from dflash_core.sampling import MAX_LOGIT_BIAS
from dflash_core.shapes import StaticShapes

MIN_CHANNEL_BYTES = 1 << 20
MESSAGE_OVERHEAD_BYTES = 64 << 10
LOGPROBS_BYTES = 512  # of one token with 20 alternatives, pickled
CONTROL_CPUS = 0.1
NXD_RUNNER = "dflash_core.nxd.drafter_runner:NxdDrafterRunner"
HEALTH_CHECK_PERIOD_S = 2.0  # what Serve lets pass before it replaces a replica without workers


def build(args: AppArgs) -> Application:
    """Router, Verifier and (with speculation) Drafter, wired together.

    Access to both repositories is checked, checkpoints are resolved and the pair is validated
    here, so that a mistake in the file is reported before any model is loaded.

    Raises:
        CheckpointError, ConfigError, PairingError: naming the field, the values and the remedy.
        ResourcesMissing: the cluster has not what one replica of each model reserves.
    """
    speculation = args.speculation
    named = [(args.target.model, args.target.revision)]
    if speculation is not None:
        named.append((speculation.drafter, speculation.revision))
    check_access(named)
    folder = resolve(args.target.model, revision=args.target.revision)
    target = load_target_config(folder)
    load_sampling_defaults(folder)  # the Router's; a mistake in them shows here
    drafter = None
    if speculation is not None:
        drafter = load_drafter_config(resolve(speculation.drafter, revision=speculation.revision))
    validate_pair(
        target,
        drafter,
        num_speculative_tokens=args.num_drafts,
        target_tp=args.target.tensor_parallel_size,
        drafter_tp=speculation.tensor_parallel_size if speculation else 1,
        max_model_len=args.max_model_len,
    )
    models = [args.target] if speculation is None else [args.target, speculation]
    require(
        [[{"CPU": CONTROL_CPUS}], *(bundles(args, model) for model in models)],
        args.cluster_wait_s,
    )
    tapped_layers = drafter.target_layer_ids if drafter is not None else ()
    shapes = args.shapes(args.max_num_seqs)
    row_bytes = len(tapped_layers) * target.hidden_size * DTYPES[args.dtype].itemsize
    verifier_spec = VerifierSpec(
        model=args.target.model,
        revision=args.target.revision,
        dtype=args.dtype,
        compile=args.compile,
        device=args.device,
        shapes=shapes,
        channel_bytes=channel_bytes(shapes.max_draft_rows, row_bytes)
        + args.max_num_seqs * (args.num_drafts + 1) * LOGPROBS_BYTES,
        tapped_layers=tapped_layers,
        plan_bytes=plan_bytes(shapes),
        **rank_options(args, args.target),
    )
    verifier = Verifier.options(
        max_ongoing_requests=args.max_num_seqs + args.max_queued_requests,
        graceful_shutdown_timeout_s=args.drain_timeout_s,
        **replica_options(args, args.target),
    ).bind(verifier_spec)
    router = Router.options(
        graceful_shutdown_timeout_s=args.drain_timeout_s,
        ray_actor_options=control_options(args),
    )
    if speculation is None:
        return router.bind(args, verifier_spec, verifier)
    draft_shapes = args.shapes(args.max_num_seqs * speculation.verifiers_per_drafter)
    drafter_spec = DrafterSpec(
        model=speculation.drafter,
        revision=speculation.revision,
        dtype=args.dtype,
        compile=args.compile,
        device=args.device,
        shapes=draft_shapes,
        channel_bytes=channel_bytes(draft_shapes.max_draft_rows, row_bytes),
        target=args.target.model,
        target_revision=args.target.revision,
        runner=NXD_RUNNER if args.parallel == "nxd" else speculation.runner,
        slots_per_verifier=args.max_num_seqs,
        **rank_options(args, speculation),
    )
    replicas = Drafter.options(**replica_options(args, speculation)).bind(drafter_spec)
    return router.bind(args, verifier_spec, verifier, drafter_spec, replicas)


def channel_bytes(rows: int, row_bytes: int) -> int:
    """Buffer that holds the features of that many rows and what goes with them."""
    return max(MIN_CHANNEL_BYTES, rows * row_bytes + MESSAGE_OVERHEAD_BYTES)


def plan_bytes(shapes: StaticShapes) -> int:
    """Buffer that holds any VerifyPlan: above all the tokens that penalties look at, the logit
    biases, and the stop ids that min_tokens keeps out, of every slot."""
    per_slot = 9 * shapes.max_model_len + 12 * MAX_LOGIT_BIAS + 16 * MAX_STOP_TOKEN_IDS
    return max(MIN_CHANNEL_BYTES, shapes.num_slots * per_slot + MESSAGE_OVERHEAD_BYTES)


def rank_options(args: AppArgs, model: WorkerArgs) -> dict:
    cores = model.core_map() if args.device == "neuron" else None
    return {
        "tensor_parallel_size": model.tensor_parallel_size,
        "num_threads": model.num_threads,
        "rank_cores": model.rank_cores(),
        "cpus_per_rank": model.cpus_per_rank,
        "resources_per_rank": rank_resources(args, model),
        "neuron": None
        if cores is None
        else NeuronSpec(cores, args.logical_nc_config, args.parallel),
    }


def rank_resources(args: AppArgs, model: WorkerArgs) -> dict[str, float]:
    """What a rank reserves besides CPUs: on Trainium a core, so that Ray knows what is left."""
    cores = {NEURON_CORES: 1.0} if args.device == "neuron" else {}
    return cores | model.resources_per_rank


def bundles(args: AppArgs, model: WorkerArgs) -> list[dict[str, float]]:
    """One for the replica, one per process: of each rank, or of all ranks with `parallel: nxd`."""
    rank = {"CPU": model.cpus_per_rank, **rank_resources(args, model)}
    ranks = model.tensor_parallel_size
    if args.parallel == "nxd":
        return [{"CPU": CONTROL_CPUS}, {name: ranks * amount for name, amount in rank.items()}]
    return [{"CPU": CONTROL_CPUS}, *[rank] * ranks]


def replica_options(args: AppArgs, model: WorkerArgs) -> dict:
    """All bundles of a replica are on one node."""
    return {
        "ray_actor_options": control_options(args),
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "placement_group_bundles": bundles(args, model),
        "placement_group_strategy": "STRICT_PACK",
    }


def control_options(args: AppArgs) -> dict:
    """Of the processes that compute nothing. On Trainium they must leave the device alone."""
    options: dict = {"num_cpus": CONTROL_CPUS}
    if args.device == "neuron":
        options["runtime_env"] = {"env_vars": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}}
    return options
