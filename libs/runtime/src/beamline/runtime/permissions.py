"""What each service may publish and subscribe to, as the broker enforces it: nothing that it does not need.

JetStream is spoken to over subjects too, so a permission names the API call: `CONSUMER.MSG.NEXT` pulls from a work
queue, `$JS.ACK` acknowledges, `CONSUMER.CREATE` opens an ordered reader, `STREAM.MSG.GET` reads the last value.
"""

import msgspec

from beamline.protocol.errors import ConfigError
from beamline.protocol.subjects import Subjects
from beamline.runtime.credentials import SERVICES, Credentials

_API = "$JS.API"


class Permissions(msgspec.Struct, frozen=True, kw_only=True):
    """Subjects of one user."""

    publish: list[str]
    subscribe: list[str]


def permissions(subjects: Subjects, service: str, *, blobs: bool = False) -> Permissions:
    """The permissions of a service's user; `blobs` adds the blob stream.

    Raises:
        ConfigError: no such service.
    """
    root, work = subjects.root, f"{subjects.root}.work"
    inbox = f"{Credentials(url='', user=service).inbox_prefix}.>"
    worker = [subjects.heartbeat(), subjects.metrics(service), subjects.error(), f"{work}.coordinator"]
    reader = _read(subjects.stream("last"))
    match service:
        case "coordinator":
            publish = [
                *worker, *reader, f"{work}.rollout.>", f"{work}.trainer", subjects.fence, subjects.phase,
                subjects.evaluation,
                subjects.journal, *_read(subjects.stream("journal")), *_pull(subjects, service),
                *_manage(subjects, blobs=blobs),
            ]  # fmt: skip
            return Permissions(
                publish=publish + _blobs(subjects, blobs, owner=True),
                subscribe=[inbox, subjects.control, subjects.heartbeat(), subjects.metrics(), subjects.error()],
            )
        case "rollout":
            publish = [*worker, *reader, f"{work}.reward", *_pull(subjects, service)]
            return Permissions(publish=publish + _blobs(subjects, blobs), subscribe=[inbox])
        case "reward":
            publish = [*worker, *reader, *_pull(subjects, service)]
            return Permissions(publish=publish + _blobs(subjects, blobs), subscribe=[inbox])
        case "trainer":
            publish = [*worker, *reader, subjects.policy, *_pull(subjects, service)]
            return Permissions(publish=publish + _blobs(subjects, blobs, owner=True), subscribe=[inbox])
        case "cli":
            watched = [subjects.heartbeat(), subjects.metrics(), subjects.error(), subjects.evaluation]
            publish = [subjects.control, subjects.error(), *reader]
            return Permissions(publish=publish, subscribe=[inbox, *watched])
        case _:
            raise ConfigError(f"no service {service!r} on {root}: it is one of {', '.join(SERVICES)}")


def _pull(subjects: Subjects, service: str) -> list[str]:
    stream = subjects.stream("work")
    return [f"{_API}.CONSUMER.MSG.NEXT.{stream}.{service}", f"$JS.ACK.{stream}.{service}.>"]


def _read(stream: str) -> list[str]:
    return [
        f"{_API}.CONSUMER.CREATE.{stream}.>",
        f"{_API}.CONSUMER.MSG.NEXT.{stream}.*",
        f"{_API}.STREAM.MSG.GET.{stream}",
    ]


def _manage(subjects: Subjects, *, blobs: bool) -> list[str]:
    streams = [subjects.stream(name) for name in ("work", "last", "journal", *(("blob",) if blobs else ()))]
    calls = [f"{_API}.STREAM.{verb}.{stream}" for stream in streams for verb in ("CREATE", "UPDATE", "INFO")]
    work = subjects.stream("work")
    return [*calls, f"{_API}.CONSUMER.CREATE.{work}.>", f"{_API}.CONSUMER.INFO.{work}.*"]


def _blobs(subjects: Subjects, used: bool, *, owner: bool = False) -> list[str]:
    if not used:
        return []
    stream = subjects.stream("blob")
    purge = [f"{_API}.STREAM.PURGE.{stream}"] if owner else []
    return [f"{subjects.root}.blob.>", *_read(stream), *purge]
