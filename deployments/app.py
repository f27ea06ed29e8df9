"""Builds the application of a `serve run` YAML file: `import_path: deployments.app:build`."""

# No `from __future__ import annotations`: Serve looks at the class that annotates `args`.

from ray.serve import Application

from deployments.api.openai_protocol import MAX_STOP_TOKEN_IDS
from deployments.app_args import AppArgs, WorkerArgs
from deployments.drafter import Drafter
from deployments.router import Router
from deployments.specs import DrafterSpec, VerifierSpec
from deployments.verifier import Verifier
from dflash_core.checkpoint import (
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
HEALTH_CHECK_PERIOD_S = 2.0  # what Serve lets pass before it replaces a replica without workers


def build(args: AppArgs) -> Application:
    """Router, Verifier and (with speculation) Drafter, wired together.

    Checkpoints are resolved and the pair is validated here, so that a mistake in the file is
    reported before any model is loaded.

    Raises:
        CheckpointError, ConfigError, PairingError: naming the field, the values and the remedy.
    """
    folder = resolve(args.target.model, revision=args.target.revision)
    target = load_target_config(folder)
    load_sampling_defaults(folder)  # the Router's; a mistake in them shows here
    speculation = args.speculation
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
    tapped_layers = drafter.target_layer_ids if drafter is not None else ()
    shapes = args.shapes(args.max_num_seqs)
    row_bytes = len(tapped_layers) * target.hidden_size * DTYPES[args.dtype].itemsize
    verifier_spec = VerifierSpec(
        model=args.target.model,
        revision=args.target.revision,
        dtype=args.dtype,
        device=args.device,
        shapes=shapes,
        channel_bytes=channel_bytes(shapes.max_draft_rows, row_bytes)
        + args.max_num_seqs * (args.num_drafts + 1) * LOGPROBS_BYTES,
        tapped_layers=tapped_layers,
        plan_bytes=plan_bytes(shapes),
        **rank_options(args.target),
    )
    verifier = Verifier.options(
        max_ongoing_requests=args.max_num_seqs + args.max_queued_requests,
        graceful_shutdown_timeout_s=args.drain_timeout_s,
        **replica_options(args.target),
    ).bind(verifier_spec)
    router = Router.options(
        graceful_shutdown_timeout_s=args.drain_timeout_s,
        ray_actor_options={"num_cpus": CONTROL_CPUS},
    )
    if speculation is None:
        return router.bind(args, verifier_spec, verifier)
    draft_shapes = args.shapes(args.max_num_seqs * speculation.verifiers_per_drafter)
    drafter_spec = DrafterSpec(
        model=speculation.drafter,
        revision=speculation.revision,
        dtype=args.dtype,
        device=args.device,
        shapes=draft_shapes,
        channel_bytes=channel_bytes(draft_shapes.max_draft_rows, row_bytes),
        target=args.target.model,
        target_revision=args.target.revision,
        runner=speculation.runner,
        slots_per_verifier=args.max_num_seqs,
        **rank_options(speculation),
    )
    replicas = Drafter.options(**replica_options(speculation)).bind(drafter_spec)
    return router.bind(args, verifier_spec, verifier, drafter_spec, replicas)


def channel_bytes(rows: int, row_bytes: int) -> int:
    """Buffer that holds the features of that many rows and what goes with them."""
    return max(MIN_CHANNEL_BYTES, rows * row_bytes + MESSAGE_OVERHEAD_BYTES)


def plan_bytes(shapes: StaticShapes) -> int:
    """Buffer that holds any VerifyPlan: above all the tokens that penalties look at, the logit
    biases, and the stop ids that min_tokens keeps out, of every slot."""
    per_slot = 9 * shapes.max_model_len + 12 * MAX_LOGIT_BIAS + 16 * MAX_STOP_TOKEN_IDS
    return max(MIN_CHANNEL_BYTES, shapes.num_slots * per_slot + MESSAGE_OVERHEAD_BYTES)


def rank_options(args: WorkerArgs) -> dict:
    return {
        "tensor_parallel_size": args.tensor_parallel_size,
        "num_threads": args.num_threads,
        "cpus_per_rank": args.cpus_per_rank,
        "resources_per_rank": args.resources_per_rank,
    }


def replica_options(args: WorkerArgs) -> dict:
    """One bundle for the replica, one per rank, all on one node."""
    rank = {"CPU": args.cpus_per_rank, **args.resources_per_rank}
    return {
        "ray_actor_options": {"num_cpus": CONTROL_CPUS},
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "placement_group_bundles": [
            {"CPU": CONTROL_CPUS},
            *[rank] * args.tensor_parallel_size,
        ],
        "placement_group_strategy": "STRICT_PACK",
    }
