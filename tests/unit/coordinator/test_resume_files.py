"""The formats are pinned: what an earlier build has written is read, and is written the same."""

from pathlib import Path

import msgspec
import pytest

from beamline.coordinator.resume_files import DataCursorFile, DataIdentity, Ends, LedgerFile, encode_files, read_files
from beamline.protocol.errors import BlobError
from beamline.protocol.saving import CoordinatorFiles
from ring_messages import prompt

CURSOR = """{
  "format": "beamline-data-cursor/1",
  "position": 14,
  "rows": {
    "source": "data/train.parquet",
    "num_rows": 100,
    "rows_hash": "00112233445566778899aabbccddeeff",
    "seed": 7
  }
}
"""
LEDGER = """{
  "format": "beamline-ledger/1",
  "step": 3,
  "started": 1700000000.5,
  "ends": {
    "trained": 9,
    "filtered": 2,
    "stale": 1,
    "failed": 0
  },
  "open": [
    {
      "type": "PromptGroup/1",
      "group_id": "g-000012",
      "attempt": 1,
      "purpose": "train",
      "task": {
        "prompt_id": "p",
        "data_source": "sums",
        "grader": "math_dapo",
        "ground_truth": "4",
        "environment": ""
      },
      "prompt_tokens": [
        1,
        2,
        3
      ],
      "sampling": {
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 8,
        "stop": []
      },
      "seeds": [
        0,
        1
      ],
      "min_policy_version": 0,
      "deadline": 1000000000000.0,
      "keep_routes": false,
      "traceparent": ""
    }
  ],
  "evaluated": [
    0,
    2
  ]
}
"""


def test_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    rows = DataIdentity(source="data/train.parquet", num_rows=100, rows_hash="00112233445566778899aabbccddeeff", seed=7)
    cursor = DataCursorFile(position=14, rows=rows)
    ledger = LedgerFile(
        step=3,
        started=1_700_000_000.5,
        ends=Ends(trained=9, filtered=2, stale=1, failed=0),
        open=[prompt(12, attempt=1)],
        evaluated=[0, 2],
    )
    assert encode_files(cursor, ledger) == {"data_cursor.json": CURSOR.encode(), "ledger.json": LEDGER.encode()}
    (tmp_path / "data_cursor.json").write_text(CURSOR)
    (tmp_path / "ledger.json").write_text(LEDGER)
    found = read_files(tmp_path)
    assert (found.folder, found.cursor, found.ledger) == (tmp_path, cursor, ledger)


def test_a_group_cannot_be_open_twice() -> None:
    before, rest = LEDGER.split('"open": [\n')
    group, after = rest.split("\n  ],\n", maxsplit=1)
    text = f'{before}"open": [\n{group},\n{group}\n  ],\n{after}'
    with pytest.raises(msgspec.ValidationError, match="a group is open twice"):
        msgspec.json.decode(text, type=LedgerFile)


def test_the_blob_on_the_wire() -> None:
    files = CoordinatorFiles(files={"ledger.json": b"{}"})
    payload = b"\x82\xa4type\xb2CoordinatorFiles/1\xa5files\x81\xabledger.json\xc4\x02{}"
    assert files.encode() == payload
    assert CoordinatorFiles.decode(memoryview(payload)) == files
    for damaged in (b"", payload[:-1], payload.replace(b"Files/1", b"Files/2")):
        with pytest.raises(BlobError, match=r"bytes are not the coordinator's files of a checkpoint"):
            CoordinatorFiles.decode(damaged)
