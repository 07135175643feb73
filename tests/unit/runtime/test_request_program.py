"""Programs that take a request: what they are asked reaches the work, what is wrong is said in one line."""

from pathlib import Path

import pytest

from beamline.protocol.doctor import ReadRequest
from beamline.protocol.errors import ConfigError
from beamline.runtime.request_program import REFUSED, serve, write_request

REQUEST = ReadRequest(model="model", dtype="float32", replay=True, max_tokens=64)


def test_the_work_is_done_in_the_folder(tmp_path: Path):
    done: list[tuple[ReadRequest, Path]] = []
    write_request(tmp_path / "request.json", REQUEST)
    code = serve(ReadRequest, lambda *given: done.append(given), [str(tmp_path / "request.json"), str(tmp_path)])
    assert (code, done) == (0, [(REQUEST, tmp_path)])


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), (b"{}", "missing required field `model`"), (b"\xff", "is no ReadRequest")],
)
def test_a_request_that_is_none(content: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "request.json"
    if content is not None:
        path.write_bytes(content)
    assert serve(ReadRequest, lambda *_: None, [str(path), str(tmp_path)]) == REFUSED
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path} is no ReadRequest") and words in error and error.count("\n") == 1


def test_what_the_work_refuses_is_said_in_a_line_and_what_breaks_it_is_raised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def refuse(_request: ReadRequest, _folder: Path) -> None:
        raise ConfigError("raise max_tokens")

    def break_down(_request: ReadRequest, _folder: Path) -> None:
        raise ZeroDivisionError

    path = tmp_path / "request.json"
    write_request(path, REQUEST)
    assert serve(ReadRequest, refuse, [str(path), str(tmp_path)]) == REFUSED
    assert capsys.readouterr().err == "error: raise max_tokens\n"
    with pytest.raises(ZeroDivisionError):
        serve(ReadRequest, break_down, [str(path), str(tmp_path)])
