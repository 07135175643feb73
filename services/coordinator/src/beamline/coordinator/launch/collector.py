"""Whether the collector of a run's spans is there: the user hears it at the start, once, and the run goes on."""

import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit

CONNECT_S = 2.0
_DEFAULT_PORTS = {"http": 80, "https": 443}


async def say_if_away(endpoint: str, say: Callable[[str], None]) -> None:
    """Try a connection to `telemetry.otlp_endpoint`, where there is one."""
    if endpoint and (why := await _why_away(endpoint)):
        say(
            f"no collector at {endpoint} ({why}): spans are kept in the run's folder alone until one answers; start "
            "it, or correct telemetry.otlp_endpoint"
        )


async def _why_away(endpoint: str) -> str:
    try:
        url = urlsplit(endpoint)
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(url.hostname, url.port or _DEFAULT_PORTS[url.scheme])
    except TimeoutError:
        return f"no connection within {CONNECT_S:g} s"
    except ConnectionRefusedError:
        return "nobody listens there"
    except (OSError, ValueError) as error:
        return str(error)
    writer.close()
    return ""
