"""Questions in JSON lines: what is read, and what is refused with file and line."""

import json

import pytest

from fairseq_rpe.core import UserError
from fairseq_rpe.questions.question import Question, read

GOOD = {"id": "a", "prompt": "Who mended the wheel?\n\n", "document": "Tamsin did.", "answers": ["Tamsin", "she"]}


def written(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_reading(tmp_path):
    more = {**GOOD, "id": "b", "cue": "\n\nAnswer:", "group": "g", "choices": ["she", "Tamsin"], "distance": 3}
    one, other = read(written(tmp_path / "q.jsonl", GOOD, "", more))
    assert one == Question("a", "Who mended the wheel?\n\n", ("Tamsin", "she"), "Tamsin did.")
    assert (other.cue, other.group, other.choices, other.distance) == ("\n\nAnswer:", "g", ("she", "Tamsin"), 3)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("[1]", "q.jsonl line 2 is not a JSON object"),
        ({"id": "b", "prompt": "x"}, "line 2: the question lacks answers"),
        ({**GOOD, "id": "b", "anwsers": []}, "line 2: the question has an unknown key 'anwsers' (did you mean 'ans"),
        ({**GOOD, "id": 7}, "line 2: id of the question must be"),
        (GOOD, "line 2: id 'a' is that of line 1"),
        ({**GOOD, "id": "b", "prompt": " ", "document": ""}, "line 2: question 'b' has an empty prompt"),
        ({**GOOD, "id": "b", "answers": []}, "line 2: question 'b' has no answer"),
        ({**GOOD, "id": "b", "answers": ["x", " "]}, "line 2: question 'b' has an empty answer"),
        ({**GOOD, "id": "b", "distance": -1}, "line 2: distance of the question must be a whole number from 0 on"),
        ({**GOOD, "id": "b", "choices": ["no"]}, "line 2: answer 'Tamsin' of 'b' is none of its choices"),
    ],
)
def test_refusals(tmp_path, row, words):
    with pytest.raises(UserError) as caught:
        list(read(written(tmp_path / "q.jsonl", GOOD, row)))
    assert words in str(caught.value) and "\n" not in str(caught.value)
