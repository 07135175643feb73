"""One examination, top to bottom: samples, readings, diagnosis, files."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from beamline.coordinator.doctor.attribution import Evidence
from beamline.coordinator.doctor.case import Case, Options
from beamline.coordinator.doctor.diagnose import diagnose
from beamline.coordinator.doctor.diagnosis import Diagnosis
from beamline.coordinator.doctor.engine_tokens import EngineTokens, read_engine_tokens
from beamline.coordinator.doctor.page import render
from beamline.coordinator.doctor.sides import Sides
from beamline.coordinator.summary import write_atomically
from beamline.models.chat import ChatTokenizer
from beamline.protocol.doctor import INDEX, KeptSamples, Recomputed, Routing, reading_name
from beamline.protocol.errors import BlobError, ConfigError
from beamline.runtime.sample_files import read_index


def examine(case: Case, options: Options, sides: Sides, tell: Callable[[str], None]) -> tuple[Diagnosis, Path]:
    """Find out why the two sides differ; returns the diagnosis and the page's path.

    Args:
        tell: shows what is being waited for.

    Raises:
        ConfigError: what the user has to mend.
        BlobError: samples that are damaged.
        BeamlineError: a side that broke.
    """
    if case.sample or not (case.folder / INDEX).is_file():
        tell("an engine samples a few trajectories")
        sides.sample(case, options)
    samples = read_index(case.folder)
    engine = read_engine_tokens(case.folder, samples, _decode(case))
    tell(f"the trainer recomputes {len(engine.logprobs_L)} log-probabilities")
    recomputed = sides.recompute(case)
    evidence = evidence_of(case, samples, engine, recomputed)
    diagnosis = diagnose(case.name, evidence, samples, recomputed)
    write_atomically(
        case.folder / "mismatch.json", msgspec.json.format(msgspec.json.encode(diagnosis), indent=2) + b"\n"
    )
    page = case.folder / "mismatch.html"
    write_atomically(page, render(diagnosis, engine.logprobs_L, evidence.readings[evidence.own]).encode())
    return diagnosis, page


def evidence_of(case: Case, samples: KeptSamples, engine: EngineTokens, recomputed: Recomputed) -> Evidence:
    """Samples and readings side by side. Raises BlobError where their numbers of tokens differ."""
    readings = {name: np.frombuffer(column, "<f4").astype(np.float64) for name, column in recomputed.readings.items()}
    for name, column in readings.items():
        if len(column) != len(engine.logprobs_L):
            raise BlobError(
                f"reading {name!r} has {len(column)} log-probabilities, the samples {len(engine.logprobs_L)}: "
                f"something else writes into {case.folder}"
            )
    dtype = case.config.model.dtype
    replays = case.config.algorithm.routing_replay and reading_name(dtype, "replay") in readings
    routing: Routing = "replay" if replays else "live"
    version = recomputed.policy_version if recomputed.policy_version >= 0 else case.policy_version
    return Evidence(
        engine=engine,
        readings=readings,
        dtype=dtype,
        routing=routing,
        temperature=samples.temperature,
        softcap=recomputed.softcap,
        policy_version=version,
        num_weights=recomputed.num_weights,
        differing_weights=recomputed.differing_weights,
        comparable_weights=samples.policy_version == version,
    )


def _decode(case: Case) -> Callable[..., str]:
    """As the engine turned tokens into text."""
    try:
        tokenizer = ChatTokenizer.load(case.engine_model)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return tokenizer.decode
