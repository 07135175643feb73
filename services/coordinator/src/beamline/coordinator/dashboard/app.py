"""The pages and what they ask for: a list of runs, a run, its events, the completions of one of its steps."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import cache
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from beamline.coordinator.dashboard.access import Access
from beamline.coordinator.dashboard.runs import is_run, list_runs
from beamline.coordinator.dashboard.watch import Watch
from beamline.coordinator.report import page as report
from beamline.coordinator.report.chart_library import chart_library
from beamline.coordinator.samples import read_samples, samples_path
from beamline.protocol.errors import ConfigError

ASSETS = Path(__file__).parent / "assets"
TYPES = {".js": "text/javascript", ".css": "text/css"}
SECTIONS = (("learning", "Does it learn?"), ("soundness", "Is it sound?"), ("time", "Where does the time go?"))


def make_app(runs: Path, token: str, port: int, closing: asyncio.Event) -> Starlette:
    """The dashboard of a folder of runs.

    Args:
        token: without it nothing is answered.
        closing: set when the server ends; streams end with it.
    """
    pages = _Pages(runs, closing)
    return Starlette(
        routes=[
            Route("/", pages.runs),
            Route("/assets/{name}", pages.asset),
            Route("/runs/{run}", pages.run),
            Route("/runs/{run}/events", pages.events),
            Route("/runs/{run}/samples/{step:int}", pages.samples),
        ],
        middleware=[Middleware(Access, token=token, port=port)],
    )


class _Pages:
    def __init__(self, runs: Path, closing: asyncio.Event) -> None:
        self._runs = runs
        self._closing = closing
        self._watches: dict[str, Watch] = {}
        self._templates = report.environment(ASSETS)

    async def runs(self, request: Request) -> Response:
        found = list_runs(self._runs)
        return HTMLResponse(self._templates.get_template("runs.html.j2").render(runs=found, asset=_address))

    async def run(self, request: Request) -> Response:
        run_dir = self._folder(request)
        page = self._templates.get_template("run.html.j2")
        return HTMLResponse(page.render(run=run_dir.name, sections=SECTIONS, asset=_address))

    async def events(self, request: Request) -> Response:
        run_dir = self._folder(request)
        watch = self._watches.setdefault(run_dir.name, Watch(run_dir))
        return StreamingResponse(self._stream(watch), media_type="text/event-stream")

    async def samples(self, request: Request) -> Response:
        path = samples_path(self._folder(request) / "samples", request.path_params["step"])
        try:
            groups = await asyncio.to_thread(read_samples, path)
        except FileNotFoundError:
            raise HTTPException(404, f"{path.name} is missing") from None
        except ConfigError as error:
            raise HTTPException(422, str(error)) from error
        return Response(msgspec.json.encode(groups), media_type="application/json")

    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _ASSETS:
            raise HTTPException(404)
        content = await asyncio.to_thread(_content, name)
        lasting = {"Cache-Control": "private, max-age=31536000, immutable"}
        return Response(content, media_type=TYPES[Path(name).suffix], headers=lasting)

    async def _stream(self, watch: Watch) -> AsyncIterator[bytes]:
        closing = asyncio.ensure_future(self._closing.wait())
        async with aclosing(watch.changes()) as changes:
            coming = asyncio.ensure_future(anext(changes))
            try:
                while True:
                    await asyncio.wait({coming, closing}, return_when=asyncio.FIRST_COMPLETED)
                    if closing.done():
                        return
                    yield b"data: " + msgspec.json.encode(coming.result()) + b"\n\n"
                    coming = asyncio.ensure_future(anext(changes))
            finally:
                closing.cancel()
                coming.cancel()
                await asyncio.gather(closing, coming, return_exceptions=True)

    def _folder(self, request: Request) -> Path:
        """A folder right under the runs, never one that a path leads to."""
        name = request.path_params["run"]
        run_dir = self._runs / name
        if name in (".", "..") or not is_run(run_dir):
            raise HTTPException(404, f"no run is called {name!r}")
        return run_dir


_ASSETS: dict[str, Callable[[], str]] = {
    "vega.js": chart_library,
    "draw.js": (report.ASSETS / "draw.js").read_text,
    "page.css": (report.ASSETS / "page.css").read_text,
    **{name: (ASSETS / name).read_text for name in ("theme.js", "dashboard.js", "dashboard.css")},
}


@cache
def _content(name: str) -> bytes:
    return _ASSETS[name]().encode()


def _address(name: str) -> str:
    """An asset's path, another one whenever its content is: a browser may keep it for good."""
    version = "vega" if name == "vega.js" else hashlib.sha256(_content(name)).hexdigest()[:12]
    return f"/assets/{name}?{version}"
