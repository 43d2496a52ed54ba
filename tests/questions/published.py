"""Small known sets, made by hand, in the files and formats that their authors ship and that the hub has.

``write(name, folder)`` writes one as its authors do and returns what to read; ``write_hub`` as the hub has it.
All texts are invented. The test splits have no labels, as published.
"""

from __future__ import annotations

import json
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

from fairseq_rpe.questions import known

Rows = list[dict[str, Any]]
SPLITS = {"train": "train", "valid": "validation", "test": "test"}  # as the hub calls them
# What broken lines of QQP look like, between the first row and the second: a newline within a question.
BROKEN = ("9\t9\t9\tHow do I", "mend this?\tHow?\t0")


def story(*middle: str) -> str:
    """A text of some length with what matters in its middle."""
    before = (
        "The river rose in March and the lower fields stood under water. Nobody in the valley had seen it so high. "
    )
    after = " In autumn the rain came back, and the people carried sand and stone to the bank.\n\nSo ended that year."
    return before * 2 + " ".join(middle) + after


def _scrolls(name: str, *rows: tuple[str, str, str | None], **more: Any) -> Rows:
    return [
        {"id": f"{name}-{key}", "pid": f"{name}-{key}_{place}", "input": text, "output": output, **more}
        for place, (key, text, output) in enumerate(rows)
    ]


def _options(question: str, *options: str) -> str:
    letters = "".join(f" ({letter}) {text}\n" for letter, text in zip("ABCD", options, strict=True))
    return f"{question}\n\n{letters}\n"


MILL, FERRY = story("Old Tamsin mended the mill wheel with oak."), story("Ivo sold the ferry to Sela for nine coins.")
WHY = _options(
    "Why did Bren leave the station?", "He was ill", "He was  recalled\n   by letter", "He lost a bet", "He never left"
)
WHO = _options("Who waited on the quay?", "Sela (A)", "Ivo", "Both of them", "Nobody")
TERMS = story("The receiver may keep one copy of the papers. It shall return all else.")

ROWS: dict[str, dict[str, Any]] = {
    "qasper": {
        "train": _scrolls(
            "qa",
            ("1", f"How many kites were flown?\n\n{story('We flew 40 kites.')}", "40 kites"),
            ("2", f"Was it windy?\n\n{story('The wind was strong.')}", "Yes"),
            ("2", f"Was it windy?\n\n{story('The wind was strong.')}", "Yes, strong wind"),
            ("3", f"Who paid?\n\n{story('We flew kites.')}", "Unanswerable"),
            ("4", f'Which "line" was used?\n\n{story("The line was silk.")}', "silk, 2 mm"),
        ),
        # the rows of q6 stand apart
        "valid": _scrolls(
            "qa",
            ("5", f"How long did they fly?\n\n{story('They flew for two hours.')}", "two hours"),
            ("6", f"Was it cold?\n\n{story('It was mild.')}", "No"),
            ("7", f"What broke?\n\n{story('One line broke.')}", "One line"),
            ("6", f"Was it cold?\n\n{story('It was mild.')}", "no, it was mild"),
            ("7", f"What broke?\n\n{story('One line broke.')}", "One line"),
        ),
        "test": _scrolls("qa", ("8", f"Who flew?\n\n{story('We flew.')}", None)),
    },
    "narrative_qa": {
        "train": _scrolls(
            "nq",
            ("1", f"Who repaired the mill wheel?\n\n{MILL}", "Tamsin"),
            ("1", f"Who repaired the mill wheel?\n\n{MILL}", "the old woman Tamsin"),
            ("2", f"What was the wheel mended with?\n\n{MILL}", "oak"),
            ("3", f"Who bought the ferry?\n\n{FERRY}", "Sela"),
            ("4", f"What did the ferry cost?\n\n{FERRY}", "nine coins"),
            ("4", f"What did the ferry cost?\n\n{FERRY}", "Nine coins."),
        ),
        "valid": _scrolls(
            "nq",
            ("7", "Who repaired the mill wheel?\n\nThe river rose in March. Old Tamsin mended the wheel.", "Tamsin"),
            (
                "7",
                "Who repaired the mill wheel?\n\nThe river rose in March. Old Tamsin mended the wheel.",
                "Old Tamsin",
            ),
            ("8", f"Who sold the ferry?\n\n{FERRY}", "Ivo"),
            ("9", f"What did the people carry?\n\n{FERRY}", "sand and stone"),
        ),
        "test": _scrolls("nq", ("10", f"When did the river rise?\n\n{MILL}", None)),
    },
    "quality": {
        "train": _scrolls(
            "ql",
            ("3", WHY + story("A letter called Bren back."), "He was recalled by letter"),
            ("4", WHO + FERRY, "Sela (A)"),
            ("5", WHO + MILL, "Nobody"),
            ("6", WHY + MILL, "He never left"),
            is_hard=False,
        ),
        "valid": _scrolls(
            "ql",
            ("7", WHY + story("A letter called Bren back."), "He was recalled\nby letter"),
            ("8", WHO + FERRY, "Ivo"),
            ("9", WHO + story("Both were there."), "Both of them"),
            is_hard=True,
        ),
        "test": _scrolls("ql", ("10", WHO + FERRY, None)),
    },
    "contract_nli": {
        "train": _scrolls(
            "cn",
            ("1", f"The receiver may keep one copy.\n\n{TERMS}", "Entailment"),
            ("2", f"The receiver may keep everything.\n\n{TERMS}", "Contradiction"),
            ("3", f"The receiver may tell the press.\n\n{TERMS}", "Not mentioned"),
            ("4", f"Some papers go back.\n\n{TERMS}", "Entailment"),
        ),
        "valid": _scrolls(
            "cn",
            ("12", "The receiver may keep one copy.\n\nTHIS AGREEMENT is made in March.", "Not mentioned"),
            ("13", f"A copy may be kept.\n\n{TERMS}", "Entailment"),
            ("14", f"Nothing is returned.\n\n{TERMS}", "Contradiction"),
        ),
        "test": _scrolls("cn", ("15", f"Nothing is kept.\n\n{TERMS}", None)),
    },
    "qmsum": {
        "train": _scrolls(
            "qm",
            ("1", f"Summarize the whole meeting.\n\n{story('Ana: Oak lasts. Ben: Oak it is.')}", "The team chose oak."),
            ("2", f"What did Ana say of oak?\n\n{story('Ana: Oak lasts.')}", "Ana said that oak lasts."),
            ("3", f"What did Ben decide?\n\n{story('Ben: Oak it is.')}", "He decided for oak."),
            ("4", f"Summarize the talk of sand.\n\n{story('Cy: We need sand.')}", "Cy asked for sand."),
        ),
        "valid": _scrolls(
            "qm",
            ("5", "Summarize the meeting.\n\nAna: Hello.\n\nBen: Let us stop.", "Ana greeted.\nBen ended it."),
            ("6", f"What of stone?\n\n{story('Cy: Stone is dear.')}", "Cy found stone dear."),
            ("7", f"Who spoke last?\n\n{story('Ana: Good night.')}", "Ana spoke last."),
        ),
        "test": _scrolls("qm", ("8", f"Who spoke first?\n\n{story('Ana: Hello.')}", None)),
    },
    "summ_screen_fd": {
        "train": _scrolls(
            "fd",
            ("1", story("Ivo: Sell it? Sela: Gladly."), "Ivo sells the ferry."),
            ("2", story("Tamsin: More oak!"), "Tamsin mends the wheel."),
            ("3", story("Bren: A letter?"), "Bren is called back."),
            ("4", story("Ula: Rye again."), "Ula bakes."),
        ),
        "valid": _scrolls(
            "fd",
            ("5", "Nils: Thank you.\n\nOda: I waited.", "Oda waits for Nils."),
            ("6", story("Max: I ate it."), "Max eats the bread."),
            ("7", story("Ada: The bridge!"), "Ada sees the bridge fall."),
        ),
        "test": _scrolls("fd", ("8", story("Cy: Sand!"), None)),
    },
    "gov_report": {
        "train": _scrolls(
            "gr",
            ("1", story("The agency spent nine coins on oak."), "The agency bought oak. It cost nine coins."),
            ("2", story("The levee was inspected twice."), "Two inspections were made."),
            ("3", story("No ferry was lost."), "All ferries are there."),
            ("4", story("Rates were raised."), "Rates rose."),
        ),
        "valid": _scrolls(
            "gr",
            ("5", "Background\n\nThe levee is old.", "The levee is old.\n\nIt needs work."),
            ("6", story("Four bridges were closed."), "Four bridges are closed."),
            ("7", story("Funds were late."), "The funds came late."),
        ),
        "test": _scrolls("gr", ("8", story("Nothing new."), None)),
    },
    "cola": {
        "train": [
            {"sentence": "The kite the boy flew it was red.", "label": 0},
            {"sentence": 'She said "no to him.', "label": 1},
            {"sentence": "They sand carried.", "label": 0},
            {"sentence": "They carried sand.", "label": 1},
        ],
        "valid": [
            {"sentence": "The rain came back.", "label": 1},
            {"sentence": "Back rain the came.", "label": 0},
            {"sentence": "Who did you see who?", "label": 0},
        ],
        "test": [{"sentence": "The wheel turns.", "label": -1}],
    },
    "sst2": {
        "train": [
            {"sentence": "a warm and clumsy little film ", "label": 1},
            {"sentence": "dull from the first minute ", "label": 0},
            {"sentence": '" bold " it is not ', "label": 0},
            {"sentence": "caf\u00e9 scenes of rare charm ", "label": 1},
        ],
        "valid": [
            {"sentence": "a joy ", "label": 1},
            {"sentence": "wooden , wooden , wooden ", "label": 0},
            {"sentence": "it sings ", "label": 1},
        ],
        "test": [{"sentence": "fine ", "label": -1}],
    },
    "mrpc": {
        "train": [
            {"sentence1": "The ferry was sold on Friday.", "sentence2": "On Friday the ferry was sold.", "label": 1},
            {"sentence1": 'He said "never.', "sentence2": "He said nothing.", "label": 0},
            {"sentence1": "Rates rose by 2 %.", "sentence2": "Rates rose by two percent.", "label": 1},
            {"sentence1": "Oak is dear.", "sentence2": "Stone is dear.", "label": 0},
        ],
        "valid": [
            {"sentence1": "The bridge closed.", "sentence2": "The bridge was closed.", "label": 1},
            {"sentence1": "Nine boats came.", "sentence2": "Nine boats left.", "label": 0},
            {"sentence1": "It rained.", "sentence2": "Rain fell.", "label": 1},
        ],
        "test": [{"sentence1": "It froze.", "sentence2": "Ice came.", "label": -1}],
    },
    "qqp": {
        "train": [
            {"question1": "How do I mend a wheel?", "question2": "How is a wheel mended?", "label": 1},
            {"question1": 'What is "oak?', "question2": "Where is oak?", "label": 0},
            {"question1": "Why is the sky blue?", "question2": "Why is it blue?", "label": 0},
            {"question1": "Is rye good?", "question2": "Is rye any good?", "label": 1},
        ],
        "valid": [
            {"question1": "Who is Ivo?", "question2": "Who is this Ivo?", "label": 1},
            {"question1": "Who is Ivo?", "question2": "Who is Sela?", "label": 0},
            {"question1": "When does it rain?", "question2": "Where does it rain?", "label": 0},
        ],
        "test": [{"question1": "How?", "question2": "Why?", "label": -1}],
    },
    "stsb": {
        "train": [
            {"sentence1": "A man sells a boat.", "sentence2": "A boat is sold by a man.", "label": 5.0},
            {"sentence1": "A dog runs.", "sentence2": "A dog sleeps.", "label": 2.5},
            {"sentence1": "A child sings.", "sentence2": "Stone is dear.", "label": 0.1},
            {"sentence1": "It rains.", "sentence2": "It pours.", "label": 3.75},
        ],
        "valid": [
            {"sentence1": "A cat eats.", "sentence2": "A cat is eating.", "label": 4.7},
            {"sentence1": "Two boats.", "sentence2": "Three boats.", "label": 2.857},
            {"sentence1": "Oak.", "sentence2": "Rye.", "label": 1.1},
        ],
        "test": [{"sentence1": "Sand.", "sentence2": "Stone.", "label": -1.0}],
    },
    "mnli": {
        "train": [
            {"premise": "Nobody saw the comet.", "hypothesis": "The comet was seen by many.", "label": 2},
            {"premise": "Ivo sold the boat.", "hypothesis": "The boat was sold.", "label": 0},
            {"premise": "Ivo sold the boat.", "hypothesis": "Ivo was glad.", "label": 1},
            {"premise": 'He read "Dusk.', "hypothesis": "He can read.", "label": 0},
        ],
        "valid": [
            {"premise": "The wheel is oak.", "hypothesis": "The wheel is made of wood.", "label": 0},
            {"premise": "The wheel is oak.", "hypothesis": "The wheel is new.", "label": 1},
            {"premise": "The wheel is oak.", "hypothesis": "There is no wheel.", "label": 2},
        ],
        "test": [{"premise": "It rains.", "hypothesis": "It is wet.", "label": -1}],
    },
    "qnli": {
        "train": [
            {"question": "Who mended the wheel?", "sentence": "Tamsin mended it with oak.", "label": 0},
            {"question": "When did it rain?", "sentence": "The fields were wide.", "label": 1},
            {"question": 'What is "Dusk?', "sentence": "Dusk is a tale of 1901.", "label": 0},
            {"question": "Who paid?", "sentence": "The boat was blue.", "label": 1},
        ],
        "valid": [
            {"question": "Where is the mill?", "sentence": "The mill stands by the river.", "label": 0},
            {"question": "Where is the mill?", "sentence": "It rained for a week.", "label": 1},
            {"question": "How old is Ula?", "sentence": "Ula is nine.", "label": 0},
        ],
        "test": [{"question": "Why?", "sentence": "Because.", "label": -1}],
    },
    "rte": {
        "train": [
            {
                "sentence1": "The ferry to Ostrel was cancelled on Friday.",
                "sentence2": "No ferry went to Ostrel on Friday.",
                "label": 0,
            },
            {"sentence1": 'The "Dusk sank.', "sentence2": "Dusk is a film.", "label": 1},
            {"sentence1": "Ula baked rye bread.", "sentence2": "Ula baked.", "label": 0},
            {"sentence1": "Max ate.", "sentence2": "Max slept.", "label": 1},
        ],
        "valid": [
            {"sentence1": "Nine boats came in.", "sentence2": "Some boats came in.", "label": 0},
            {"sentence1": "Nine boats came in.", "sentence2": "Ten boats came in.", "label": 1},
            {"sentence1": "The mill burnt down.", "sentence2": "There was a fire.", "label": 0},
        ],
        "test": [{"sentence1": "It froze.", "sentence2": "It was cold.", "label": -1}],
    },
    "wnli": {
        "train": [
            {"sentence1": "The lid fits the pot since it is wide.", "sentence2": "The pot is wide.", "label": 0},
            {"sentence1": "The lid fits the pot since it is wide.", "sentence2": "The lid is wide.", "label": 1},
            {"sentence1": "Oda waved to Nils as he left.", "sentence2": "Nils left.", "label": 1},
            {"sentence1": "Oda waved to Nils as he left.", "sentence2": "Oda left.", "label": 0},
        ],
        "valid": [
            {"sentence1": "The cart hit the wall and it broke.", "sentence2": "The wall broke.", "label": 0},
            {"sentence1": "The cart hit the wall and it broke.", "sentence2": "The cart broke.", "label": 1},
            {"sentence1": "Ana fed the dog as it begged.", "sentence2": "The dog begged.", "label": 1},
        ],
        "test": [{"sentence1": "It broke.", "sentence2": "The cart broke.", "label": -1}],
    },
    "boolq": {
        "train": [
            {"question": "is rye a grain", "passage": "Rye -- Rye is a grain. It is sown in autumn.", "label": 1},
            {"question": "is oak a metal", "passage": "Oak -- Oak is a tree.", "label": 0},
            {"question": "can ferries fly", "passage": "Ferry -- A ferry is a boat that crosses water.", "label": 0},
            {"question": "do mills turn", "passage": "Mill -- The wheel of a mill turns.", "label": 1},
        ],
        "valid": [
            {"question": "is dusk before night", "passage": "Dusk -- Dusk comes before the night.", "label": 1},
            {"question": "is sand a stone", "passage": "Sand -- Sand is made of grains.", "label": 0},
            {"question": "is it wet", "passage": "Rain -- Rain is water.", "label": 1},
        ],
        "test": [{"question": "is it", "passage": "It is.", "label": -1}],
    },
    "cb": {
        "train": [
            {"premise": "A: Did he sell? B: I know that he sold it.", "hypothesis": "he sold it", "label": 0},
            {"premise": "I do not think that he sold it.", "hypothesis": "he sold it", "label": 1},
            {"premise": "Perhaps he sold it?", "hypothesis": "he sold it", "label": 2},
            {"premise": "She found that it rained.", "hypothesis": "it rained", "label": 0},
        ],
        "valid": [
            {"premise": "They forgot that the mill was shut.", "hypothesis": "the mill was shut", "label": 0},
            {"premise": "Nobody said that it was shut. It was not.", "hypothesis": "it was shut", "label": 1},
            {"premise": "If it was shut, we shall see.", "hypothesis": "it was shut", "label": 2},
        ],
        "test": [{"premise": "Was it?", "hypothesis": "it was", "label": -1}],
    },
    "copa": {
        "train": [
            {
                "premise": "The lamp went dark.",
                "choice1": "The fuse blew.",
                "choice2": "The lamp was new.",
                "question": "cause",
                "label": 0,
            },
            {
                "premise": "The river rose.",
                "choice1": "The sun shone.",
                "choice2": "The fields were flooded.",
                "question": "effect",
                "label": 1,
            },
            {
                "premise": "Max was hungry.",
                "choice1": "He ate.",
                "choice2": "He sang.",
                "question": "effect",
                "label": 0,
            },
            {
                "premise": "The cart broke.",
                "choice1": "It was blue.",
                "choice2": "It hit a wall.",
                "question": "cause",
                "label": 1,
            },
        ],
        "valid": [
            {"premise": "It froze.", "choice1": "Ice came.", "choice2": "Rye grew.", "question": "effect", "label": 0},
            {"premise": "Ula slept.", "choice1": "She ran.", "choice2": "She tired.", "question": "cause", "label": 1},
            {"premise": "Ivo paid.", "choice1": "He owed.", "choice2": "He sang.", "question": "cause", "label": 0},
        ],
        "test": [{"premise": "Oh.", "choice1": "A.", "choice2": "B.", "question": "cause", "label": -1}],
    },
    "multirc": {
        "train": [
            (0, "<b>Sent 1: </b>Ula baked rye.<br><b>Sent 2: </b>Max ate it.", {"Who ate?": {"Max": 1, "Ula": 0}}),
            (1, "<b>Sent 1: </b>It rained.", {"What fell?": {"Rain": 1, "Snow": 0}, "Where?": {"Here": 0}}),
        ],
        "valid": [
            (7, "<b>Sent 1: </b>Ivo sold it.", {"Who sold?": {"Ivo": 1, "Sela": 0, "Max": 0}, "What?": {"It": 1}}),
            (8, "<b>Sent 1: </b>Oda left.", {"Who left?": {"Oda": 1, "Nobody": 0}}),
        ],
        "test": [(9, "Nothing.", {"What?": {"Nothing": -1}})],
    },
    "record": {
        "train": [
            (
                2,
                "Ivo met Sela at the quay.\n@highlight\nSela sold the boat",
                ["Ivo", "Sela", "Sela"],
                [(9, "@placeholder no longer owns a boat", ["Sela", "Sela"])],
            ),
            (
                3,
                "Ada Quill of Marrow spoke\n@highlight\nQuill was glad",
                ["Ada Quill", "Marrow", "Quill"],
                [
                    (10, "In @placeholder she is known", ["Marrow"]),
                    (11, "They heard @placeholder speak", ["Ada Quill", "Quill"]),
                ],
            ),
            (4, "Ula fed Max.", ["Ula", "Max"], [(12, "@placeholder ate", ["Max"])]),
        ],
        "valid": [
            (
                5,
                "Lake Orrin froze.\n@highlight\nOrrin froze",
                ["Lake Orrin", "Orrin"],
                [(1, "@placeholder was cold", ["Orrin", "Lake Orrin"])],
            ),
            (
                6,
                "Bren left Tessaly.",
                ["Bren", "Tessaly"],
                [(2, "@placeholder is far", ["Tessaly"]), (3, "@placeholder went", ["Bren"])],
            ),
        ],
        "test": [(7, "Oda left.", ["Oda"], [(4, "@placeholder left", [])])],
    },
    "superglue_rte": {
        "train": [
            {"premise": "The ferry was cancelled.", "hypothesis": "No ferry went.", "label": 0},
            {"premise": "Dusk sank.", "hypothesis": "Dusk is a film.", "label": 1},
            {"premise": "Ula baked rye bread.", "hypothesis": "Ula baked.", "label": 0},
            {"premise": "Max ate.", "hypothesis": "Max slept.", "label": 1},
        ],
        "valid": [
            {"premise": "Nine boats came in.", "hypothesis": "Some boats came in.", "label": 0},
            {"premise": "Nine boats came in.", "hypothesis": "Ten boats came in.", "label": 1},
            {"premise": "The mill burnt down.", "hypothesis": "There was a fire.", "label": 0},
        ],
        "test": [{"premise": "It froze.", "hypothesis": "It was cold.", "label": -1}],
    },
    "wic": {
        "train": [
            {"word": "bank", "sentence1": "The bank was wet.", "sentence2": "He swam to the bank.", "label": 1},
            {"word": "bank", "sentence1": "The bank was wet.", "sentence2": "The bank lent him coins.", "label": 0},
            {"word": "fly", "sentence1": "Kites fly.", "sentence2": "Birds fly south.", "label": 1},
            {"word": "line", "sentence1": "The line broke.", "sentence2": "Read the last line.", "label": 0},
        ],
        "valid": [
            {"word": "mill", "sentence1": "The mill turns.", "sentence2": "A mill by the river.", "label": 1},
            {"word": "rose", "sentence1": "The river rose.", "sentence2": "A red rose.", "label": 0},
            {"word": "rye", "sentence1": "She sowed rye.", "sentence2": "The rye is ripe.", "label": 1},
        ],
        "test": [{"word": "oak", "sentence1": "Oak.", "sentence2": "Oak lasts.", "label": -1}],
    },
    "wsc": {
        "train": [
            ("Nils thanked Oda because she had waited.", ("Oda", 2), ("she", 4), 1),
            ("Nils thanked Oda because she had waited.", ("Nils", 0), ("she", 4), 0),
            # the pronoun comes first; the noun's first letter and end are not as in the text
            ("When he had paid, the old man left.", ("The  old man.", 4), ("he", 1), 1),
            # words that do not stand there
            ("Ivo, and with him Sela, left; they sang.", ("Ivo and Sela", 0), ("they", 6), 1),
        ],
        "valid": [
            ("The cart hit the wall and it broke.", ("The cart", 0), ("it", 6), 1),
            ("The cart hit the wall and it broke.", ("the wall", 3), ("it", 6), 0),
            ("Ana fed Ben's dog; his cat slept.", ("Ben", 2), ("his", 4), 1),
        ],
        "test": [("Oda waved as she left.", ("Oda", 0), ("she", 3), -1)],
    },
}
ROWS["mnli_mismatched"] = {
    **ROWS["mnli"],
    "valid": [
        {"premise": "Yeah, uh, the boat sank.", "hypothesis": "The boat is gone.", "label": 0},
        {"premise": "Yeah, uh, the boat sank.", "hypothesis": "It was blue.", "label": 1},
        {"premise": "Yeah, uh, the boat sank.", "hypothesis": "It floats.", "label": 2},
    ],
}


def write(name: str, folder: Path) -> Path:
    """Write a set as its authors ship it; gives the folder or zip archive to read it from."""
    suite = known.load(name).suite
    if suite == "glue":
        return _glue(name, folder)
    called = {"superglue_rte": "RTE", **_SUPERGLUE}.get(name, name)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{called}.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for split, hub in SPLITS.items():
            file = "val" if (split, suite) == ("valid", "superglue") else hub
            rows = ROWS[name][split] if suite == "scrolls" else _originals(name, split)
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            archive.writestr(f"{called}/{file}.jsonl", text)
    return path


_SUPERGLUE = {
    **{"boolq": "BoolQ", "cb": "CB", "copa": "COPA", "multirc": "MultiRC", "record": "ReCoRD", "wic": "WiC"},
    "wsc": "WSC",
}
_GLUE = {
    **{"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "qqp": "QQP", "stsb": "STS-B", "mnli": "MNLI", "qnli": "QNLI"},
    **{"rte": "RTE", "wnli": "WNLI", "mnli_mismatched": "MNLI"},
}
_PARSES = "sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse".split()
_HEADERS = {
    "sst2": ["sentence", "label"],
    "mrpc": ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
    "qqp": ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
    "stsb": "index genre filename year old_index source1 source2 sentence1 sentence2 score".split(),
    "mnli": ["index", "promptID", "pairID", "genre", *_PARSES, "sentence1", "sentence2", "label1", "gold_label"],
    "qnli": ["index", "question", "sentence", "label"],
    "rte": ["index", "sentence1", "sentence2", "label"],
    "wnli": ["index", "sentence1", "sentence2", "label"],
}
_HEADERS["mnli_mismatched"] = _HEADERS["mnli"]


def _glue(name: str, folder: Path) -> Path:
    place = folder / _GLUE[name]
    place.mkdir(parents=True, exist_ok=True)
    for split in ["test"] if name == "mrpc" else SPLITS:
        text = "".join("\t".join(cells) + "\n" for cells in _tsv(name, split))
        file = "dev" if split == "valid" else split
        if name.startswith("mnli") and split != "train":
            file += "_mismatched" if name == "mnli_mismatched" else "_matched"
        (place / f"{file}.tsv").write_bytes(text.encode())
    if name == "mrpc":
        rows = [(row, row in ROWS[name]["valid"]) for row in _mrpc()]
        lines = ["\t".join(_HEADERS[name])]
        lines += [
            "\t".join([str(row["label"]), str(100 + n), str(200 + n), row["sentence1"], row["sentence2"]])
            for n, (row, _) in enumerate(rows)
        ]
        text = "".join(line + "\r\n" for line in lines)
        (place / "msr_paraphrase_train.txt").write_bytes(text.encode("utf-8-sig"))
        ids = "".join(f"{100 + n}\t{200 + n}\n" for n, (_, valid) in enumerate(rows) if valid)
        (place / "mrpc_dev_ids.tsv").write_text(ids)
    return place


def _mrpc() -> Rows:
    """The rows of both splits as one file has them, by turns; the last one is of training."""
    train, valid = ROWS["mrpc"]["train"], ROWS["mrpc"]["valid"]
    return [row for pair in zip(train, valid, strict=False) for row in pair] + train[len(valid) :]


def _tsv(name: str, split: str) -> list[list[str]]:
    labelled = split != "test"
    rows, choices = ROWS[name][split], known.load(name).choices
    if name == "cola":
        if labelled:
            return [["zz01", str(row["label"]), "" if row["label"] else "*", row["sentence"]] for row in rows]
        return [["index", "sentence"], *([str(n), row["sentence"]] for n, row in enumerate(rows))]
    unlabelled = {"Quality", "is_duplicate", "score", "label1", "gold_label", "label"}
    header = [column for column in _HEADERS[name] if labelled or column not in unlabelled]
    if name == "sst2" and not labelled:
        header = ["index", "sentence"]
    table = [header]
    for n, row in enumerate(rows):
        words = choices[row["label"]] if labelled and name in ("mnli", "mnli_mismatched", "qnli", "rte") else None
        label = words or str(row["label"])
        cells = {**row, "label": label, "gold_label": label, "label1": label, "is_duplicate": label, "score": label}
        if name.startswith("mnli"):
            cells |= {"sentence1": row["premise"], "sentence2": row["hypothesis"]}
        if name == "mrpc":
            cells |= {"#1 String": row["sentence1"], "#2 String": row["sentence2"]}
        table.append([cells.get(column, str(n)) for column in header])
        if name == "qqp" and split == "train" and n == 0:
            table += [line.split("\t") for line in BROKEN]
    return table


def _originals(name: str, split: str) -> Rows:
    """Rows of SuperGLUE's JSON lines."""
    rows = ROWS[name][split]
    if name == "multirc":
        return [
            {
                "idx": number,
                "version": 1.1,
                "passage": {
                    "text": text,
                    "questions": [
                        {
                            "idx": q,
                            "question": question,
                            "answers": [
                                {"text": answer, "idx": a, **({"label": label} if label >= 0 else {})}
                                for a, (answer, label) in enumerate(answers.items())
                            ],
                        }
                        for q, (question, answers) in enumerate(questions.items())
                    ],
                },
            }
            for number, text, questions in rows
        ]
    if name == "record":
        return [
            {
                "source": "made by hand",
                "idx": number,
                "passage": {"text": text, "entities": _places(text, entities)},
                "qas": [
                    {"query": query, "idx": q, **({"answers": _answers(text, answers)} if answers else {})}
                    for q, query, answers in queries
                ],
            }
            for number, text, entities, queries in rows
        ]
    if name == "wsc":
        return [
            {"text": text, "target": _spans(noun, pronoun), "idx": n, **({"label": bool(label)} if label >= 0 else {})}
            for n, (text, noun, pronoun, label) in enumerate(rows)
        ]
    boolean, choices = name in ("boolq", "wic"), known.load(name).choices
    found = []
    for n, row in enumerate(rows):
        label = row["label"]
        spelled = bool(label) if boolean else label if name == "copa" else choices[label]
        texts = {key: value for key, value in row.items() if key != "label"}
        found.append({**texts, **({"version": 1.1} if name == "wic" else {}), "idx": n})
        if label >= 0:
            found[-1]["label"] = spelled
    return found


def _places(text: str, entities: list[str]) -> list[dict[str, int]]:
    """Where the entities stand, each behind the one before; the end is that of the last character."""
    found, at = [], 0
    for entity in entities:
        begin = text.index(entity, at) if entity in text[at:] else text.index(entity)
        found.append({"start": begin, "end": begin + len(entity) - 1})
        at = begin + 1
    return found


def _answers(text: str, answers: list[str]) -> Rows:
    return [{**place, "text": answer} for answer, place in zip(answers, _places(text, answers), strict=True)]


def _spans(noun: tuple[str, int], pronoun: tuple[str, int]) -> dict[str, Any]:
    return {"span1_text": noun[0], "span1_index": noun[1], "span2_text": pronoun[0], "span2_index": pronoun[1]}


def hub_rows(name: str, split: str) -> Rows:
    """Rows of GLUE and SuperGLUE as the hub has them."""
    rows = ROWS[name][split]
    if name == "multirc":
        return [
            {
                "paragraph": text,
                "question": question,
                "answer": answer,
                "idx": {"paragraph": number, "question": q, "answer": a},
                "label": label,
            }
            for number, text, questions in rows
            for q, (question, answers) in enumerate(questions.items())
            for a, (answer, label) in enumerate(answers.items())
        ]
    if name == "record":
        return [
            {
                "passage": text,
                "query": query,
                "entities": list(dict.fromkeys(entities)),
                "answers": list(dict.fromkeys(answers)),
                "idx": {"passage": number, "query": q},
            }
            for number, text, entities, queries in rows
            for q, query, answers in queries
        ]
    if name == "wsc":
        return [
            {"text": text, **_spans(noun, pronoun), "idx": n, "label": label}
            for n, (text, noun, pronoun, label) in enumerate(rows)
        ]
    if name == "mrpc" and split != "test":
        return [{**row, "idx": n} for n, row in enumerate(_mrpc()) if row in rows]
    gap = len(BROKEN) if (name, split) == ("qqp", "train") else 0
    return [{**row, "idx": n + gap * (n > 0)} for n, row in enumerate(rows)]


def hub_files(name: str) -> dict[str, bytes]:
    """The files of a data set on the hub, by their paths there, with those of other splits."""
    import pyarrow
    from pyarrow import parquet

    found = known.load(name)
    config = found.places.hub.rpartition("/")[2]
    if found.suite == "scrolls":
        raise ValueError("the hub has the authors' zip archives: use write")
    files = {}
    for split, called in SPLITS.items():
        file = BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(hub_rows(name, split)), file)
        if name.startswith("mnli") and split != "train":
            called += "_mismatched" if name == "mnli_mismatched" else "_matched"
        path = f"{called}-00000-of-00001" if found.suite == "glue" else f"{called}/0000"
        files[f"{config}/{path}.parquet"] = file.getvalue()
    return files


def write_hub(name: str, folder: Path) -> Path:
    """Write a set of GLUE or SuperGLUE as a copy of the hub's files; gives the folder to read it from."""
    for path, content in hub_files(name).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder
