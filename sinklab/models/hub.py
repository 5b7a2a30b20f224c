"""Files of a model repository: the local cache first, the network only if allowed, and failure in one sentence."""

from __future__ import annotations

from pathlib import Path

from sinklab.errors import InputError, NotFoundError


def hub_file(repository: str, names: tuple[str, ...], *, offline: bool, optional: bool = False) -> Path | None:
    """The first of `names` that the repository has, as a local path.

    A cached copy is used without asking the network. None if the files are `optional` and there are none, or none
    can be had now.
    Raises NotFoundError if the repository or all files are absent or cannot be reached.
    """
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        found = _from_cache_or_network(repository, names, offline)
    except HFValidationError as error:
        raise InputError(f"{repository!r} is neither a local folder nor a repository name (owner/name).") from error
    except GatedRepoError as error:
        raise NotFoundError(
            f"{repository} is gated: accept its licence on its page and log in with `hf auth login`, then try again."
        ) from error
    except RepositoryNotFoundError as error:
        raise NotFoundError(f"There is no model repository {repository} (or it is private).") from error
    except OSError as error:
        raise NotFoundError(f"{repository} could not be fetched: {_reason(error)}.") from error
    if isinstance(found, Path):
        return found
    if optional:
        return None
    raise NotFoundError(found)


def _from_cache_or_network(repository: str, names: tuple[str, ...], offline: bool) -> Path | str:
    """The first file there is, or the sentence that says why there is none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for name in names:
        cached = _cached(repository, name)
        if cached is not None:
            return cached
    if offline or _env_offline():
        return (
            f"{repository} is not in the local model cache ({' or '.join(names)}), and offline mode forbids "
            "fetching it: load it once without --offline, or name a local file or folder."
        )
    unreachable = _unreachable()
    if unreachable:
        return (
            f"{repository} is not in the local model cache, and the model hub cannot be reached ({unreachable}): "
            "name a local file or folder, or try again with a connection."
        )
    for name in names:
        try:
            return Path(hf_hub_download(repository, name))
        except LocalEntryNotFoundError:  # a child of EntryNotFoundError, but it means: no connection
            raise
        except EntryNotFoundError:
            continue
    return f"The repository {repository} has none of the files {', '.join(names)}."


def revision_of(path: Path) -> str:
    """The commit under which a cached repository file was stored, or "" for any other file."""
    parts = path.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-1] else ""


def repository_of(path: Path) -> str:
    """owner/name of the repository that a cached file belongs to."""
    parts = path.parts
    return parts[parts.index("snapshots") - 1].removeprefix("models--").replace("--", "/")


def _cached(repository: str, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, name)
    return Path(found) if isinstance(found, str) else None


def _env_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _unreachable() -> str:
    """Why the hub cannot be reached, found within seconds instead of the client's half minute of retries; "" if it can.

    Behind a proxy only the client itself can tell, so nothing is checked there.
    """
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    if getproxies():
        return ""
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=5).close()
    except OSError as error:
        return _reason(error)
    return ""


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
