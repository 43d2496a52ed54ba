"""The programs of SLURM that submitit needs, on one machine: sbatch, srun, scontrol and sacct.

The jobs of an array run one after another, and each node of a job is a process. A job waits for the jobs that it
depends on. The folder ``$FAKE_SLURM`` has a script and a state for each job.
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
    """Write the programs into ``folder``, and return the environment variables for their use."""
    folder.mkdir(parents=True)
    for name in PROGRAMS:
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {name} "$@"\n')
        program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "FAKE_SLURM": str(folder)}


def sbatch(state: Path, script: str) -> None:
    """Submit a script: a background process runs it."""
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
    """Run a submitted job, or all jobs of an array, after the jobs that it depends on."""
    script = state / f"{number}.sh"
    (state / f"{number}.daemon").write_text(str(os.getpid()))
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script.read_text(), re.M))
    for dependency in options.get("dependency", "").split(":")[1:]:
        state_file = state / f"{dependency}.state"
        while not state_file.exists() or state_file.read_text() == "RUNNING":
            time.sleep(0.1)
    nodes = {"SLURM_JOB_NODELIST": "localhost"}
    nodes |= dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS"), options["nodes"])
    if "array" not in options:
        run_job(state, number, script, {**nodes, "SLURM_JOB_ID": number})
        return
    last_task = int(options["array"].partition("%")[0].removeprefix("0-"))
    for task in range(last_task + 1):
        job = {"SLURM_JOB_ID": f"{number}{task}", "SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": str(task)}
        run_job(state, f"{number}_{task}", script, {**nodes, **job})


def run_job(state: Path, name: str, script: Path, variables: dict[str, str]) -> None:
    """Run a job, again if it was requeued, and record its state."""
    requeue = state / f"{name}.requeue"
    while True:
        (state / f"{name}.state").write_text("RUNNING")
        code = subprocess.run(["bash", str(script)], env={**os.environ, **variables}).returncode
        if not requeue.exists():
            break
        requeue.rename(state / f"{name}.requeued")
    (state / f"{name}.state").write_text("FAILED" if code else "COMPLETED")


def srun(state: Path, *words: str) -> None:
    """Run a command on each node of the job; its exit status is the largest one."""
    command, outputs = list(words), {}
    while command[0].startswith("--"):
        option = command.pop(0)
        if option in ("--output", "--error"):
            outputs[option] = command.pop(0)
    processes = []
    for node in range(int(os.environ["SLURM_NNODES"])):
        variables = {"SLURM_PROCID": str(node), "SLURM_NODEID": str(node), "SLURM_LOCALID": "0"}
        out, error = (open(file_name(outputs[option], node), "a") for option in ("--output", "--error"))
        processes.append(subprocess.Popen(command, env={**os.environ, **variables}, stdout=out, stderr=error))
    sys.exit(max(abs(process.wait()) for process in processes))


def file_name(pattern: str, node: int) -> str:
    """Return the name of an output file: %A is the array, %a the task in it, %j the job, %t the node."""
    signs = {"%A": os.environ.get("SLURM_ARRAY_JOB_ID", ""), "%a": os.environ.get("SLURM_ARRAY_TASK_ID", "")}
    signs |= {"%j": os.environ["SLURM_JOB_ID"], "%t": str(node)}
    for sign, value in signs.items():
        pattern = pattern.replace(sign, value)
    return pattern


def scontrol(state: Path, command: str, *words: str) -> None:
    """Requeue a job, or print the names of nodes."""
    if command == "requeue":
        (state / f"{words[0]}.requeue").touch()
    elif (command, words[0]) == ("show", "hostnames"):
        print(words[1])
    else:
        sys.exit(f"scontrol {command} is not known here")


def sacct(state: Path, *words: str) -> None:
    """Print the state of every job."""
    print("JobID|State|NodeList")
    for path in state.glob("*.state"):
        print(f"{path.stem}|{path.read_text()}|localhost")


if __name__ == "__main__":
    programs = {function.__name__: function for function in (sbatch, srun, scontrol, sacct, daemon)}
    programs[sys.argv[1]](Path(os.environ["FAKE_SLURM"]), *sys.argv[2:])
