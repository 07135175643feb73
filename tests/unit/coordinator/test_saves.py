"""What was asked of the trainer and what came of it, whatever comes twice or out of order."""

from beamline.coordinator.saves import Saves
from beamline.protocol.messages import CheckpointSaved, SaveRequest


def asked(step: int, *, checkpoint: bool = True, export: bool = False) -> SaveRequest:
    return SaveRequest(step=step, checkpoint=checkpoint, export=export)


def kept(step: int) -> CheckpointSaved:
    return CheckpointSaved(step=step, path=f"global_step_{step}", num_bytes=1, save_s=0.5)


def test_an_answer_ends_its_request_once() -> None:
    saves = Saves()
    saves.record_request(asked(2))
    assert saves.open_steps() == [2] and saves.copied_step == 0
    saves.record_copied(2)
    assert saves.record_saved(kept(2))
    assert not saves.record_saved(kept(2)) and saves.open_steps() == []
    assert saves.checkpoint == kept(2) and saves.export is None and saves.error(2) == ""


def test_an_answer_that_overtakes_the_copys_says_that_nothing_is_left_to_copy() -> None:
    saves = Saves()
    saves.record_request(asked(2))
    assert saves.record_saved(CheckpointSaved(step=2, error="no space left"))
    assert saves.copied_step == 2 and saves.error(2) == "no space left" and saves.checkpoint is None
    saves.record_copied(1)
    assert saves.copied_step == 2


def test_what_a_step_still_lacks_is_asked_once_more() -> None:
    saves = Saves()
    assert saves.missing(2, checkpoint=True, export=False) == (True, False)
    saves.record_request(asked(2))
    assert saves.missing(2, checkpoint=True, export=True) == (False, True)
    saves.record_saved(kept(2))
    saves.record_request(asked(2, checkpoint=False, export=True))
    assert not saves.record_saved(kept(2)), "the first answer, delivered again"
    exported = CheckpointSaved(step=2, export_path="exports/2", save_s=0.25)
    assert saves.record_saved(exported)
    assert (saves.checkpoint, saves.export) == (kept(2), exported)
    assert saves.missing(2, checkpoint=True, export=True) == (False, False)


def test_a_resumed_run_has_its_checkpoint_and_lacks_an_export() -> None:
    saves = Saves()
    saves.resume(6, "checkpoints/global_step_6")
    assert saves.checkpoint is not None and saves.checkpoint.path == "checkpoints/global_step_6"
    assert saves.missing(6, checkpoint=True, export=True) == (False, True)
    assert saves.missing(7, checkpoint=True, export=False) == (True, False)


def test_a_checkpoint_is_whole_though_its_export_has_failed() -> None:
    saves = Saves()
    saves.record_request(asked(2, export=True))
    half = CheckpointSaved(step=2, path="global_step_2", error="no space left for the export")
    assert saves.record_saved(half)
    assert (saves.checkpoint, saves.export) == (half, None)
    assert saves.error(2) == "no space left for the export"
