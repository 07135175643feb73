"""The grader `http` against a server on loopback that answers as the response's text tells it to."""

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from beamline.protocol.config import RunConfig
from beamline.protocol.reward_config import HttpSection, RewardSection
from beamline.reward.frames import Abstained
from beamline.reward.grader import Verdict
from beamline.reward.http_grader import EndpointError, make_grader


class Endpoint(BaseHTTPRequestHandler):
    """Right where response and ground truth are equal, unless the response asks for trouble."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[Counter[str]] = Counter()
    over = threading.Event()

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = question["response"]
        self.asked[text] += 1
        match text.split():
            case ["busy", status, num_tries] if self.asked[text] <= int(num_tries):
                self.answer(b"later", status=int(status))
            case ["status", status]:
                self.answer(b"{}", status=int(status))
            case ["silent"]:
                self.over.wait(30)
            case ["say", *said]:
                self.answer(" ".join(said).encode())
            case _:
                right = text == question["ground_truth"]
                self.answer(json.dumps({"reward": float(right), "pred": text, "why": "as is"}).encode())

    def answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def url():
    Endpoint.over.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield f"http://127.0.0.1:{server.server_port}/grade"
    Endpoint.over.set()
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.fixture
def settings(url):
    Endpoint.asked.clear()
    return HttpSection(url=url, timeout_s=0.3, retries=2, backoff_s=0.05, deadline_s=2.0)


def test_a_verdict_is_the_endpoints(settings):
    grade = make_grader(settings)
    assert grade("5", "5") == Verdict(reward=1.0, acc=1.0, pred="5", why="as is")
    assert grade("é\n", "5").acc == 0.0
    assert grade('say {"reward": -0.5, "acc": 0.25, "more": [1]}', "") == Verdict(reward=-0.5, acc=0.25)
    assert grade('say {"reward": 2}', "") == Verdict(reward=2.0, acc=1.0)


def test_a_busy_endpoint_is_asked_again_later(settings):
    grade, started = make_grader(settings), time.monotonic()
    assert grade("busy 503 2", "busy 503 2").acc == 1.0
    assert Endpoint.asked["busy 503 2"] == 3
    assert time.monotonic() - started >= 0.05 + 0.1
    assert grade("busy 429 1", "busy 429 1").acc == 1.0


@pytest.mark.parametrize(
    ("text", "num_tries", "why"),
    [
        ("busy 500 9", 3, "answered with status 500"),
        ("silent", 3, "gave no answer: ReadTimeout"),
        ("status 404", 1, "answered with status 404"),
        ("status 201", 1, "answered with status 201"),
        ("say hello", 1, "answered 'hello': JSON is malformed"),
        ("say {}", 1, "missing required field `reward`"),
        ('say {"reward": "1"}', 1, "Expected `float`, got `str`"),
        ('say {"reward": null}', 1, "Expected `float`, got `null`"),
        ('say {"reward": NaN}', 1, "malformed"),
        ('say {"reward": 1e999}', 1, "out of range"),
        ('say {"reward": 1, "acc": 3}', 1, "acc=3.0 must be in [0, 1]"),
    ],
)
def test_what_is_no_reward_is_an_error_that_says_what_it_is(settings, text, num_tries, why):
    with pytest.raises(EndpointError) as error:
        make_grader(settings)(text, "")
    assert f"{settings.url} " in str(error.value)
    assert why in str(error.value)
    assert Endpoint.asked[text] == num_tries


def test_all_tries_together_have_a_deadline(url):
    started = time.monotonic()
    with pytest.raises(EndpointError, match=r"gave no reward within 0\.5 s"):
        make_grader(HttpSection(url=url, timeout_s=0.3, retries=100, deadline_s=0.5))("silent", "")
    assert time.monotonic() - started < 1.5


def test_an_endpoint_that_is_not_there_is_an_error():
    with pytest.raises(EndpointError, match="gave no answer: ConnectError"):
        make_grader(HttpSection(url="http://127.0.0.1:9/", retries=0))("5", "5")


async def test_a_run_abstains_where_the_endpoint_does(start_pool, settings):
    pool = await start_pool("http", http=settings, workers=2, grade_timeout_s=5.0)
    right, lost, wrong = await pool.grade(["5", 'say {"reward": NaN}', "6"], "5")
    assert (right.acc, wrong.acc) == (1.0, 0.0)
    assert isinstance(lost, Abstained)
    assert lost.kind == "error"
    assert "malformed" in lost.why


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (RewardSection(grader="http"), "reward.http.url='': the grader http needs a URL"),
        (RewardSection(grader="http", http=HttpSection(url="localhost:80")), "reward.http.url='localhost:80'"),
        (RewardSection(grader="code", grade_timeout_s=5.0), "reward.code.wall_s=8 must be under"),
        (
            RewardSection(grader="http", http=HttpSection(url="http://[::1]/", deadline_s=10.0)),
            "reward.http.deadline_s=10 must be under reward.grade_timeout_s=10",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(reward, words):
    with pytest.raises(ValueError) as error:
        RunConfig(reward=reward)
    assert words in str(error.value)
