"""A few cases of the generator of odd inputs; ``tests/tools/odd_inputs.py`` draws as many as are asked for."""

import sys
from pathlib import Path

import pytest
from conftest import run

TOOL = Path(__file__).resolve().parents[1] / "tools/odd_inputs.py"


@pytest.mark.release
def test_odd_inputs_are_refused_in_one_line_or_carried_out(tmp_path):
    done = run(sys.executable, TOOL, "--count", 200, "--seed", 5, "--keep", tmp_path, ok=False, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "200 cases, 0 bad ones" in done.stdout


def test_a_case_depends_on_seed_and_number_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(TOOL.parent)
    from odd_values import Generator

    (tmp_path / "texts").mkdir()

    def drawn(seed: int, *numbers: int) -> list[list[str]]:
        generator = Generator(tmp_path, tmp_path, tmp_path / "out", seed, ("verdict", "list"))
        return [generator.case(number).words for number in numbers]

    assert drawn(1, 7, 8) == [drawn(1, 7)[0], drawn(1, 8)[0]] and drawn(1, *range(9)) != drawn(2, *range(9))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("raise LookupError('x')", "internal error"),
        ("raise UserError('x')", "refused"),
        ("print('error: y', file=sys.stderr); raise UserError('x')", "not one line"),
        ("Path('left').touch(); raise UserError('x')", "left behind"),
        ("print('Traceback (most recent call last):')", "traceback"),
        ("print('{\"ppl\": NaN}')", "no numbers"),
        ("time.sleep(30)", "hang"),
        ("pass", "nonsense"),
    ],
)
def test_verdicts(code, kind, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(TOOL.parent)
    import time

    import odd_inputs

    from fairseq_rpe.core import UserError

    names = {"UserError": UserError, "Path": Path, "sys": sys, "time": time}
    monkeypatch.setattr("fairseq_rpe.cli.list.run_user_dir", lambda args: exec(code, names))
    (tmp_path / "fixtures").mkdir()
    workspace = odd_inputs.Workspace(tmp_path / "fixtures", tmp_path)
    assert odd_inputs.judge(["user-dir"], True, workspace, 0.5 if kind == "hang" else 60).kind == kind
