"""Download of a checkpoint from the Hugging Face hub, with errors that say what to do.

Only data files are fetched (JSON, safetensors, tokenizer files), never code or pickles.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors

from dflash_core.errors import CheckpointError

ALLOWED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
IGNORED = ("original/*", "consolidated*")  # second copies of the weights in some repositories


def download(model: str, revision: str | None = None) -> Path:
    """The local snapshot folder of a hub id, fetched as far as the hub's cache lacks it.

    Credentials come from HF_TOKEN or `hf auth login`. Raises CheckpointError.
    """
    with _advice(model, revision):
        return Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                allow_patterns=list(ALLOWED),
                ignore_patterns=list(IGNORED),
            )
        )


def check_access(model: str, revision: str | None = None) -> None:
    """Fetch a hub id's config.json and nothing else: whoever may read it may read the weights.

    Raises CheckpointError.
    """
    with _advice(model, revision):
        huggingface_hub.hf_hub_download(model, "config.json", revision=revision)


@contextmanager
def _advice(model: str, revision: str | None) -> Iterator[None]:
    """Turns what the hub client raises into a CheckpointError that says what to do."""
    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(_gated(model)) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{model}: the hub has no revision {revision!r} of it; check the branch, tag or commit"
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise CheckpointError(f"{model}: has no config.json, so this is no checkpoint") from error
    except errors.IncompleteSnapshotError as error:
        raise CheckpointError(
            f"{model}: the download was interrupted earlier and the hub cannot be reached now to "
            "complete it; try again with a network connection"
        ) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError) as error:
        raise CheckpointError(_unavailable(model, error)) from error
    except (errors.HFValidationError, OSError) as error:
        raise CheckpointError(f"{model}: cannot be downloaded: {error}") from error


def _unavailable(model: str, error: BaseException) -> str:
    """Why a model cannot be had; the cause may lie under the hub client's 'not cached' error."""
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else error
    if isinstance(cause, errors.OfflineModeIsEnabled) or huggingface_hub.constants.HF_HUB_OFFLINE:
        return (
            f"{model}: not in the local cache, and HF_HUB_OFFLINE forbids downloads; unset it, or "
            "copy the model to a folder and name that"
        )
    status = cause.response.status_code if isinstance(cause, errors.HfHubHTTPError) else None
    match status:
        case 401:
            return (
                f"{model}: the hub answered 401: no such model, or it is private or gated; check "
                "the spelling (owner/name) and set HF_TOKEN (or run `hf auth login`)"
            )
        case 403:
            return _gated(model)
        case 404:
            return (
                f"{model}: the hub answered 404: there is no such model; check the spelling "
                "(owner/name), or name a local folder"
            )
        case None:
            return (
                f"{model}: not in the local cache, and the hub cannot be reached "
                f"({type(cause or error).__name__}); check the network, or copy the model to a "
                "folder and name that"
            )
    return f"{model}: the hub answered {status}; try again later"


def _gated(model: str) -> str:
    return (
        f"{model}: access refused: the model is gated, or the token lacks the right to read it; "
        "accept its licence on its hub page and set HF_TOKEN to a token of that account with read "
        "access"
    )
