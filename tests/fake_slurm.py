"""As much of SLURM as submitit needs, on one machine: sbatch, srun, scontrol and sacct as a folder of programs.

Jobs run one after another, each of their nodes as a process; an array waits for what it depends on. ``$FAKE_SLURM``
holds what was submitted and the states.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("sbatch", "srun", "scontrol", "sacct")


def install(folder: Path) -> dict[str, str]:
    """Put the programs into ``folder``; returns the environment to use them."""
    folder.mkdir(parents=True)
    for name in PROGRAMS:
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {name} "$@"\n')
        program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "FAKE_SLURM": str(folder)}


def sbatch(state: Path, script: str) -> None:
    number = 100 + len(list(state.glob("*.sh")))
    (state / f"{number}.sh").write_text(Path(script).read_text())
    subprocess.Popen(
        [sys.executable, __file__, "daemon", str(number)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=open(state / f"{number}.errors", "w"),
        start_new_session=True,
    )
    print(f"Submitted batch job {number}")


def daemon(state: Path, number: str) -> None:
    """Run the job, or the jobs of the array."""
    script = state / f"{number}.sh"
    (state / f"{number}.daemon").write_text(str(os.getpid()))
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script.read_text(), re.M))
    for before in options.get("dependency", "").split(":")[1:]:
        ended = state / f"{before}.state"
        while not ended.exists() or ended.read_text() == "RUNNING":
            time.sleep(0.1)
    last = re.match(r"0-(\d+)", options["array"]) if "array" in options else None
    for task in range(int(last[1]) + 1) if last else [None]:
        name = number if task is None else f"{number}_{task}"
        job = {"SLURM_JOB_ID": f"{number}{task or 0}" if last else number, "SLURM_JOB_NODELIST": "localhost"}
        job |= {"SLURM_NNODES": options["nodes"], "SLURM_JOB_NUM_NODES": options["nodes"]}
        job |= {"SLURM_NTASKS": options["nodes"]}
        if last:
            job |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": str(task)}
        while True:
            (state / f"{name}.state").write_text("RUNNING")
            code = subprocess.run(["bash", str(script)], env={**os.environ, **job}).returncode
            if not (state / f"{name}.requeue").exists():
                break
            (state / f"{name}.requeue").rename(state / f"{name}.requeued")
        (state / f"{name}.state").write_text("FAILED" if code else "COMPLETED")


def srun(state: Path, *words: str) -> None:
    given = list(words)
    patterns = {}
    while given[0].startswith("--"):
        option = given.pop(0)
        if option in ("--output", "--error"):
            patterns[option] = given.pop(0)
    jobs = []
    for node in range(int(os.environ["SLURM_NNODES"])):
        files = dict(patterns)
        names = {"%A": os.environ.get("SLURM_ARRAY_JOB_ID", ""), "%a": os.environ.get("SLURM_ARRAY_TASK_ID", "")}
        names |= {"%j": os.environ["SLURM_JOB_ID"], "%t": str(node)}
        for sign, value in names.items():
            files = {key: name.replace(sign, value) for key, name in files.items()}
        own = {"SLURM_PROCID": str(node), "SLURM_NODEID": str(node), "SLURM_LOCALID": "0"}
        with open(files["--output"], "a") as out, open(files["--error"], "a") as error:
            jobs.append(subprocess.Popen(given, env={**os.environ, **own}, stdout=out, stderr=error))
    sys.exit(max(abs(job.wait()) for job in jobs))


def scontrol(state: Path, what: str, *words: str) -> None:
    if what == "requeue":
        (state / f"{words[0]}.requeue").touch()
    elif (what, words[0]) == ("show", "hostnames"):
        print(words[1])
    else:
        sys.exit(f"scontrol {what} is not known here")


def sacct(state: Path, *words: str) -> None:
    print("JobID|State|NodeList")
    for path in state.glob("*.state"):
        print(f"{path.stem}|{path.read_text()}|localhost")


if __name__ == "__main__":
    {f.__name__: f for f in (sbatch, srun, scontrol, sacct, daemon)}[sys.argv[1]](
        Path(os.environ["FAKE_SLURM"]), *sys.argv[2:]
    )
