"""What a sweep and a look at its encodings put on record, damaged: one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fairseq_rpe.analysis import bias_snapshots
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.renamed import LAST_COMMIT_OF_OLD_LAYOUT
from fairseq_rpe.runs.run_folder import CheckpointFolder
from fairseq_rpe.sweeps.sweep_record import SweepFolder

STATE = {"layout": 2, "settings": {}, "encodings": ["alibi"], "seeds": [1], "lengths": [64]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"settings": [1]}, "settings of the sweep is not a table"),
        ({"encodings": "alibi"}, "encodings of the sweep must be a list, not 'alibi'"),
        ({"encodings": [1]}, "encodings of the sweep must be text, not 1"),
        ({"seeds": [-1]}, "seeds of the sweep must be a whole number from 0 on, not -1"),
        ({"lengths": [0]}, "lengths of the sweep must be a whole number above 0, not 0"),
        ({"methods": [1]}, "methods of the sweep must be a table, not [1]"),
        ({"methods": {"a": "rope"}}, "a of methods of the sweep is not a table"),
        ({"methods": {"a": {}}}, "a of methods of the sweep lacks rpe"),
        ({"published": [1]}, "published is not a table"),
        ({"published": {"source": "x", "a": {"64": "many"}}}, "must be a whole number, not 'many'"),
        ({"commands": {"a": {"training": "x"}}}, "must be a list, not 'x'"),
        ({"algorithms": 3}, "algorithms of the sweep must be a list, not 3"),
    ],
)
def test_a_damaged_record_of_a_sweep(change: dict, words: str, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(STATE))
    assert SweepFolder(tmp_path).read_record().lengths == (64,)
    path.write_text(json.dumps({**STATE, **change}))
    with pytest.raises(UserError) as caught:
        SweepFolder(tmp_path).read_record()
    said = str(caught.value)
    assert said.startswith(f"{path}: ") and words in said and said.endswith("restore it or delete it")


@pytest.mark.parametrize("layout", [None, 1, 3, "2"])
def test_a_record_of_another_layout_is_refused(layout: object, tmp_path: Path) -> None:
    """An earlier one names the commit that reads it."""
    record = {"settings": {}, "encodings": [], "seeds": []} | ({} if layout is None else {"layout": layout})
    for folder in (SweepFolder(tmp_path), CheckpointFolder(tmp_path)):
        folder.record_path.write_text(json.dumps(record))
        with pytest.raises(UserError) as caught:
            folder.read_record()
        words = LAST_COMMIT_OF_OLD_LAYOUT if layout is None else "update fairseq-rpe"
        assert str(caught.value).startswith(str(folder.record_path)) and words in str(caught.value)


@pytest.mark.parametrize("change", [{"step": "x"}, {"distances": 3}, {"bias": []}, {"bias": {"model": [["x"]]}}])
def test_a_damaged_look(change: dict, tmp_path: Path) -> None:
    path, look = tmp_path / bias_snapshots.FILE, {"step": 3, "distances": [0, 1], "bias": {"model": [[0, -1.5]]}}
    path.write_text(json.dumps(look) + '\n{"step": 5, "distances": [0], "bias": {"model": [[-Infinity]]}}\n')
    assert [one["step"] for one in bias_snapshots.read_history(tmp_path)] == [3, 5]
    path.write_text(json.dumps(look) + "\n" + json.dumps({**look, **change}) + "\n")
    with pytest.raises(UserError, match=r"profiles.jsonl line 2: .* of the snapshot must be .*: delete that line"):
        bias_snapshots.read_history(tmp_path)
