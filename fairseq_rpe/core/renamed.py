"""Names that changed before the first release. An old name is refused, and the error message gives the new one."""

# old command -> new command
COMMANDS = {
    "accuracy": "eval-task",
    "answer": "eval-questions",
    "prepare-answers": "prepare-questions",
    "prepare-gaps": "prepare-cloze",
    "prepare-known": "prepare-corpus",
    "profile": "bias",
}

# (command, old option) -> new option; the command "" stands for every command that does not have the old option
OPTIONS = {
    ("", "--cut"): "--truncate",
    ("", "--dest"): "--out",
    ("", "--draws"): "--position-samples",
    ("", "--inspect-every"): "--log-encodings-every",
    ("", "--positions"): "--positions-eval",
    ("", "--save-dir"): "--out",
    ("", "--scale"): "--preset",
    ("", "--subset"): "--split",
    ("eval-questions", "--by"): "--answer-mode",
    ("eval-task", "--unit"): "--ratio-unit",
    ("prepare", "--divide-by"): "--split-by",
    ("prepare-corpus", "--divide-by"): "--split-by",
    ("prepare-cloze", "--form"): "--question-format",
    ("prepare-cloze", "--names"): "--entity-names",
    ("prepare-cloze", "--question"): "--question-position",
    ("prepare-cloze", "--sentence"): "--source",
    ("prepare-cloze", "--shortest"): "--min-tokens",
}

# (encoding, position transform or generated task, old option of its spec) -> new option
SPEC_OPTIONS = {
    ("bipe", "ends"): "segment_delimiters",
    ("cope", "scaled"): "scale_on",
    ("dual_chunk", "cap"): "max_position",
    ("forgetting", "longest"): "max_timescale",
    ("forgetting", "shortest"): "min_timescale",
    ("inv_n", "form"): "variant",
    ("inv_nlnn", "form"): "variant",
    ("leaky_rerope", "leak"): "k",
    ("lm_infinite", "ceiling"): "max_distance",
    ("music", "beyond"): "out_of_range",
    ("offset", "by"): "tokens",
    ("random_padding", "max"): "max_position",
    ("randomized", "max"): "max_position",
    ("rope", "scaled"): "temperature_on",
    ("sandwich", "form"): "variant",
    ("shape", "max"): "max_position",
    ("shaw", "clip"): "max_distance",
    ("transformer_xl", "clamp"): "max_distance",
    ("type1", "form"): "variant",
    ("type2", "form"): "variant",
}

# old key of a recipe -> new key
RECIPE_KEYS = {"asking": "question_config", "by": "answer_mode", "cut": "truncate", "scales": "presets"}

# The last commit that reads run and sweep folders of the earlier layout.
LAST_COMMIT_OF_OLD_LAYOUT = "8cb7da5"
