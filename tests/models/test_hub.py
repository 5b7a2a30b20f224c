"""Repository files without a network: the cache first, then one sentence, quickly."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import huggingface_hub.constants
import pytest

from sinklab.errors import InputError, NotFoundError
from sinklab.models.hub import hub_file, repository_of, revision_of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and an endpoint on this machine where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return tmp_path


def stored(cache: Path, repository: str, name: str, commit: str = "0" * 40) -> Path:
    """A file as the hub's client keeps it."""
    home = cache / f"models--{repository.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    path = home / "snapshots" / commit / name
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    return path


def test_a_cached_file_is_used_without_asking_the_network(cache: Path) -> None:
    path = stored(cache, "someone/model", "config.json")
    for offline in (True, False):
        assert hub_file("someone/model", ("absent.json", "config.json"), offline=offline) == path
    assert revision_of(path) == "0" * 40
    assert repository_of(path) == "someone/model"


def test_offline_a_repository_that_is_not_cached_gets_one_sentence(cache: Path) -> None:
    with pytest.raises(NotFoundError, match="not in the local model cache.*offline"):
        hub_file("someone/model", ("config.json",), offline=True)
    assert hub_file("someone/model", ("config.json",), offline=True, optional=True) is None


def test_an_unreachable_hub_gets_one_sentence_within_seconds(cache: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(NotFoundError, match="cannot be reached"):
        hub_file("someone/model", ("config.json",), offline=False)
    assert hub_file("someone/model", ("config.json",), offline=False, optional=True) is None
    assert time.monotonic() - begun < 12


def test_what_is_no_repository_name_gets_a_sentence(cache: Path) -> None:
    with pytest.raises(InputError, match="neither a local folder nor a repository name"):
        hub_file("a/b/c", ("config.json",), offline=True)


def test_a_local_path_has_no_revision(tmp_path: Path) -> None:
    assert revision_of(tmp_path / "model.safetensors") == ""
