"""Who is let in: a browser with the token, pointed at this machine, and nobody else."""

import http.client
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dashboards import dashboard

PAGES = ("/", "/runs/demo", "/runs/demo/events", "/runs/demo/samples/1", "/assets/dashboard.js", "/nothing")


class Visitor:
    """Asks the server as itself, with whatever headers it likes."""

    def __init__(self, url: str) -> None:
        self.address = urlsplit(url)
        self.token = self.address.query.removeprefix("token=")

    def ask(self, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.address.netloc, timeout=10)
        connection.request(method, path, headers=headers)
        return connection.getresponse()

    def cookie(self) -> str:
        """As the page sets it."""
        given = self.ask(f"/?token={self.token}").headers["Set-Cookie"]
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in given.split(";")}
        return given.partition(";")[0]


@pytest.fixture
def visitor(url: str) -> Visitor:
    return Visitor(url)


@pytest.mark.parametrize("path", PAGES)
def test_without_the_token_nothing_is_answered(visitor: Visitor, path: str):
    for headers in ({}, {"Cookie": f"beamline-{visitor.address.port}=wrong"}, {"Cookie": f"beamline={visitor.token}"}):
        assert visitor.ask(path, **headers).status == 401
    assert visitor.ask(f"{path}?token={visitor.token[:-1]}").status == 401
    assert "Set-Cookie" not in visitor.ask(f"{path}?token=").headers


def test_the_urls_token_becomes_a_cookie(visitor: Visitor):
    answer = visitor.ask("/runs/demo", Cookie=visitor.cookie())
    assert answer.status == 200 and b"demo" in answer.read()
    assert len(visitor.token) >= 40
    odd = f"a[b]=c; =; {visitor.cookie()}; d"
    assert visitor.ask("/runs/demo", Cookie=odd).status == 200, "cookies of others do no harm"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example:1"]
)
def test_another_name_for_this_machine_is_refused(visitor: Visitor, host: str):
    for path in (f"/?token={visitor.token}", "/"):
        answer = visitor.ask(path, Host=host, Cookie=visitor.cookie())
        assert answer.status == 403 and "Set-Cookie" not in answer.headers


@pytest.mark.parametrize("host", ["localhost:9", "127.0.0.1", "[::1]:9"])
def test_a_tunnel_may_end_at_another_port(visitor: Visitor, host: str):
    assert visitor.ask("/", Host=host, Cookie=visitor.cookie()).status == 200


def test_pages_may_load_nothing_from_elsewhere(visitor: Visitor):
    for path in ("/", "/runs/demo", "/nothing"):
        headers = visitor.ask(path, Cookie=visitor.cookie()).headers
        policy = dict(rule.strip().split(" ", 1) for rule in headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
        assert "unsafe" not in str(policy) and "http" not in str(policy)
        assert headers["Referrer-Policy"] == "no-referrer" and headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    "path", ["/runs/..", "/runs/%2e%2e", "/runs/..%2fdemo", "/runs/%2e%2e/events", "/runs/demo/samples/-1",
             "/runs/demo/samples/99", "/assets/..%2frun.html.j2", "/assets/page.js", "/runs/"]
)  # fmt: skip
def test_only_what_belongs_to_a_run_is_there(visitor: Visitor, path: str):
    assert visitor.ask(path, Cookie=visitor.cookie()).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(visitor: Visitor, method: str):
    assert visitor.ask("/runs/demo", method, Cookie=visitor.cookie()).status == 405


def test_it_listens_on_this_machine_alone(url: str):
    port = f"{urlsplit(url).port:04X}"
    listening = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    assert [line[1] for line in listening if line[1].endswith(f":{port}") and line[3] == "0A"] == [f"0100007F:{port}"]


def test_without_a_run_the_newest_is_shown_and_all_are_listed(finished: Path):
    with dashboard("--runs", str(finished.parent)) as url:
        assert urlsplit(url).path == "/runs/demo"
        visitor = Visitor(url)
        page = visitor.ask("/", Cookie=visitor.cookie()).read().decode()
        assert 'href="/runs/demo"' in page and "finished" in page


def test_an_empty_folder_has_an_empty_list(tmp_path: Path):
    with dashboard("--runs", str(tmp_path)) as url:
        assert urlsplit(url).path == "/"
        assert "no run in this folder yet" in Visitor(url).ask(f"/?{urlsplit(url).query}").read().decode()
