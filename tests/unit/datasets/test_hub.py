"""Data sets from the hub: the real client against a hub of the test's own, and against none."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from beamline.coordinator.hub import Hub, choose_file, is_hub_name
from beamline.protocol.errors import ConfigError

COMMIT = "0" * 40
FILES = {
    "main/train-00000-of-00001.parquet": b"the training rows",
    "main/test-00000-of-00001.parquet": b"the test rows",
    "socratic/train-00000-of-00001.parquet": b"another variant",
    "README.md": b"read me",
}


class HubHandler(BaseHTTPRequestHandler):
    """As much of the hub's interface as the download of a small file needs; it has one data set, openai/gsm8k."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        _, _, file = self.path.partition(f"/datasets/openai/gsm8k/resolve/{COMMIT}/")
        _, _, newest = self.path.partition("/datasets/openai/gsm8k/resolve/main/")
        if self.path.startswith("/api/datasets/openai/gsm8k"):
            siblings = [{"rfilename": name} for name in FILES]
            self.answer(200, json.dumps({"id": "openai/gsm8k", "sha": COMMIT, "siblings": siblings}).encode())
        elif (content := FILES.get(file or newest)) is not None:
            self.answer(200, content)
        else:
            self.answer(404, b"{}", ("X-Error-Code", "RepoNotFound"))

    def answer(self, status: int, content: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (
            ("ETag", f'"{content.hex()[:16]}"'),
            ("X-Repo-Commit", COMMIT),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(content))),
            *headers,
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_split_of_a_variant_is_downloaded_and_kept(tmp_path: Path) -> None:
    with serve() as endpoint:
        hub = Hub(endpoint=endpoint, cache=tmp_path)
        assert hub.fetch("openai/gsm8k/main", "test").read_bytes() == b"the test rows"
        assert hub.fetch("openai/gsm8k/main", "train").read_bytes() == b"the training rows"
        assert hub.fetch("openai/gsm8k/socratic", "train").read_bytes() == b"another variant"
        with pytest.raises(ConfigError, match=r"has 3 data files \(main/train.*not one of split 'train'.*FOLDER"):
            hub.fetch("openai/gsm8k", "train")
        with pytest.raises(ConfigError, match=r"no public data set openai/gsm9k: check the name, or .*--from FILE"):
            hub.fetch("openai/gsm9k", "train")


def test_without_a_hub_the_error_comes_at_once_and_says_what_was_tried(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    begin = time.monotonic()
    with pytest.raises(ConfigError) as error:
        Hub(endpoint=f"http://127.0.0.1:{port}", cache=tmp_path).fetch("openai/gsm8k/main", "train")
    assert time.monotonic() - begin < 5
    for words in ("openai/gsm8k", f"http://127.0.0.1:{port}", "refused", "--from FILE"):
        assert words in str(error.value)


def test_a_hub_that_does_not_answer_is_given_up_by_the_deadline(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(ConfigError, match=r"cannot be fetched from .*timed out.*--from FILE"):
            Hub(endpoint=endpoint, cache=tmp_path, connect_deadline_s=0.5).fetch("openai/gsm8k/main", "train")
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("openai/gsm8k", True),
        ("openai/gsm8k/main", True),
        ("BytedTsinghua-SIA/DAPO-Math-17k", True),
        ("data/train.parquet", False),
        ("train.jsonl", False),
        ("gsm8k", False),
        ("/data/gsm8k", False),
    ],
)
def test_a_name_on_the_hub_is_told_from_a_file(text: str, is_name: bool) -> None:
    assert is_hub_name(text) is is_name


def test_one_data_file_is_chosen_whatever_it_is_called() -> None:
    assert choose_file("a/b", ["README.md", "data/all.parquet"], "train") == "data/all.parquet"
    with pytest.raises(ConfigError, match=r"a/b has 0 data files \(none\)"):
        choose_file("a/b", ["README.md"], "train")
