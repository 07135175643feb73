"""Who may see the pages: whoever has the token, from a browser that was pointed at this machine by its own name.

The token comes once, in the URL that the command prints; the page that it opens sets a cookie that no script and no
other site can read or send.
"""

import secrets
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
"""Another name in the Host header is a site that had its own name lead here."""
TOKEN_BYTES = 32
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


class Access:
    """ASGI middleware: refuses what it must, and sets the headers that keep a page to itself.

    Args:
        token: what the URL or the cookie must have.
        port: in the cookie's name, since the cookies of a host are shared by all its ports.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._cookie = f"beamline-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        in_url = self._is_token(parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0])

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                to_set = MutableHeaders(scope=message)
                to_set.update(HEADERS)
                to_set.setdefault("Cache-Control", "no-store")
                if in_url:
                    cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
                    to_set.append("Set-Cookie", cookie)
            await send(message)

        answer = self._app
        if headers.get("host", "").rpartition(":")[0] not in LOCAL_NAMES and headers.get("host") not in LOCAL_NAMES:
            in_url = False
            answer = PlainTextResponse("Open this page by the URL that `beamline dashboard` printed.\n", 403)
        elif not in_url and not self._is_token(self._token_of(headers)):
            text = "This page needs its token: open the URL that `beamline dashboard` printed.\n"
            answer = PlainTextResponse(text, 401)
        await answer(scope, receive, send_with_headers)

    def _token_of(self, headers: Headers) -> str:
        return cookie_parser(headers.get("cookie", "")).get(self._cookie, "")

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())
