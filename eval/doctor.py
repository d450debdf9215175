"""What this installation can run, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pageweaver.common.native import cuda_status, load_native
from pageweaver.common.problem import make_problem
from pageweaver.common.reference import exact_attention, nrms
from pageweaver.common.strategy import available, load
from pageweaver.common.supports import preset

# Every environment variable that the package reads, with its meaning: none so far.
ENVIRONMENT: Mapping[str, str] = {}

# Packages that only a part needs, and that part.
OPTIONAL = {
    "triton": "only the GPU baselines need it; comes with CUDA builds of torch on Linux",
    "transformers": "only its bridge and `pageweaver capture` need it: pip install '.[transformers]'",
    "accelerate": "only `pageweaver capture` of GGUF files needs it: pip install '.[capture]'",
    "gguf": "only `pageweaver capture` of GGUF files needs it: pip install '.[capture]'",
}
KERNEL_CAPABILITY = (9, 0)
# FP8 execution of normal inputs stays far under this; beyond it something is broken.
NRMS_LIMIT = 0.1


@dataclass(frozen=True)
class Finding:
    """One line of the report; `good` is None where nothing needs the thing here."""

    section: str
    name: str
    detail: str
    good: bool | None = True


def examine() -> list[Finding]:
    """Look at everything; `usable` judges the result."""
    return [*_versions(), *_gpu(), *_modules(), _cpu_path(), *_environment()]


def usable(findings: list[Finding]) -> bool:
    """Whether the CPU path works."""
    return all(f.good is not False for f in findings if f.section == "CPU path")


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> list[Finding]:
    section = "versions"
    found = [
        Finding(section, "pageweaver", str(_package("pageweaver"))),
        Finding(section, "python", f"{platform.python_version()} ({sys.platform}, {platform.machine()})"),
        Finding(section, "torch", f"{torch.__version__} ({torch.get_num_threads()} threads)"),
        *(Finding(section, name, str(_package(name))) for name in ("numpy", "scipy")),
    ]
    for name, missing in OPTIONAL.items():
        installed = _package(name)
        found.append(
            Finding(section, name, installed or f"not installed; {missing}", True if installed else None)
        )
    return found


def find_nvcc() -> str | None:
    """The CUDA compiler that a build would find."""
    if named := os.environ.get("CUDACXX"):
        return shutil.which(named)
    folders = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [shutil.which("nvcc")]
    candidates += [shutil.which("nvcc", path=str(Path(folder) / "bin")) for folder in folders if folder]
    return next((c for c in candidates if c and shutil.which(c)), None)


def _output(*command: str) -> str | None:
    """What a command prints, None when it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _gpu() -> list[Finding]:
    section = "GPU"
    listed = _output("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
    found = []
    first = listed.splitlines()[0] if listed else ""
    if not torch.cuda.is_available():
        if not listed:
            detail = "none seen; strategies run on the CPU as reference"
        elif torch.version.cuda is None:
            detail = f"{first}: this torch has no CUDA, install a CUDA build of torch"
        else:
            detail = f"{first}: torch (CUDA {torch.version.cuda}) cannot use it, update the driver"
        found.append(Finding(section, "device", detail, None if not listed else False))
    else:
        driver = first.split(",")[0] or "unknown"
        for index in range(torch.cuda.device_count()):
            capability = torch.cuda.get_device_capability(index)
            detail = (
                f"{torch.cuda.get_device_name(index)}, capability {capability[0]}.{capability[1]},"
                f" driver {driver}, CUDA {torch.version.cuda} in torch"
            )
            fits = capability == KERNEL_CAPABILITY
            if not fits:
                detail += "; the kernels run on 9.0 (H100, H200)"
            found.append(Finding(section, f"cuda:{index}", detail, True if fits else None))
    nvcc = find_nvcc()
    if nvcc is None:
        detail = "not found; only building the kernels needs it (CUDA 12.3 or later)"
    else:
        lines = [x for x in (_output(nvcc, "--version") or "").splitlines() if "release" in x]
        detail = f"{lines[0].split('release ')[-1].split(',')[0] if lines else 'does not run'} ({nvcc})"
    found.append(Finding(section, "nvcc", detail, None if nvcc is None else True))
    return found


def _modules() -> list[Finding]:
    section = "modules"
    try:
        load_native()
        native = Finding(section, "_native", "built: C++ search and host twins")
    except ImportError as error:
        native = Finding(section, "_native", str(error), False)
    built, reason = cuda_status()
    # Without kernels everything runs as reference: missing is a fact here, not a failure.
    kernels = Finding(
        section, "_cuda", reason if built else f"not available: {reason}", True if built else None
    )
    return [native, kernels]


def _cpu_path() -> Finding:
    """Run a small call end to end and check its numbers."""
    strategy = "regroup_w64" if "regroup_w64" in available() else available()[0]
    try:
        problem = make_problem(preset("mid", total_q=64, prefix=2048))
        out = load(strategy, backend="reference")(problem)
        error = nrms(out, exact_attention(problem)[0])
    except Exception as problem_found:
        # Whatever breaks here is the answer that the user came for.
        return Finding("CPU path", "check", f"{type(problem_found).__name__}: {problem_found}", False)
    detail = f"{strategy} on 64 queries, NRMS {error:.2%} to float64"
    return Finding("CPU path", "check", detail, bool(error < NRMS_LIMIT))


def _environment() -> list[Finding]:
    section = "environment"
    found = [
        Finding(section, name, f"{os.environ.get(name, 'not set')}: {meaning}")
        for name, meaning in ENVIRONMENT.items()
    ]
    found += [
        Finding(section, name, "set, but nothing reads it", None)
        for name in sorted(os.environ)
        if name.startswith("PAGEWEAVER_") and name not in ENVIRONMENT
    ]
    return found or [Finding(section, "PAGEWEAVER_*", "no variable is read, and none is set")]


def print_findings(console: Console, findings: list[Finding]) -> None:
    """Print the report and a last line that says what works."""
    table = Table(
        box=box.SIMPLE_HEAD, show_header=False, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("section", style="bold", no_wrap=True)
    table.add_column("name", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("detail", overflow="fold")
    before = ""
    for finding in findings:
        if before and finding.section != before:
            table.add_section()
        mark = {True: Text("ok", "green"), None: Text("-", "dim"), False: Text("BAD", "bold red")}[
            finding.good
        ]
        table.add_row(
            finding.section if finding.section != before else "", finding.name, mark, Text(finding.detail)
        )
        before = finding.section
    console.print(table)
    console.print()
    if not usable(findings):
        console.print(Text("The CPU path does not work: see the line above.", "bold red"))
        return
    if cuda_status()[0] and torch.cuda.is_available():
        console.print("The CPU path and the CUDA module work; `pageweaver compare` runs on the GPU.")
    else:
        console.print("The CPU path works: `pageweaver compare` compares all strategies by their reference.")
