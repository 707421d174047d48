"""Pulling models, from a local server that acts as the hub."""

from __future__ import annotations

import errno
import io
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeqwen.convert.download import RemoteFile, download
from edgeqwen.convert.hub import HubSettings, ModelId, choose_files, is_reachable, parse_id, pull
from edgeqwen.convert.sources import open_checkpoint
from edgeqwen.core.model import Source
from edgeqwen.errors import EXIT_CANNOT_WRITE, BadRequest, CannotWrite, ModelInvalid, ModelMissing
from tests.checkpoints import write_gguf_model, write_safetensors_model
from tests.hub_server import COMMIT, REPO, Hub, serve_hub

BIG = bytes(range(256)) * 8192  # 2 MiB


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("hub") / "model"
    write_safetensors_model(folder, num_shards=2)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(model_files: dict[str, bytes]) -> Iterator[Hub]:
    extra = {"pytorch_model.bin": b"\x80\x02pickle", "run.py": b"import os", "README.md": b"#", "onnx/model.onnx": b"x"}
    with serve_hub(model_files | extra) as server:
        yield server


def settings(hub: Hub, cache: Path, *, offline: bool = False) -> HubSettings:
    return HubSettings(hub.endpoint, hub.endpoint, cache, offline)


@pytest.mark.parametrize("prefix", ["", "modelscope:"])
def test_pull_fetches_what_an_import_reads_and_pins_the_commit(prefix: str, hub: Hub, tmp_path: Path) -> None:
    shares: list[float] = []
    pulled = pull(prefix + REPO, settings=settings(hub, tmp_path), progress=shares.append)

    assert pulled.source == Source("modelscope" if prefix else "hub", REPO, COMMIT)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert not any(path.name in ("pytorch_model.bin", "run.py", "README.md") for path in pulled.path.rglob("*"))
    assert not any("pytorch_model" in path or "run.py" in path for _, path, _ in hub.requests)
    checkpoint = open_checkpoint(pulled.path, pulled.source)
    assert checkpoint.source.revision == COMMIT
    checkpoint.close()


@pytest.mark.parametrize("prefix", ["", "modelscope:"])
def test_a_finished_pull_works_offline_without_a_request(prefix: str, hub: Hub, tmp_path: Path) -> None:
    first = pull(prefix + REPO, settings=settings(hub, tmp_path))
    hub.requests.clear()

    assert pull(prefix + REPO, settings=settings(hub, tmp_path, offline=True)) == first
    assert hub.requests == []


@pytest.mark.parametrize("prefix", ["", "modelscope:"])
def test_offline_without_a_pull_before_says_so(prefix: str, hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match=r"Org/Tiny is not in the cache.*HF_HUB_OFFLINE"):
        pull(prefix + REPO, settings=settings(hub, tmp_path, offline=True))
    assert hub.requests == []


@pytest.mark.parametrize("prefix", ["", "modelscope:"])
def test_an_unknown_model_is_named(prefix: str, hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match="Org/Other was not found at http"):
        pull(f"{prefix}Org/Other", settings=settings(hub, tmp_path))


@pytest.mark.parametrize("prefix", ["", "modelscope:"])
def test_an_unknown_revision_is_named(prefix: str, hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match="revision 'v9'"):
        pull(prefix + REPO, settings=settings(hub, tmp_path), revision="v9")


def test_a_gated_model_says_what_to_do(hub: Hub, tmp_path: Path) -> None:
    hub.is_gated = True
    with pytest.raises(ModelMissing, match=r"Org/Tiny is gated: accept its terms.*HF_TOKEN"):
        pull(REPO, settings=settings(hub, tmp_path))


@pytest.mark.parametrize("prefix", ["", "modelscope:"])
def test_a_hub_that_cannot_be_reached_is_named(prefix: str, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(ModelMissing, match=f"{endpoint} cannot be reached"):
        pull(prefix + REPO, settings=HubSettings(endpoint, endpoint, tmp_path))


def test_modelscope_resumes_where_the_connection_broke(hub: Hub, tmp_path: Path) -> None:
    hub.cuts["model-00001-of-00002.safetensors"] = [1000, 50]
    pulled = pull(f"modelscope:{REPO}", settings=settings(hub, tmp_path))

    ranges = hub.fetched("model-00001-of-00002.safetensors")
    assert ranges == ["bytes=0-", "bytes=1000-", "bytes=1050-"]
    open_checkpoint(pulled.path).close()


def test_a_second_pull_goes_on_where_the_first_gave_up(hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    hub.files["weights"] = BIG
    hub.cuts["weights"] = [1 << 20, 0, 0, 0, 0, 0]
    remote = RemoteFile(f"{hub.endpoint}/{REPO}/resolve/main/weights", len(BIG))
    waits: list[float] = []
    with pytest.raises(ModelMissing, match=r"cannot be fetched.*weights\.part"):
        download(remote, path, sleep=waits.append)
    assert waits == [1.0, 2.0, 4.0, 8.0]
    assert not path.exists()

    download(remote, path, sleep=waits.append)
    assert path.read_bytes() == BIG
    assert hub.fetched("weights")[-1] == f"bytes={1 << 20}-"


def test_a_server_without_ranges_starts_again(hub: Hub, tmp_path: Path) -> None:
    hub.files["weights"], hub.has_ranges = BIG, False
    hub.cuts["weights"] = [1000]
    download(RemoteFile(f"{hub.endpoint}/{REPO}/resolve/main/weights", len(BIG)), tmp_path / "weights")
    assert (tmp_path / "weights").read_bytes() == BIG


def test_a_file_that_is_not_what_was_announced_never_gets_its_name(hub: Hub, tmp_path: Path) -> None:
    hub.sha256["config.json"] = "0" * 64
    with pytest.raises(ModelInvalid, match=r"config\.json came with another sha256"):
        pull(f"modelscope:{REPO}", settings=settings(hub, tmp_path))
    assert not list(tmp_path.rglob("config.json*"))

    with pytest.raises(ModelInvalid, match="more than the 10 bytes"):
        download(RemoteFile(f"{hub.endpoint}/{REPO}/resolve/main/config.json", 10), tmp_path / "config.json")


def test_the_hub_library_resumes_within_a_pull(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 500)  # it keeps whole pieces only
    hub.cuts["model-00002-of-00002.safetensors"] = [1000]
    pulled = pull(REPO, settings=settings(hub, tmp_path))
    assert "bytes=1000-" in hub.fetched("model-00002-of-00002.safetensors")
    open_checkpoint(pulled.path).close()


@pytest.fixture
def one_mebibyte_files() -> Iterator[None]:
    """Files cannot grow beyond 1 MiB, as on a disk that is full then."""
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, old)


@pytest.mark.usefixtures("one_mebibyte_files")
@pytest.mark.parametrize("prefix", ["", "modelscope:"])
def test_a_full_disk_is_a_file_that_cannot_be_written(prefix: str, hub: Hub, tmp_path: Path) -> None:
    hub.files["model.safetensors"] = BIG
    with pytest.raises(CannotWrite, match=f"{tmp_path}.* cannot be written.*{os.strerror(errno.EFBIG)}") as error:
        pull(prefix + REPO, settings=settings(hub, tmp_path))
    assert error.value.exit_code == EXIT_CANNOT_WRITE
    assert not list(tmp_path.rglob("model.safetensors"))


@pytest.mark.parametrize("prefix", ["", "modelscope:"])
def test_a_cache_that_is_no_folder_cannot_be_written(prefix: str, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CannotWrite, match=r"cache.* cannot be written"):
        pull(prefix + REPO, settings=settings(hub, tmp_path / "cache"))


def test_a_gguf_file_is_pulled_by_name(tmp_path: Path) -> None:
    write_gguf_model(tmp_path / "a-Q8_0.gguf", stored_type="Q8_0")
    files = {"a-Q8_0.gguf": (tmp_path / "a-Q8_0.gguf").read_bytes(), "a-F32.gguf": b"GGUF"}
    with serve_hub(files) as hub:
        with pytest.raises(ModelMissing, match=r"a-F32.gguf, a-Q8_0.gguf; name one as Org/Tiny:FILE.gguf"):
            pull(REPO, settings=settings(hub, tmp_path / "cache"))
        with pytest.raises(ModelMissing, match=r"Org/Tiny has no file b.gguf"):
            pull(f"{REPO}:b.gguf", settings=settings(hub, tmp_path / "cache"))
        pulled = pull(f"{REPO}:a-Q8_0.gguf", settings=settings(hub, tmp_path / "cache"))
        again = pull(f"{REPO}:a-Q8_0.gguf", settings=settings(hub, tmp_path / "cache", offline=True))
    assert again == pulled
    assert pulled.source == Source("hub", f"{REPO}:a-Q8_0.gguf", COMMIT)
    open_checkpoint(pulled.path, pulled.source).close()


@pytest.mark.parametrize(
    "text",
    ["", "Tiny", "Org/", "a/b/c", "../etc", "Org/..", "-a/b", "Org/Tiny:../x.gguf", "Org/Tiny:x.bin", "a/b:", "a b/c"],
)
def test_a_malformed_id_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="is not a model's id") as error:
        parse_id(text)
    assert error.value.field == "id"


def test_ids_are_taken_apart() -> None:
    assert parse_id("Qwen/Qwen3-0.6B") == ModelId("hub", "Qwen/Qwen3-0.6B")
    assert parse_id("modelscope:Qwen/Qwen3-0.6B") == ModelId("modelscope", "Qwen/Qwen3-0.6B")
    assert parse_id("Qwen/Q:f-Q8_0.gguf") == ModelId("hub", "Qwen/Q", "f-Q8_0.gguf")


def test_a_whole_file_is_taken_before_its_shards() -> None:
    names = [
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "consolidated.safetensors",
        "config.json",
        "x.gguf",
    ]
    assert choose_files(ModelId("hub", REPO), names) == ["config.json", "model.safetensors"]


def test_settings_follow_the_environment(tmp_path: Path) -> None:
    environ = {"HF_ENDPOINT": "https://mirror.example/", "HF_HUB_OFFLINE": "1"}
    given = HubSettings.from_environment(environ, cache=tmp_path)
    assert (given.endpoint, given.offline, given.cache) == ("https://mirror.example", True, tmp_path)
    assert not HubSettings.from_environment({"HF_HUB_OFFLINE": "0"}).offline


def test_reachable_tells_an_answer_from_an_error_and_from_silence(hub: Hub) -> None:
    assert is_reachable(hub.endpoint)
    hub.status = 403
    assert not is_reachable(hub.endpoint)
    assert not is_reachable("not a url")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        before = threading.active_count()
        assert not is_reachable(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2)
        assert threading.active_count() <= before + 1


def test_an_answer_that_nests_without_end_is_no_listing(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: io.BytesIO(b'{"Data":' + b"[" * 100_000))
    with pytest.raises(ModelMissing, match=hub.endpoint):
        pull(f"modelscope:{REPO}", settings=settings(hub, tmp_path))
